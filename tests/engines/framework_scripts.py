"""Scripts of other frameworks, for tests: run by themselves in a process of their own, or by `paceline run`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

DATA = """
import os, signal, sys, time
from pathlib import Path
import numpy as np

chance = np.random.default_rng(0)
X = chance.normal(size=(640, 8)).astype(np.float32)
Y = (X @ chance.normal(size=(8, 3))).argmax(1)
items = [(X[i : i + 32], Y[i : i + 32]) for i in range(0, 640, 32)]

def keep(name, arrays):
    np.save(name, np.concatenate([np.asarray(one).reshape(-1) for one in arrays]))
"""

# worker 1 kills itself once; the other one waits for it, so that there is something left to do
KILL = """
def perhaps_die(pace):
    if pace.rank == 1 and pace.resumed:
        Path("back").touch()
    elif pace.rank == 1 and pace.updates >= 5:
        Path("killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    while pace.rank == 0 and pace.updates >= 20 and not Path("back").exists():
        time.sleep(0.01)
"""


def python(script: str, folder: Path, backend: str = "tensorflow") -> str:
    """What a script prints; fails with its errors."""
    (folder / "script.py").write_text(script)
    return _run([sys.executable, "script.py"], folder, backend)


def launched(script: str | Path, folder: Path, *options: str, backend: str = "tensorflow") -> dict[str, Any]:
    """The result of `paceline run`; `script`: its text, or its path."""
    if isinstance(script, str):
        (folder / "script.py").write_text(script)
        script = folder / "script.py"
    if "--dir" not in options:
        options = ("--dir", "run", *options)
    where = folder / options[options.index("--dir") + 1]
    _run([sys.executable, "-m", "paceline", "run", str(script), "--workers", "2", *options], folder, backend)
    found: dict[str, Any] = json.loads((where / "result.json").read_text())
    return found


def _run(command: list[str], folder: Path, backend: str) -> str:
    environment = {**os.environ, "KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
