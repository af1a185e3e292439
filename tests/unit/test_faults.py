"""How faults are written."""

from __future__ import annotations

import math

import pytest

from paceline import simulate
from paceline.errors import UsageError
from paceline.simulator.faults import Fault, FaultTarget, check_faults, parse_fault


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("kill:1@step=20", Fault("kill", 1, 20, "step")),
        ("kill:1@step=20,back=5", Fault("kill", 1, 20, "step", 5.0)),
        ("kill:12@await=3", Fault("kill", 12, 3, "await")),
        ("kill:0@time=1e-3,back=0", Fault("kill", 0, 0.001, "time", 0.0)),
        ("restart:1@time=30", Fault("restart", 1, 30.0)),
        ("restart:1@step=30", Fault("restart", 1, 30.0, "update")),
        ("kill:1@update=30", Fault("kill", 1, 30.0, "update")),
        ("stop:2@time=3,for=4.5", Fault("stop", 2, 3.0, "time", 4.5)),
        ("stop:chief@event=30,for=2", Fault("stop", 0, 30, "event", 2.0)),
        ("kill:worker:2@event=0", Fault("kill", 2, 0, "event")),
        ("kill:server:1@time=2,back=1", Fault("kill", 1, 2.0, "time", 1.0, "server")),
        ("kill:server:0@call=7,back=0", Fault("kill", 0, 7, "call", 0.0, "server")),
        ("restart:server:0@update=4", Fault("restart", 0, 4, "update", role="server")),
        ("delay:2@time=3,by=0.5,for=4.5", Fault("delay", 2, 3.0, "time", 4.5, by=0.5)),
        ("delay:2@event=3,by=0.5", Fault("delay", 2, 3, "event", 0.0, by=0.5)),
        ("partition:1-server:0@time=3,for=2", Fault("partition", 1, 3, "time", 2.0, other=FaultTarget("server", 0))),
        ("partition:1-2@step=3,for=2", Fault("partition", 1, 3, "step", 2.0, other=FaultTarget("worker", 2))),
        (
            "partition:server:0-server:1@time=3,for=2",
            Fault("partition", 0, 3, "time", 2.0, "server", FaultTarget("server", 1)),
        ),
        ("partition:2@step=3,for=4", Fault("partition", 2, 3.0, "step", 4.0)),
        ("  kill:1@time=2 ", Fault("kill", 1, 2.0)),
    ],
)
def test_the_grammar(text: str, fault: Fault) -> None:
    assert parse_fault(text) == fault
    assert parse_fault(str(fault)) == fault


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kill", "is not a fault; write ACTION:WHO@time=S"),
        ("kill:1", "is not a fault; write"),
        ("kill:1@step", "is not a fault"),
        ("kill:-1@step=2", "is not a fault"),
        ("kill:1@step=2,", "is not a fault"),
        ("kill:1@step=two", "is not a fault"),
        ("kill:1@step=-2", "needs when >= 0"),
        ("kill:1@step=2.5", "kill:1: step must be a whole number, not 2.5"),
        ("kill:1@update=0.5", "update must be a whole number, not 0.5"),
        ("kill:1@await=1e-3", "await must be a whole number, not 0.001"),
        ("restart:1@step=2.5", "step must be a whole number, not 2.5"),
        ("kill:1@step=1e", "has something that is not a number"),
        ("kill:1@step=2,back=soon", "has something that is not a number"),
        ("kill:1@step=2,back=-1", "a duration >= 0"),
        ("kill:1@step=2,back=nan", "a duration >= 0"),
        ("kill:1@step=2,for=3", "kill takes only back=SECONDS"),
        ("stop:1@step=2,back=3", "stop takes only for=SECONDS"),
        ("delay:1@step=2,back=3", "delay takes only by=SECONDS and for=SECONDS"),
        ("restart:1@time=2,for=3", "restart takes no option"),
        ("stop:1@step=2", "needs an end: add ',for=SECONDS'"),
        ("delay:1@step=2", "delay:1 needs how much later messages arrive: add ',by=SECONDS'"),
        ("delay:1@time=2,for=3", "to freeze the process: stop:1@"),
        ("delay:server:0@time=2,by=3", "give the worker whose messages are late"),
        ("kill:1-2@time=2", "only a partition is between two processes"),
        ("partition:1-1@time=2,for=1", "only a partition is between two processes, and they differ"),
        ("kill:server:0@step=2", "a server makes no steps; write @time="),
        ("kill:1@call=2", "only a server can be killed inside a call: kill:server:0@call=2"),
        ("stop:server:0@call=2,for=1", "only a server can be killed inside a call"),
        ("kill:evaluator@time=2", "is not a fault"),
        ("partition:1@step=2", "needs an end"),
        ("partition:1@step=2,for=inf", "needs an end"),
        ("explode:1@step=2", "a fault is one of kill, restart, stop, partition, delay, not 'explode'"),
        ("kill:1@hour=2", "a fault happens at time=, step=, update=, await=, event= or call=, not 'hour'"),
        ("restart:1@await=2", "a dead worker awaits nothing: restart it at time= or step="),
    ],
)
def test_what_is_wrong_is_named(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_fault(text)
    assert message in str(caught.value)


def test_moments_are_finite() -> None:
    for when in (math.inf, math.nan, -1.0):
        with pytest.raises(UsageError, match="when >= 0"):
            Fault("kill", 0, when)


def test_nobody_else_can_fail() -> None:
    check_faults([Fault("kill", 2, 1)], 3)
    with pytest.raises(UsageError, match="a fault names worker 3; workers are 0 to 2"):
        check_faults([Fault("kill", 3, 1)], 3)
    with pytest.raises(UsageError, match="a fault names server 1; servers are 0 to 0"):
        check_faults([Fault("partition", 0, 1, duration=1, other=FaultTarget("server", 1))], 3)
    with pytest.raises(UsageError, match="this run has no server"):
        check_faults([Fault("kill", 0, 1, role="server")], 3, 0)
    with pytest.raises(UsageError, match="workers are 0 to 1"):
        simulate("toy", "async", workers=2, steps=3, faults=["kill:2@step=1"])


def test_a_fault_at_an_update_of_the_centre_strikes_there() -> None:
    deaths: list[tuple[int, bool]] = []
    simulate(
        "toy",
        "async",
        workers=3,
        steps=30,
        lr=0.01,
        faults=["kill:1@update=10", "restart:1@step=20"],
        watch=lambda engine: deaths.append((engine.updates, engine.seats[1].worker.alive)),
    )
    # an update's faults strike after everybody has seen it
    assert [update for update, alive in deaths if not alive] == list(range(11, 21))
