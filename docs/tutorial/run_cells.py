"""Runs the cells of a lesson in one namespace: `run_cells.py FIGURES STEM`, cells as JSON on stdin, outputs on stdout.

As in a notebook: what a cell prints is its output, and so is every pyplot figure that is open at its end.
"""

import io
import json
import sys
import traceback
import types
import warnings
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any


def main(figures: Path, stem: str) -> None:
    warnings.filterwarnings("ignore", message="FigureCanvasAgg is non-interactive")  # plt.show() in a cell
    module = types.ModuleType("__main__")  # classes and functions of a cell are those of a script
    sys.modules["__main__"] = module
    outputs, drawn = [], 0
    for number, cell in enumerate(json.load(sys.stdin), 1):
        printed = io.StringIO()
        name = f"<cell {number}>"
        try:
            with redirect_stdout(printed):
                exec(compile(cell["code"], name, "exec"), module.__dict__)
        except BaseException:
            sys.exit(f"cell {number} failed\n{cell['code']}\n{traceback.format_exc()}")
        for check in cell["checks"]:
            if not eval(check, module.__dict__):
                sys.exit(f"cell {number}: this claim of the text is false: {check}\n{printed.getvalue()}")
        files = []
        if "matplotlib.pyplot" in sys.modules:
            from matplotlib import pyplot

            for handle in pyplot.get_fignums():
                drawn += 1
                files.append(f"{stem}-{drawn}.png")
                _save(pyplot.figure(handle), figures / files[-1])
            pyplot.close("all")
        outputs.append({"text": _ended(printed.getvalue()), "figures": files})
    json.dump(outputs, sys.stdout)


def _save(figure: Any, path: Path) -> None:
    """As a picture of 64 colours, which takes a third of the bytes."""
    from PIL import Image

    whole = io.BytesIO()
    figure.savefig(whole, format="png", dpi=80, facecolor="white", metadata={"Software": None})
    Image.open(whole).convert("RGB").quantize(64).save(path, optimize=True)


def _ended(text: str) -> str:
    lines = "\n".join(line.rstrip() for line in text.splitlines()).strip("\n")
    return f"{lines}\n" if lines else ""


main(Path(sys.argv[1]), sys.argv[2])
