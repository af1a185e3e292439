"""The lessons of docs/tutorial fit together: pages, outputs, figures and notebooks are of the same code; and the script
that builds them refuses cells that fail and claims that are false."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

TUTORIAL = Path(__file__).resolve().parents[2] / "docs" / "tutorial"


def _builder() -> Any:
    spec = importlib.util.spec_from_file_location("tutorial_build", TUTORIAL / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


build = _builder()
LESSONS = build.lessons()


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_outputs_figures_and_notebook_are_of_the_code_of_the_page(path: Path) -> None:
    assert build.stale(path) == []


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_a_lesson_can_be_taught_from_its_page(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for part in ("**The question.**", "## The idea", "**What to see.**", "## Pitfalls", "## Exercises", "**Answers.**"):
        assert part in text, part
    assert "## Further reading" in text
    lesson = build.read(path)
    assert sum(len(cell.figures) for cell in lesson.cells) >= 1
    assert sum(len(cell.checks) for cell in lesson.cells) >= 2, "claims of the text that a run checks"
    assert path.name in (TUTORIAL / "README.md").read_text(encoding="utf-8")


def test_the_folder_stays_small() -> None:
    files = [path for path in TUTORIAL.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert sum(path.stat().st_size for path in files) < 3e6
    assert max(path.stat().st_size for path in files if path.suffix == ".png") < 80e3


def test_every_figure_belongs_to_a_lesson() -> None:
    shown = {name for path in LESSONS for cell in build.read(path).cells for name in cell.figures}
    assert {f"figures/{path.name}" for path in (TUTORIAL / "figures").glob("*.png")} == shown


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A lesson of its own, in a folder of its own."""
    (tmp_path / "figures").mkdir()
    monkeypatch.setattr(build, "HERE", tmp_path)
    path = tmp_path / "01-small.md"
    path.write_text(
        "# Small\n\n```python\nx = 6\n```\n\ntext\n\n```python\nprint('six', x)\n```\n<!-- check: x == 6 -->\n\nend\n"
    )
    return path


def test_a_lesson_is_built_and_then_changed(small: Path) -> None:
    build.build(small)
    assert "```text\nsix 6\n```" in small.read_text()
    assert build.stale(small) == build.differences(small) == []
    notebook = json.loads(small.with_suffix(".ipynb").read_text())
    assert [cell["cell_type"] for cell in notebook["cells"]] == ["markdown", "code", "markdown", "code", "markdown"]
    assert notebook["cells"][3]["outputs"][0]["text"] == "six 6\n"
    assert "check:" not in json.dumps(notebook)

    built = small.read_text()
    small.write_text(built.replace("six 6", "seven 6"))  # an output that the code does not print
    assert "not what" in build.stale(small)[0]
    assert "printed\nsix 6" in build.differences(small)[0]
    small.write_text(built.replace("x = 6", "x = 3 + 3"))  # code that the output is not of
    assert "other code" in build.stale(small)[0]
    small.write_text(built.replace("x = 6", "x = 5"))
    with pytest.raises(SystemExit, match="this claim of the text is false: x == 6"):
        build.build(small)


def test_a_cell_that_fails_is_named_with_its_error(small: Path) -> None:
    small.write_text(small.read_text().replace("x = 6", "x = six"))
    with pytest.raises(SystemExit, match=r"(?s)01-small.md: cell 1 failed.*NameError: name 'six'"):
        build.build(small)


def test_a_name_that_is_no_lesson_is_refused() -> None:
    with pytest.raises(SystemExit, match="no lesson begins with 99"):
        build.lessons(["99"])
