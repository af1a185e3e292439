"""A real notebook, executed by Jupyter's kernel: the table in place, results, figures, errors of its cells."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
pytest.importorskip("matplotlib")
pytest.importorskip("pandas")

CELLS = (
    """
import paceline, torch
from torch import nn
x = torch.randn(256, 20, generator=torch.Generator().manual_seed(0))
y = (x.sum(1) > 0).long()
""",
    """
task = paceline.TorchTask(lambda: nn.Linear(20, 2), nn.CrossEntropyLoss(), train=(x, y), test=(x, y), batch=32)
result = paceline.train(task, "async", workers=2, steps=60, every=20)
result
""",
    "result.plot()",
    "result.history.frame()",
    'paceline.simulate(task, "async", steps=60, workers=2)',
    """
def bad(out, target):
    wrong = target + 5
    return nn.functional.cross_entropy(out, wrong)

task = paceline.TorchTask(lambda: nn.Linear(20, 2), bad, train=(x, y), test=(x, y), batch=32)
paceline.train(task, "sync", workers=1, steps=5)
""",
)


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    """The outputs of each cell."""
    place: Path = tmp_path_factory.mktemp("notebook")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text.strip()) for text in CELLS])
    client = nbclient.NotebookClient(
        notebook, timeout=200, allow_errors=True, resources={"metadata": {"path": str(place)}}
    )
    client.execute()
    return [list(cell.outputs) for cell in notebook.cells]


def shown(cell: list[dict[str, Any]], kind: str) -> list[dict[str, str]]:
    return [one["data"] for one in cell if one["output_type"] == kind]


def test_the_table_is_one_output_that_is_replaced_and_stays(outputs: list[list[dict[str, Any]]]) -> None:
    (table,) = shown(outputs[1], "display_data")
    assert "update 60/60  100%" in table["text/html"]
    assert "worker:1" in table["text/html"]


def test_a_result_is_a_table(outputs: list[list[dict[str, Any]]]) -> None:
    for cell, task in ((outputs[1], "async on task"), (outputs[4], "async on task")):
        (result,) = shown(cell, "execute_result")
        assert f"<caption>{task}</caption>" in result["text/html"]


def test_a_figure_is_shown_once(outputs: list[list[dict[str, Any]]]) -> None:
    (figure,) = (one["data"] for one in outputs[2])
    assert len(figure["image/png"]) > 1000


def test_the_history_is_a_data_frame(outputs: list[list[dict[str, Any]]]) -> None:
    (frame,) = shown(outputs[3], "execute_result")
    assert 'class="dataframe"' in frame["text/html"]
    assert frame["text/plain"].split()[:3] == ["update", "seconds", "loss"]


def test_the_bar_of_a_simulation_is_gone_at_its_end(outputs: list[list[dict[str, Any]]]) -> None:
    assert [one["text/html"] for one in shown(outputs[4], "display_data")] == [""]


def test_an_error_names_the_line_of_the_cell(outputs: list[list[dict[str, Any]]]) -> None:
    (error,) = (one for one in outputs[5] if one["output_type"] == "error")
    assert error["ename"] == "RunError"
    told = "".join(error["traceback"])
    assert ":3: return nn.functional.cross_entropy(out, wrong)" in told
    assert "raised in" in told
