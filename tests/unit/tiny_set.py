"""A data set of two small files, published like the real ones."""

from __future__ import annotations

import numpy as np

from paceline.datasets import mnist
from paceline.datasets._download import File
from paceline.datasets._published import Published, md5

CONTENT = {
    "train-images-idx3-ubyte": mnist.write_idx(np.arange(12, dtype=np.uint8).reshape(3, 2, 2)),
    "train-labels-idx1-ubyte": mnist.write_idx(np.arange(3, dtype=np.uint8)),
}
TINY = Published(
    "tiny",
    "Tiny",
    tuple(File(name, md5(content), len(content)) for name, content in CONTENT.items()),
    folders=("TINY/raw", "."),
    advice="ask for it",
)
