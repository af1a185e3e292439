"""Scripts that keep their own loop, run as `python script.py`: a run of one worker."""

from __future__ import annotations

import json
import multiprocessing
import os
import runpy
import subprocess
import sys
import traceback
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from attached import PLAIN, PRELUDE, launch, same, weights

__all__ = ["launch"]  # pytest finds them here


class TestByItself:
    def test_it_is_a_run_of_one_worker(self, launch, tmp_path):
        launched = launch(PLAIN, workers=1)
        launched_weights = weights("0.weights")
        (tmp_path / "by_itself.py").write_text(PRELUDE + "torch.set_num_threads(1)\n" + PLAIN)
        done = subprocess.run([sys.executable, "by_itself.py"], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("paceline: by_itself runs by itself, as the only worker of sync, in runs/")
        told = told_in(tmp_path)
        assert told["scheme"] == "sync"
        assert (told["workers"], told["updates"], told["samples"]) == (1, 30, 30 * 32)
        assert told["digest"] == launched.digest
        assert same(weights(tmp_path / "0.weights"), launched_weights)

    @pytest.mark.parametrize("name", ["downpour", "hogwild", "averaging", "groups"])
    def test_with_and_without_its_own_server(self, tmp_path, name):
        told = alone(tmp_path, PLAIN.replace("sync", name))
        assert (told["scheme"], told["updates"]) == (name, 30)

    def test_it_goes_on_from_its_checkpoint(self, tmp_path):
        alone(tmp_path, PLAIN.replace("steps=30", "steps=10, directory='here'"))
        body = PLAIN.replace("steps=30", "steps=20, directory='here', resume=True")
        told = alone(tmp_path, body + "\nassert pace.resumed", directory=tmp_path / "here")
        assert (told["updates"], told["gradients"]) == (20, 20)

    def test_an_interrupt_ends_it_in_order(self, tmp_path):
        body = PLAIN.replace(
            "        pace.step", "        pace.updates == 5 and signal.raise_signal(2)\n        pace.step"
        )
        told = alone(tmp_path, body, code=1)
        assert (told["updates"], told["stopped"]) == (5, "interrupted")

    def test_an_exception_is_written_down(self, tmp_path):
        body = PLAIN.replace("        pace.step", "        pace.updates == 5 and 1 / 0\n        pace.step")
        told = alone(tmp_path, body, code=1)
        assert told["error"] == "ZeroDivisionError: division by zero"

    def test_one_at_a_time(self, tmp_path):
        told = alone(tmp_path, PLAIN.replace("    for", "    attach(model)\n    for"), code=1)
        assert "before the block of the first one has ended" in told["error"]


def alone(tmp_path: Path, body: str = PLAIN, *, code: int = 0, directory: Path | None = None) -> dict[str, Any]:
    """Run a script as python does, in a fork that need not import anything; gives what its run directory says."""
    script = tmp_path / "by_itself.py"
    script.write_text(PRELUDE + body)
    process = multiprocessing.get_context("fork").Process(target=_as_python_does, args=(script,))
    process.start()
    process.join()
    assert process.exitcode == code, (tmp_path / "said").read_text()
    return told_in(directory or tmp_path)


def _as_python_does(script: Path) -> None:
    os.chdir(script.parent)
    with Path("said").open("w", buffering=1) as stream, redirect_stdout(stream), redirect_stderr(stream):
        sys.argv = [script.name]
        try:
            runpy.run_path(script.name, run_name="__main__")
        except BaseException:
            traceback.print_exc()
            raise


def told_in(place: Path) -> dict[str, Any]:
    """The result of the only run by itself that lies there."""
    (found,) = [path for path in place.glob("**/result.json") if "run-" not in str(path.parent)]
    told: dict[str, Any] = json.loads(found.read_text())
    return told
