"""What docs/from-tensorflow.md promises is run: its Python, its commands, and its table of hooks."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import Commands, paceline
from shells import free_ports, shells, trained
from test_documents import ROOT, blocks

from paceline.config import build, discovery

__all__ = ["paceline"]  # pytest finds it here

PAGE = "docs/from-tensorflow.md"
HOOKS = (
    *("CheckpointSaver", "FeedFn", "FinalOps", "GlobalStepWaiter", "LoggingTensor", "NanTensor", "Profiler"),
    *("SessionRun", "StepCounter", "StopAtStep", "SummarySaver"),
)  # all that tf.train has


def in_shells(block: str) -> bool:
    return "--job-name" in block or "TF_CONFIG=" in block


MODEL, *SCRIPTS = blocks(PAGE, "python")
KEPT = "examples/from-tensorflow"  # need TensorFlow: tests/engines/test_guides.py
TYPED = [
    line for block in blocks(PAGE, "sh") if not in_shells(block) and KEPT not in block for line in block.splitlines()
]
IN_SHELLS = [block for block in blocks(PAGE, "sh") if in_shells(block)]


@pytest.mark.parametrize("script", SCRIPTS, ids=["session", "hook", "estimator"])
def test_its_python_runs(script: str, tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path, timeout=300, check=False
    )
    assert ran.returncode == 0, ran.stderr


def test_its_commands_run(paceline: Commands, tmp_path: Path) -> None:
    (tmp_path / "my_digits.py").write_text(MODEL)
    assert len(TYPED) == 8
    for line in TYPED:
        name, *words = shlex.split(line)
        assert name == "paceline"
        shown = paceline(*words)
        assert shown.code == 0, f"{line}\n{shown.err}"
        accuracy = re.search(r"accuracy\D*(\d+\.\d+)(%?)", shown.out)
        assert accuracy, shown.out
        assert float(accuracy[1]) > (80 if accuracy[2] else 0.8), f"{line}\n{shown.out}"


@pytest.mark.parametrize("block", IN_SHELLS, ids=["lists of hosts", "TF_CONFIG"])
def test_its_shells_run(block: str, tmp_path: Path) -> None:
    """As they are typed, but for the ports: those of the page may be taken on this machine."""
    written = sorted(set(re.findall(r"localhost:(\d+)", block)))
    ports = dict(zip(written, free_ports(len(written)), strict=True))
    block = re.sub(r"localhost:(\d+)", lambda found: f"localhost:{ports[found[1]]}", block)
    with shells(tmp_path) as made:
        for number, line in enumerate(reversed(block.splitlines())):  # in any order: the chief comes late
            words = shlex.split(line)
            given = words.pop(0).removeprefix("TF_CONFIG=") if words[0].startswith("TF_CONFIG=") else ""
            assert words[:2] == ["paceline", "train"]
            made(f"shell {number}", *words[1:], **({"TF_CONFIG": given} if given else {}))
        made.all_ended()
    trained(tmp_path / "runs" / "digits-mlp-async-001", updates=1000)


def test_every_hook_has_its_line() -> None:
    text = (ROOT / PAGE).read_text(encoding="utf-8")
    table = text[text.index("| `tf.train.` |") : text.index("Others without a forerunner")]
    rows = [line.split("|") for line in table.splitlines()[2:] if line.startswith("|")]
    assert {
        name.removesuffix("Hook") for name in re.findall(r"\w+Hook(?=[`(])", "".join(row[1] for row in rows))
    } == set(HOOKS)
    named = [word for row in rows for word in re.findall(r"`([a-z][a-z-]+(?::[^`]*)?)`", row[2])]
    known = [word for word in named if word.partition(":")[0] in discovery.hooks()]
    assert len(known) >= len(HOOKS) - 1
    for word in known:
        name, colon, options = word.partition(":")
        if colon and "function=" not in options:
            build.hook_of(f"{name}:{options.replace('=N', '=9')}")
