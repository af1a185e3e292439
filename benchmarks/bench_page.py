"""Writes docs/benchmarks.md and its figure from the JSON files in benchmarks/results/."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS, PAGE = ROOT / "benchmarks" / "results", ROOT / "docs" / "benchmarks.md"
SIZES = {"mnist-mlp": "0.4 MB", "mnist-cnn": "13 MB", "wide-mlp": "40 MB"}

INTRODUCTION = """# Benchmarks

<!-- written by `make bench` from benchmarks/results/*.json; `bench.py --only-page` writes it again -->

Speeds are shares of a limit: the samples per second of as many independent processes that never communicate. The speed
of a machine drifts: so blocks of gradients of a run of paceline are in turn with blocks of the limit in the same
processes; of other libraries the limit is measured before and after. A number is the median of the rounds, in brackets
the least and the most. `make bench` measures all of this on your machine in under 15 minutes; what the other
scripts of [benchmarks](../benchmarks/README.md) measure is described there.
"""


def write_page() -> list[Path]:
    """Gives the files that it has written."""
    told = _read("bench.json")
    written = [PAGE]
    parts = [INTRODUCTION]
    if told is not None:
        written += _figure(told)
        parts.append("\n".join(_against_others(told)))
    sections = {"cores.json": _cores, "gpu.json": _gpu, "startup.json": _startup, "slow_links.json": _slow_links}
    for name, section in sections.items():
        found = _read(name)
        if found is not None:
            parts.append("\n".join(section(found)))
    PAGE.write_text("\n".join(part.rstrip("\n") + "\n" for part in parts))
    return written


def _read(name: str) -> dict[str, Any] | None:
    path = RESULTS / name
    return json.loads(path.read_text()) if path.exists() else None


def _against_others(told: dict[str, Any]) -> Iterator[str]:
    machine, workers = told["machine"], told["workers"]
    yield "## Beside other libraries"
    yield ""
    yield (
        f"{told['date']}; {machine['processor']}, {machine['cores']} cores, {machine['memory_gb']} GB, "
        f"{machine['system']}; Python {machine['python']}, torch {machine['torch']}, paceline {machine['paceline']}. "
        f"{workers} workers with one thread each, one server; rounds: {told['rounds']}, in {told['minutes']:g} minutes."
    )
    yield ""
    tasks = told["tasks"]
    heads = [f"{name} ({SIZES[name]}, batch {one['batch']})" for name, one in tasks.items()]
    yield f"| | {' | '.join(heads)} |"
    yield "|---" * (len(tasks) + 1) + "|"
    limits = [f"{one['limit_samples_per_second']:,} samples/s" for one in tasks.values()]
    yield f"| limit | {' | '.join(limits)} |"
    names = list(dict.fromkeys(name for one in tasks.values() for name in one["shares"]))
    for name in names:
        yield f"| {_label(name)} | {' | '.join(_share(one['shares'].get(name)) for one in tasks.values())} |"
    yield ""
    if told["skipped"]:
        yield "Skipped: " + "; ".join(f"{name} ({why})" for name, why in told["skipped"].items()) + "."
        yield ""
    if (RESULTS / "bench.png").exists():
        yield "![Shares of the limit](../benchmarks/results/bench.png)"


def _label(name: str) -> str:
    return name if _is_other(name) else f"paceline `{name}`"


def _is_other(name: str) -> bool:
    return name[0].isupper() or name.startswith(("torch", "a barrier"))


def _share(found: dict[str, Any] | None) -> str:
    if found is None:
        return ""
    rounds = found["rounds"]
    return f"{found['median']:.2f} ({min(rounds):.2f} – {max(rounds):.2f})"


def _cores(told: dict[str, Any]) -> Iterator[str]:
    counts = told["workers"]
    yield "## Many cores"
    yield ""
    where = f"{told['cores']} cores, torch {told['torch']}" + (f", {told['date']}" if "date" in told else "")
    yield f"`python benchmarks/cores.py` on {where}: {told['task']}, batch {told['batch']}."
    yield ""
    yield f"| | {' | '.join(f'{count} workers' for count in counts)} |"
    yield "|---" * (len(counts) + 1) + "|"
    limits = " | ".join(f"{one['limit_samples_per_second']:,} samples/s" for one in counts.values())
    yield f"| limit | {limits} |"
    for name in dict.fromkeys(name for one in counts.values() for name in one["shares"]):
        shares = (f"{one['shares'][name]['median']:.2f}" if name in one["shares"] else "" for one in counts.values())
        yield f"| {_label(name)} | {' | '.join(shares)} |"


def _gpu(told: dict[str, Any]) -> Iterator[str]:
    yield "## One GPU"
    yield ""
    gpu = told.get("gpu") or told["device"]
    yield (
        f"`python benchmarks/gpu.py` on {gpu}, {told['date']}. Beside it a plain PyTorch loop, in turn with the run in "
        "the same processes; with two workers two such loops that never communicate. In brackets what 8 of 10 blocks "
        "of steps had."
    )
    yield ""
    yield "| | ms per step | plain loop, ms | share of the plain loop | extra ms |"
    yield "|---|---|---|---|---|"
    for name, cell in told["cells"].items():
        if "error" in cell:
            yield f"| {name} | not finished | | | |"
            continue
        spread = f" ({cell['least']:.2f} – {cell['most']:.2f})" if "least" in cell else ""
        share = f"{cell['share']:.2f}{spread}"
        times = f"{cell['ms_per_step']:.2f} | {cell['plain_ms']:.2f}"
        yield f"| {name} | {times} | {share} | {cell['extra_ms']:.2f} |"


def _startup(told: dict[str, Any]) -> Iterator[str]:
    yield "## Start-up"
    yield ""
    yield (
        f"`python benchmarks/startup.py`: seconds to the first gradient beyond `import torch` "
        f"({told['import_torch']:.2f} s), {told['workers']} workers."
    )
    yield ""
    yield "| model | started by | scheme | seconds to the first gradient | memory of all processes, MB |"
    yield "|---|---|---|---|---|"
    for run in told["runs"]:
        yield f"| {run['model']} | {run['way']} | {run['scheme']} | {run['beyond']:.2f} | {run['peak_mb']:,.0f} |"


def _slow_links(told: dict[str, Any]) -> Iterator[str]:
    yield "## Slow links"
    yield ""
    yield (
        f"`python benchmarks/slow_links.py`: {told['title']} of training. One worker on each host, AdamW at the same "
        "rate inside, one run each. The evaluations are not in the time. Each of these runs survives a worker that is "
        "killed, and is replayed bit for bit: `tests/system/test_slow_links.py`."
    )
    yield ""
    yield "| | test loss at the end | samples/s | updates | MB over the link | kB per 1,000 samples |"
    yield "|---|---|---|---|---|---|"
    for name, run in told["runs"].items():
        last, sent = run["course"][-1], run["megabytes"]
        yield (
            f"| {name} | {last['loss']:.3f} | {last['samples'] / last['seconds']:,.0f} | {last['updates']:,} "
            f"| {sent:.1f} | {1e6 * sent / last['samples']:,.0f} |"
        )
    yield ""
    yield "| | command |"
    yield "|---|---|"
    for name, run in told["runs"].items():
        yield f"| {name} | `paceline train char-lm --scheme {run['words']}` |"
    yield ""
    yield "![Test loss against time](../benchmarks/results/slow_links.svg)"


def _figure(told: dict[str, Any]) -> list[Path]:
    try:
        import matplotlib
    except ModuleNotFoundError:
        print("no figure: it needs matplotlib (pip install 'paceline[bench]')", file=sys.stderr)
        return []
    matplotlib.use("Agg")
    from matplotlib import pyplot

    tasks = told["tasks"]
    names = list(dict.fromkeys(name for one in tasks.values() for name in one["shares"]))
    figure, panels = pyplot.subplots(
        1, len(tasks), figsize=(3.6 * len(tasks) + 1.4, 0.36 * len(names) + 1.4), sharey=True, squeeze=False
    )
    for panel, (task, one) in zip(panels[0], tasks.items(), strict=True):
        for place, name in enumerate(names):
            rounds = one["shares"].get(name, {}).get("rounds")
            if not rounds:
                continue
            middle = statistics.median(rounds)
            spread = [[middle - min(rounds)], [max(rounds) - middle]]
            colour = "#9aa5b1" if _is_other(name) else "#1f6fb2"
            panel.barh(place, middle, xerr=spread, color=colour, height=0.7, ecolor="#333333", capsize=2)
            panel.text(0.02, place, f"{middle:.2f}", va="center", ha="left", color="white", fontsize=8)
        panel.axvline(1.0, color="#c0392b", linewidth=1, linestyle="--")
        panel.set_title(f"{task} ({SIZES[task]})", fontsize=10)
        panel.set_xlabel("share of the limit")
        panel.set_xlim(0, max(1.15, panel.get_xlim()[1]))
    panels[0][0].set_yticks(range(len(names)), [name if _is_other(name) else f"paceline {name}" for name in names])
    panels[0][0].invert_yaxis()
    machine = told["machine"]
    figure.suptitle(f"{told['workers']} workers on {machine['cores']} cores, {told['date']}", fontsize=10)
    figure.tight_layout()
    path = RESULTS / "bench.png"
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return [path]
