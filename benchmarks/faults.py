"""Faults of a run on three hosts with a network between them: who notices when, who goes on when, what is lost.

The hosts are network and process namespaces of this machine (tests/beds), so this needs root and iproute2. Chief,
worker and server have a host each; the run is asynchronous SGD on a small network, with a checkpoint every second:

    python benchmarks/faults.py --patience 5
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from beds.hosts import Host, Running, several

TASKS = {"h1": "chief", "h2": "worker:0", "h3": "server:0"}
HOOK = """
import os, time
from dataclasses import dataclass
from paceline.hook import Hook, Session

@dataclass
class Progress(Hook):
    folder: str

    def begin(self, session):
        self._file = open(f"{self.folder}/steps-{session.worker.rank}", "a", buffering=1)

    def after_step(self, session):
        self._file.write(f"{time.monotonic()} {session.updates}\\n")
        if os.path.exists(f"{self.folder}/enough"):
            session.stop("enough")
        time.sleep(0.002)
"""


@dataclass
class Run:
    """One run, and what was heard of it."""

    place: Path
    hosts: dict[str, Host]
    patience: float
    scheme: str
    tasks: dict[str, Running] = field(default_factory=dict)
    said: list[tuple[float, str]] = field(default_factory=list)
    until_the_end: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def begin(self, name: str) -> None:
        environment = os.environ | {
            "PACELINE_TASK": TASKS[name],
            "PACELINE_CLUSTER": "chief=1,worker=1,server=1",
            "PACELINE_HUB": "h1:7070",
            "PACELINE_SECRET": os.urandom(32).hex() if not self.tasks else self._secret,
            "PYTHONUNBUFFERED": "1",
        }
        self._secret = environment["PACELINE_SECRET"]
        words = [sys.executable, "-m", "paceline", "train", "digits-mlp", "--scheme", self.scheme, "--plain"]
        words += ["--steps", "10000000", "--checkpoint-seconds", "1", "--patience", str(self.patience)]
        words += ["--hook", f"{self.place}/progress.py:Progress:folder={self.place}", "--dir", f"{self.place}/run"]
        how = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT} if name == "h1" else {}
        log = (self.place / f"{name}.log").open("a")
        task = self.hosts[name].start(words, env=environment, **(how or {"stdout": log, "stderr": log}))
        self.tasks[name] = task
        if name == "h1":
            threading.Thread(target=self._listen, args=(task,), daemon=True).start()

    def _listen(self, task: Running) -> None:
        assert task.stdout is not None
        for line in task.stdout:
            self.said.append((time.monotonic(), line.rstrip()))

    def steps(self, rank: int) -> list[tuple[float, int]]:
        path = self.place / f"steps-{rank}"
        rows = path.read_text().splitlines()[:-1] if path.exists() else []
        return [(float(at), int(update)) for at, update in (row.split() for row in rows)]

    def wait(self, ready: Callable[[], bool], seconds: float) -> bool:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if ready():
                return True
            time.sleep(0.02)
        return False

    def role(self, name: str) -> int:
        """The process id of a role."""
        for host in self.hosts.values():
            for pid, words in host.processes().items():
                if words.strip() == f"paceline role {name}":
                    return pid
        raise SystemExit(f"no process of {name}")


Deed = Callable[[Run], None]
NOTICED = ("died", "is gone", "going back", "restarting")


def kill(name: str) -> Deed:
    return lambda run: os.kill(run.role(name), signal.SIGKILL)


def cut(name: str, *, back: bool) -> Deed:
    def deed(run: Run) -> None:
        run.hosts[name].power_cut()
        if back:
            run.hosts[name].power_on()
            run.begin(name)

    return deed


def cable(name: str, seconds: float | None) -> Deed:
    """None: it stays out."""

    def deed(run: Run) -> None:
        run.until_the_end.enter_context(run.hosts[name].cable_out())
        if seconds is not None:
            time.sleep(seconds)
            run.until_the_end.close()

    return deed


def slow(name: str, seconds: float) -> Deed:
    def deed(run: Run) -> None:
        with run.hosts[name].slow(delay=20):
            time.sleep(seconds)

    return deed


def narrow(name: str, seconds: float) -> Deed:
    def deed(run: Run) -> None:
        with run.hosts[name].limited("50mbit"):
            time.sleep(seconds)

    return deed


# name, what is done, whose steps show whether others stand still, and whose that the victim is back
FAULTS: dict[str, tuple[Deed, int, int]] = {
    "kill -9 of the worker": (kill("worker:1"), 0, 1),
    "kill -9 of the server": (kill("server:0"), 0, 0),
    "kill -9 of the chief": (kill("chief"), 1, 0),
    "the worker's host, begun again at once": (cut("h2", back=True), 0, 1),
    "the server's host, begun again at once": (cut("h3", back=True), 0, 0),
    "the server's host, for good": (cut("h3", back=False), 0, 0),
    "the worker's cable out for 5 s": (cable("h2", 5.0), 0, 1),
    "the server's cable out for 5 s": (cable("h3", 5.0), 0, 0),
    "the worker's cable out for good": (cable("h2", None), 0, 0),
    "the server's cable out for good": (cable("h3", None), 0, 0),
    "20 ms to the worker for 5 s": (slow("h2", 5.0), 0, 1),
    "50 Mbit/s to the server for 5 s": (narrow("h3", 5.0), 0, 0),
}


@dataclass
class Seen:
    notice: float | None
    still: float | None
    back: float | None
    lost: int
    code: int | None


def look(name: str, patience: float, scheme: str) -> Seen:
    deed, other, victim = FAULTS[name]
    place = Path(tempfile.mkdtemp(prefix="paceline-faults-"))
    (place / "progress.py").write_text(HOOK)
    try:
        with several(3) as hosts:
            run = Run(place, hosts, patience, scheme)
            for host in TASKS:
                run.begin(host)
            if not run.wait(lambda: len(run.steps(0)) > 500 and len(run.steps(1)) > 500, 120):
                raise SystemExit(f"the run did not begin:\n{run.said}")
            time.sleep(1.5)  # a checkpoint or two
            began = time.monotonic()
            deed(run)

            def after(rank: int) -> list[tuple[float, int]]:
                return [row for row in run.steps(rank) if row[0] > began]

            def gap(rank: int) -> tuple[float | None, float | None]:
                """The longest standstill of a role, and when it was over."""
                times = [began, *(at for at, _ in after(rank))]
                if len(times) < 20:
                    return None, None
                longest = max(range(1, len(times)), key=lambda k: times[k] - times[k - 1])
                return times[longest] - times[longest - 1], times[longest] - began

            def noticed() -> float | None:
                told = (at for at, text in run.said if at > began and any(word in text for word in NOTICED))
                return next((at - began for at in told), None)

            run.wait(lambda: len(after(other)) > 100 and len(after(victim)) > 100, 90)
            if name.endswith("for good"):
                run.wait(lambda: noticed() is not None, 60)
            time.sleep(1.0)
            told = [(at, text) for at, text in run.said if at > began]
            notice = noticed()
            lost = sum(
                int(m[1].replace(",", "")) for _, text in told if (m := re.search(r"\(([\d,]+) updates are", text))
            )
            (still, _), (_, back) = gap(other), gap(victim)
            (place / "enough").touch()
            code = run.tasks["h1"].wait(60)
            if code or back is None:
                print("\n".join(text for _, text in run.said), file=sys.stderr)
            run.until_the_end.close()
            return Seen(notice, still, back, lost, code)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--patience", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--scheme", default="async")
    parser.add_argument("--only", default="", help="faults whose names hold this")
    options = parser.parse_args()
    table = Table(title=f"three hosts, {options.scheme}, patience {options.patience:g} s; seconds after the fault")
    for column in ("fault", "noticed", "others stand still", "victim is back", "updates lost", "exit code"):
        table.add_column(column, justify="left" if column == "fault" else "right")
    for name in FAULTS:
        if options.only not in name:
            continue
        rounds = [look(name, options.patience, options.scheme) for _ in range(options.rounds)]

        def middle(values: list[float | None]) -> str:
            known = [value for value in values if value is not None]
            return f"{statistics.median(known):.2f}" if known else "-"

        codes = {str(one.code) for one in rounds}
        table.add_row(
            name,
            middle([one.notice for one in rounds]),
            middle([one.still for one in rounds]),
            middle([one.back for one in rounds]),
            str(int(statistics.median(one.lost for one in rounds))),
            ",".join(sorted(codes)),
        )
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
