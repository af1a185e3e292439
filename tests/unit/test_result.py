"""What a run gives back."""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from paceline import UsageError, simulate
from paceline.result import SHORT, Point, Result, Staleness, digest

FIELDS = {
    "scheme",
    "task",
    "workers",
    "updates",
    "gradients",
    "dropped",
    "samples",
    "virtual_seconds",
    "staleness",
    "metrics",
    "loss",
    "digest",
    "final",
    "seed",
    "batch",
    "hyper",
    "history",
    "warnings",
    "notice",
}


def result(**changed: Any) -> Result:
    made = Result(
        scheme="async",
        task="toy",
        workers=2,
        updates=3,
        gradients=4,
        samples=8,
        virtual_seconds=1.5,
        staleness=Staleness(0.5, 1, {0: 2, 1: 1}),
        metrics={"loss": 0.25},
        vector=torch.tensor([1.0, -2.0]),
    )
    return replace(made, **changed)


def test_the_digest_is_that_of_the_vectors_bytes_alone() -> None:
    vector = torch.tensor([1.0, -2.0])
    assert result().digest == digest(vector) == hashlib.sha256(vector.numpy().tobytes()).hexdigest()
    assert result(workers=7, task="other", seed=3, metrics={}).digest == digest(vector)
    assert result(vector=torch.tensor([1.0, 2.0])).digest != digest(vector)
    assert digest(torch.tensor([0.0])) != digest(torch.tensor([-0.0]))
    assert digest(torch.arange(4.0)[::2]) == digest(torch.tensor([0.0, 2.0]))  # by value, not by where it lies


def test_json_has_the_promised_fields() -> None:
    plain = json.loads(result(history=[Point(1, 0.5, {"loss": 2.0})]).to_json())
    assert set(plain) >= FIELDS
    assert plain["staleness"]["histogram"] == {"0": 2, "1": 1}
    assert plain["history"][0] == {"update": 1, "seconds": 0.5, "loss": 2.0}
    assert plain["final"] == [1.0, -2.0]
    assert plain["loss"] == 0.25
    assert "\n" not in result().to_json()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_json_cannot_write_becomes_null(bad: float) -> None:
    odd = result(
        metrics={"loss": bad},
        vector=torch.tensor([bad, 1.0]),
        virtual_seconds=bad,
        history=[Point(1, bad, {"loss": bad})],
        hyper={"rates": (bad, 1.0)},
    )
    plain = json.loads(odd.to_json(), parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert plain["loss"] is None
    assert plain["metrics"] == {"loss": None}
    assert plain["final"] == [None, 1.0]
    assert plain["virtual_seconds"] is None
    assert plain["history"] == [{"update": 1, "seconds": None, "loss": None}]
    assert plain["hyper"] == {"rates": [None, 1.0]}


def test_only_a_short_vector_is_shown() -> None:
    assert SHORT == 16
    assert result(vector=torch.zeros(16)).final == [0.0] * 16
    assert result(vector=torch.zeros(17)).final is None
    assert json.loads(result(vector=torch.zeros(17)).to_json())["final"] is None


def test_without_a_loss_it_is_not_a_number() -> None:
    assert math.isnan(result(metrics={}).loss)


def test_a_result_of_a_run_stays_as_it_is() -> None:
    run = simulate("toy", "async", workers=2, steps=5, seed=3, lr=0.1)
    assert (run.scheme, run.task, run.workers, run.updates, run.seed, run.batch) == ("async", "toy", 2, 5, 3, 1)
    assert run.samples == run.gradients == 5
    assert run.hyper == {"lr": 0.1, "rule": "sgd"}
    assert run.staleness.histogram == {0: 1, 1: 4}
    assert run.staleness.mean == pytest.approx(0.8)
    assert json.loads(run.to_json())["final"] == run.vector.tolist()
    again = simulate("toy", "async", workers=2, steps=5, seed=3, lr=0.1)
    assert again.to_json() == run.to_json()


def course() -> Result:
    """With evaluations, and a value of another hook."""
    points = [
        Point(10, 1.0, {"loss": 2.0, "accuracy": 0.5}),
        Point(15, 1.4, {"speed": 7.0}),
        Point(20, 2.0, {"loss": 1.0, "accuracy": 0.75}),
    ]
    return result(history=points, task="<toy>", warnings=["a & b"], stopped="it was enough")


def test_the_history_is_a_list_with_names() -> None:
    made = course()
    assert isinstance(made.history, list)
    assert made.history == list(made.history)
    assert made.history.names() == ["loss", "accuracy", "speed"]
    assert replace(made, workers=3).history.names() == ["loss", "accuracy", "speed"]
    assert result().history == []
    made.history.append(Point(30, 3.0, {}))
    assert len(made.history) == 4


def test_notebooks_show_a_result_as_a_table_and_nothing_in_it_as_markup() -> None:
    html = course()._repr_html_()
    assert "<caption>async on &lt;toy&gt;</caption>" in html
    assert "<td>1.5 s</td>" in html  # virtual time
    assert html.endswith("<div>stopped: it was enough</div><div>warning: a &amp; b</div>")
    table = course().history._repr_html_()
    assert table.startswith(
        "<table><tr><th>update</th><th>seconds</th><th>loss</th><th>accuracy</th><th>speed</th></tr>"
    )
    assert "<tr><td>15</td><td>1.4</td><td></td><td></td><td>7</td></tr>" in table


def test_a_data_frame() -> None:
    pytest.importorskip("pandas")
    frame = course().history.frame()
    assert list(frame.columns) == ["update", "seconds", "loss", "accuracy", "speed"]
    assert frame["accuracy"].dropna().tolist() == [0.5, 0.75]
    assert list(result().history.frame().columns) == ["update", "seconds"]


def test_a_figure() -> None:
    pytest.importorskip("matplotlib")
    figure = course().plot()
    assert [panel.get_ylabel() for panel in figure.axes] == ["loss", "accuracy", "speed"]
    assert figure.axes[0].lines[0].get_xydata().tolist() == [[10, 2], [20, 1]]
    assert figure._repr_png_().startswith(b"\x89PNG")
    (panel,) = course().plot("accuracy", over="seconds").axes
    assert panel.lines[0].get_xydata().tolist() == [[1, 0.5], [2, 0.75]]
    assert panel.get_xlabel() == "virtual seconds"
    with pytest.raises(UsageError, match="no metric in the history 'accurcy'; did you mean 'accuracy'"):
        course().plot("accurcy")


def test_a_run_without_evaluations_has_nothing_to_draw() -> None:
    with pytest.raises(UsageError, match="no evaluations to draw: give every=UPDATES"):
        result().plot()


@pytest.mark.parametrize(
    ("package", "call"), [("pandas", lambda one: one.history.frame()), ("matplotlib", Result.plot)]
)
def test_a_missing_package_is_named_with_the_command_that_installs_it(
    package: str, call: Callable[[Result], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (package, f"{package}.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UsageError, match=rf"needs {package}; install it with: pip install 'paceline\[notebook\]'"):
        call(course())
