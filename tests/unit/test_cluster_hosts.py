"""Clusters by lists of hosts and by a TOML file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.errors import UsageError
from paceline.network.cluster.description import ClusterTask
from paceline.network.cluster.host_lists import listed, read

LISTS: dict[str, Any] = {"worker_hosts": "b:2222, c:2222", "ps_hosts": "a:2222"}


class TestLists:
    @pytest.mark.parametrize(
        ("job", "index", "me"),
        [
            ("ps", 0, ClusterTask("server", 0, "a", 2222)),
            ("server", 0, ClusterTask("server", 0, "a", 2222)),
            ("worker", 0, ClusterTask("worker", 0, "b", 2222)),
            ("worker", 1, ClusterTask("worker", 1, "c", 2222)),
            ("evaluator", 0, ClusterTask("evaluator", 0)),
            ("evaluator", None, ClusterTask("evaluator", 0)),
            (None, None, None),
        ],
    )
    def test_who_this_process_is(self, job: str | None, index: int | None, me: ClusterTask | None) -> None:
        cluster = listed(**LISTS, job_name=job, task_index=index)
        assert cluster.me == me
        assert cluster.chief == ClusterTask("worker", 0, "b", 2222)
        assert len(cluster.tasks) == 3

    def test_chief_and_evaluator_may_have_hosts(self) -> None:
        cluster = listed(**LISTS, chief_hosts="d:1", evaluator_hosts="e", job_name="chief")
        assert cluster.me == cluster.chief == ClusterTask("chief", 0, "d", 1)
        assert cluster.of("evaluator") == (ClusterTask("evaluator", 0, "e"),)
        assert cluster.complete

    def test_without_ports_it_is_not_complete(self) -> None:
        assert not listed(worker_hosts="a,b").complete

    @pytest.mark.parametrize(
        ("more", "why"),
        [
            ({"worker_hosts": " "}, "--worker-hosts is missing: a cluster needs a worker"),
            ({"job_name": "worker"}, "--job-name worker is given without --task-index"),
            ({"job_name": "ps"}, "--job-name ps is given without --task-index"),
            ({"task_index": 1}, "--task-index 1 is given without --job-name"),
            ({"job_name": "wroker", "task_index": 0}, "no job name 'wroker'; did you mean 'worker'"),
            (
                {"job_name": "worker", "task_index": 2},
                "--task-index is 2, but of job worker there are only the .* 0 to 1",
            ),
            ({"job_name": "worker", "task_index": -1}, "--task-index is -1, but"),
            ({"job_name": "chief", "task_index": 0}, "--task-index is 0, but of job chief there are none"),
            ({"job_name": "evaluator", "task_index": 1}, "--task-index is 1, but of job evaluator there are none"),
            ({"worker_hosts": "a:1,,b:1"}, "--worker-hosts: '' is not an address"),
            ({"ps_hosts": "a:99999"}, "--ps-hosts: the port of 'a:99999' must be a number from 1 to 65535"),
            ({"ps_hosts": "b:2222"}, "lists of hosts: worker:0 and server:0 have the same address b:2222"),
            ({"chief_hosts": "x:1,y:1"}, "there can be one chief, not 2"),
        ],
    )
    def test_what_is_refused(self, more: dict[str, Any], why: str) -> None:
        with pytest.raises(UsageError, match=why):
            listed(**(LISTS | more))


FILE = """
[cluster]
chief = "a:2222"
workers = ["b:2222", "c:2222"]
servers = ["d:2222"]
evaluator = "e"
"""


class TestFile:
    def test_read(self, tmp_path: Path) -> None:
        path = tmp_path / "cluster.toml"
        path.write_text(FILE)
        cluster = read(path, "worker", 1)
        assert [str(task) for task in cluster.tasks] == ["chief:0", "worker:0", "worker:1", "server:0", "evaluator:0"]
        assert cluster.me == ClusterTask("worker", 1, "c", 2222)
        assert cluster.complete
        assert cluster.source == str(path)

    def test_workers_are_enough(self, tmp_path: Path) -> None:
        path = tmp_path / "f.toml"
        path.write_text('[cluster]\nworkers = ["a:1"]')
        cluster = read(path)
        assert cluster.chief == ClusterTask("worker", 0, "a", 1)
        assert cluster.me is None

    @pytest.mark.parametrize(
        ("text", "why"),
        [
            ("[cluster]\nworkers", "f.toml is not TOML: Expected '=' after a key"),
            ("a = " + "[" * 100_000, "f.toml is not TOML"),
            ("", r"f.toml: the table \[cluster\] is missing"),
            ("cluster = 1", r"f.toml: the table \[cluster\] is missing"),
            ("[clutser]", "no table in f.toml: 'clutser'; did you mean 'cluster'"),
            ("[cluster]\nworker = []", r"no key of \[cluster\] in f.toml: 'worker'; did you mean 'workers'"),
            ("[cluster]\nps = []", r"'ps'; there are: chief, evaluator, servers, workers"),
            ('[cluster]\nworkers = "a:1"', r'f.toml: cluster.workers must be a list: \["host:port", …\]'),
            ('[cluster]\nworkers = ["a:1", "b:x"]', r"f.toml: cluster.workers\[1\]: the port of 'b:x'"),
            ('[cluster]\nchief = ["a:1"]', r"f.toml: cluster.chief: \['a:1'\] is not an address"),
            ("[cluster]\nworkers = [1]", r"f.toml: cluster.workers\[0\]: 1 is not an address"),
            ('[cluster]\nservers = ["a:1"]', "f.toml: the cluster has neither a chief nor a worker"),
        ],
    )
    def test_what_is_refused(self, tmp_path: Path, text: str, why: str) -> None:
        path = tmp_path / "f.toml"
        path.write_text(text)
        with pytest.raises(UsageError, match=why.replace(" in f.toml", " in .*f.toml")):
            read(path)

    def test_a_file_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match=r"no file .*absent.toml \(looked in "):
            read(tmp_path / "absent.toml")

    def test_a_file_that_is_no_text(self, tmp_path: Path) -> None:
        path = tmp_path / "cluster.toml"
        path.write_bytes(b"\xff\xfe")
        with pytest.raises(UsageError, match=r"cluster.toml cannot be read: .*codec"):
            read(path)
