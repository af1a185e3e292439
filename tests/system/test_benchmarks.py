"""The benchmarks run, with settings so small that their numbers mean nothing; and TensorFlow is not imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
TINY = ("--schemes", "async", "--rounds", "1")


def ran(*words: str, cwd: Path, path: tuple[Path, ...] = ()) -> str:
    paths = os.pathsep.join(map(str, (*path, ROOT)))
    done = subprocess.run(
        [sys.executable, *words], cwd=cwd, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("cores.py", ("--workers", "2", "--seconds", "0.4", *TINY, "--others", "torch HogWild", "--out")),
        ("bench.py", ("--tasks", "mnist-mlp", "--scale", "0.2", *TINY, "--peers", "torch DDP (Gloo)", "--out")),
        (
            "gpu.py",
            ("--device", "cpu", "--tiny", "--seconds", "0.6", "--warm", "0.2", "--only", "gpt async x1", "--out"),
        ),
        ("startup.py", ("--models", "mnist-mlp", "--ways", "command", *TINY, "--json")),
    ],
)
def test_a_benchmark_writes_its_json(name: str, words: tuple[str, ...], tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    ran(str(ROOT / "benchmarks" / name), *words, str(out), cwd=tmp_path)
    told = json.loads(out.read_text())
    match name:
        case "cores.py":
            barriers = {"a barrier alone", "a barrier alone window=10"}
            assert told["workers"]["2"]["shares"].keys() == {"async", "torch HogWild"} | barriers
        case "bench.py":
            assert told["tasks"]["mnist-mlp"]["shares"]["torch DDP (Gloo)"]["median"] > 0
        case "gpu.py":
            assert told["cells"]["gpt async x1"]["ms_per_step"] > 0
        case "startup.py":
            assert told["runs"][0]["first"] > told["runs"][0]["inside"] > 0


def test_the_page_of_benchmarks_is_written_from_its_files(tmp_path: Path) -> None:
    machine = dict.fromkeys(("processor", "system", "python", "torch", "paceline"), "x") | {"cores": 2, "memory_gb": 4}
    shares = {"async": {"median": 0.9, "rounds": [0.8, 0.9, 0.95]}, "torch HogWild": {"median": 1, "rounds": [1]}}
    task = {"parameters": 5, "batch": 100, "gradient_ms": 1, "limit_samples_per_second": 1234, "shares": shares}
    common = {"date": "2026-01-02", "workers": 2, "rounds": 3, "minutes": 9.5, "machine": machine}
    told = {**common, "skipped": {"Ray": "ray is not installed"}, "tasks": {"mnist-mlp": task}}
    (tmp_path / "bench.json").write_text(json.dumps(told))
    cores = {"task": "t", "batch": 1, "cores": 16, "torch": "2", "workers": {"8": task}}
    (tmp_path / "cores.json").write_text(json.dumps(cores))
    script = """
import bench_page, pathlib, sys
bench_page.RESULTS, bench_page.PAGE = pathlib.Path.cwd(), pathlib.Path("page.md")
bench_page.write_page()
"""
    ran("-c", script, cwd=tmp_path, path=(ROOT / "benchmarks",))
    page = (tmp_path / "page.md").read_text()
    assert "| paceline `async` | 0.90 (0.80 – 0.95) |" in page
    assert "| torch HogWild | 1.00 |" in page
    assert "Skipped: Ray (ray is not installed)." in page


def test_a_run_writes_summaries_without_importing_tensorboard(tmp_path: Path) -> None:
    """The import takes a third of a second of the chief, for which a barrier would let all workers wait."""
    for package in ("tensorboard", "tensorflow"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(f"raise SystemExit('{package} was imported')")
    script = """
import paceline
hooks = ["summary-saver:every=10", "validation:every=10"]
paceline.train("toy", "sync", workers=2, steps=40, directory="run", hooks=hooks)
"""
    ran("-c", script, cwd=tmp_path, path=(tmp_path,))
    assert len(list((tmp_path / "run" / "summaries").rglob("events.out.*"))) >= 3
