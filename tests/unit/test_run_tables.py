"""What people see of their runs."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from paceline.cli import runs, show
from paceline.cli.commands import RunsOptions
from paceline.cli.main import app
from paceline.report.run_detail import detail
from paceline.report.run_tables import Listing, summary
from paceline.result import size_text
from paceline.runs import checkpoint
from paceline.runs.run_directory import RunDirectory, RunState

PLAN = {"task": "mnist-mlp", "scheme": "sync", "workers": 4, "servers": 1, "hyper": {"lr": 0.1}, "title": ""}
RESULT = {
    **{"task": "mnist-mlp", "scheme": "sync", "workers": 4, "servers": 1, "updates": 1234, "samples": 99},
    **{"metrics": {"loss": 0.25, "accuracy": 0.9731}, "wall_seconds": 12.5, "digest": "ab" * 32},
    **{"staleness": {"mean": 0.0, "max": 0, "histogram": {}}},
}


def made(root: Path, name: str = "mnist") -> RunDirectory:
    run = RunDirectory.create(None, name, root)
    run.write_plan(PLAN)
    return run


def printed(*parts: object, width: int = 200) -> str:
    console = Console(width=width, highlight=False)
    with console.capture() as captured:
        for part in parts:
            console.print(part)
    return captured.get()


class TestListing:
    def test_a_line_for_each(self, tmp_path):
        done, failed, broken, damaged = (made(tmp_path) for _ in range(4))
        done.write_result(RESULT)
        failed.write_result({"error": "worker:1 died", "metrics": {"loss": 0.5}})
        broken.append_history({"update": 70, "seconds": 3.5, "loss": 2.0})
        broken.append_history({"update": 80, "seconds": 4.5, "learning_rate": 0.1})
        (damaged.path / "plan.json").write_text("{")
        head, *lines = printed(Listing([done, failed, broken, damaged])).splitlines()[1:]
        assert head.split()[0] == "run"
        for line, words in zip(
            lines,
            (
                ["mnist-001", "mnist-mlp", "sync", "4/1", "1,234", "97.31%", "done", "12.5"],
                ["mnist-002", "loss 0.5", "failed"],
                ["mnist-003", "mnist-mlp", "80", "loss 2", "broken off", "4.5"],
                ["mnist-004", "-/-", "broken off"],
                ["mnist-004: plan.json is not what was written"],
            ),
            strict=True,
        ):
            assert all(word in line for word in words), (line, words)

    @pytest.mark.parametrize("width", [30, 60, 80, 100, 120, 200])
    def test_on_a_narrow_terminal_columns_are_left_out_and_never_cut(self, width, tmp_path):
        run = made(tmp_path, "mnist-mlp-downpour-easy")
        run.write_result(RESULT)
        shown = printed(Listing([run]), width=width)
        assert "…" not in shown
        assert all(len(line) <= width for line in shown.splitlines())
        head, line = shown.splitlines()[1:3]
        if width >= 60:
            assert {"run", "reached", "state"} <= set(head.split())
            assert {run.name, "97.31%", "done"} <= set(line.split())
        if width >= 80:
            assert {"scheme", "updates"} <= set(head.split())
        assert ("workers/servers" in head) == (width >= 200)  # samples and epochs come first

    def test_a_running_one(self, tmp_path):
        run = made(tmp_path)
        with run.lock():
            assert summary(run)["state"] == "running"
            assert "running" in printed(Listing([run]))

    def test_names_are_not_markup(self, tmp_path):
        run = RunDirectory(tmp_path / "[red]x")
        run.path.mkdir()
        run.write_plan(PLAN | {"task": "[/bold].py:task"})
        text = printed(Listing([run]), *detail(run))
        assert "[red]x" in text
        assert "[/bold].py:task" in text


def in_state(state: RunState, run: RunDirectory) -> RunDirectory:
    """A run that is made to stand so (a running one: while its lock is held)."""
    match state:
        case RunState.DONE:
            run.write_result(RESULT)
        case RunState.INTERRUPTED:
            run.write_result(RESULT | {"stopped": "interrupted"})
        case RunState.FAILED:
            run.write_result(RESULT | {"error": "worker:1 died"})
        case RunState.DAMAGED:
            (run.path / "result.json").write_text('{"updates": ')
        case RunState.RUNNING | RunState.BROKEN_OFF:
            pass
    return run


class TestStates:
    @pytest.mark.parametrize("state", RunState)
    def test_every_table_shows_every_state(self, state, tmp_path, monkeypatch, capsys):
        run = in_state(state, made(tmp_path))
        with run.lock() if state is RunState.RUNNING else nullcontext():
            assert run.state is state
            assert json.loads(json.dumps(summary(run)))["state"] == state
            assert state in printed(Listing([run])).splitlines()[2]
            assert f"(run, {state})" in printed(*detail(run))
            for module in (runs, show):
                monkeypatch.setattr(module, "screen", Console(width=200, force_terminal=True))
            runs.runs(RunsOptions(tmp_path))
            runs.runs(RunsOptions(tmp_path, as_json=True))
            assert show.show_run(run.path)
        assert capsys.readouterr().out.count(state) >= 3

    def test_an_interruption_before_the_first_checkpoint_is_no_failure(self, tmp_path):
        run = made(tmp_path)
        run.write_result({"stopped": "interrupted"})
        assert run.state is RunState.INTERRUPTED
        assert "interrupted" in printed(Listing([run]), *detail(run))


class TestDetail:
    def test_of_a_finished_one(self, tmp_path):
        run = made(tmp_path)
        run.write_result(RESULT)
        for step in (100, 200):
            path = checkpoint.save(run.checkpoints, step, {"model": torch.zeros(1000)}, {})
            checkpoint.keep_best(run.path, checkpoint.load(path), {"loss": 1.0}, "loss", smaller_is_better=True)
        (run.logs / "worker-0.log").write_text("all was well\n")
        text = printed(*detail(run))
        for word in ("mnist-001 (run, done)", '{"lr": 0.1}', "97.31%", "1,234", "12.5 s", "abababab", "4.", "kB"):
            assert word in text
        assert "best: step 100, loss 1" in text
        assert "title" not in text
        assert "all was well" not in text

    def test_of_a_failed_one_ends_with_its_logs(self, tmp_path):
        run = made(tmp_path)
        run.write_result({"error": "worker:1 died", "updates": 5})
        (run.logs / "worker-1.log").write_bytes(b"early\n" * 5000 + b"\xff[red]Traceback[/red]\nKeyError: 7\n")
        (run.logs / "worker-2.log").write_text("")
        text = printed(*detail(run))
        assert "worker:1 died" in text
        assert "[red]Traceback[/red]\nKeyError: 7" in text
        assert text.count("early") == 8
        assert "worker-2.log" not in text

    def test_of_one_that_goes_on(self, tmp_path):
        run = made(tmp_path)
        run.append_history({"update": 80, "seconds": 4.5, "loss": 2.0, "accuracy": None})
        with run.lock():
            text = printed(*detail(run))
        for word in ("running", "progress", "80", "no checkpoints"):
            assert word in text


class TestCommands:
    def runs(self, *words: str):
        return CliRunner().invoke(app, ["runs", *words])

    def test_runs(self, tmp_path):
        made(tmp_path).write_result(RESULT)
        made(tmp_path)
        assert "mnist-002" in self.runs(str(tmp_path)).stdout
        lines = [json.loads(line) for line in self.runs(str(tmp_path), "--json").stdout.splitlines()]
        assert [(line["run"], line["state"]) for line in lines] == [("mnist-001", "done"), ("mnist-002", "broken off")]

    def test_none(self, tmp_path):
        ran = self.runs(str(tmp_path))
        assert (ran.exit_code, ran.stdout) == (0, "")
        assert "no runs in" in ran.stderr
        assert "no folder" in str(self.runs(str(tmp_path / "none")).exception)

    def test_show_run(self, tmp_path, monkeypatch, capsys):
        monkeypatch.chdir(tmp_path)
        made(Path("runs"))
        monkeypatch.setattr(show, "screen", Console(width=200))
        assert show.show_run("mnist-001")
        assert "mnist-001 (run, broken off)" in capsys.readouterr().out
        assert show.show_run(tmp_path / "runs" / "mnist-001")
        assert not show.show_run("sync")


@pytest.mark.parametrize(("count", "shown"), [(0, "0 B"), (999, "999 B"), (4_100, "4.1 kB"), (13_100_000, "13.1 MB")])
def test_sizes(count: int, shown: str) -> None:
    assert size_text(count) == shown
