"""Random faults in real processes: `make chaos SECONDS=600 SEED=7`, or `python tests/chaos/chaos.py --help`.

Each trial is a run of some scheme whose processes are killed, stopped and terminated; afterwards what must hold is
checked. A trial that fails is kept, and named so that it can be repeated: --seed S --only N. With --routes the
processes are on three hosts (network namespaces), and routes between them are cut.
"""

from __future__ import annotations

import argparse
import pprint
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(Path(__file__).parent), str(TESTS / "system"), str(TESTS)]

import torch  # noqa: E402
from invariants import broken  # noqa: E402
from launched import run  # noqa: E402
from processes import shared_files  # noqa: E402
from routes import route_trial, run_routes  # noqa: E402
from trials import trial  # noqa: E402

from paceline.config import discovery  # noqa: E402


def attempt(seed: int, number: int, folder: Path, *, routes: bool) -> tuple[list[str], Counter[str]]:
    """One trial: what does not hold, and what was done."""
    chosen, shared = (route_trial if routes else trial)(seed, number), shared_files()
    place = folder / f"{'routes-' if routes else ''}{number:04d}-{chosen.scheme}"
    shutil.rmtree(place, ignore_errors=True)  # of an earlier try
    ended = (run_routes if routes else run)(chosen, place)
    found = broken(chosen, ended, shared)
    counts = Counter(words.split()[1] for words in ended.dealt if "not there" not in words)
    if found:
        again = f"--seed {seed} --only {number}{' --routes' if routes else ''}"
        print(f"\nFAILED: python tests/chaos/chaos.py {again}   (kept in {place})")
        pprint.pprint(chosen, width=140)
        print(f"exit code {ended.code} after {ended.seconds:.1f} s; dealt:", *ended.dealt, sep="\n  ")
        print(*(f"BROKEN: {text}" for text in found), sep="\n", flush=True)
    else:
        for path in folder.glob(f"{place.name}*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return found, counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of all trials")
    parser.add_argument("--seconds", type=float, default=60.0, help="no trial begins later than this")
    parser.add_argument("--runs", type=int, default=1_000_000, help="at most this number of trials")
    parser.add_argument("--rounds", type=int, help="each scheme this number of times, in place of --runs")
    parser.add_argument("--first", type=int, default=0, help="the number of the first trial")
    parser.add_argument("--only", type=int, help="one trial, by its number")
    parser.add_argument("--keep", type=Path, help="where failed runs are kept (default: a new folder)")
    parser.add_argument("--routes", action="store_true", help="three hosts, and cut routes between them (as root)")
    given = parser.parse_args()
    torch.set_num_threads(1)  # this process forks launchers
    folder = given.keep or Path(tempfile.mkdtemp(prefix="chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    runs = given.runs if given.rounds is None else given.rounds * len(discovery.schemes())
    numbers = [given.only] if given.only is not None else range(given.first, given.first + runs)
    began, failed, done, totals = time.monotonic(), 0, 0, Counter[str]()
    for number in numbers:
        if time.monotonic() - began > given.seconds:
            break
        found, counts = attempt(given.seed, number, folder, routes=given.routes)
        done, failed, totals = done + 1, failed + bool(found), totals + counts
        if done % 10 == 0:
            print(f"{done} runs, {failed} failed, {time.monotonic() - began:.0f} s", flush=True)
    dealt = ", ".join(f"{count} {what}" for what, count in sorted(totals.items()))
    print(f"{done - failed} passed, {failed} failed in {time.monotonic() - began:.0f} s; dealt: {dealt}")
    if not failed:
        shutil.rmtree(folder, ignore_errors=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
