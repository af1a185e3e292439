"""Imports a framework beside torch, and starts it in a process with as many threads as torch has there."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from paceline.errors import UsageError

ONE_THREAD = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"


def needed(module: str, who: str, extra: str) -> Any:
    """A module of a framework; UsageError with the command that installs it if it cannot be imported."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # TensorFlow tells of every processor it could use
    try:
        return import_module(module)
    except ImportError as error:
        name = module.partition(".")[0]
        raise UsageError(f"{who} needs {name} ({error}): pip install 'paceline[{extra}]'") from error


def started() -> str | None:
    """The framework whose threads run in this process, or None: after a fork they would be missing."""
    bridge = sys.modules.get("jax._src.xla_bridge")
    if bridge is not None and getattr(bridge, "backends_are_initialized", lambda: True)():
        return "JAX"
    context = getattr(sys.modules.get("tensorflow.python.eager.context"), "_context", None)
    if context is not None and getattr(context, "_initialized", True):
        return "TensorFlow"
    names = (path.read_text(errors="replace") for path in Path("/proc/self/task").glob("*/comm"))
    return "TensorFlow" if any(name.startswith("tf_") for name in names) else None  # a session of a graph


def start_jax(jax: Any) -> None:
    """Start JAX on the CPU, unless it runs; the threads of XLA are counted then."""
    if sys.modules["jax._src.xla_bridge"].backends_are_initialized():
        return
    threads = torch.get_num_threads()
    flags = os.environ.get("XLA_FLAGS", "")
    asked = {"NPROC": str(threads), "XLA_FLAGS": f"{flags} {ONE_THREAD}" if threads == 1 else flags}
    with _environment({"JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS", "cpu")} | asked):
        if not jax.config.jax_platforms:
            jax.config.update("jax_platforms", "cpu")
        jax.local_devices()


def start_tensorflow(tf: Any) -> None:
    """Give TensorFlow its threads, and the CPU alone, unless it runs."""
    context = sys.modules["tensorflow.python.eager.context"]
    if context.context()._initialized:
        return
    threads = torch.get_num_threads()
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(threads)
    tf.config.set_visible_devices([], "GPU")


def limit_threads(number: int) -> None:
    """TensorFlow and JAX, which code of the user starts in this process, take as many threads as torch, unless the
    environment says another number."""
    wanted = {"TF_NUM_INTRAOP_THREADS": str(number), "TF_NUM_INTEROP_THREADS": str(number), "NPROC": str(number)}
    for name, value in (wanted | ({"XLA_FLAGS": ONE_THREAD} if number == 1 else {})).items():
        os.environ.setdefault(name, value)


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
