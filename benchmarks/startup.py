"""Start-up: seconds from the start of a process to its first gradient, beyond those of `import torch`.

A run of two workers is started as a user does it, by the command `paceline train` and by a script that calls
`paceline.train`. The task notes the time when its first gradient is finished. `import torch` is measured in turn with
the runs. A script's launcher is a process of its own, which imports torch once more: that is subtracted too.

    python benchmarks/startup.py --models mnist-mlp gpt --rounds 5
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
NOTED = "PACELINE_STARTUP_NOTES"  # a file for the times of the first gradients
SCRIPT = """
import sys
sys.path.insert(0, {folder!r})
import torch, paceline
from startup_tasks import {task}
if __name__ == "__main__":
    paceline.train({task}(), {scheme!r}, workers={workers}, steps={steps}, directory={directory!r}, say=print)
"""
MODELS = {"mnist-mlp": "mlp", "gpt": "gpt"}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="gpt: 85 M parameters")
    options.add_argument("--ways", nargs="+", choices=("command", "script"), default=["command", "script"])
    options.add_argument("--schemes", nargs="+", default=["async"])
    options.add_argument("--workers", type=int, default=2)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--json", type=Path)
    given = options.parse_args()
    cases = [(model, way, scheme) for model in given.models for way in given.ways for scheme in given.schemes]
    rows: dict[tuple[str, str, str], list[dict[str, float]]] = {case: [] for case in cases}
    imports = []
    for _ in range(given.rounds):
        for case in cases:
            alone = import_torch()
            imports.append(alone)
            rows[case].append(started(*case, given.workers, alone))
    report: dict[str, Any] = {"import_torch": statistics.median(imports), "workers": given.workers, "runs": []}
    print(f"import torch: {report['import_torch']:.2f} s; {given.workers} workers")
    for (model, way, scheme), found in rows.items():
        medians = {name: round(statistics.median(one[name] for one in found), 3) for name in found[0]}
        report["runs"].append({"model": model, "way": way, "scheme": scheme, **medians})
        print(
            f"{model:10} {way:8} {scheme:10} first gradient {medians['beyond']:5.2f} s beyond import torch "
            f"({medians['first']:.2f} s in all, {medians['inside']:.2f} s in the run); "
            f"ended after {medians['ended']:.2f} s, {medians['peak_mb']:,.0f} MB at the peak"
        )
    if given.json is not None:
        given.json.write_text(json.dumps(report, indent=1) + "\n")


def import_torch() -> float:
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.monotonic() - began


def started(model: str, way: str, scheme: str, workers: int, alone: float) -> dict[str, float]:
    """One run of a few updates."""
    with tempfile.TemporaryDirectory() as folder:
        notes, directory = Path(folder) / "notes", Path(folder) / "run"
        given = {"scheme": scheme, "workers": workers, "steps": 4}
        if way == "command":
            task = f"{Path(__file__).with_name('startup_tasks.py')}:{MODELS[model]}"
            words = [f"--{name}={value}" for name, value in given.items()]
            command = [sys.executable, "-m", "paceline", "train", task, *words, "--dir", str(directory)]
        else:
            script = Path(folder) / "script.py"
            content = {"folder": str(Path(__file__).parent), "task": MODELS[model], "directory": str(directory)}
            script.write_text(SCRIPT.format(**content, **given))
            command = [sys.executable, str(script)]
        environment = os.environ | {NOTED: str(notes), "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
        began = time.monotonic()
        run = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=folder, text=True
        )
        peak = Peak(run.pid)
        said, _ = run.communicate()
        ended = time.monotonic() - began
        if run.returncode:
            raise SystemExit(said)
        first = min(float(line) for line in notes.read_text().split()) - began
        inside = json.loads((directory / "result.json").read_text())["time_to_first_step"]
    subtracted = alone * (2 if way == "script" else 1)
    return {"first": first, "beyond": first - subtracted, "inside": inside, "ended": ended, "peak_mb": peak.end()}


class Peak:
    """The most memory that a process and its descendants hold at a time: what they share is counted once (PSS)."""

    def __init__(self, pid: int) -> None:
        self.pid, self.most, self.over = pid, 0.0, threading.Event()
        self.thread = threading.Thread(target=self._look)
        self.thread.start()

    def _look(self) -> None:
        while not self.over.wait(0.1):
            self.most = max(self.most, sum(self._pss(pid) for pid in self._family(self.pid)))

    def _family(self, pid: int) -> Iterator[int]:
        yield pid
        with suppress(OSError):
            for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
                yield from self._family(int(child))

    @staticmethod
    def _pss(pid: int) -> float:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            return 0.0
        return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("Pss:")), 0.0)

    def end(self) -> float:
        self.over.set()
        self.thread.join()
        return self.most


if __name__ == "__main__":
    main()
