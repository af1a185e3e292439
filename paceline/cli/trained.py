"""The commands on trained models: `paceline evaluate`, `paceline predict`."""

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.markup import escape
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from paceline.cli.commands import EvaluateOptions, PredictOptions
from paceline.cli.console import say, screen, warn
from paceline.cli.options import print_json
from paceline.errors import DataError, UsageError
from paceline.runs.run_directory import RunDirectory
from paceline.runs.trained_model import evaluated, expected, first_sample, predicted, sampled_task_of, task_of, trained
from paceline.torch_task import SampledTask


def evaluate(asked: EvaluateOptions) -> None:
    directory = RunDirectory.open(asked.run)
    kept = trained(directory, asked.which, ema=asked.ema, say=say)
    metrics = evaluated(kept, task_of(directory))
    if asked.as_json:
        print_json({"run": directory.name, "step": kept.checkpoint.step, "metrics": metrics})
        return
    screen.print(f"{escape(directory.name)}, step {kept.checkpoint.step:,}")
    for name, value in metrics.items():
        screen.print(f"{escape(name)} {value:.2%}" if name == "accuracy" else f"{escape(name)} {value:.6g}")


def predict(asked: PredictOptions) -> None:
    output, files = asked.output, [*asked.inputs, *asked.given]
    if output is not None and output.suffix != ".npy":
        raise UsageError(f"--output must be a .npy file, not {output}")
    if not files:
        raise UsageError("predict needs samples: give --input FILE")
    directory = RunDirectory.open(asked.run)
    kept = trained(directory, asked.which, ema=asked.ema, say=say)
    task = sampled_task_of(directory)
    samples = _read(files, expected(task))
    _warn_of_other_scale(task, samples)
    scores = predicted(kept, task, samples).to(torch.float64)
    if output is not None:
        try:
            np.save(output, scores.numpy())
        except OSError as error:
            raise UsageError(f"cannot write {output}: {error.strerror}") from error
        say(f"{len(scores):,} outputs written to {output}")
        return
    target = task._prepared(first_sample(task))[-1]
    classes = not target.is_floating_point() and scores.dim() > 1 and scores.shape[-1] > 1
    for index, score in enumerate(scores):
        line: dict[str, Any] = {"index": index}
        if classes:
            line["label"] = score.argmax(-1).tolist()
        print_json(line | {"scores": score.tolist()})


def _warn_of_other_scale(task: SampledTask, samples: tuple[Tensor, ...]) -> None:
    """Pixels up to 255 for a model that was trained on pixels up to 16 would give nonsense without notice."""
    known = task.train.tensors
    if known is None or len(known) != len(samples) + 1:
        return
    for given, seen in zip(samples, known, strict=False):
        if given.numel() and (given.max() > seen.max() or given.min() < seen.min()):
            warn(
                f"the numbers range from {given.min():g} to {given.max():g}; the training data range from "
                f"{seen.min():g} to {seen.max():g}"
            )


def _read(paths: list[Path], samples: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The samples of the files: a tensor for each input of the model."""
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
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, TypeError, SafetensorError) as error:
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


def _table(path: Path) -> dict[str, Tensor]:
    text = path.read_text(encoding="utf-8-sig")
    rows = [line.split(",") for line in text.splitlines() if line.strip()]
    if len({len(row) for row in rows}) != 1:
        raise ValueError("its lines must hold the same number of numbers, separated by commas")
    try:
        return {"": torch.tensor([[float(word) for word in row] for row in rows], dtype=torch.float64)}
    except ValueError as error:
        raise ValueError(f"{error}; a table must hold numbers only, and no header line") from None


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
    ".safetensors": load_file,
    ".csv": _table,
}
