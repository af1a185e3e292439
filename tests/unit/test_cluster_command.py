"""`paceline cluster`: what it prints, and how it ends."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.main import main
from paceline.network.cluster import addresses

SLURM = {
    "SLURM_JOB_ID": "71",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "2",
    "SLURM_NTASKS": "4",
    "SLURM_NODEID": "0",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "pace[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "3,1",
    "SLURM_GTIDS": "0,2,3",
    "SLURM_STEP_RESV_PORTS": "12000-12002",
}
HOSTS = ("--worker-hosts", "b:2222,c:2222", "--ps-hosts", "a:2222")


TF_CONFIG = {
    "cluster": {"chief": ["a:2222"], "worker": ["b:2222"], "ps": ["c:2222"]},
    "task": {"type": "evaluator", "index": 0},
}
ENGINES = (
    "SLURM",
    "OMPI_",
    "PMI",
    "MPI_",
    "TORCHELASTIC_",
    "TF_CONFIG",
    "RANK",
    "WORLD_SIZE",
    "MASTER_",
    "LOCAL_",
    "GROUP_",
)


@pytest.fixture(autouse=True)
def _no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that runs the tests may be a task of some engine."""
    for name in list(os.environ):
        if name.startswith(ENGINES):
            monkeypatch.delenv(name)


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["cluster", *words])
    told = capsys.readouterr()
    return int(ended.value.code or 0), told.out, told.err


def told(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    code, out, _ = run(capsys, *words, "--json")
    assert code == 0
    found: dict[str, Any] = json.loads(out)
    return found


def rows(out: str) -> list[list[str]]:
    """The lines of the table, without its frame."""
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in out.splitlines() if line.startswith("│")]


class TestEnvironment:
    def test_nothing(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert run(capsys)[:2] == (0, "local: no cluster in the environment\n")

    def test_nothing_as_json(self, capsys: pytest.CaptureFixture[str]) -> None:
        found = told(capsys)
        assert found["source"] is None
        assert found["tasks"] == []
        assert found["listen"] == "127.0.0.1"

    @pytest.mark.usefixtures("step")
    def test_a_step_of_slurm(self, capsys: pytest.CaptureFixture[str]) -> None:
        code, out, _ = run(capsys)
        assert code == 0
        assert out.startswith("source: Slurm step 71.0\n")
        assert rows(out) == [
            ["worker:0", "chief", "pace1", "12000", ""],
            ["worker:1", "worker", "pace2", "12000", ""],
            ["worker:2", "worker", "pace1", "12001", "this process"],
            ["worker:3", "worker", "pace1", "12002", ""],
        ]
        assert "missing" not in out

    @pytest.mark.usefixtures("step")
    def test_placement(self, capsys: pytest.CaptureFixture[str]) -> None:
        _, out, _ = run(capsys, "--placement", "spread", "--servers", "2")
        assert rows(out) == [
            ["chief:0", "chief", "pace1", "12001", "this process"],
            ["worker:0", "worker", "pace1", "12002", ""],
            ["server:0", "server", "pace1", "12000", ""],
            ["server:1", "server", "pace2", "12000", ""],
        ]

    @pytest.mark.usefixtures("step")
    def test_what_is_missing_and_what_is_not_read(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("SLURM_GTIDS")
        monkeypatch.delenv("SLURM_STEP_RESV_PORTS")
        monkeypatch.setenv("PMI_RANK", "7")
        _, out, _ = run(capsys)
        assert rows(out)[0] == ["worker:0", "chief", "?", "?", ""]
        assert "missing: hosts of worker:0, worker:1, worker:3: where they run is not told and must be exchanged" in out
        assert "missing: ports of worker:0, worker:1, worker:2, worker:3" in out
        assert "note: SLURM_STEP_RESV_PORTS is not set" in out
        assert "note: SLURM_PROCID counts, which is 2; PMI_RANK is 7 and is not read" in out

    @pytest.mark.usefixtures("step")
    def test_tf_config_before_slurm(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TF_CONFIG", json.dumps(TF_CONFIG))
        _, out, _ = run(capsys)
        assert rows(out)[-1] == ["evaluator:0", "evaluator", "", "", "this process"]
        assert "note: TF_CONFIG counts; the variables of Slurm are not read" in out

    def test_the_meeting_point(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "h"), ("MASTER_PORT", "29500")):
            monkeypatch.setenv(name, value)
        assert "meeting point: h:29500" in run(capsys)[1]
        assert told(capsys)["meeting"] == "h:29500"

    def test_a_broken_variable(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TF_CONFIG", "{")
        code, out, err = run(capsys)
        assert (code, out) == (2, "")
        assert err.startswith("error: TF_CONFIG is not JSON")


class TestOptions:
    def test_lists_of_hosts(self, capsys: pytest.CaptureFixture[str]) -> None:
        found = told(capsys, *HOSTS, "--job-name", "ps", "--task-index", "0")
        assert found["me"] == "server:0"
        assert found["chief"] == "worker:0"
        assert found["complete"] is True
        assert found["tasks"][1] == {"task": "worker:1", "role": "worker", "rank": 1, "host": "c", "port": 2222}
        assert found["tasks"][2] == {"task": "server:0", "role": "server", "rank": None, "host": "a", "port": 2222}
        assert found["missing"] == found["notes"] == []

    def test_each_list_is_of_its_own_kind(self, capsys: pytest.CaptureFixture[str]) -> None:
        found = told(capsys, *HOSTS, "--chief-hosts", "d:1", "--evaluator-hosts", "e:1")
        kinds = {task["host"]: task["task"] for task in found["tasks"]}
        assert kinds == {"a": "server:0", "b": "worker:0", "c": "worker:1", "d": "chief:0", "e": "evaluator:0"}

    @pytest.mark.usefixtures("step")
    def test_options_count_before_the_environment(self, capsys: pytest.CaptureFixture[str]) -> None:
        _, out, _ = run(capsys, *HOSTS)
        assert out.startswith("source: lists of hosts\n")
        assert "this process: none of them" in out

    def test_a_file(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        path = tmp_path / "cluster.toml"
        path.write_text('[cluster]\nworkers = ["a:1", "b:1"]\nservers = ["c:1"]\n')
        found = told(capsys, "--file", str(path), "--job-name", "worker", "--task-index", "1")
        assert found["me"] == "worker:1"
        assert found["source"] == str(path)

    def test_one_host_is_called_by_loopback(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert told(capsys, "--worker-hosts", "a:1,a:2")["listen"] == "127.0.0.1"
        assert "address of this host: 127.0.0.1" in run(capsys, "--worker-hosts", "a:1,a:2")[1]

    def test_an_interface(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        known = [addresses.Interface("eth0", "192.168.7.4"), addresses.Interface("ib0", "10.1.0.4", infiniband=True)]
        monkeypatch.setattr(addresses, "interfaces", lambda: known)
        assert told(capsys, *HOSTS)["listen"] == "10.1.0.4"
        assert told(capsys, *HOSTS, "--no-ib")["listen"] == "192.168.7.4"
        assert told(capsys, *HOSTS, "--interface", "192.168.0.0/16")["listen"] == "192.168.7.4"
        assert told(capsys, "--interface", "ib0")["listen"] == "10.1.0.4"

    def test_an_address_that_cannot_be_told_is_a_note(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(addresses, "interfaces", list)
        found = told(capsys, *HOSTS)
        assert found["listen"] is None
        assert found["notes"] == ["no network interface with an address; there are: none"]
        assert run(capsys, *HOSTS, "--no-ib")[0] == 2

    def test_a_site_rule(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        path = tmp_path / "hosts_of_command_test.py"
        path.write_text("def over_ib(host):\n    return host + '-ib'\n")
        found = told(capsys, *HOSTS, "--address-rule", f"{path}:over_ib")
        assert [task["host"] for task in found["tasks"]] == ["b-ib", "c-ib", "a-ib"]

    @pytest.mark.parametrize(
        ("words", "why"),
        [
            (("--ps-hosts", "a:1"), "--worker-hosts is missing: a cluster needs a worker"),
            (("--job-name", "worker"), "--job-name and --task-index go with lists of hosts or --file"),
            ((*HOSTS, "--file", "x.toml"), "--file and lists of hosts both describe the cluster; give one of them"),
            (("--file", "absent.toml"), "no file absent.toml"),
            (("--placement", "pack"), "--placement needs the tasks of an engine; there is no cluster in the"),
            ((*HOSTS, "--placement", "pack"), "lists of hosts names the role of every task"),
            (("--servers", "2"), "--servers goes with --placement"),
            (("--interface", "no-such-wire"), "no network interface 'no-such-wire'"),
            ((*HOSTS, "--address-rule", "rule"), "'rule' names no rule from host to address; write file.py:NAME"),
        ],
    )
    def test_what_is_refused(self, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], why: str) -> None:
        code, out, err = run(capsys, *words)
        assert (code, out) == (2, "")
        assert why in err
