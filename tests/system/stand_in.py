"""Stands in for `paceline train …` where a launcher is tested, not the training: python stand_in.py FOLDER DEED

Every task writes what it was told to FOLDER/TASK.LIFE.json. The chief listens, tells where, and ends when all others
have called; the others call it. DEED: `none`, `die:TASK` (that task kills itself in its first life), `stay` (wait for
the end by a signal), `fail:CODE` (the chief ends with it).
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

LIMIT = 20.0  # seconds; past them it hangs


def main(folder: Path, deed: str) -> int:
    told = {key: value for key, value in os.environ.items() if key.startswith("PACELINE_")}
    task = told.get("PACELINE_TASK") or _by_rank(told)
    ended: list[int] = []
    for number in (signal.SIGTERM, signal.SIGUSR1) if task == "chief" else ():
        signal.signal(number, lambda number, _: ended.append(number))
    if task != "chief":
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # the chief will tell
    life = len(list(folder.glob(f"{task}.*.json")))
    path = folder / f"{task}.{life}.json"
    path.with_suffix(".part").write_text(json.dumps(told | {"pid": os.getpid(), "cwd": str(Path.cwd())}))
    path.with_suffix(".part").rename(path)
    print(f"{task} is here", file=sys.stderr, flush=True)
    if deed == f"die:{task}" and life == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    if task == "chief":
        return _chief(told, folder, deed, ended)
    host, _, port = _hub(told).rpartition(":")
    with socket.create_connection((host, int(port)), timeout=LIMIT) as call:
        call.sendall(task.encode() + b"\n")
        call.recv(1)  # until the chief has gone
    return 0


def _by_rank(told: dict[str, str]) -> str:
    if "PACELINE_TASKS" in told:
        return told["PACELINE_TASKS"].split(",")[int(os.environ["RANK"])]
    rank = int(next(os.environ[key] for key in ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK") if key in os.environ))
    roles = told["PACELINE_PLACEMENT"].split(",")
    role = roles[rank]
    return role if role in ("chief", "evaluator") else f"{role}:{roles[:rank].count(role)}"


def _chief(told: dict[str, str], folder: Path, deed: str, ended: list[int]) -> int:
    listed = told.get("PACELINE_PLACEMENT") or told.get("PACELINE_TASKS")
    others = len(listed.split(",")) - 1 if listed else _count(told)
    if deed.startswith("fail:"):
        return int(deed.removeprefix("fail:"))
    with socket.create_server(("127.0.0.1", 0)) as door:
        hub = f"127.0.0.1:{door.getsockname()[1]}"
        if told.get("PACELINE_TELL_HUB") == "1":
            print(f"hub: {hub}", file=sys.stderr, flush=True)
        if "PACELINE_MEET" in told:
            aside = Path(told["PACELINE_MEET"] + ".aside")
            aside.write_text(hub)
            aside.rename(told["PACELINE_MEET"])
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE"):
            from paceline.network.cluster import torchrun_store

            torchrun_store.publish(os.environ, hub)
        door.settimeout(0.1)
        names: set[str] = set()
        calls, deadline = [], time.monotonic() + LIMIT
        while (len(names) < others or deed == "stay") and not ended:
            assert time.monotonic() < deadline, f"only {names} have called"
            try:
                calls.append(door.accept()[0])
                names.add(calls[-1].makefile().readline())
            except TimeoutError:
                pass
        for call in calls:
            call.close()
    (folder / "ended").write_text("by a signal" if ended else "in order")
    print(json.dumps({"called": sorted(name.strip() for name in names)}), flush=True)
    return 130 if ended else 0


def _count(told: dict[str, str]) -> int:
    return sum(int(word.partition("=")[2]) for word in told["PACELINE_CLUSTER"].split(",")) - 1


def _hub(told: dict[str, str]) -> str:
    if "PACELINE_HUB" in told:
        return told["PACELINE_HUB"]
    if "PACELINE_MEET" in told:
        deadline = time.monotonic() + LIMIT
        while not Path(told["PACELINE_MEET"]).exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return Path(told["PACELINE_MEET"]).read_text()
    from paceline.network.cluster import torchrun_store

    return torchrun_store.wait(os.environ, LIMIT)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
