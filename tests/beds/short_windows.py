"""Windows for tests that run every scheme: tens or hundreds of local steps would take them minutes."""

from __future__ import annotations

from functools import cache
from typing import Any

from paceline.config import discovery

SHORT = 5


@cache
def _fields(name: str) -> dict[str, Any]:
    return getattr(discovery.scheme(name), "__dataclass_fields__", {})


def short(name: str) -> dict[str, Any]:
    """The hyper-parameters to run a scheme with: its defaults, but a short window, and few pushes of an update."""
    known = _fields(name)
    found = {"window": SHORT} if "window" in known and known["window"].default > SHORT else {}
    return found | ({"pushes": 2} if "pushes" in known else {})
