"""Loss against time over a slow link: two hosts, 50 Mbit/s and 20 ms between them, a small language model.

The hosts are network namespaces of this machine (tests/beds), so this needs root and iproute2; elsewhere it says so and
ends. Each host has one worker with one thread. The chief evaluates the centre a few times; the time of that is not
counted. Writes a JSON file and a figure:

    python benchmarks/slow_links.py --seconds 60                          # all schemes, a few minutes
    python benchmarks/slow_links.py --seconds 60 --runs "diloco|local-sgd"
    python benchmarks/slow_links.py --add "int8: allreduce rule=adamw lr=0.002 --compress int8"
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pytest
from hosts import together
from rich.console import Console
from rich.table import Table

from paceline.hook import Hook, Session

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from beds.hosts import Host, several

RESULTS = Path(__file__).resolve().parent / "results"
COLOURS = ("#000000", "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9")  # told apart by everybody
INNER = "lr=0.002"
RUNS = {
    "allreduce": f"allreduce rule=adamw {INNER}",
    "local-sgd": f"local-sgd rule=adamw window=10 {INNER}",
    "diloco": f"diloco window=40 {INNER}",
    "streaming-diloco": f"streaming-diloco window=10 fragments=4 overlap=5 {INNER}",
    "sparseloco": f"sparseloco window=40 {INNER}",
    "allreduce, topk:0.01": f"allreduce rule=adamw {INNER} --compress topk:0.01",
    "allreduce, int8": f"allreduce rule=adamw {INNER} --compress int8",
}


@dataclass
class Course(Hook):
    """Evaluates the centre `points` times in some seconds of training, and then stops the run."""

    file: str
    seconds: float
    points: int = 12

    def begin(self, session: Session) -> None:
        self._course: list[dict[str, float]] = []
        self._began = self._away = 0.0

    def before_step(self, session: Session) -> None:
        self._began = self._began or time.perf_counter()

    def after_step(self, session: Session) -> None:
        if session.worker.rank:
            return
        now = time.perf_counter()
        trained = now - self._began - self._away
        if trained < self.seconds * len(self._course) / self.points:
            return
        samples, updates = session.samples, session.updates
        loss = session.evaluate()["loss"]
        self._course.append({"seconds": trained, "loss": loss, "samples": samples, "updates": updates})
        Path(self.file).write_text(json.dumps(self._course))
        self._away += time.perf_counter() - now
        if trained >= self.seconds:
            session.stop("enough")


def sent(host: Host) -> int:
    """Bytes that have left and reached a host."""
    lines = host.run(["cat", "/proc/net/dev"]).stdout.splitlines()
    words = next(line for line in lines if "eth0:" in line).partition(":")[2].split()
    return int(words[0]) + int(words[8])


def trained(words: str, given: argparse.Namespace, hosts: dict[str, Host], folder: Path) -> dict[str, Any]:
    """One run of two workers: the chief on the first host, with the server if there is one, the other on the second."""
    scheme, *hyper = words.split()
    server = scheme in given.servers.split(",")
    environment = os.environ | {
        "PACELINE_CLUSTER": f"chief=1,worker=1{',server=1' if server else ''}",
        "PACELINE_HUB": "h1:7070",
        "PACELINE_SECRET": secrets.token_hex(32),
    }
    file = folder / "course.json"
    command = [sys.executable, "-m", "paceline", "train", given.task, "--scheme", scheme, *hyper, "--plain"]
    command += ["--steps", "10000000", "--checkpoint-seconds", "3600", "--dir", str(folder / "run")]
    command += ["--hook", f"{__file__}:Course:file={file},seconds={given.seconds},points={given.points}"]
    tasks = [("h1", "chief"), ("h2", "worker:0"), *([("h1", "server:0")] if server else [])]
    before = sent(hosts["h2"])
    together([(hosts[name], command, environment | {"PACELINE_TASK": task}) for name, task in tasks], folder)
    course = json.loads(file.read_text())
    return {"words": words, "megabytes": (sent(hosts["h2"]) - before) / 1e6, "course": course}


def drawn(found: dict[str, Any], title: str, path: Path) -> None:
    mpl.use("svg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7.5, 4.5))
    for number, (name, run) in enumerate(found.items()):
        seconds, losses = ([point[key] for point in run["course"]] for key in ("seconds", "loss"))
        look = {"color": COLOURS[number % len(COLOURS)], "linestyle": "--" if "," in name else "-"}
        axes.plot(seconds, losses, marker="o^sDvPX"[number % 7], markersize=4, label=name, **look)
    axes.set(xlabel="seconds of training", ylabel="test loss", title=title, ylim=(None, 3.3))
    axes.legend(title="dashed: compressed", ncols=2)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--task", default="char-lm")
    options.add_argument("--runs", default="|".join(RUNS), help="which of the known runs, with | between them")
    options.add_argument("--add", action="append", default=[], help="NAME: SCHEME WORD …, another run")
    options.add_argument("--servers", default="sync,async,async-diloco,fedavg,fedbuff", help="schemes with a server")
    options.add_argument("--rate", default="50mbit", help="of the cable, as tc writes it")
    options.add_argument("--delay", type=float, default=20.0, help="milliseconds, one way")
    options.add_argument("--seconds", type=float, default=60.0, help="of training, for each run")
    options.add_argument("--points", type=int, default=12, help="evaluations of a run")
    options.add_argument("--out", type=Path, default=RESULTS / "slow_links")
    given = options.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    runs = {name: RUNS[name] for name in given.runs.split("|") if name}
    runs |= {name.strip(): words for name, _, words in (text.partition(":") for text in given.add)}
    found: dict[str, Any] = {}
    try:
        with several(2) as hosts, contextlib.ExitStack() as stack:
            stack.enter_context(hosts["h2"].slow(delay=given.delay))
            stack.enter_context(hosts["h2"].limited(given.rate))
            for name, words in runs.items():
                with tempfile.TemporaryDirectory() as place:
                    found[name] = trained(words, given, hosts, Path(place))
    except pytest.skip.Exception as why:
        raise SystemExit(f"nothing was measured: {why.msg}") from None
    title = f"{given.task}, two hosts, {given.rate}, {given.delay:g} ms, {given.seconds:g} s"
    given.out.parent.mkdir(exist_ok=True)
    if given.out.with_suffix(".json").exists():  # runs that were measured before, with the same settings, stay
        before = json.loads(given.out.with_suffix(".json").read_text())
        found = (before["runs"] if before["title"] == title else {}) | found
    given.out.with_suffix(".json").write_text(json.dumps({"title": title, "runs": found}, indent=1) + "\n")
    drawn(found, title, given.out.with_suffix(".svg"))
    table = Table(
        "run", "loss", "samples", "updates", "samples/s", "MB over the link", "kB per 1000 samples", title=title
    )
    for name, run in found.items():
        last = run["course"][-1]
        rate, weight = last["samples"] / last["seconds"], 1e6 * run["megabytes"] / max(last["samples"], 1)
        table.add_row(
            name, f"{last['loss']:.3f}", f"{last['samples']:,}", f"{last['updates']:,}", f"{rate:,.0f}",
            f"{run['megabytes']:.1f}", f"{weight:,.0f}",
        )  # fmt: skip
    Console().print(table)


if __name__ == "__main__":
    main()
