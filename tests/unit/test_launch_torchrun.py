"""The command that `--on torchrun` runs, and the store by which its ranks meet."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from launch_jobs import made
from torch.distributed import TCPStore
from torch.distributed.run import get_args_parser

from paceline.errors import UsageError
from paceline.launchers import torchrun
from paceline.launchers.torchrun import TorchrunLauncher
from paceline.network.cluster import torchrun_store
from paceline.network.cluster.assignment import told


def command(directory: Path, *tasks: str, **options: object) -> list[str]:
    return TorchrunLauncher().shown(made(directory, *tasks, **options).job).splitlines()[-1].split()


def test_one_node_needs_no_meeting_place(tmp_path: Path) -> None:
    assert TorchrunLauncher().shown(made(tmp_path).job).splitlines() == [
        "export OMP_NUM_THREADS=1",
        f"export PACELINE_SECRET_FILE={tmp_path}/secret",
        "export PACELINE_TASKS=chief,worker:0,worker:1,server:0",
        f"{sys.executable} -m torch.distributed.run --standalone --nnodes 1 --nproc-per-node 4 --max-restarts 3 "
        "--signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 --no-python "
        f"{sys.executable} -P -m paceline train digits-mlp --scheme async --dir /runs/one",
    ]
    assert not list(tmp_path.iterdir())  # a dry run writes nothing


def test_several_nodes_meet(tmp_path: Path) -> None:
    text = TorchrunLauncher().shown(
        made(tmp_path, nnodes="1:2", rdzv="h1:29777", max_restarts=5, local_addr="10.0.0.7").job
    )
    assert "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1\n" in text
    words = text.splitlines()[-1].split()
    assert "--standalone" not in words
    for option, value in {
        "--nnodes": "1:2",
        "--nproc-per-node": "2",
        "--max-restarts": "5",
        "--rdzv-backend": "c10d",
        "--rdzv-endpoint": "h1:29777",
        "--rdzv-id": "one",
        "--rdzv-conf": torchrun.RENDEZVOUS,
        "--local-addr": "10.0.0.7",
    }.items():
        assert words[words.index(option) + 1] == value
    assert "TORCH_DISABLE" not in TorchrunLauncher().shown(made(tmp_path, nnodes=2, rdzv="h1:29777").job)


@pytest.mark.parametrize("options", [{}, {"nnodes": "2:4", "rdzv": "h1:1", "rdzv_conf": "a=1", "extra": "--tee 3"}])
def test_torchrun_understands_it(options: dict[str, str], tmp_path: Path) -> None:
    words = command(tmp_path, **options)[3:]
    read = get_args_parser().parse_args(words)
    assert read.no_python
    assert read.training_script == sys.executable
    assert read.training_script_args[:4] == ["-P", "-m", "paceline", "train"]
    assert str(read.nproc_per_node) == ("1" if options else "4")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nnodes": "two"}, "nnodes= must be a number of nodes or a range such as 1:4, not 'two'"),
        ({"nnodes": "3:2"}, "the smaller number of nodes comes first"),
        ({"nnodes": 2}, "give --engine rdzv=HOST:PORT, the same on every node"),
        ({"nnodes": 2, "rdzv": "h1"}, "the port is missing"),
        ({"nnodes": 2, "rdzv": "h 1:3"}, "--engine rdzv=: 'h 1:3' is not an address"),
        ({"nnodes": 3, "rdzv": "h1:1"}, "4 tasks do not fit 3 nodes"),
        ({"nproc_per_node": 3}, "4 tasks are not 1 nodes with 3 processes each"),
        ({"max_restarts": "often"}, "max-restarts=often: a whole number"),
        ({"rdzv_conf": "a=1"}, "rdzv-conf= goes with rdzv=HOST:PORT"),
    ],
)
def test_what_is_refused(options: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        TorchrunLauncher().shown(made(tmp_path, **options).job)


def test_the_chief_is_with_rank_0(tmp_path: Path) -> None:
    text = TorchrunLauncher().shown(made(tmp_path, "server:0", "worker:0", "chief").job)
    assert "export PACELINE_TASKS=chief,server:0,worker:0\n" in text


# who is what

TASKS = {"PACELINE_TASKS": "chief,worker:0,worker:1,server:0", "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "29777"}


def rank(number: int, size: int, **more: str) -> dict[str, str]:
    return TASKS | {"RANK": str(number), "WORLD_SIZE": str(size), "TORCHELASTIC_RUN_ID": "j1"} | more


@pytest.mark.parametrize(
    ("number", "size", "roles"),
    [
        (0, 4, ("chief",)),
        (1, 4, ("worker:1",)),  # runs count the chief
        (3, 4, ("server:0",)),
        (0, 2, ("chief", "worker:2")),  # a node is missing: those that are there share the tasks
        (1, 2, ("worker:1", "server:0")),
        (0, 1, ("chief", "worker:1", "worker:2", "server:0")),
    ],
)
def test_ranks_share_the_tasks(number: int, size: int, roles: tuple[str, ...]) -> None:
    found = told(rank(number, size))
    assert found is not None
    assert found.roles == roles
    assert (found.workers, found.servers, found.evaluator) == (3, 1, False)
    assert found.hub == ("10.0.0.7", 29777)  # no agent keeps a store: the port is rank 0's
    assert not found.store


def test_where_an_agent_keeps_a_store_the_hub_is_told_there() -> None:
    found = told(rank(1, 4, TORCHELASTIC_USE_AGENT_STORE="True"))
    assert found is not None
    assert found.store
    assert found.hub is None


def test_more_ranks_than_tasks() -> None:
    with pytest.raises(UsageError, match="PACELINE_TASKS names 4 tasks, and RANK is 4"):
        told(rank(4, 5))


# the store


@pytest.fixture
def agent() -> Iterator[dict[str, str]]:
    """The environment of a rank whose agent keeps a store, as torchrun's does."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10))
    yield {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": "j1",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    del store


def test_the_hub_is_told_to_who_asks(agent: dict[str, str]) -> None:
    torchrun_store.publish(agent, "10.0.0.7:7070")
    assert torchrun_store.wait(agent, 10) == "10.0.0.7:7070"
    torchrun_store.publish(agent, "[fd00::2]:7071")  # a node has joined: the same round, another hub
    assert torchrun_store.wait(agent, 10) == "[fd00::2]:7071"


def test_who_asks_first_waits(agent: dict[str, str]) -> None:
    code = (
        "import os; from paceline.network.cluster.torchrun_store import wait; "
        "print('asks', flush=True); print(wait(os.environ, 30))"
    )
    asking = subprocess.Popen([sys.executable, "-c", code], env=agent, stdout=subprocess.PIPE, text=True)
    assert asking.stdout is not None
    with asking.stdout:
        assert asking.stdout.readline() == "asks\n"
        torchrun_store.publish(agent, "10.0.0.7:7070")
        assert asking.stdout.read() == "10.0.0.7:7070\n"
    assert asking.wait() == 0


def test_rounds_and_runs_are_kept_apart(agent: dict[str, str]) -> None:
    torchrun_store.publish(agent, "10.0.0.7:7070")
    for other in ({"TORCHELASTIC_RESTART_COUNT": "1"}, {"TORCHELASTIC_RUN_ID": "j2"}):
        with pytest.raises(TimeoutError, match="has not told the hub's address"):
            torchrun_store.wait(agent | other, 0.2)


def test_what_is_no_address_is_neither_told_nor_believed(agent: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="is not an address"):
        torchrun_store.publish(agent, "nowhere near")
    TCPStore("127.0.0.1", int(agent["MASTER_PORT"]), is_master=False, wait_for_workers=False).set(
        "paceline/hub/j1/0", "x" * 100_000
    )
    with pytest.raises(UsageError, match="is not an address"):
        torchrun_store.wait(agent, 10)


def test_whether_there_is_a_store(agent: dict[str, str]) -> None:
    assert torchrun_store.present(agent)
    for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"):
        assert not torchrun_store.present({key: value for key, value in agent.items() if key != name})
