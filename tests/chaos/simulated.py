"""Whole schedules of faults in virtual time, over many seeds: `make chaos-sim SEEDS=100000 SEED=0`.

Every seed stands for a scheme, its processes, a network and random faults (`simulated_cases`). After each run the laws
of `simulated_checks` must hold. A seed that breaks one is run with fewer and fewer faults; what is printed is the
shortest schedule that still breaks it, and the command that repeats it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parent))

from simulated_cases import Case, case
from simulated_checks import check

from paceline.simulator.faults import Fault, parse_fault

CHUNK = 100
REPEAT_EVERY = 4  # one run in four is made twice


class Failure(NamedTuple):
    """A case that broke a law, with as few faults as it takes."""

    case: Case
    what: str

    def __str__(self) -> str:
        return f"{self.what}\n  {self.case}\n  again: {self.case.command()}"


def broken(one: Case, *, repeat: bool) -> str | None:
    """What is wrong with a case, if anything is."""
    try:
        check(one, repeat=repeat)
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}: {error} ({Path(last.filename).name}:{last.lineno})"
    return None


def shortest(one: Case, what: str) -> Failure:
    """Drop faults one by one as long as something is still wrong."""
    smaller = True
    while smaller:
        smaller = False
        for number in range(len(one.faults)):
            fewer = one.with_faults(one.faults[:number] + one.faults[number + 1 :])
            found = broken(fewer, repeat=True)
            if found is not None:
                one, what, smaller = fewer, found, True
                break
    return Failure(one, what)


def judged(seeds: Sequence[int]) -> tuple[Counter[str], list[Failure]]:
    """Run some seeds."""
    torch.set_num_threads(1)
    counts: Counter[str] = Counter()
    failures = []
    for seed in seeds:
        one = case(seed)
        try:
            counts += check(one, repeat=seed % REPEAT_EVERY == 0)
        except Exception:
            what = broken(one, repeat=True)
            failures.append(shortest(one, what or "only when it is run for the first time in its process"))
    return counts, failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=1000, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="the first")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--fault", action="append", type=parse_fault, help="instead of the seed's own; may be repeated")
    parser.add_argument("--no-faults", action="store_true")
    asked = parser.parse_args()
    if asked.fault or asked.no_faults:
        return _one(case(asked.seed).with_faults(tuple(asked.fault or ())))
    began, counts, failures = time.monotonic(), Counter[str](), list[Failure]()
    last = asked.seed + asked.seeds
    chunks = [range(first, min(first + CHUNK, last)) for first in range(asked.seed, last, CHUNK)]
    with multiprocessing.Pool(asked.processes) as pool:
        for number, (found, failed) in enumerate(pool.imap_unordered(judged, chunks), start=1):
            counts += found
            for failure in failed:
                print(f"FAILED: {failure}", flush=True)
            failures += failed
            if number % 50 == 0 or number == len(chunks):
                print(f"{counts['runs']:,} runs, {time.monotonic() - began:.0f} s, {len(failures)} failed", flush=True)
    for name, count in sorted(counts.items()):
        print(f"  {name}: {count:,}")
    return 1 if failures else 0


def _one(chosen: Case) -> int:
    torch.set_num_threads(1)
    print(chosen, *map(str, chosen.faults), sep="\n  ")
    what = broken(chosen, repeat=True)
    print(what or "nothing is wrong")
    return 1 if what else 0


__all__ = ["Failure", "Fault", "judged", "shortest"]

if __name__ == "__main__":
    sys.exit(main())
