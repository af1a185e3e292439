"""Servers that die, stand still or are cut off, and returns to a virtual checkpoint."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from machine import engine, log, push_once, scheme_with
from typer.testing import CliRunner

from paceline import simulate
from paceline.cli.main import app
from paceline.errors import RunError, UsageError
from paceline.simulator.engine import SimulationEngine
from paceline.simulator.faults import Fault, FaultTarget, RunSize, drawn, parse_fault, planned

CREW = RunSize(workers=3, servers=2, updates=20)


def pushing(faults: list[str], **setting: Any) -> SimulationEngine:
    """Two workers that push once a second."""
    return engine(scheme_with(push_once), faults=[parse_fault(text) for text in faults], **setting)


def test_a_server_that_dies_between_two_calls_loses_nothing() -> None:
    run = pushing(["kill:server:0@time=1.5,back=4"])
    run.run(6)
    assert log(run) == [0, 1, 0, 1, 0, 1]
    assert run.now == 6.5  # the calls of 2.0 waited until 5.5
    assert (run.recovery.returns, run.accounts.closed(run.seats)["lost"]) == (0, 0)


def test_a_server_that_dies_inside_a_call_sets_everybody_back_to_the_newest_checkpoint() -> None:
    run = pushing(["kill:server:0@call=9,back=3"], checkpoint_every=2)
    seen = [0]
    run.run(8, watch=lambda engine: seen.append(engine.updates))
    first_again = next(k for k in range(1, len(seen)) if seen[k] <= seen[k - 1])
    assert seen[:first_again] == list(range(first_again))
    assert seen[first_again:] == list(range(seen[first_again], 9))
    assert run.recovery.newest.update >= seen[first_again] - 1 > 0
    assert (run.recovery.returns, run.recovery.rolled_back) == (1, seen[first_again - 1] - seen[first_again] + 1)
    assert torch.isfinite(run.centre.x).all()
    assert run.updates == 8


def test_without_a_checkpoint_the_start_is_one() -> None:
    run = pushing(["kill:server:0@call=3,back=1"])
    run.run(4)
    assert (run.recovery.returns, run.recovery.rolled_back) == (1, 2)
    assert run.accounts.closed(run.seats)["rolled back"] == 2
    calm = pushing([])
    calm.run(4)
    assert torch.equal(run.centre.x, calm.centre.x)


def test_a_server_that_stays_dead_ends_the_run_with_a_reason() -> None:
    with pytest.raises(RunError, match="server:0 is dead at 2 s, after 2 updates, and nothing restarts it"):
        pushing(["kill:server:0@time=1.5"]).run(6)
    with pytest.raises(RunError, match="server:0 is dead") as caught:
        simulate("toy", "async", workers=2, steps=9, lr=0.01, faults=["kill:server:0@call=9"])
    assert caught.value.result is not None
    assert torch.isfinite(caught.value.result.vector).all()


def test_a_frozen_server_takes_its_calls_later() -> None:
    run = pushing(["stop:server:0@time=0.5,for=3"])
    run.run(4)
    assert (run.now, log(run)) == (4.5, [0, 1, 0, 1])


def test_the_successor_of_a_frozen_process_is_not_frozen() -> None:
    server = pushing(["stop:server:0@time=0.5,for=50", "kill:server:0@time=2.5,back=1"])
    server.run(4)
    assert server.now == 4.5
    worker = pushing(["stop:0@time=0.5,for=50", "kill:0@time=2.5,back=1"], workers=1)
    worker.run(1)
    assert worker.now == 4.5


def test_what_a_frozen_worker_has_sent_arrives_all_the_same() -> None:
    run = pushing(["stop:1@time=1.1,for=9"], network="latency=0.3")
    run.run(4)
    assert log(run)[:2] == [0, 1]
    assert run.seats[1].worker.t == 0  # it has not heard the answer


def test_a_partition_from_one_server_holds_up_those_who_follow_the_lead() -> None:
    """The lead performs the call, the other server has not got it: the answer, and all later ones, wait for that."""
    run = pushing(["partition:1-server:1@time=0.5,for=5"], servers=2)
    run.run(4)
    assert log(run) == [0, 1, 0, 0]  # both are answered at 5.5
    assert run.now == 6.5
    assert run.servers is not None
    lead, other = run.servers._states
    numbers = [name for name in lead if name not in run.centre.vectors()]
    assert all(torch.equal(lead.cell(name), other.cell(name)) for name in numbers)


def test_who_dies_with_a_call_that_reached_only_some_servers_sets_everybody_back() -> None:
    run = pushing(["partition:1-server:1@time=0.5,for=5", "kill:1@time=2,back=1"], servers=2)
    run.run(4)
    assert run.recovery.returns == 1
    assert run.updates == 4


def test_who_is_back_before_all_servers_have_missed_it_is_counted_once_they_have() -> None:
    """Server 1 waits for a call of worker 1, and has not heard that worker 0 is gone."""
    run = pushing(["partition:1-server:1@time=0.5,for=5", "kill:0@time=2.5,back=1"], servers=2)
    run.run(8)
    assert all(seat.worker.alive for seat in run.seats)
    assert log(run) == [0, 1, 0, 0, 1, 0, 1, 0]
    assert run.now == 8.5


def test_two_workers_that_cannot_reach_each_other_hold_up_their_mean() -> None:
    result = simulate("toy", "allreduce", workers=3, steps=3, lr=0.01, faults=["partition:1-2@time=0.5,for=4"])
    assert result.virtual_seconds == 4.5 + 2
    apart = simulate("toy", "groups", size=2, workers=4, steps=8, lr=0.01, faults=["partition:1-2@time=0.5,for=4"])
    assert apart.virtual_seconds == 4.0  # they have no mean in common


def test_a_late_message_and_all_messages_of_a_time() -> None:
    one = pushing(["delay:0@time=0.5,by=2"], workers=1)
    one.run(2)
    assert one.now == 3 + 1
    some = pushing(["delay:0@time=0.5,by=0.25,for=1.5"], workers=1)
    some.run(3)
    assert some.now == 1.25 + 0.25 + 1 + 1  # the push of 1.0 and its answer are late, nothing after 2.0


def test_any_event() -> None:
    """Each event of a run is a moment at which somebody may die."""
    calm = pushing([])
    calm.run(6)
    for number in range(calm.events):
        for who in ("0", "server:0"):
            run = pushing([f"kill:{who}@event={number},back=0.5"])
            run.run(6)
            assert run.updates == 6
            account = run.accounts.closed(run.seats)
            assert sum(account.values()) == run.accounts.drawn


def test_two_servers_give_the_bits_of_one() -> None:
    for scheme in ("async", "sync", "agn", "aeasgd", "groups", "downpour"):
        results = [simulate("quadratic", scheme, workers=3, steps=15, lr=0.01, servers=n) for n in (1, 2, 3)]
        assert len({result.digest for result in results}) == 1


def test_an_exact_run_has_its_bits_whichever_role_dies() -> None:
    settings: dict[str, Any] = {"steps": 12, "lr": 0.01, "exact": True, "micro": 4, "batch": 8, "workers": 2}
    for scheme in ("sync", "allreduce", "averaging"):
        calm = simulate("quadratic", scheme, **settings)
        faults = ["kill:1@update=7,back=2", "stop:0@time=1,for=3"]
        struck = simulate("quadratic", scheme, faults=faults, checkpoint_steps=3, **settings)
        assert struck.digest == calm.digest
        assert struck.rolled_back_updates
        assert struck.gradients == calm.gradients


def test_what_became_of_the_gradients_is_told() -> None:
    result = simulate("toy", "async", workers=2, steps=9, lr=0.01, faults=["kill:1@time=1.5,back=1"])
    assert result.fates is not None
    assert result.fates["used"] == 9
    assert result.as_dict()["fates"] == result.fates
    assert "fates" not in simulate("toy", "async", workers=2, steps=9, lr=0.01).as_dict()


def test_servers_that_cannot_be() -> None:
    with pytest.raises(UsageError, match="allreduce has no server: 2 were asked for"):
        simulate("toy", "allreduce", servers=2)
    with pytest.raises(UsageError, match="adag takes one server: distance=norm"):
        simulate("toy", "adag", distance="norm", servers=2)
    with pytest.raises(UsageError, match="this run has no server"):
        simulate("toy", "allreduce", faults=["kill:server:0@time=1"])


def test_a_seed_draws_the_same_schedule_every_time() -> None:
    assert drawn(7, 5, CREW) == drawn(7, 5, CREW) != drawn(8, 5, CREW)
    assert planned(["random:seed=7,count=5", "kill:1@time=3"], CREW) == [*drawn(7, 5, CREW), Fault("kill", 1, 3.0)]
    assert planned(["random:"], CREW) == drawn(0, 5, CREW)
    for text in ("random:seed=x", "random:many=3", "random:count=-1"):
        with pytest.raises(UsageError, match="write random:seed=7,count=5, both whole numbers"):
            planned([text], CREW)


def test_drawn_faults_strike_all_kinds_of_processes_in_all_ways_and_can_be_written_down() -> None:
    faults = drawn(0, 400, CREW)
    assert {(fault.action, fault.role) for fault in faults} == {
        *(("kill", "worker"), ("kill", "server"), ("stop", "worker"), ("stop", "server")),
        *(("partition", "worker"), ("delay", "worker")),
    }
    assert {fault.unit for fault in faults} == {"time", "step", "await", "update", "event", "call"}
    assert {fault.other for fault in faults} >= {None, FaultTarget("server", 1), FaultTarget("worker", 2)}
    assert [parse_fault(str(fault)) for fault in faults] == faults


def test_on_the_command_line() -> None:
    words = "simulate toy -s async lr=0.01 --workers 3 --steps 30 --servers 2 --checkpoint-every 5 --json"
    faults = ["--fault", "random:seed=3,count=4", "--fault", "kill:server:1@call=20,back=1"]
    told = CliRunner().invoke(app, [*words.split(), *faults])
    assert told.exit_code == 0
    result = json.loads(told.stdout)
    assert result["updates"] == 30
    assert result["rolled_back_updates"] > 0
    assert result["servers"] == 2
