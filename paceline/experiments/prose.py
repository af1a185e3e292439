"""What a comparison has found, and what it has not, in plain words."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from paceline.experiments.length import rising
from paceline.experiments.rows import metric_text, rate_text, spread_text
from paceline.experiments.statistics import ALPHA, PairTest, estimate
from paceline.experiments.summary import ArmSummary, Findings
from paceline.result import size_text

METHOD = (
    "± is half of a 95 % confidence interval over seeds (Student's t). Differences are tested by Welch's test, with p "
    "corrected for the number of pairs by Holm's method; significant means p < 0.05."
)


def paragraphs(found: Findings) -> list[str]:
    """The text of the report, a paragraph each."""
    ends = [_goals(found)] if found.length.target is not None else [_ends(found), _times(found), _goals(found)]
    parts = [_setup(found), _rates(found), *ends, _costs(found)]
    parts += [_troubles(found), _unproven(found)]
    return [part for part in parts if part]


def _setup(found: Findings) -> str:
    number, seeds = len(found.arms), len(found.seeds)
    arms = f"{number} schemes were" if number != 1 else "One scheme was"
    workers = sorted({one.arm.workers for one in found.arms})
    crew = f"{workers[0]} workers" if workers != [1] else "1 worker"
    crew = crew if len(workers) == 1 else f"{_listed([str(one) for one in workers])} workers"
    times = {1: "once", 2: "twice"}.get(seeds, f"{seeds} times")
    world = (
        "in real processes" if found.real else f"in the simulator ({found.setting.get('compute', '')} s per gradient)"
    )
    equal = "equal time" if found.length.seconds is not None else "equal work"
    equal = equal if found.length.target is None else "an equal target"
    default = ", the default" if found.length.chosen else ""
    each = "" if number == 1 else " each"
    return (
        f"{arms} trained {times}{each} on {found.task} with {crew} {world}, with {equal}: "
        f"{found.length.text(not found.real)} in every run{default}."
    )


def _rates(found: Findings) -> str:
    if found.swept:
        chosen = [f"{one.label} {one.tuned.text}" for one in found.arms if one.tuned is not None]
        edge = [one.label for one in found.arms if one.tuned is not None and one.tuned.edges]
        text = f"The best of the swept values, by {found.metric}: {_listed(chosen)}."
        if edge:
            text += (
                f" For {_listed(edge)} it is the least or largest value tried: a wider sweep might find a better one."
            )
        return text
    rates = {one.label: rate_text(one) for one in found.arms if rate_text(one)}
    if not rates:
        return ""
    if len(set(rates.values())) == 1:
        return (
            f"All schemes had the same learning rate, {next(iter(rates.values()))}: it was not tuned, and need not be "
            "the best for any of them (--sweep tunes it)."
        )
    told = _listed([f"{label} {rate}" for label, rate in rates.items()])
    return (
        f"Learning rates were not tuned: {told}. A difference between schemes may be one of rates (--sweep tunes them)."
    )


def _ends(found: Findings) -> str:
    ranked = found.ranked
    if len(ranked) < 2:
        return ""
    best, name = ranked[0], found.metric
    most = "highest" if rising(name) else "lowest"
    text = f"{best.label} ended with the {most} {name}, {metric_text(name, best.final(name))}."
    return text + _beside(found, best, found.metric_tests, "worse")


def _beside(found: Findings, best: ArmSummary, tests: Sequence[PairTest], word: str) -> str:
    """Which arms differ significantly from the best one, and which do not."""
    if not tests:
        return f" With {len(found.seeds)} seed no difference can be tested."
    same: list[tuple[str, float]] = []
    other: list[tuple[str, float]] = []
    for test in tests:
        if best.label not in (test.first, test.second):
            continue
        label = test.second if test.first == best.label else test.first
        (other if test.significant else same).append((label, test.corrected))
    text = ""
    if same:
        text += f" NOT significantly different from it: {_listed([f'{a} (p = {_p(p)})' for a, p in same])}."
    if other:
        text += f" Significantly {word}: {_listed([label for label, _ in other])}."
    return text


def _times(found: Findings) -> str:
    if not found.time_tests:
        return ""
    arms = sorted(found.compared, key=lambda one: estimate(one.seconds).mean)
    quick, slow = arms[0], arms[-1]
    fast, long = estimate(quick.seconds), estimate(slow.seconds)
    text = f"The same work took {quick.label} the least time, {spread_text(fast)} {found.unit}"
    if fast.mean > 0 and long.mean > fast.mean:
        text += f", and {slow.label} the most, {spread_text(long)}: {long.mean / fast.mean:.3g} times as long"
    return f"{text}.{_beside(found, quick, found.time_tests, 'slower')}"


def _goals(found: Findings) -> str:
    goal = found.goal
    if goal is None:
        return ""
    times = {one.label: found.times_to_goal(one) for one in found.compared}
    whole = {label: [t for t in some if t is not None] for label, some in times.items() if None not in some and some}
    missed = [label for label in times if label not in whole]
    why = "" if found.length.target is not None else ", which about half of the schemes reached,"
    if not whole:
        return f"No scheme reached {goal} with all seeds." if found.length.target is not None else ""
    first = min(whole, key=lambda label: estimate(whole[label]).mean)
    text = f"{goal}{why} was reached first by {first}, after {spread_text(estimate(whole[first]))} "
    text += f"{found.unit}."
    tests = [test for test in found.goal_tests if first in (test.first, test.second) and not test.significant]
    if tests:
        near = [f"{t.second if t.first == first else t.first} (p = {_p(t.corrected)})" for t in tests]
        text += f" NOT significantly later: {_listed(near)}."
    if found.length.target is not None:
        surely = [t for t in found.goal_tests if first in (t.first, t.second) and t.significant]
        if surely:
            text += f" Significantly later: {_listed([t.second if t.first == first else t.first for t in surely])}."
        if len(whole) > 1 and not found.goal_tests:
            text += f" With {len(found.seeds)} seed no difference can be tested."
    if missed:
        text += f" Not reached with every seed by {_listed(missed)}."
    return text


def _costs(found: Findings) -> str:
    sent = {one.label: estimate(one.bytes_per_worker).mean for one in found.compared if one.bytes_per_worker}
    sent = {label: value for label, value in sent.items() if value > 0}
    if len(sent) < 2:
        return ""
    least, most = min(sent, key=lambda k: sent[k]), max(sent, key=lambda k: sent[k])
    return (
        f"A worker sent {size_text(sent[least])} under {least} and {size_text(sent[most])} under {most}, the least and "
        "the most."
    )


def _troubles(found: Findings) -> str:
    parts = [f"{one.label} {one.trouble}: {one.reason.partition(';')[0]}" for one in found.arms if one.trouble]
    text = f"Left out of all tests: {'; '.join(parts)}." if parts else ""
    stuck = [one.label for one in found.compared if one.unlearned]
    if stuck:
        text += f" {_listed(stuck)} ended with a loss that is not below that of the start."
    return text.strip()


def _unproven(found: Findings) -> str:
    tests = found.main_tests
    if not tests:
        return ""
    what = found.metric if found.length.target is None else f"the time to {found.length.target}"
    same = [test for test in tests if not test.significant]
    seeds = len(found.seeds)
    pairs_of = "1 pair" if len(tests) == 1 else f"{len(tests)} pairs"
    differ = len(tests) - len(same)
    told = f"Of {pairs_of} of schemes, {differ} {'differs' if differ == 1 else 'differ'} significantly in {what}"
    if len(tests) == 1 and len(found.compared) == 2:
        told = f"The two schemes {'do not ' if same else ''}differ significantly in {what}"
        return f"{told} (p = {_p(tests[0].corrected)}). {METHOD}"
    if same:
        pairs = ", ".join(f"{test.first} – {test.second}" for test in same[:12])
        rest = f", and {len(same) - 12} more" if len(same) > 12 else ""
        told += f"; these do not: {pairs}{rest}. That is no proof that they are equal: with {seeds} seeds only large"
        told += " differences can be seen"
    return f"{told}. {METHOD}"


def _p(value: float) -> str:
    if math.isnan(value):
        return "?"
    if value >= ALPHA:
        return f"{value:.2f}" if value < 0.995 else "1"
    return f"{value:.2g}" if value >= 1e-4 else "< 0.0001"


def _listed(words: Sequence[str]) -> str:
    """One, two and three."""
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} and {words[-1]}"


def lines(found: Findings) -> Iterator[str]:
    """The paragraphs and the remarks."""
    yield from paragraphs(found)
    yield from found.notes
