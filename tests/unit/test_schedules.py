"""A rate belongs to an update: who makes the update looks the rate up by the version that it changes."""

from __future__ import annotations

import math
import pickle
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import paceline
from paceline.config import build
from paceline.errors import UnknownName, UsageError
from paceline.rules import SGD
from paceline.schedules import Schedule
from paceline.scheme import Rate, Scheme, State, Vector, on_server
from paceline.worker import Worker


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("constant:1", {0: 1.0, 500: 1.0}),
        ("step:1,over=10,gamma=0.5", {0: 1.0, 9: 1.0, 10: 0.5, 25: 0.25}),
        ("exponential:1,over=10,gamma=0.25", {0: 1.0, 5: 0.5, 10: 0.25}),
        ("linear:1,over=10,lowest=0.2", {0: 1.0, 5: 0.6, 10: 0.2, 99: 0.2}),
        ("cosine:1,over=10", {0: 1.0, 5: 0.5, 10: 0.0, 99: 0.0}),
        ("constant:1,warmup=4", {0: 0.25, 1: 0.5, 3: 1.0, 4: 1.0}),
        ("linear:1,warmup=4,over=10", {3: 1.0, 4: 1.0, 9: 0.5, 14: 0.0}),
        ("linear:1,over=100,every=5", {0: 1.0, 4: 1.0, 5: 0.95, 9: 0.95, 10: 0.9}),
    ],
)
def test_schedules_are_what_their_formulas_say(text: str, expected: dict[int, float]) -> None:
    schedule = Schedule.read(text)
    for version, rate in expected.items():
        assert schedule.at(version) == pytest.approx(rate, abs=1e-12)
    assert Schedule.read(str(schedule)) == schedule == pickle.loads(pickle.dumps(schedule))


def test_samples_and_epochs_are_counted_by_what_an_update_takes() -> None:
    by_samples = Schedule.read("linear:1,over=1000,warmup=200,unit=samples").in_unit("samples", 100)
    by_updates = Schedule.read("linear:1,over=10,warmup=2")
    by_epochs = Schedule.read("linear:1,over=2,warmup=0.4,unit=epochs").in_unit("epochs", 100 / 500)
    for version in range(15):
        assert by_samples.at(version) == pytest.approx(by_updates.at(version))
        assert by_epochs.at(version) == pytest.approx(by_updates.at(version))
    assert Schedule.read(str(by_epochs)) == by_epochs  # a process that reads it counts the same


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("cosine:0.1", "needs over=UPDATES"),
        ("cosine:0.1,over=3,unit=weeks", "unit must be one of updates, samples, epochs, not 'weeks'"),
        ("cosine:0.1,ovr=3", "no option of the schedule cosine 'ovr'; did you mean 'over'"),
        ("cosine:much,over=3", "rate must be a number, not 'much'"),
        ("cosine:-1,over=3", "rate must be at least 0"),
        ("step:0.1,over=3,every=1.5", "every must be a whole number"),
        ("step:0.1,over", "is no schedule"),
        ("cosines:0.1,over=3", "lr must be a number"),
    ],
)
def test_mistakes_are_told(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        build.scheme_of("async", {"lr": text})


def test_a_unit_that_no_run_has_counted_is_refused() -> None:
    with pytest.raises(UsageError, match="counts epochs, and this run does not say"):
        Schedule.read("cosine:0.1,over=3,unit=epochs").at(0)
    with pytest.raises(UsageError, match="the length of an epoch is not known here"):
        paceline.simulate("toy", "async", steps=3, lr="cosine:0.1,over=3,unit=epochs")


def test_a_scheme_at_a_version_has_numbers() -> None:
    scheme = build.scheme_of("agn", {"lr": "linear:1,over=10", "rule.lr": "step:0.4,over=2,gamma=0.5"})
    state = State(x=torch.zeros(2))
    for version, lr, local in ((0, 1.0, 0.4), (5, 0.5, 0.1), (0, 1.0, 0.4)):
        state.v = version
        now: Any = scheme.rates_at(state)
        assert (now.lr, now.rule.lr) == (lr, local)
        assert type(now.lr) is float
        assert now.source is scheme
        assert now.rates_at(state) is now
        assert build.scheme_of(now, {"window": 3}).lr == scheme.lr  # type: ignore[attr-defined]
    assert build.hyper_of(scheme)["lr"] == "linear:1,over=10"
    assert build.scheme_of("agn", build.hyper_of(scheme)) == scheme
    plain = build.scheme_of("agn", {"lr": 0.1})
    assert plain.rates_at(state) is plain


@dataclass(frozen=True)
class Own(Scheme, name="own"):
    """A user's scheme that multiplies with its rate itself."""

    lr: Rate = 0.1
    asynchronous = True

    @on_server(reads=True)
    def pull(self, s: State) -> tuple[Vector, int]:
        return s.x, s.v

    @on_server
    def push(self, s: State, g: Vector, v: int) -> None:
        s.admit(v)
        s.x -= self.lr * g
        s.v += 1

    async def step(self, w: Worker) -> None:
        w.x, w.v = await self.pull()
        await self.push(await w.grad(w.x), w.v)


def test_a_scheme_that_uses_its_rate_as_a_number_follows_too() -> None:
    given = {"workers": 3, "steps": 30, "lr": "cosine:0.01,over=30,warmup=3"}
    assert paceline.simulate("toy", Own(), **given).digest == paceline.simulate("toy", "async", **given).digest


@pytest.mark.parametrize("scheme", ["sync", "sagn", "sync-repeat", "async", "agn", "allreduce", "hogwild"])
def test_the_hook_and_the_scheme_say_the_same(scheme: str) -> None:
    hook = "learning-rate:base=0.02,kind=cosine,over=20,warmup=4"
    by_hook = paceline.simulate("toy", scheme, workers=3, steps=20, hooks=hook, say=lambda _: None)
    given = paceline.simulate("toy", scheme, workers=3, steps=20, lr="cosine:0.02,over=20,warmup=4")
    assert by_hook.digest == given.digest
    assert given.digest != paceline.simulate("toy", scheme, workers=3, steps=20, lr=0.02).digest


@pytest.mark.parametrize("compute", ["constant:1.0", "exponential:1.0"])
def test_sync_with_a_schedule_does_not_depend_on_who_finishes_first(compute: str) -> None:
    hook = "learning-rate:base=0.02,kind=cosine,over=20"
    run = paceline.simulate("toy", "sync", workers=3, steps=20, hooks=hook, compute=compute, say=lambda _: None)
    assert run.digest == paceline.simulate("toy", "allreduce", workers=3, steps=20, lr="cosine:0.02,over=20").digest


def test_the_update_of_version_v_has_the_rate_of_version_v() -> None:
    """Sequentially: x moves by rate(v) * g for v = 0, 1, …, whatever makes the update."""
    schedule = Schedule.read("linear:0.02,over=7,warmup=3")
    one = paceline.simulate("toy", "sgd", steps=1, lr=schedule.at(0))
    for steps, scheme in ((1, "sync"), (1, "async"), (1, "sgd")):
        workers = 1
        assert paceline.simulate("toy", scheme, workers=workers, steps=steps, lr=schedule).digest == one.digest
    rates = []

    @dataclass(frozen=True)
    class Noted(SGD):
        def rate(self, lr: float) -> float:
            rates.append(lr)
            return lr

    paceline.simulate("toy", "sync", workers=2, steps=6, lr=schedule, rule=Noted())
    assert rates == [schedule.at(version) for version in range(6)]


def test_a_schedule_scales_the_rates_of_all_workers() -> None:
    given: dict[str, Any] = {"workers": 2, "steps": 6}
    falls = paceline.simulate("toy", "sync-rates", rates=(0.01, 0.03), lr="step:0.01,over=3,gamma=0", **given)
    stays = paceline.simulate("toy", "sync-rates", rates=(0.01, 0.03), lr=0.01, **given | {"steps": 3})
    assert falls.digest == stays.digest  # no rate is left after three updates


def test_the_momentum_of_aeamsgd_has_the_rate_of_its_rule() -> None:
    given: dict[str, Any] = {"workers": 2, "steps": 20, "delta": 0.5, "window": 2}
    own = paceline.simulate("toy", "aeamsgd", lr=0.5, **{"rule.lr": 0.002}, **given)
    assert own.digest == paceline.simulate("toy", "aeamsgd", lr=0.002, **given).digest


def test_a_schedule_shows_its_base_to_warnings() -> None:
    schedule = Schedule.read("cosine:0.25,over=10")
    assert f"{schedule:.2g}" == "0.25"
    assert schedule * 4 == 1.0
    assert math.isclose(schedule, 0.25)


def test_a_hyper_parameter_by_its_word() -> None:
    scheme = build.scheme_of("agn", {"lr": 0.2, "rule.lr": 0.3, "server.lr": "linear:1,over=10"})
    found = [build.value_of(scheme, key) for key in ("lr", "rule.lr", "server.lr")]
    assert found == [0.2, 0.3, Schedule.read("linear:1,over=10")]
    assert build.value_of(build.scheme_of("async", {"lr": 0.2}), "server.lr") == 0.2
    for scheme_name, key in (("allreduce", "server.lr"), ("allreduce", "step"), ("async", "rule.beta1")):
        with pytest.raises(UnknownName, match=key.rpartition(".")[2]):
            build.value_of(build.scheme_of(scheme_name, {}), key)


def test_a_word_of_another_option_is_no_schedule() -> None:
    result = paceline.simulate(
        "digits-mlp", "dynsgd", workers=2, steps=3, weight="constant", lr=0.1, warn=lambda _: None
    )
    assert result.updates == 3
    with pytest.raises(UsageError, match="schedule cosine: rate must be a number"):
        build.scheme_of("async", {"lr": "cosine"})
