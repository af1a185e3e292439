"""`paceline compare`: arms, equal work, statistics, tuning, tables, prose, figures, the page."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from paceline import UsageError, compare
from paceline.compute_times import Exponential, Uniform
from paceline.config import build
from paceline.experiments import curve_figures, simulated_cell
from paceline.experiments.arms import Arm, Sweep, arms_of
from paceline.experiments.cells import DIVERGED, DONE, CellOutcome, Moment, RunCell
from paceline.experiments.child import updates_of
from paceline.experiments.length import Goal, Length
from paceline.experiments.prose import paragraphs
from paceline.experiments.report import written
from paceline.experiments.rows import metric_text, rows_of, spread_text
from paceline.experiments.staleness_theory import expected_staleness
from paceline.experiments.statistics import Estimate, estimate, holm, pair_tests, welch
from paceline.experiments.styles import styles
from paceline.experiments.summary import ArmSummary, Findings
from paceline.experiments.tuning import tuned


class TestStatistics:
    def test_an_interval_by_hand(self) -> None:
        found = estimate([1.0, 2.0, 3.0])  # s = 1, t(2) = 4.302653 for 95 %
        assert found.mean == 2.0
        assert found.half == pytest.approx(4.302653 / math.sqrt(3), rel=1e-6)

    def test_one_value_has_no_interval(self) -> None:
        assert math.isnan(estimate([5.0]).half)
        assert estimate([]).count == 0

    def test_welch_by_hand(self) -> None:
        # variances 1 and 4, means 2 and 6: t = 4 / sqrt(5 / 3) = 3.0984, degrees = (5/3)^2 / (1/18 + 16/18) = 2.9412
        assert welch([1.0, 2.0, 3.0], [4.0, 6.0, 8.0]) == pytest.approx(0.0550, abs=1e-3)
        assert welch([1.0, 2.0, 3.0], [3.0, 2.0, 1.0]) == pytest.approx(1.0)

    def test_without_variation_any_difference_is_one(self) -> None:
        assert welch([1.0, 1.0], [1.0, 1.0]) == 1.0
        assert welch([1.0, 1.0], [2.0, 2.0]) == 0.0
        assert math.isnan(welch([1.0], [2.0, 3.0]))

    def test_holm_by_hand(self) -> None:
        assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
        assert holm([0.9, 0.8]) == [1.0, 1.0]

    def test_more_pairs_need_more_evidence(self) -> None:
        near, far = [0.0, 1.0, 2.0], [4.0, 5.0, 6.0]  # p = 0.008 alone
        (alone,) = pair_tests({"a": near, "b": far})
        assert alone.significant
        assert alone.difference == -4.0
        many = pair_tests({"a": near, "b": far, **{f"c{k}": [1.0 * k, 50.0, -40.0] for k in range(8)}})
        (among,) = [one for one in many if (one.first, one.second) == ("a", "b")]
        assert among.p == alone.p
        assert not among.significant


class TestArms:
    def test_values_go_to_the_schemes_that_have_them(self) -> None:
        arms, ignored = arms_of("sync,agn", [4], {"lr": "0.3", "window": "7", "agn.lr": "0.2"})
        assert [(arm.label, dict(arm.hyper)) for arm in arms] == [
            ("sync", {"lr": "0.3"}),
            ("agn", {"lr": "0.2", "window": "7"}),
        ]
        assert ignored == ["window=7 is ignored by sync"]

    def test_each_scheme_at_each_number_of_workers(self) -> None:
        arms, _ = arms_of(["sync"], [1, 2], {})
        assert [(arm.label, arm.workers) for arm in arms] == [("sync ×1", 1), ("sync ×2", 2)]

    @pytest.mark.parametrize(
        ("schemes", "hyper", "text"),
        [
            ("sinc", {}, "no scheme 'sinc'; did you mean 'sync'"),
            ("sync,sync", {}, "given twice"),
            ("", {}, "nothing to compare"),
            ("sync,async", {"windw": "3"}, "windw"),
            ("sync", {"lr": "fast"}, "lr"),
        ],
    )
    def test_mistakes_are_told(self, schemes: str, hyper: dict[str, str], text: str) -> None:
        with pytest.raises(UsageError, match=re.escape(text)):
            arms_of(schemes, [2], hyper)

    def test_a_dictionary_gives_labels(self) -> None:
        arms, _ = arms_of({"slow": build.scheme_of("sync", {"lr": 0.01}), "quick": "sync"}, [2], {})
        assert [arm.label for arm in arms] == ["slow", "quick"]
        assert build.hyper_of(arms[0].built())["lr"] == 0.01

    def test_a_sweep_is_of_what_a_scheme_has(self) -> None:
        sweep = Sweep.read(["lr=0.1,0.2", "window=2,3"])
        assert list(sweep.candidates(Arm("sync", "sync", 2))) == [{"lr": "0.1"}, {"lr": "0.2"}]
        assert len(list(sweep.candidates(Arm("agn", "agn", 2)))) == 4
        with pytest.raises(UsageError, match="several values"):
            Sweep.read(["lr=0.1"])


def cell(scheme: str, **more: Any) -> RunCell:
    given: dict[str, Any] = {
        "label": scheme,
        "scheme": scheme,
        "workers": 4,
        "hyper": {"lr": 0.01},
        "seed": 0,
        "real": False,
        "samples": 400,
        "seconds": None,
        "target": None,
        "points": 5,
        "task": "quadratic",
        "settings": {"compute": "exponential:1.0"},
    }
    return RunCell(**given | more)


def simulated(one: RunCell) -> CellOutcome:
    task = build.task_of(one.task, {})
    counted = updates_of(one, one.scheme, task) is not None
    start = task.evaluate(task.start(one.seed))
    return simulated_cell.performed(one, task, one.scheme, start, lambda _: None, counted)


class TestEqualWork:
    @pytest.mark.parametrize("scheme", ["sync", "async", "agn", "easgd", "rennala"])
    def test_every_scheme_has_the_same_samples(self, scheme: str) -> None:
        one = cell(scheme)
        found = simulated(one)
        task = build.task_of("quadratic", {})
        # rounded up to whole updates, and what is under way then
        gradients = build.scheme_of(scheme, {}).gradients_per_update(4) or 8
        assert 400 <= found.samples <= 400 + task.batch * (gradients + 4 * 12)
        assert found.moments[0].update == 0
        assert found.moments[-1].update == found.updates
        assert [m.samples for m in found.moments] == sorted(m.samples for m in found.moments)

    @pytest.mark.parametrize("scheme", ["sync", "async"])
    def test_equal_time_ends_at_that_time(self, scheme: str) -> None:
        found = simulated(cell(scheme, samples=None, seconds=7.5))
        assert found.seconds == 7.5
        assert all(m.seconds <= 7.5 for m in found.moments)

    def test_a_target_ends_a_run(self) -> None:
        whole = simulated(cell("async", samples=2000))
        half = math.sqrt(whole.moments[0].metrics["loss"] * whole.final["loss"])
        found = simulated(cell("async", samples=2000, target=("loss", half)))
        assert found.final["loss"] <= half
        assert found.samples < whole.samples
        assert "reached" in found.reason

    def test_a_run_that_diverges_is_an_outcome(self) -> None:
        found = simulated(cell("async", hyper={"lr": 1e30}, samples=20000))
        assert found.status == DIVERGED
        assert "loss" in found.reason

    def test_the_same_cell_has_the_same_outcome_and_file(self) -> None:
        one = cell("async")
        assert simulated(one) == simulated(one)
        assert one.key == cell("async").key
        assert len({one.key, cell("async", seed=1).key, cell("async", samples=401).key}) == 3


class TestOutcomes:
    def test_it_is_read_as_it_was_written(self, tmp_path: Path) -> None:
        found = simulated(cell("async"))
        found.write(tmp_path / "cells" / "a.json")
        assert CellOutcome.read(tmp_path / "cells" / "a.json") == found

    def test_a_damaged_or_missing_file_is_no_outcome(self, tmp_path: Path) -> None:
        (tmp_path / "a.json").write_text('{"status": "done"')
        assert CellOutcome.read(tmp_path / "a.json") is None
        assert CellOutcome.read(tmp_path / "b.json") is None


def outcome(accuracy: float, seconds: float = 10.0, status: str = DONE) -> CellOutcome:
    moments = [
        Moment(0, 0, 0.0, {"loss": 2.3, "accuracy": 0.1}),
        Moment(5, 50, seconds / 2, {"loss": 1.0, "accuracy": accuracy / 2}),
        Moment(10, 100, seconds, {"loss": 0.5, "accuracy": accuracy}),
    ]
    return CellOutcome(status, moments, "", 10, 10, 100, seconds, 1000, {0: 4, 1: 6}, {"lr": 0.1})


def findings(values: dict[str, Sequence[CellOutcome]], **more: Any) -> Findings:
    seeds = range(len(next(iter(values.values()))))
    arms = [ArmSummary(Arm(label, "async", 4), list(seeds), runs) for label, runs in values.items()]
    return Findings(
        "digits", False, Length(100, None), list(seeds), "accuracy", arms, {"compute": "constant:1"}, **more
    )


CLEAR = {
    "good": [outcome(0.95), outcome(0.951), outcome(0.949)],
    "also": [outcome(0.948), outcome(0.953), outcome(0.951)],
    "bad": [outcome(0.5, 30.0), outcome(0.502, 31.0), outcome(0.498, 29.0)],
}


class TestProse:
    def test_what_is_not_significant_is_said(self) -> None:
        text = " ".join(paragraphs(findings(CLEAR)))
        assert "also ended with the highest accuracy" in text
        assert re.search(r"NOT significantly different from it: good \(p = [\d.]+\)", text)
        assert "Significantly worse: bad." in text
        assert "these do not: also – good" in text
        assert "no proof that they are equal" in text

    def test_two_schemes_that_do_not_differ(self) -> None:
        text = " ".join(paragraphs(findings({name: CLEAR[name] for name in ("good", "also")})))
        assert "do not differ significantly in accuracy" in text

    def test_rates_that_were_not_tuned_are_said(self) -> None:
        assert "it was not tuned" in " ".join(paragraphs(findings(CLEAR)))

    def test_one_seed_proves_nothing(self) -> None:
        text = " ".join(paragraphs(findings({name: runs[:1] for name, runs in CLEAR.items()})))
        assert "no difference can be tested" in text
        assert "ignificantly" not in text.replace("significant means", "")

    def test_a_scheme_that_diverged_is_named_and_not_tested(self) -> None:
        broken = [outcome(0.9), CellOutcome(DIVERGED, [], "the loss is nan"), outcome(0.9)]
        found = findings(CLEAR | {"broken": broken})
        assert "broken diverged (1 of 3 seeds): the loss is nan" in " ".join(paragraphs(found))
        assert not [one for one in found.metric_tests if "broken" in (one.first, one.second)]
        assert list(rows_of(found))[-1][:3] == ("broken", "0.1", "diverged (1 of 3 seeds)")


class TestTables:
    @pytest.mark.parametrize(
        ("value", "text"),
        [
            (Estimate(1234.5, 12.3, 3), "1,234 ± 12"),
            (Estimate(0.12345, 0.0021, 3), "0.1235 ± 0.0021"),
            (Estimate(3.0, math.nan, 1), "3"),
            (Estimate(3.0, 0.0, 3), "3 ± 0"),
            (Estimate(math.nan, math.nan, 0), ""),
        ],
    )
    def test_digits_follow_the_interval(self, value: Estimate, text: str) -> None:
        assert spread_text(value) == text

    def test_accuracy_is_in_percent(self) -> None:
        assert metric_text("accuracy", Estimate(0.95123, 0.0031, 3)) == "95.12 ± 0.31 %"

    def test_a_target_that_some_seeds_missed(self) -> None:
        found = findings({"some": [outcome(0.9), outcome(0.2), outcome(0.9)], "all": [outcome(0.9)] * 3})
        found = Findings(**{**vars_of(found), "length": Length(100, None, Goal("accuracy", 0.8))})
        texts = {row[0]: row[4] for row in rows_of(found)}
        assert texts == {"some": "2 of 3 seeds", "all": "10 ± 0"}

    def test_with_a_target_the_time_to_it_decides(self, tmp_path: Path) -> None:
        """Runs end at the target: their final metric says next to nothing."""
        values = {
            "late": [outcome(0.99, 30.0), outcome(0.99, 31.0), outcome(0.99, 29.0)],
            "soon": [outcome(0.91, 10.0), outcome(0.91, 10.1), outcome(0.91, 9.9)],
            "some": [outcome(0.99, 5.0), outcome(0.5, 5.0), outcome(0.99, 5.0)],
        }
        found = Findings(**{**vars_of(findings(values)), "length": Length(100, None, Goal("accuracy", 0.9))})
        assert [row[0] for row in rows_of(found)] == ["soon", "late", "some"]
        text = " ".join(paragraphs(found))
        assert "with an equal target: until accuracy ≥ 0.9, at most 100 samples" in text
        assert "accuracy ≥ 0.9 was reached first by soon, after 10.00 ± 0.25 virtual seconds" in text
        assert "Significantly later: late. Not reached with every seed by some." in text
        assert "ended with the highest" not in text
        assert "Of 1 pair of schemes, 1 differs significantly in the time to accuracy ≥ 0.9" in text
        assert "By the time to accuracy ≥ 0.9: Welch" in Path(written(tmp_path, found).page).read_text()
        alone = Findings(
            **{**vars_of(found), "arms": [ArmSummary(one.arm, [0], one.outcomes[:1]) for one in found.arms]}
        )
        assert "no difference can be tested" in " ".join(paragraphs(Findings(**{**vars_of(alone), "seeds": [0]})))


def vars_of(found: Findings) -> dict[str, Any]:
    return {name: getattr(found, name) for name in Findings.__dataclass_fields__}


class TestTheory:
    def test_exponential_workers_have_a_geometric_law(self) -> None:
        found = expected_staleness(build.scheme_of("async", {}), 4, Exponential(1.0))
        assert found is not None
        assert found.probabilities[0] == 0.25
        assert sum(k * p for k, p in found.probabilities.items()) == pytest.approx(3.0, rel=0.01)

    def test_a_renewal_model_has_the_mean_of_the_law_of_conservation(self) -> None:
        found = expected_staleness(build.scheme_of("agn", {"window": 3}), 4, Uniform())
        assert found is not None
        assert sum(found.probabilities.values()) == pytest.approx(1.0)
        assert sum(k * p for k, p in found.probabilities.items()) == pytest.approx(3.0, rel=0.02)

    def test_it_says_nothing_of_schemes_with_other_laws(self) -> None:
        for name in ("k-async", "softsync", "ringmaster", "ssp"):
            assert expected_staleness(build.scheme_of(name, {}), 4, Exponential(1.0)) is None


class TestTuning:
    def test_the_best_value_is_chosen_and_an_edge_is_told(self) -> None:
        sweep = Sweep.read(["lr=0.1,0.2,0.4"])
        pairs = [({"lr": "0.1"}, outcome(0.8)), ({"lr": "0.2"}, outcome(0.9)), ({"lr": "0.4"}, outcome(0.85))]
        found = tuned(Arm("sync", "sync", 2), sweep, pairs, "accuracy")
        assert (found.chosen, found.edges, dict(found.arm.hyper)) == ({"lr": "0.2"}, [], {"lr": "0.2"})
        pairs[1] = ({"lr": "0.2"}, CellOutcome(DIVERGED, [], "the loss is nan"))
        assert tuned(Arm("sync", "sync", 2), sweep, pairs, "accuracy").edges == ["lr"]


class TestReport:
    def test_the_page_needs_nothing_else_and_figures_are_whole(self, tmp_path: Path) -> None:
        done = written(tmp_path, findings(CLEAR))
        text = Path(done.page).read_text()
        assert "http-equiv" not in text
        assert not re.search(r'(src|href)="(https?:)?//', text.replace('href="http://www.w3.org', ""))
        assert "<script" not in text
        assert text.count("<svg") >= 5
        ids = re.findall(r'\bid="([^"]+)"', text)
        assert len(ids) == len(set(ids))
        for path in done.figures:
            assert Path(path).stat().st_size > 1000
            if path.endswith(".svg"):
                ElementTree.parse(path)
        with (tmp_path / "curves.csv").open() as stream:
            rows = list(csv.DictReader(stream))
        assert len(rows) == 27
        assert rows[2] == {
            "scheme": "good",
            "seed": "0",
            "update": "10",
            "samples": "100",
            "seconds": "10",
            "loss": "0.5",
            "accuracy": "0.95",
        }

    @pytest.mark.parametrize("arms", [curve_figures.CROWDED, curve_figures.CROWDED + 1])
    def test_bands_are_drawn_while_lines_can_be_seen(self, arms: int) -> None:
        values = {str(k): [outcome(0.5 + k / 100), outcome(0.6 + k / 100)] for k in range(arms)}
        figure = curve_figures.against_all(findings(values), "accuracy", styles(list(values)))
        for panel in figure.axes:
            assert len(panel.lines) == arms
            assert len(panel.collections) == (arms if arms <= curve_figures.CROWDED else 0)

    def test_ten_schemes_have_ten_looks(self) -> None:
        looks = styles([str(k) for k in range(12)]).values()
        assert len({(look.colour, str(look.dash)) for look in looks}) == 12
        assert len({look.marker for look in looks}) == 12


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"schemes": "sync,sgd", "workers": 4}, "sgd"),
        ({"schemes": "sync", "target": "acuracy=0.9"}, "no metric of this task 'acuracy'"),
        ({"schemes": "sync", "target": "loss"}, "METRIC=VALUE"),
        ({"schemes": "sync", "samples": 10, "seconds": 1.0}, "not both"),
        ({"schemes": "sync", "real": True, "simulate": True}, "real or simulated"),
        ({"schemes": "sync", "real": True, "compute": "constant:1"}, "simulator"),
        ({"schemes": "sync", "sweep": {"window": (1, 2)}}, "no scheme has"),
        ({"schemes": "malenia", "real": True}, "does not say how many gradients"),
        ({"schemes": "sync", "seeds": 0}, "at least 1"),
    ],
)
def test_mistakes_are_refused_before_anything_starts(given: dict[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=re.escape(text)):
        compare("toy", **given, directory=tmp_path / "out")
    assert not (tmp_path / "out").exists()
