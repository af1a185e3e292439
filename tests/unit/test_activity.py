"""Who computes and who waits in a comparison: the part of a timeline that is kept, and its figure."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

import pytest

from paceline.api.simulate import simulate
from paceline.errors import DataError
from paceline.experiments import activity, activity_figure
from paceline.experiments.activity import ActivityExcerpt, Span
from paceline.experiments.arms import Arm
from paceline.experiments.cells import DONE, CellOutcome, Moment
from paceline.experiments.length import Length
from paceline.experiments.report import written
from paceline.experiments.summary import ArmSummary, Findings
from paceline.runs.run_directory import RunDirectory
from paceline.runtime.timeline import Interval, Timeline

QUIET = {"watch": lambda _: None, "warn": lambda _: None}


def of(scheme: str, **settings: object) -> ActivityExcerpt:
    timeline = activity.recorder(4)
    simulate("toy", scheme, workers=4, steps=200, trace=timeline, **(QUIET | settings))
    found = activity.of_simulation(timeline)
    assert found is not None
    return found


class TestShares:
    def test_a_synchronous_scheme_waits_for_the_slow_worker(self) -> None:
        """Gradients of 1 s, of the slow one 5 s: three of four workers wait for four fifths of the time."""
        shares = of("sync", speeds=(1, 1, 1, 0.2), compute="constant:1").shares(10.0)
        assert shares == pytest.approx({"computes": (3 * 0.2 + 1) / 4, "waits": 3 * 0.8 / 4})

    def test_an_asynchronous_scheme_waits_for_nobody(self) -> None:
        assert of("async", speeds=(1, 1, 1, 0.2), compute="constant:1").shares(10.0) == pytest.approx({"computes": 1.0})

    def test_messages_are_told_from_waits(self) -> None:
        """A pull and a push of half a second each, there and back, for each gradient of a second."""
        shares = of("async", compute="constant:1", network="0.25").shares(6.0)
        assert shares["sends and receives"] == pytest.approx(1 / 2)
        assert "waits" not in shares


def test_eight_workers_and_the_beginning_are_kept() -> None:
    timeline = activity.recorder(20)
    simulate("toy", "async", workers=20, steps=4000, trace=timeline, lr=0.001, **QUIET)
    found = activity.of_simulation(timeline)
    assert found is not None
    assert {rank for rank, *_ in found.spans} == set(range(activity.WORKERS))
    assert len(found.spans) <= 4 * activity.GRADIENTS * 20
    assert all(0 <= a < b <= found.end for _, _, a, b in found.spans)


def test_of_a_real_run_the_middle_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the start, where processes begin at different moments."""
    intervals = [Interval("worker:0", "gradient", k, k + 0.9) for k in range(100)]
    intervals += [Interval("worker:1", "wait", 0.0, 100.0), Interval("server:0", "call", 1.0, 2.0)]
    monkeypatch.setattr(activity, "timeline_of", lambda _: Timeline(intervals=intervals))
    found = activity.of_run(RunDirectory(Path("run")))
    assert found is not None
    assert found.end == pytest.approx(activity.GRADIENTS)
    assert found.mean == pytest.approx(0.9)
    (waits,) = [span for span in found.spans if span[0] == 1]
    assert waits == (1, "waits", 0.0, pytest.approx(found.end))

    def none(_: RunDirectory) -> Timeline:
        raise DataError("no times")

    monkeypatch.setattr(activity, "timeline_of", none)
    assert activity.of_run(RunDirectory(Path("run"))) is None


def findings(activities: Sequence[ActivityExcerpt | None], *, real: bool = False) -> Findings:
    moments = [Moment(0, 0, 0.0, {"loss": 2.0}), Moment(9, 90, 9.0, {"loss": 1.0})]
    arms = [
        ArmSummary(Arm(f"scheme{k}", "async", 2), [0], [CellOutcome(DONE, moments, seconds=9.0, activity=one)])
        for k, one in enumerate(activities)
    ]
    return Findings("toy", real, Length(90, None), [0], "loss", arms)


SPANS: list[Span] = [(0, "computes", 0.0, 1.0), (0, "waits", 1.0, 4.0), (1, "computes", 0.0, 4.0)]


class TestFigure:
    @pytest.mark.parametrize("number", [1, 2, 3, 4])
    def test_a_panel_for_each_scheme_with_the_same_span_of_time(self, number: int) -> None:
        ends = [4.0, 3.0, 4.0, 2.0][:number]
        figure = activity_figure.activity(findings([ActivityExcerpt(end, 1.0, SPANS) for end in ends]))
        assert figure is not None
        panels = [panel for panel in figure.axes if panel.axison]
        assert {panel.get_xlim() for panel in panels} == {(0, min(ends))}
        titles = [panel.get_title() for panel in panels]
        assert titles[0].startswith("scheme0: computes ")
        below = [panel for panel in panels if panel.xaxis.get_tick_params()["labelbottom"]]
        assert len(below) == min(number, 2)  # the lowest of each column

    def test_without_times_there_is_no_figure(self, tmp_path: Path) -> None:
        assert activity_figure.activity(findings([None, None])) is None
        done = written(tmp_path, findings([None]))
        assert "Who computes" not in Path(done.page).read_text()

    def test_it_is_on_the_page_and_in_a_table(self, tmp_path: Path) -> None:
        done = written(tmp_path, findings([ActivityExcerpt(4.0, 1.0, SPANS)] * 2))
        text = Path(done.page).read_text()
        assert "Who computes and who waits" in text
        assert "at the beginning of the run" in text
        with (tmp_path / "who-waits.csv").open() as stream:
            rows = list(csv.DictReader(stream))
        assert len(rows) == 6
        assert rows[1] == {"scheme": "scheme0", "seed": "0", "worker": "0", "does": "waits", "from": "1", "to": "4"}
        done = written(tmp_path, findings([ActivityExcerpt(4.0, 1.0, SPANS)], real=True))
        assert "in the middle of the run" in Path(done.page).read_text()
