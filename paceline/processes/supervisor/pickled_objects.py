"""Objects of the caller's own process (a task defined in a notebook) on their way to its child processes.

Nothing else of paceline pickles. The pickle is in anonymous memory, which only the caller's own children inherit:
nothing from a network, a file or a checkpoint is unpickled.
"""

from __future__ import annotations

import mmap
import os
from typing import Any

try:
    import cloudpickle  # knows classes and lambdas of a notebook
except ImportError:  # older releases of joblib, which comes with scikit-learn, bring their own
    from joblib.externals import cloudpickle

from paceline.errors import UsageError
from paceline.processes.memory.segment import anonymous


def packed(objects: dict[str, Any]) -> int:
    """The descriptor of memory that holds the objects."""
    try:
        data = cloudpickle.dumps(objects)
    except Exception as error:
        raise UsageError(
            f"this task, scheme or hook cannot be handed to other processes ({error}); put it into a file and "
            "name it as file.py:name"
        ) from error
    descriptor = anonymous("paceline-objects", len(data))
    with os.fdopen(descriptor, "wb", closefd=False) as file:
        file.write(data)
    return descriptor


def unpacked(descriptor: int) -> dict[str, Any]:
    """What the caller packed."""
    with mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) as data:
        objects: dict[str, Any] = cloudpickle.loads(data)
    return objects
