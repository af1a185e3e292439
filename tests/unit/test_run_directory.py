"""Run directories: numbering, the lock, what is written and what can be read after a crash."""

from __future__ import annotations

import fcntl
import json
import math
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Timer

import pytest

from paceline.errors import DataError, RunError, UsageError
from paceline.runs.run_directory import RunDirectory, runs_in


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(None, "toy-sync", tmp_path)


class TestCreate:
    def test_numbers_go_up_and_gaps_stay(self, tmp_path):
        for number in ("001", "002", "003"):
            assert RunDirectory.create(None, "toy-sync", tmp_path).path == tmp_path / f"toy-sync-{number}"
        for folder in ("checkpoints", "logs", "summaries"):
            (tmp_path / "toy-sync-001" / folder).rmdir()
        (tmp_path / "toy-sync-001").rmdir()
        assert RunDirectory.create(None, "toy-sync", tmp_path).name == "toy-sync-004"
        assert RunDirectory.create(None, "toy", tmp_path).name == "toy-001"

    def test_makes_the_folders(self, run):
        assert all(folder.is_dir() for folder in (run.checkpoints, run.logs, run.summaries))

    def test_a_name_cannot_lead_elsewhere(self, tmp_path):
        assert (
            RunDirectory.create(None, "../my dir/file.py:task", tmp_path).path == tmp_path / "my-dir-file.py-task-001"
        )
        assert RunDirectory.create(None, "..", tmp_path).path == tmp_path / "run-001"

    def test_many_at_once_get_a_number_each(self, tmp_path):
        with ThreadPoolExecutor(16) as pool:
            made = list(pool.map(lambda _: RunDirectory.create(None, "x", tmp_path).name, range(48)))
        assert sorted(made) == [f"x-{number:03d}" for number in range(1, 49)]

    def test_a_given_path(self, tmp_path):
        place = tmp_path / "deep" / "own"
        assert RunDirectory.create(place, "ignored").path == place
        assert RunDirectory.create(str(place), "ignored").path == place  # a start that failed early leaves no trace

    def test_one_that_is_in_use_is_refused_and_left_alone(self, tmp_path):
        (tmp_path / "thesis.tex").write_text("years of work")
        with pytest.raises(UsageError, match="exists and is not empty; use --resume to resume it, or another --dir"):
            RunDirectory.create(tmp_path, "x")
        assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]

    @pytest.mark.parametrize("where", ["/proc/none", __file__])
    def test_where_none_can_be_made(self, where):
        for given in ((where, "x"), (None, "x", Path(where))):
            with pytest.raises(UsageError, match=rf"cannot make a run directory in {where}: .*; name another one"):
                RunDirectory.create(*given)


class TestOpen:
    def test_by_path_and_by_name(self, run, tmp_path):
        assert RunDirectory.open(run.path).path == run.path
        assert RunDirectory.open("toy-sync-001", tmp_path).path == run.path
        assert RunDirectory.open("toy-sync-001/", tmp_path).path == run.path

    def test_a_misspelt_one(self, run, tmp_path):
        with pytest.raises(UsageError, match=r"no run 'toy-snc-001' in .*; did you mean toy-sync-001\?"):
            RunDirectory.open("toy-snc-001", tmp_path)
        with pytest.raises(UsageError, match="did you mean toy-sync-001"):
            RunDirectory.open(tmp_path / "toy-sync-01")
        with pytest.raises(UsageError, match="there are: toy-sync-001"):
            RunDirectory.open("elephant", tmp_path)
        with pytest.raises(UsageError, match="there are: none"):
            RunDirectory.open("elephant", tmp_path / "none")

    def test_a_folder_that_is_no_run(self, tmp_path):
        with pytest.raises(UsageError, match=r"is not a run directory: it has no plan\.json"):
            RunDirectory.open(tmp_path)

    def test_all_of_a_folder(self, tmp_path):
        made = [RunDirectory.create(None, "x", tmp_path) for _ in range(3)]
        (tmp_path / "other").mkdir()
        (tmp_path / "note.txt").write_text("")
        assert {run.name for run in runs_in(tmp_path)} == {run.name for run in made}
        assert runs_in(tmp_path / "none") == []


HOLD = """
import sys
from pathlib import Path
from paceline.runs.run_directory import RunDirectory
with RunDirectory(Path(sys.argv[1])).lock():
    print("held", flush=True)
    sys.stdin.read()
"""


class TestLock:
    def test_another_process_keeps_us_out_until_it_dies(self, run):
        with subprocess.Popen(
            [sys.executable, "-c", HOLD, run.path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as other:
            assert other.stdout is not None
            assert other.stdout.readline() == "held\n"
            assert run.is_locked()
            assert run.state == "running"
            with pytest.raises(UsageError, match=rf"another run is using it \(pid {other.pid}\)"), run.lock():
                raise AssertionError("both hold it")
            other.kill()
        assert not run.is_locked()
        with run.lock():
            assert run.is_locked()
        assert not run.is_locked()

    def test_within_one_process_too(self, run):
        with run.lock(), pytest.raises(UsageError, match="another run is using it"), run.lock():
            raise AssertionError("both hold it")

    def test_asking_does_not_keep_a_run_from_starting(self, run):
        with run.lock():
            pass
        asking = os.open(run.path / "lock", os.O_RDONLY)
        fcntl.flock(asking, fcntl.LOCK_SH)
        done = Timer(0.05, os.close, (asking,))
        done.start()
        with run.lock():
            assert run.is_locked()
        done.join()

    def test_where_it_cannot_be_written(self):
        with (
            pytest.raises(UsageError, match="cannot write to /proc/none: No such file"),
            RunDirectory(Path("/proc/none")).lock(),
        ):
            raise AssertionError("held")


class TestFiles:
    def test_plan_and_result(self, run):
        plan = {"task": "toy", "workers": 4, "hyper": {"lr": 0.1}}
        run.write_plan(plan)
        assert run.plan() == plan
        assert run.result() is None
        run.write_result({"loss": math.nan, "metrics": {"loss": math.inf}})
        assert run.result() == {"loss": None, "metrics": {"loss": None}}
        assert not [path.name for path in run.path.iterdir() if path.name.startswith(".")]

    def test_states(self, run):
        assert run.state == "broken off"
        with run.lock():
            assert run.state == "running"
        run.write_result({"loss": 1.0})
        assert run.state == "done"
        run.write_result({"loss": 1.0, "error": None})
        assert run.state == "done"
        run.write_result({"error": "worker:1 died"})
        assert run.state == "failed"
        (run.path / "result.json").write_text('{"lo')
        assert run.state == "damaged"

    def test_a_launch_that_a_signal_ended_early(self, run):
        with run.lock():
            run.write_interrupted()  # of another launch, which has the directory
        assert run.result() is None
        run.write_interrupted()
        assert run.state == "interrupted"
        run.write_result({"loss": 1.0})
        run.write_interrupted()
        assert run.state == "done"

    def test_a_write_that_fails_leaves_what_was_there(self, run):
        run.write_result({"loss": 1.0})
        with pytest.raises(TypeError):
            run.write_result({"loss": object()})
        assert run.result() == {"loss": 1.0}
        (run.path / "plan.json").mkdir()
        with pytest.raises(RunError, match=r"plan\.json could not be written: Is a directory"):
            run.write_plan({})

    def test_a_damaged_plan(self, run):
        with pytest.raises(DataError, match=r"toy-sync-001: plan\.json cannot be read: No such file"):
            run.plan()
        (run.path / "plan.json").write_text("[1]")
        with pytest.raises(DataError, match="it holds a list"):
            run.plan()

    def test_history_outlives_a_cut_off_line(self, run):
        assert run.history() == []
        for update in (1, 2):
            run.append_history({"update": update, "seconds": 0.5, "loss": math.nan})
        with (run.path / "history.jsonl").open("ab") as stream:
            stream.write('{"update": 3, "note": "ü'.encode()[:-1])
        said: list[str] = []
        assert [line["update"] for line in run.history(said.append)] == [1, 2]
        run.append_history({"update": 4, "seconds": 0.7, "loss": 0.5})
        first = [{"update": n, "seconds": 0.5, "loss": None} for n in (1, 2)]
        assert run.history(said.append) == [*first, {"update": 4, "seconds": 0.7, "loss": 0.5}]
        assert said == 2 * ["history.jsonl: line 3 is not what was written, or a crash cut it off; it is omitted"]
        assert json.loads((run.path / "history.jsonl").read_text(errors="replace").splitlines()[-1])["update"] == 4

    @pytest.mark.parametrize(
        "line", ["[1]", "null", '{"updbte": 1, "seconds": 1}', '{"update": "x", "seconds": 1}', "["]
    )
    def test_a_line_of_the_history_that_holds_something_else_is_omitted_and_said(self, line, run):
        (run.path / "history.jsonl").write_text(f'{line}\n{{"update": 2, "seconds": 1}}\n')
        said: list[str] = []
        assert [one["update"] for one in run.history(said.append)] == [2]
        assert [text.partition(" is")[0] for text in said] == ["history.jsonl: line 1"]
