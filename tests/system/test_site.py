"""The site of the docs is built without a warning, finds what is searched, and asks no other host for anything."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import paceline

exceptions = pytest.importorskip("mkdocs.exceptions", reason="mkdocs, of the extra 'docs', is not installed")
pytest.importorskip("mkdocstrings", reason="mkdocstrings, of the extra 'docs', is not installed")

markdown = pytest.importorskip("markdown")

ROOT = Path(__file__).resolve().parents[2]


def build(root: Path, site: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    ran = build(ROOT, folder)
    assert ran.returncode == 0, ran.stderr
    assert "WARNING" not in ran.stdout + ran.stderr
    return folder


def test_every_page_of_the_docs_is_in_it(site: Path) -> None:
    pages = [path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")]
    built = {str(path.relative_to(site)) for path in site.rglob("*.html")}
    expected = {str(page.with_suffix(".html")).replace("README", "index") for page in pages}
    assert expected | {"index.html", "changelog.html", "contributing.html", "benchmarks/index.html"} <= built


def test_the_reference_shows_every_public_name(site: Path) -> None:
    shown = "".join((site / page).read_text(encoding="utf-8") for page in ("api.html", "api-extending.html"))
    assert [name for name in paceline.__all__ if f'id="paceline.{name}"' not in shown] == []
    assert "SHA-256 of the bytes of the final vector" in shown  # of a property
    assert "Gradients that came too late and were not used" in shown  # the comment of a field


def test_nothing_is_loaded_from_another_host(site: Path) -> None:
    loading = re.compile(r"<(?:script|link|img|iframe|source)\b[^>]*?\b(?:src|href)=[\"']?(https?:)?//([^\"'> ]+)")
    for path in site.rglob("*.html"):
        assert loading.findall(path.read_text(encoding="utf-8")) == [], path.name


def test_formulas_of_lessons_are_mathml(site: Path) -> None:
    for path in (site / "tutorial").glob("*.html"):
        page = path.read_text(encoding="utf-8")
        prose = re.sub(r"<(code|pre|script|style|math)\b.*?</\1>", "", page, flags=re.DOTALL)
        assert re.findall(r"\$[^$]+\$|\$\$|\\[a-z]{2,}", prose) == [], path.name
    lesson = (site / "tutorial" / "02-parameter-server.html").read_text(encoding="utf-8")
    assert lesson.count('display="block"') == 1
    assert lesson.count('display="inline"') > 20


def test_a_formula_that_cannot_be_converted_fails_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs")
    site_math = importlib.import_module("site_math")
    made = markdown.markdown(r"`$a$` costs $x_{t+1} \leftarrow x_t * 2$ and *5 \$*", extensions=[site_math.Formulas()])
    assert "<code>$a$</code> costs <math" in made
    assert "<em>5 \\$</em>" in made.replace("\\\\", "\\")
    assert "<msub>" in made
    for wrong in (r"\nosuchcommand x", r"x + \frac"):
        with pytest.raises(exceptions.PluginError, match=re.escape(wrong)):
            markdown.markdown(f"a ${wrong}$ b", extensions=[site_math.Formulas()])


def test_the_search_finds_schemes_options_and_names(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    places = {entry["location"]: entry["text"] for entry in index["docs"]}
    assert "schemes.html#downpour" in places
    assert "api.html#paceline.attach" in places
    assert any("--patience" in text for place, text in places.items() if place.startswith("command-line.html"))
    assert (site / "search" / "search_index.js").is_file()  # for pages that are opened from disk


def test_links_out_of_the_docs_lead_to_pages_of_the_site(site: Path) -> None:
    start = (site / "index.html").read_text(encoding="utf-8")
    assert 'href="examples/picture.py.html"' in start
    assert "def main" in re.sub(r"<[^>]+>", "", (site / "examples" / "picture.py.html").read_text(encoding="utf-8"))
    assert (site / "benchmarks" / "results" / "bench.png").read_bytes()[:4] == b"\x89PNG"


def test_broken_links_fail_the_build(tmp_path: Path) -> None:
    for name in ("docs", "paceline", "benchmarks", "examples"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("mkdocs.yml", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / name)
    page = tmp_path / "docs" / "glossary.md"
    broken = ("no-such-page.md", "exact.md#no-such-heading", "../no-such-file.py")
    links = " ".join(f"[broken]({link})" for link in broken)
    page.write_text(f"{page.read_text(encoding='utf-8')}\n{links}\n", encoding="utf-8")
    ran = build(tmp_path, tmp_path / "site")
    assert ran.returncode == 1
    assert [link for link in broken if f"'{link}'" not in ran.stderr] == []
    assert ran.stderr.count("WARNING") == len(broken)
