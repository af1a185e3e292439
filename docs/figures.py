"""Draws the figures of the docs from runs: `python docs/figures.py [NAME …]`, or `make figures`.

Every figure is made by a command, which its page shows. Simulated runs draw the same figure each time with the same
torch and kind of CPU; real runs (`--real`) draw another one each time. Runs that are done are kept in comparisons/docs:
a second call only draws.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
RUNS = HERE.parent / "comparisons" / "docs"

TEN = "mnist-mlp --schemes sync,async,downpour,agn,dynsgd,easgd,aeasgd,aeamsgd,sagn,hogwild --workers 8"
# file of docs/ -> the command that makes it
COMPARED = {
    "compare.png": TEN,
    "who-waits.png": TEN,
    "exact.png": "digits-mlp --schemes allreduce,sync --workers 1,2,4 --exact --seeds 1",
    "depth.png": "digits-mlp --schemes sync,groups,async groups.size=2 --workers 4",
    "real.png": "digits-mlp --schemes allreduce,async,downpour --workers 2 --real",
}
CURVES = "figures/error-curves.png"  # of a comparison: error against updates, samples and time
OTHERS = {"who-waits.png": "figures/who-waits.png"}


def main(names: list[str]) -> int:
    for name in names or ["pace.svg", *COMPARED]:
        if name == "pace.svg":
            subprocess.run([sys.executable, HERE.parent / "examples" / "picture.py"], check=True)
        elif name in COMPARED:
            first = next(other for other, words in COMPARED.items() if words == COMPARED[name])
            folder = RUNS / Path(first).stem
            words = [*shlex.split(COMPARED[name]), "--dir", str(folder)]
            subprocess.run([sys.executable, "-m", "paceline", "compare", *words], check=True)
            shutil.copy(folder / OTHERS.get(name, CURVES), HERE / name)
            print(f"wrote {name}")
        else:
            print(f"no figure {name!r}; there are: pace.svg, {', '.join(COMPARED)}", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
