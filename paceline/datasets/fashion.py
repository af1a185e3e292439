"""Fashion-MNIST: 60,000 + 10,000 pictures of clothes in MNIST's format (Xiao, Rasul, Vollgraf, 2017; MIT)."""

from functools import partial
from pathlib import Path

from paceline.datasets import Dataset, Say
from paceline.datasets._download import gunzipped
from paceline.datasets._published import Published, Remote, gather
from paceline.datasets.mnist import FASHION_FILES, MNIST_FILES, as_dataset

FASHION = Published(
    "fashion",
    "Fashion-MNIST",
    FASHION_FILES,
    folders=("FashionMNIST/raw", "fashion-mnist", "fashion", "share/datasets/fashion-mnist", "."),
    advice=(
        "install Debian's package dataset-fashion-mnist, or put the four idx files (gzipped or not) in a folder "
        "of their own and name it: PACELINE_DATA=folder"
    ),
    installed=(Path("/usr/share/datasets/fashion-mnist"),),
    remotes=(
        Remote(
            "the publisher's mirror", partial(gunzipped, "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com")
        ),
    ),
    namesakes=dict.fromkeys((file.md5 for file in MNIST_FILES), "MNIST"),
)


def load(directory: str | Path | None = None, *, say: Say | None = None) -> Dataset:
    """Images (n, 28, 28) as uint8, labels."""
    return as_dataset(FASHION, gather(FASHION, directory, say))
