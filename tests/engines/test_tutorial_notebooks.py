"""The notebooks of docs/tutorial run in a real Jupyter kernel, and draw the figures that are stored in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")

TUTORIAL = Path(__file__).resolve().parents[2] / "docs" / "tutorial"


def pictures(notebook: Any) -> list[int]:
    """How many each code cell shows."""
    cells = (cell for cell in notebook.cells if cell.cell_type == "code")
    return [sum("image/png" in output.get("data", {}) for output in cell.outputs) for cell in cells]


@pytest.mark.parametrize("path", sorted(TUTORIAL.glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_runs_and_draws_what_it_shows(path: Path, tmp_path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    stored = pictures(notebook)
    assert sum(stored) >= 1
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert pictures(notebook) == stored
