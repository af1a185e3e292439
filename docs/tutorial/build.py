"""Runs the lessons and writes what they print and draw: into the pages, and as notebooks beside them.

    python docs/tutorial/build.py                  # every lesson: about two minutes on two cores
    python docs/tutorial/build.py 03-global 07     # those whose names begin so
    python docs/tutorial/build.py --check          # runs nothing: are pages, figures and notebooks of the same code?
    python docs/tutorial/build.py --run 03         # runs and compares, writes nothing

A lesson is one Markdown file. Its ```python blocks are the cells, run in order in one process. The build writes each
cell's output between `<!-- output … -->` and `<!-- end of output -->`. `<!-- check: … -->` after a cell holds a claim
of the text as a Python expression: a lesson in which one is false fails. No Jupyter is needed.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
CELL = re.compile(r"^```python\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
OUTPUT = re.compile(r"\n<!-- output (\w+) -->\n(.*?)<!-- end of output -->\n", re.DOTALL)
CHECK = re.compile(r"<!-- check: (.*?) -->\n", re.DOTALL)
FIGURE = re.compile(r"!\[.*?\]\((figures/.*?\.png)\)")
NUMBER = re.compile(r"[-+]?\d[\d,]*\.?\d*(?:e[-+]?\d+)?")
RUNNER = HERE / "run_cells.py"


@dataclass
class Cell:
    """A block of code, what its run gave, and the claims that the text makes about it."""

    code: str
    digest: str  # of this code and all before it: outputs that were made by other code have another one
    checks: list[str]
    written: str | None = None  # the digest that stands at the output in the page
    text: str = ""
    figures: list[str] = field(default_factory=list)  # as paths beside the page


@dataclass
class Lesson:
    """A page: text and cells in turn."""

    path: Path
    parts: list[str | Cell]

    @property
    def cells(self) -> list[Cell]:
        return [part for part in self.parts if isinstance(part, Cell)]

    @property
    def notebook(self) -> Path:
        return self.path.with_suffix(".ipynb")


def lessons(names: list[str] | None = None) -> list[Path]:
    """The pages whose names begin with one of these, in order; all without names."""
    found = sorted(HERE.glob("[0-9][0-9]-*.md"))
    chosen = [path for path in found if not names or any(path.name.startswith(name) for name in names)]
    if not chosen:
        raise SystemExit(
            f"no lesson begins with {', '.join(names or [])}: there are {', '.join(p.stem for p in found)}"
        )
    return chosen


def read(path: Path) -> Lesson:
    page = path.read_text(encoding="utf-8")
    parts: list[str | Cell] = []
    sha, end = hashlib.sha256(), 0
    for found in CELL.finditer(page):
        parts.append(page[end : found.start()])
        sha.update(found[1].encode())
        cell = Cell(found[1], sha.hexdigest()[:12], [])
        end = found.end()
        if output := OUTPUT.match(page, end):
            cell.written, end = output[1], output.end()
            cell.figures = FIGURE.findall(output[2])
            printed = re.search(r"^```text\n(.*?)^```\n", output[2], re.MULTILINE | re.DOTALL)
            cell.text = printed[1] if printed else ""
        while check := CHECK.match(page, end):
            cell.checks.append(check[1])
            end = check.end()
        parts.append(cell)
    return Lesson(path, [*parts, page[end:]])


def page_of(lesson: Lesson) -> str:
    return "".join(part if isinstance(part, str) else _block(part) for part in lesson.parts)


def _block(cell: Cell) -> str:
    text = f"```text\n{cell.text}```\n" if cell.text else ""
    figures = "".join(f"\n![{_alt(path)}]({path})\n" for path in cell.figures)
    output = f"\n<!-- output {cell.digest} -->\n{text}{figures}<!-- end of output -->\n" if text or figures else ""
    return f"```python\n{cell.code}```\n{output}" + "".join(f"<!-- check: {check} -->\n" for check in cell.checks)


def _alt(path: str) -> str:
    number = Path(path).stem.rpartition("-")[2]
    return f"Figure {number} of this lesson"


def notebook_of(lesson: Lesson) -> str:
    """The notebook as JSON: links to other pages are as in the page, as it lies beside it."""
    cells: list[dict[str, Any]] = []
    for number, part in enumerate(lesson.parts):
        head = {"id": f"cell-{number:02}", "metadata": {}}
        if isinstance(part, str):
            if part.strip():
                cells.append({"cell_type": "markdown", **head, "source": part.strip()})
            continue
        outputs: list[dict[str, Any]] = []
        if part.text:
            outputs.append({"name": "stdout", "output_type": "stream", "text": part.text})
        for path in part.figures:
            picture = base64.b64encode((HERE / path).read_bytes()).decode()
            data = {"image/png": picture, "text/plain": _alt(path)}
            outputs.append({"data": data, "metadata": {}, "output_type": "display_data"})
        code = {"cell_type": "code", "execution_count": 1 + sum(c["cell_type"] == "code" for c in cells)}
        cells.append({**code, **head, "outputs": outputs, "source": part.code.rstrip()})
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    whole = {"cells": cells, "metadata": {"kernelspec": kernel, "language_info": {"name": "python"}}}
    return json.dumps({**whole, "nbformat": 4, "nbformat_minor": 5}, indent=1, ensure_ascii=False) + "\n"


def run(lesson: Lesson, into: Path, limit: float = 300) -> list[dict[str, Any]]:
    """Run the cells in a fresh process and folder; gives what each printed, with its figures as files in `into`."""
    told = [{"code": cell.code, "checks": cell.checks} for cell in lesson.cells]
    stem = lesson.path.stem[:2]
    with tempfile.TemporaryDirectory(prefix="lesson-") as place:
        ran = subprocess.run(
            [sys.executable, str(RUNNER), str(into), stem],
            input=json.dumps(told),
            capture_output=True,
            text=True,
            cwd=place,
            env={**os.environ, "MPLBACKEND": "agg", "COLUMNS": "100"},
            timeout=limit,
            check=False,
        )
    if ran.returncode:
        raise SystemExit(f"{lesson.path.name}: {ran.stderr.strip()}")
    outputs: list[dict[str, Any]] = json.loads(ran.stdout)
    return outputs


def build(path: Path) -> None:
    """Run a lesson and write its outputs."""
    lesson = read(path)
    for old in (HERE / "figures").glob(f"{path.stem[:2]}-*.png"):
        old.unlink()
    for cell, output in zip(lesson.cells, run(lesson, HERE / "figures"), strict=True):
        cell.text, cell.figures = output["text"], [f"figures/{name}" for name in output["figures"]]
    path.write_text(page_of(lesson), encoding="utf-8")
    lesson.notebook.write_text(notebook_of(lesson), encoding="utf-8")


def stale(path: Path) -> list[str]:
    """What does not fit together, without running anything."""
    lesson, found = read(path), []
    for number, cell in enumerate(lesson.cells, 1):
        if cell.written not in (None, cell.digest):
            found.append(f"{path.name}: the output of cell {number} is of other code")
        found += [f"{path.name}: {name} is missing" for name in cell.figures if not (HERE / name).is_file()]
    if not found and (not lesson.notebook.is_file() or lesson.notebook.read_text() != notebook_of(lesson)):
        found.append(f"{lesson.notebook.name} is not what {path.name} says")
    return found


def differences(path: Path) -> list[str]:
    """Run the lesson, with its checks, and compare: the same words and figures; numbers may be others."""
    lesson, found = read(path), []
    with tempfile.TemporaryDirectory(prefix="figures-") as place:
        for number, (cell, output) in enumerate(zip(lesson.cells, run(lesson, Path(place)), strict=True), 1):
            if _words(cell.text) != _words(output["text"]):
                found.append(f"{path.name}: cell {number} printed\n{output['text']}and the page has\n{cell.text}")
            if len(cell.figures) != len(output["figures"]):
                found.append(f"{path.name}: cell {number} drew {len(output['figures'])} figures")
    return found


def _words(text: str) -> list[str]:
    """Without numbers, in no order: a table that is sorted by a number may have other rows first."""
    return sorted(NUMBER.sub("#", re.sub(r"\b[0-9a-f]{12,}\b", "#", text)).split())


def main() -> None:
    parser = argparse.ArgumentParser(description="Runs the lessons and writes what they print and draw.")
    parser.add_argument("lesson", nargs="*", help="names of lessons, or how they begin")
    parser.add_argument("--check", action="store_true", help="run nothing; say what is stale")
    parser.add_argument("--run", action="store_true", help="run and compare; write nothing")
    given = parser.parse_args()
    found = []
    for path in lessons(given.lesson):
        if given.check:
            found += stale(path)
        elif given.run:
            found += differences(path)
        else:
            print(path.stem, flush=True)
            build(path)
    if found:
        raise SystemExit("\n".join([*found, "python docs/tutorial/build.py rebuilds the lessons"]))


if __name__ == "__main__":
    main()
