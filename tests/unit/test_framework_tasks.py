"""Tasks of other frameworks where the framework is not installed, and what they share without one."""

from __future__ import annotations

import os
import sys

import numpy as np
import pytest
import torch

import paceline
from paceline import UsageError
from paceline.errors import PacelineError
from paceline.framework_tasks.beginning import Beginning, computed_aside, flat, places

DATA = (np.zeros((4, 2), np.float32), np.zeros(4, np.int64))


def test_a_framework_that_is_missing_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in ("jax", "keras", "tensorflow"):
        monkeypatch.setitem(sys.modules, module, None)  # its import fails
    with pytest.raises(UsageError, match=r"JaxTask needs jax .*: pip install 'paceline\[jax\]'"):
        paceline.JaxTask(lambda key: key, lambda weights, x, y: 0.0, DATA)
    with pytest.raises(UsageError, match=r"KerasTask needs keras .*: pip install 'paceline\[keras\]'"):
        paceline.KerasTask(lambda: None, None, DATA)
    with pytest.raises(UsageError, match=r"TensorFlowTask needs tensorflow .*: pip install 'paceline\[tensorflow\]'"):
        paceline.TensorFlowTask(lambda x, y: 0.0, [], DATA)


def test_arrays_are_one_vector_and_back() -> None:
    vector, parameters = flat([("a", np.ones((2, 3))), ("b", np.array(2.0)), ("c", np.zeros(0))], "task 'x'")
    assert vector.tolist() == [1.0] * 6 + [2.0]
    assert places(parameters) == [(0, 6, (2, 3)), (6, 7, ()), (7, 7, (0,))]
    with pytest.raises(UsageError, match="float32, float64: they must have one type"):
        flat([("a", np.ones(1)), ("b", np.ones(1, np.float32))], "task 'x'")
    with pytest.raises(UsageError, match="no weights to train"):
        flat([], "task 'x'")


def test_another_process_computes_the_beginning() -> None:
    here = os.getpid()

    def compute() -> Beginning:
        assert os.getpid() != here
        return Beginning(torch.arange(5.0), [("a", [5])], {"mean": torch.tensor(2.5), "count": torch.tensor([7, 8])})

    found = computed_aside(compute, "task 'x'")
    assert found.vector.tolist() == [0, 1, 2, 3, 4]
    assert found.parameters == [("a", [5])]
    assert found.buffers["mean"].item() == 2.5
    assert found.buffers["count"].dtype is torch.int64


def test_its_error_is_raised_here() -> None:
    def refuse() -> Beginning:
        raise UsageError("no such model")

    def fail() -> Beginning:
        raise ValueError("broken")

    def die() -> Beginning:
        os._exit(9)

    with pytest.raises(UsageError, match="no such model"):
        computed_aside(refuse, "task 'x'")
    with pytest.raises(PacelineError, match="ValueError: broken"):
        computed_aside(fail, "task 'x'")
    with pytest.raises(PacelineError, match="task 'x' ended with exit code 9"):
        computed_aside(die, "task 'x'")
