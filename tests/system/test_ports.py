"""Fixed ports: whatever a run listens on is one of `--ports`, or the port that the cluster names."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path

import pytest
from beds.ports import LOCAL, free_range
from processes import until
from shells import SECONDS, TRAIN, Shells, free_ports, linger, shells, trained, updates_of

TASKS = ("chief", "worker:0", "server:0", "server:1")


def listening(made: Shells) -> set[int]:
    """Ports on which any process of a test listens."""
    open_ones = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for row in [line.split() for line in Path(table).read_text().splitlines()[1:]]:
            if row[3] == "0A":
                open_ones.add((row[9], int(row[1].rpartition(":")[2], 16)))
    ours = set()
    for number in made.processes():
        for path in Path(f"/proc/{number}/fd").glob("*"):
            try:
                found = re.fullmatch(r"socket:\[(\d+)\]", str(path.readlink()))
            except OSError:  # the process has just ended
                continue
            ours |= {port for inode, port in open_ones if found and inode == found[1]}
    return ours


def test_every_listener_is_in_the_range(tmp_path: Path) -> None:
    """Four tasks of one host that share no memory: a hub and two servers. They stay in the range after a restart."""
    ports = free_range(8)
    gate, waits = linger(tmp_path)
    words = (*TRAIN, "--apart", "--ports", str(ports), "--checkpoint-every", "20", *waits)
    told = {"PACELINE_CLUSTER": "chief=1,worker=1,server=2", "PACELINE_MEET": str(tmp_path / "hub")}
    with shells(tmp_path) as made:
        for task in TASKS:
            made(task, *words, PACELINE_TASK=task, **told)
        run = tmp_path / "runs" / "digits-mlp-async-001"
        until(lambda: updates_of(run) >= 40, SECONDS, f"it trains: {made.said()}")
        before = listening(made)
        assert len(before) >= 3, made.said()  # the hub and two servers
        assert all(port in ports for port in before), before
        made.kill_role("server:1")
        seen = updates_of(run)
        until(lambda: updates_of(run) > seen, SECONDS, f"it trains again: {made.said()}")
        assert all(port in ports for port in listening(made))
        gate.touch()
        made.all_ended()
    trained(run)


def test_means_listen_in_the_range(tmp_path: Path) -> None:
    ports = free_range(8)
    gate, waits = linger(tmp_path, update=20)
    words = ("train", "digits-mlp", "--scheme", "averaging", "lr=0.2", "--steps", "60", "--no-summaries", "--apart")
    told = {"PACELINE_CLUSTER": "chief=1,worker=1", "PACELINE_MEET": str(tmp_path / "hub")}
    with shells(tmp_path) as made:
        for task in ("chief", "worker:0"):
            made(task, *words, "--ports", str(ports), "--checkpoint-every", "10", *waits, PACELINE_TASK=task, **told)
        run = tmp_path / "runs" / "digits-mlp-averaging-001"
        until(lambda: updates_of(run) >= 10, SECONDS, f"it trains: {made.said()}")
        found = listening(made)
        assert len(found) >= 3, found  # the hub, its store, and the one of the two that is connected to
        assert all(port in ports for port in found), found
        gate.touch()
        made.all_ended()
    assert "warning: --collective" not in made.said()


def test_a_server_listens_where_tf_config_says(tmp_path: Path) -> None:
    hub, worker, server = free_ports(3)
    cluster = {"chief": [f"localhost:{hub}"], "worker": [f"localhost:{worker}"], "ps": [f"localhost:{server}"]}
    gate, waits = linger(tmp_path)
    with shells(tmp_path) as made:
        for kind in cluster:
            config = {"cluster": cluster, "task": {"type": kind, "index": 0}}
            made(kind, *TRAIN, "--checkpoint-every", "20", *waits, TF_CONFIG=json.dumps(config))
        run = tmp_path / "runs" / "digits-mlp-async-001"
        until(lambda: updates_of(run) >= 40, SECONDS, f"it trains: {made.said()}")
        assert {hub, server} <= listening(made)
        gate.touch()
        made.all_ended()
    trained(run)


def test_a_range_that_is_used_up_is_said(tmp_path: Path) -> None:
    """The hub and its store take both ports, and the server gets none: the run fails and says why."""
    ports = free_range(2)
    words = (*TRAIN, "--apart", "--ports", str(ports), "--patience", "5")
    told = {"PACELINE_CLUSTER": "chief=1,server=1", "PACELINE_MEET": str(tmp_path / "hub")}
    with shells(tmp_path) as made:
        chief = made("chief", *words, PACELINE_TASK="chief", **told)
        made("server", *words, PACELINE_TASK="server:0", **told)
        assert chief.ended() != 0
        for shell in made.shells:
            shell.ended()
    assert f"all ports {ports} are in use; give a wider range with --ports" in " ".join(chief.err.split())


def test_a_hub_without_a_port_is_a_wrong_request(tmp_path: Path) -> None:
    ports = free_range(1)
    with shells(tmp_path) as made, socket.create_server((LOCAL, ports.first)):
        told = {"PACELINE_CLUSTER": "chief=1,server=1", "PACELINE_HUB": f"{LOCAL}:0", "PACELINE_TASK": "chief"}
        chief = made("chief", *TRAIN, "--ports", str(ports), **told)
        assert chief.ended() == 2
    assert f"port {ports} is in use" in chief.err
    assert "Traceback" not in chief.err


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--ports", "20000-20040"), "this run is one command on one machine"),
        (("--ports", "20040-20000", "--on", "mpi", "--dry-run"), "the lower port comes first"),
    ],
)
def test_a_range_that_makes_no_sense_is_refused(tmp_path: Path, words: tuple[str, ...], why: str) -> None:
    with shells(tmp_path) as made:
        alone = made("alone", *TRAIN, *words)
        assert alone.ended() == 2
    assert why in " ".join(alone.err.split())
    assert not (tmp_path / "runs").exists()
