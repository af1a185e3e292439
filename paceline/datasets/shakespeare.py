"""Tiny Shakespeare: 1,115,394 characters of the plays (the text of Karpathy's char-rnn; public domain)."""

import hashlib
import lzma
from pathlib import Path

import numpy as np
import torch

from paceline.datasets import Dataset, Say
from paceline.errors import DataError

TEXT = Path(__file__).with_name("tinyshakespeare.txt.xz")
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
SIZE = 1_115_394


def load(directory: str | Path | None = None, *, say: Say | None = None) -> Dataset:
    """The text as ids from 0 to 64 (uint8): nine tenths to train on, the last tenth to test. Always there."""
    try:
        with lzma.open(TEXT) as stream:
            text = stream.read(SIZE + 1)
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise DataError(f"{TEXT} cannot be read: {error}; install paceline again") from error
    found = hashlib.sha256(text).hexdigest()
    if found != SHA256:
        raise DataError(f"{TEXT}: the SHA-256 of the text must be {SHA256}, but is {found}; install paceline again")
    characters, ids = np.unique(np.frombuffer(text, np.uint8), return_inverse=True)
    cut = int(0.9 * len(ids))
    tokens = torch.from_numpy(ids.astype(np.uint8))
    return Dataset(
        "shakespeare",
        (tokens[:cut],),
        (tokens[cut:],),
        TEXT.parent,
        "paceline's own copy",
        characters=bytes(characters).decode("ascii"),
    )
