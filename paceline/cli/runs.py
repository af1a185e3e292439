"""The commands on runs that are there: `paceline runs | evaluate | predict`, and `show` of a run."""

from __future__ import annotations

import json
import os
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.text import Text
from torch import Tensor

from paceline.errors import DataError, UsageError
from paceline.report.run_tables import detail, listing, summary
from paceline.runs.atomic_files import finite
from paceline.runs.run_directory import RUNS, RunDirectory, runs_in
from paceline.runs.trained_model import evaluated, expected, predicted, task_of, torch_task_of, trained
from paceline.torch_task import TorchTask

screen, messages = Console(highlight=False), Console(stderr=True, highlight=False)

Run = Annotated[str, typer.Argument(help="A run directory, or its name under runs/.")]
Which = Annotated[str, typer.Option("--which", help="newest, best, or the step of a checkpoint.")]
Averaged = Annotated[bool, typer.Option("--ema", help="The averaged weights that the hook weight-ema kept.")]
DataDirectory = Annotated[str | None, typer.Option("--data", help="A directory with data sets (or set PACELINE_DATA).")]


def runs(
    root: Annotated[Path, typer.Argument(help="The folder that holds them.")] = RUNS,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per run on stdout.")] = False,
) -> None:
    """The runs that are there: what they trained, how far they came, how they ended."""
    if root != RUNS and not root.is_dir():
        raise UsageError(f"no folder {root} (looked in {Path.cwd()})")
    found = runs_in(root)
    if as_json:
        for run in found:
            sys.stdout.write(json.dumps(finite(summary(run))) + "\n")
    elif found:
        screen.print(listing(found))
    else:
        messages.print(f"no runs in {escape(str(root.resolve()))}; `paceline train` makes them", soft_wrap=True)


def show_run(name: str | Path) -> bool:
    """Print one run in detail, if this names one; says whether it does."""
    try:
        run = RunDirectory.open(name)
    except UsageError:
        return False
    for part in detail(run):
        screen.print(part, soft_wrap=isinstance(part, Text))
    return True


def evaluate(
    run: Run,
    which: Which = "newest",
    ema: Averaged = False,
    data: DataDirectory = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Metrics of a trained model on the test data of its task."""
    _look_for_data_in(data)
    directory = RunDirectory.open(run)
    kept = trained(directory, which, ema=ema, say=_say)
    metrics = evaluated(kept, task_of(directory))
    if as_json:
        told = {"run": directory.name, "step": kept.checkpoint.step, "metrics": metrics}
        sys.stdout.write(json.dumps(finite(told)) + "\n")
        return
    screen.print(f"{escape(directory.name)}, step {kept.checkpoint.step:,}")
    for name, value in metrics.items():
        screen.print(f"{escape(name)} {value:.2%}" if name == "accuracy" else f"{escape(name)} {value:.6g}")


def predict(
    run: Run,
    inputs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[INPUT]...", help="A .npy, .npz, .safetensors or .csv file, or images."),
    ] = None,
    given: Annotated[list[Path] | None, typer.Option("--input", "-i", help="The same, as an option.")] = None,
    which: Which = "newest",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the model's outputs to this .npy file.")
    ] = None,
    ema: Averaged = False,
    data: DataDirectory = None,
) -> None:
    """The outputs of a trained model for samples from a file, as its data set has them: a JSON line each."""
    if output is not None and output.suffix != ".npy":
        raise UsageError(f"--output must be a .npy file, not {output}")
    files = [*(inputs or []), *(given or [])]
    if not files:
        raise UsageError("predict needs samples: give --input FILE")
    _look_for_data_in(data)
    directory = RunDirectory.open(run)
    kept = trained(directory, which, ema=ema, say=_say)
    task = torch_task_of(directory)
    samples = _read(files, expected(task))
    _warn_of_other_scale(task, samples)
    scores = predicted(kept, task, samples).to(torch.float64)
    if output is not None:
        try:
            np.save(output, scores.numpy())
        except OSError as error:
            raise UsageError(f"cannot write {output}: {error.strerror}") from error
        messages.print(f"{len(scores):,} outputs written to {escape(str(output))}", soft_wrap=True)
        return
    classes = _has_classes(task) and scores.dim() > 1 and scores.shape[-1] > 1
    for index, score in enumerate(scores):
        line: dict[str, Any] = {"index": index}
        if classes:
            line["label"] = score.argmax(-1).tolist()
        sys.stdout.write(json.dumps(finite(line | {"scores": score.tolist()})) + "\n")


def _look_for_data_in(directory: str | None) -> None:
    if directory is not None:
        os.environ["PACELINE_DATA"] = directory


def _say(text: str) -> None:
    messages.print(escape(text), soft_wrap=True)


def _has_classes(task: TorchTask) -> bool:
    target = task._prepared(task.test.take(np.zeros(1, dtype=np.int64)))[-1]
    return not target.is_floating_point()


def _warn_of_other_scale(task: TorchTask, samples: tuple[Tensor, ...]) -> None:
    """Pixels up to 255 for a model that was trained on pixels up to 16 would give nonsense without a word."""
    known = task.train.tensors
    if known is None or len(known) != len(samples) + 1:
        return
    for given, seen in zip(samples, known, strict=False):
        if given.numel() and (given.max() > seen.max() or given.min() < seen.min()):
            messages.print(
                f"[bold yellow]warning:[/bold yellow] the numbers go from {given.min():g} to {given.max():g}; "
                f"the training data go from {seen.min():g} to {seen.max():g}",
                soft_wrap=True,
            )


def _read(paths: list[Path], samples: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """What the files hold, a tensor for each input of the model."""
    for path in paths:
        if not path.is_file():
            raise UsageError(f"no file {path} (looked in {Path.cwd()})")
    kinds = {path.suffix.lower() for path in paths}
    if kinds <= PICTURES:
        return (torch.stack([_picture(path, samples[0]) for path in paths]),)
    if len(paths) > 1:
        raise UsageError("several files can be given only if all are images; put other samples into one file")
    path, kind = paths[0], kinds.pop()
    if kind not in READERS:
        known = ", ".join((*READERS, *sorted(PICTURES)))
        raise UsageError(f"cannot read {path}: {kind or 'a file without an ending'} is none of {known}")
    try:
        found = READERS[kind](path)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, TypeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    parts = tuple(found[name] for name in sorted(found))
    if len(parts) != len(samples):
        raise UsageError(f"the model takes {len(samples)} inputs; {path} holds {', '.join(sorted(found)) or 'none'}")
    if kind == ".csv" and samples[0].numel() == parts[0].shape[1]:
        return (parts[0].reshape(-1, *samples[0].shape),)  # a table has no further dimensions
    return parts


def _numpy(path: Path) -> dict[str, Tensor]:
    loaded = np.load(path, allow_pickle=False)
    arrays = {name: loaded[name] for name in loaded.files} if isinstance(loaded, np.lib.npyio.NpzFile) else {"": loaded}
    return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}


def _safetensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(str(error)) from error


def _table(path: Path) -> dict[str, Tensor]:
    text = path.read_text(encoding="utf-8-sig")
    rows = [line.split(",") for line in text.splitlines() if line.strip()]
    if len({len(row) for row in rows}) != 1:
        raise ValueError("its lines must be equally many numbers with commas between")
    try:
        return {"": torch.tensor([[float(word) for word in row] for row in rows], dtype=torch.float64)}
    except ValueError as error:
        raise ValueError(f"{error}; a table must hold nothing but numbers, no head line either") from None


def _picture(path: Path, sample: Tensor) -> Tensor:
    """An image with the channels of a sample; a picture of another size is refused, not stretched."""
    from PIL import Image

    channels = sample.shape[0] if sample.dim() == 3 else 1
    if sample.dim() not in (2, 3) or channels not in (1, 3):
        raise UsageError(f"a sample of this task has shape {tuple(sample.shape)}: it is not an image")
    try:
        with Image.open(path) as image:
            pixels = np.array(image.convert("L" if channels == 1 else "RGB"))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(f"{path} cannot be read as an image: {error}") from error
    height, width = sample.shape[-2:]
    if pixels.shape[:2] != (height, width):
        found = f"{pixels.shape[1]} x {pixels.shape[0]}"
        raise UsageError(f"{path} has {found} pixels; a sample has {width} x {height}, shape {tuple(sample.shape)}")
    picture = torch.from_numpy(pixels)
    return picture.reshape(sample.shape) if channels == 1 else picture.permute(2, 0, 1)


PICTURES = {".png", ".jpg", ".jpeg"}
READERS: dict[str, Callable[[Path], dict[str, Tensor]]] = {
    ".npy": _numpy,
    ".npz": _numpy,
    ".safetensors": _safetensors,
    ".csv": _table,
}
