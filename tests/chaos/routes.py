"""Trials on three hosts: routes between them are cut, cables pulled, roles killed, tasks asked to leave."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from beds.hosts import Host, Running, several, until
from launched import SIGNALS, Ended
from trials import PATIENCE, TASKS, Blow, Trial, with_exact

from paceline.config import build, discovery
from paceline.runs import checkpoint
from paceline.scheme import Scheme

LIMIT = 180.0  # seconds after which a run hangs
SPAN = 12.0  # seconds within which blows come, once the run trains
NAMES = ("h1", "h2", "h3")  # the chief is on h1
LEFT = (0, 128 + signal.SIGTERM, 1)  # how a task other than the chief may end: with the run, asked to leave, cut off


def route_trial(seed: int, number: int) -> Trial:
    """The trial of a number: schemes in turn, all else by chance."""
    rng = random.Random(f"routes {seed}-{number}")
    schemes = sorted(name for name, found in discovery.schemes().items() if not found.value().alone)
    scheme = schemes[(seed + number) % len(schemes)]
    chosen: Scheme = build.scheme_of(scheme, {})
    settings: dict[str, Any] = {
        "task": rng.choice(TASKS),
        "workers": rng.randint(2, 4),
        "servers": (1 if chosen.whole() else rng.choice([1, 2])) if chosen.methods else 0,
        "steps": rng.choice([250, 400]),
        "seed": rng.randrange(1000),
        "checkpoint_steps": rng.choice([7, 20, 60]),
        "patience": PATIENCE,
        "restarts": 50,
        "quorum": rng.choice(["shrink", "shrink", "hold"]),
    }
    if chosen.name != "hogwild" and rng.random() < 0.25:
        settings |= with_exact(chosen, rng)
    if settings["workers"] == 1:
        settings["workers"] = 2
    hyper = {"window": rng.choice([1, 2, 5])} if hasattr(chosen, "window") else {}
    return Trial(f"routes {seed}-{number}", scheme, settings, hyper, "goal", _blows(rng, settings))


def _blows(rng: random.Random, settings: dict[str, Any]) -> list[Blow]:
    roles = ["chief", *(f"worker:{rank}" for rank in range(1, settings["workers"]))]
    roles += [f"server:{shard}" for shard in range(settings["servers"])]
    found = []
    for _ in range(rng.randint(1, 4)):
        at, lasts = SPAN * rng.random(), 0.2 + 2.0 * PATIENCE * rng.random() ** 2
        kind = rng.choices(["cut", "cable", "kill", "stop", "terminate"], [4, 2, 3, 1, 1])[0]
        if kind == "cut":
            pair = "-".join(sorted(rng.sample(NAMES, 2)))
            found += [Blow(at, "cut", pair), Blow(at + lasts, "mend", pair)]
        elif kind == "cable":
            host = rng.choice(NAMES[1:])
            found += [Blow(at, "unplug", host), Blow(at + lasts, "plug", host)]
        elif kind == "stop":
            whom = rng.choice(roles)
            found += [Blow(at, "stop", whom), Blow(at + min(lasts, 0.8 * PATIENCE), "continue", whom)]
        elif kind == "kill":
            found.append(Blow(at, "kill", rng.choice(roles)))
        else:
            found.append(Blow(at, "terminate", f"task of {rng.choice(roles[1:])}"))
    return sorted(found, key=lambda blow: blow.at)


class Run:
    """The tasks of a run, a process each, on hosts by chance."""

    def __init__(self, trial: Trial, place: Path, hosts: dict[str, Host], stack: ExitStack) -> None:
        self.hosts, self._stack, self._place = hosts, stack, place
        self.tasks: dict[str, Running] = {}
        self._open: dict[str, ExitStack] = {}
        rng = random.Random(f"{trial.seed} placement")
        settings = trial.settings
        workers = settings["workers"]
        names = [f"worker:{rank}" for rank in range(workers - 1)]
        names += [f"server:{shard}" for shard in range(settings["servers"])]
        cluster = f"chief=1,worker={workers - 1}" + (f",server={settings['servers']}" if settings["servers"] else "")
        command = [sys.executable, "-P", "-m", "paceline", "train", settings["task"], "--scheme", trial.scheme]
        command += [*(f"{key}={value}" for key, value in trial.hyper.items()), *_options(trial, place)]
        for name in ["chief", *names]:
            host = "h1" if name == "chief" else rng.choice(NAMES)
            environment = os.environ | {
                "PACELINE_TASK": name,
                "PACELINE_CLUSTER": cluster,
                "PACELINE_MEET": str(place.with_suffix(".hub")),
                "PACELINE_SECRET": "5e" * 32,
            }
            with place.with_suffix(".out").open("a") as log:
                how = {"env": environment, "stdout": log, "stderr": subprocess.STDOUT}
                self.tasks[name] = stack.enter_context(hosts[host].start(command, **how))

    def deal(self, blow: Blow) -> bool:
        """False if there was nobody to deal it to."""
        if blow.what in ("cut", "unplug"):
            stack = self._open.setdefault(blow.whom, self._stack.enter_context(ExitStack()))
            near, _, far = blow.whom.partition("-")
            host = self.hosts[near]
            stack.enter_context(host.cut_from(self.hosts[far]) if far else host.cable_out())
            return True
        if blow.what in ("mend", "plug"):
            self._open.pop(blow.whom, ExitStack()).close()  # of two cuts of one route the first mend counts
            return True
        pid = self._task_of(blow.whom) if blow.whom.startswith("task of ") else self._role(blow.whom)
        if pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, SIGNALS[blow.what])
        return bool(pid)

    def _role(self, role: str) -> int:
        there = {words: pid for host in self.hosts.values() for pid, words in host.processes().items()}
        return there.get(f"paceline role {role}", 0)

    def _task_of(self, whom: str) -> int:
        role = whom.removeprefix("task of ")
        kind, _, number = role.partition(":")
        task = self.tasks[f"worker:{int(number) - 1}" if kind == "worker" else role]
        return 0 if task.poll() is not None else task.inner

    def left(self) -> list[str]:
        return [f"{name}: {words}" for name, host in self.hosts.items() for words in host.processes().values()]


def _options(trial: Trial, place: Path) -> list[str]:
    settings = trial.settings
    goal = settings["steps"]
    hook = f"{Path(__file__).with_name('linger.py')}:Linger:gate={place.with_suffix('.gate')},update={goal // 2}"
    words = ["--steps", str(goal), "--seed", str(settings["seed"]), "--patience", f"{PATIENCE:g}", "--restarts", "50"]
    words += ["--checkpoint-every", str(settings["checkpoint_steps"]), "--dir", str(place), "--hook", hook, "--plain"]
    return words + (["--exact", "--micro", "4"] if trial.exact else ["--quorum", settings["quorum"]])


def run_routes(trial: Trial, place: Path) -> Ended:
    """Start the tasks, wait until they train, deal out the blows, wait for the end of all."""
    began, dealt, code = time.monotonic(), [], None
    for leftover in place.parent.glob(f"{place.name}.*"):
        leftover.unlink()
    with several(3) as hosts, ExitStack() as stack:
        run = Run(trial, place, hosts, stack)
        chief = run.tasks["chief"]
        with contextlib.suppress(AssertionError):  # the end will show why
            until(lambda: chief.poll() is not None or bool(checkpoint.steps(place / "checkpoints")), 90, "a start")
        start = time.monotonic()
        for blow in trial.blows:
            with contextlib.suppress(subprocess.TimeoutExpired):
                chief.wait(max(start + blow.at - time.monotonic(), 0))
            there = run.deal(blow)
            dealt.append(f"{time.monotonic() - start:.3f} {blow.what} {blow.whom}{'' if there else ' (not there)'}")
        place.with_suffix(".gate").touch()
        ends = {}
        for name, task in run.tasks.items():
            with contextlib.suppress(subprocess.TimeoutExpired):
                ends[name] = task.wait(max(began + LIMIT - time.monotonic(), 1))
        code = ends.get("chief")
        hanging = [name for name in run.tasks if name not in ends]
        odd = [f"task {name} ended with {end}" for name, end in ends.items() if name != "chief" and end not in LEFT]
        with contextlib.suppress(AssertionError):
            until(lambda: not run.left(), 10, "nothing is left")
        left = [*run.left(), *odd, *(f"task {name} hangs" for name in hanging)]
    output = place.with_suffix(".out")
    return Ended(place, code, time.monotonic() - began, output.read_text(errors="replace"), dealt, left)
