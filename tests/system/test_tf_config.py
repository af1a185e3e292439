"""A cluster in shells, without any engine: TF_CONFIG and lists of hosts as the guides have them."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from processes import until
from shells import SECONDS, TRAIN, Shell, Shells, free_ports, linger, shells, trained, updates_of

ROLES = ("chief:0", "worker:0", "worker:1", "ps:0", "evaluator:0")


def begin(made: Shells, tasks: tuple[str, ...], words: tuple[str, ...]) -> dict[str, Shell]:
    """Each task in a shell of its own, with a TF_CONFIG of its own. The evaluator is outside of the cluster."""
    ports = free_ports(sum(not task.startswith("evaluator") for task in tasks))
    cluster: dict[str, list[str]] = {}
    for task in tasks:
        if not task.startswith("evaluator"):
            cluster.setdefault(task.partition(":")[0], []).append(f"localhost:{ports.pop()}")
    begun = {}
    for task in tasks:
        kind, _, index = task.partition(":")
        config = {"cluster": cluster, "task": {"type": kind, "index": int(index)}}
        begun[task] = made(task, *words, TF_CONFIG=json.dumps(config))
    return begun


def test_five_shells_with_an_evaluator(tmp_path: Path) -> None:
    words = (*TRAIN, "--evaluator", "--checkpoint-seconds", "0.5", "--json")
    with shells(tmp_path) as made:
        begun = begin(made, ROLES, words)
        made.all_ended()
    result = trained(tmp_path / "runs" / "digits-mlp-async-001")
    assert (result["workers"], result["servers"]) == (3, 1)
    assert json.loads(begun["chief:0"].out)["digest"] == result["digest"]
    assert all(not shell.out for task, shell in begun.items() if task != "chief:0")
    assert (tmp_path / "runs" / "digits-mlp-async-001" / "best").is_dir()  # the evaluator's
    assert not list((tmp_path / "config").rglob("*.part"))
    assert oct((tmp_path / "config" / "paceline" / "secret").stat().st_mode)[-3:] == "600"


def test_every_role_is_killed(tmp_path: Path) -> None:
    """kill -9 of each role: all of them are back, and the run comes to its end."""
    gate, waits = linger(tmp_path)
    words = (*TRAIN, "--evaluator", "--checkpoint-every", "20", *waits)
    with shells(tmp_path) as made:
        begin(made, ROLES, words)
        run = tmp_path / "runs" / "digits-mlp-async-001"
        until(lambda: updates_of(run) >= 40, SECONDS, f"it trains: {made.said()}")
        for name in ("worker:1", "server:0", "chief", "worker:2", "evaluator"):
            made.kill_role(name)
        gate.touch()
        made.all_ended()
    assert trained(run)["restarts"] == 5


def test_a_whole_task_is_killed_and_started_again_by_hand(tmp_path: Path) -> None:
    """The commands of the guides with lists of hosts; one of the shells dies, and the same command is typed again."""
    ps, first, second = (f"localhost:{port}" for port in free_ports(3))
    gate, waits = linger(tmp_path)
    lists = ("--ps-hosts", ps, "--worker-hosts", f"{first},{second}")
    words = (*TRAIN, "--checkpoint-every", "20", *lists, *waits)
    with shells(tmp_path) as made:
        made("ps", *words, "--job-name", "ps", "--task-index", "0")
        made("chief", *words, "--job-name", "worker", "--task-index", "0")
        lost = made("worker", *words, "--job-name", "worker", "--task-index", "1")
        run = tmp_path / "runs" / "digits-mlp-async-001"
        until(lambda: updates_of(run) >= 40, SECONDS, f"it trains: {made.said()}")
        until(lambda: made.role("worker:1") is not None, SECONDS, "the second worker is there")
        os.kill(lost.process.pid, signal.SIGKILL)
        lost.process.wait()
        before = updates_of(run)
        until(lambda: updates_of(run) > before, SECONDS, f"the others go on: {made.said()}")
        made("worker again", *words, "--job-name", "worker", "--task-index", "1")
        until(lambda: made.role("worker:1") is not None, SECONDS, f"it is back: {made.said()}")
        gate.touch()
        made.all_ended(lost)
    trained(run)


def test_servers_that_come_late(tmp_path: Path) -> None:
    """The workers are there before it is known where the servers will be: in the memory that they share."""
    ports = [f"localhost:{port}" for port in free_ports(4)]
    lists = ("--worker-hosts", ",".join(ports[:2]), "--ps-hosts", ",".join(ports[2:]))
    words = (*TRAIN, *lists, "--dir", str(tmp_path / "run"))
    with shells(tmp_path) as made:
        for index in ("0", "1"):
            made(f"worker {index}", *words, "--job-name", "worker", "--task-index", index)
        until(
            lambda: made.role("chief") is not None and made.role("worker:1") is not None, SECONDS, "the workers begin"
        )
        for index in ("0", "1"):
            made(f"ps {index}", *words, "--job-name", "ps", "--task-index", index)
        made.all_ended()
    assert trained(tmp_path / "run")["servers"] == 2


def test_a_chief_that_is_restarted_later_than_patience_finds_everybody_again(tmp_path: Path) -> None:
    """Noticing a loss and waiting for a successor have different times: loading Python and torch outlasts this
    patience. Before that `show` tells how far the run is."""
    ps, first, second = (f"localhost:{port}" for port in free_ports(3))
    gate, waits = linger(tmp_path, update=60, seconds=1.0)
    run = tmp_path / "run"
    lists = ("--ps-hosts", ps, "--worker-hosts", f"{first},{second}", "--dir", str(run))
    words = (*TRAIN, "--checkpoint-every", "20", "--patience", "3", "--seconds", "1000", *lists, *waits)
    with shells(tmp_path) as made:
        agents = [
            made("ps", *words, "--job-name", "ps", "--task-index", "0"),
            made("worker", *words, "--job-name", "worker", "--task-index", "1"),
        ]
        chief = made("chief", *words, "--job-name", "worker", "--task-index", "0")
        until(lambda: updates_of(run) >= 40, SECONDS, f"it trains: {made.said()}")
        shown = made("show", "show", str(run))
        assert shown.ended() == 0
        for word in ("updates/s", "of 400", "left", "newest checkpoint", "worker:1", "server:0"):
            assert word in shown.out, shown.out
        os.kill(chief.process.pid, signal.SIGKILL)
        chief.process.wait()
        for agent in agents:
            until(lambda agent=agent: "for the hub to come back" in agent.err, SECONDS, f"it waits: {agent.err}")
        again = made("chief again", *words, "--job-name", "worker", "--task-index", "0")
        until(lambda: "roles have joined" in again.err, SECONDS, f"all are back: {made.said()}")
        gate.touch()
        made.all_ended(chief)
        assert "resuming" in again.err
    trained(run)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_of_the_chief_ends_all_in_order(number: signal.Signals, tmp_path: Path) -> None:
    _, waits = linger(tmp_path)
    with shells(tmp_path) as made:
        begun = begin(made, ("chief:0", "ps:0"), (*TRAIN, "--checkpoint-every", "20", *waits))
        run = tmp_path / "runs" / "digits-mlp-async-001"
        until(lambda: updates_of(run) >= 40, SECONDS, f"it trains: {made.said()}")
        begun["chief:0"].process.send_signal(number)
        assert begun["chief:0"].ended() == 130
        assert begun["ps:0"].ended() == 130, begun["ps:0"].err  # as the run has
    assert "interrupted" in begun["chief:0"].err


def test_a_chief_alone_trains_with_one_worker(tmp_path: Path) -> None:
    with shells(tmp_path) as made:
        begun = begin(made, ("chief:0",), (*TRAIN, "--json"))
        made.all_ended()
    result = json.loads(begun["chief:0"].out)
    assert (result["workers"], result["servers"]) == (1, 1)


def test_a_misspelt_cluster_does_not_train_alone(tmp_path: Path) -> None:
    config = {"clutser": {"chief": ["localhost:1"]}, "task": {"type": "chief", "index": 0}}
    with shells(tmp_path) as made:
        alone = made("alone", *TRAIN, TF_CONFIG=json.dumps(config))
        assert alone.ended() == 2
    assert "did you mean 'cluster'" in alone.err
    assert not (tmp_path / "runs").exists()


def test_a_generated_certificate_that_is_not_seen_is_not_waited_for(tmp_path: Path) -> None:
    """The chief's directory is not the server's, as on hosts without a common file system: the server says so."""
    told = {"PACELINE_CLUSTER": "chief=1,server=1", "PACELINE_HUB": f"127.0.0.1:{free_ports(1)[0]}"}
    words = (*TRAIN, "--tls", "generated", "--dir")
    with shells(tmp_path) as made:
        chief = made("chief", *words, str(tmp_path / "here"), PACELINE_TASK="chief", **told)
        server = made("server", *words, str(tmp_path / "there"), PACELINE_TASK="server:0", **told)
        assert server.ended() == 2
        chief.process.send_signal(signal.SIGINT)
        chief.ended()
    assert "--tls generated needs a directory that all tasks see" in " ".join(server.err.split())
    assert "Traceback" not in server.err
    assert not (tmp_path / "there" / "tls").exists()
