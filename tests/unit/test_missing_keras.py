"""Without Keras, paceline.keras says in one sentence what to install."""

from __future__ import annotations

import sys

import pytest

import paceline
from paceline.errors import UsageError


def test_it_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "keras", None)  # as if it were not installed
    monkeypatch.delitem(sys.modules, "paceline.keras", raising=False)
    with pytest.raises(UsageError, match=r"pip install 'paceline\[keras\]'"):
        _ = paceline.keras.Pace
