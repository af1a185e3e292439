"""Objects on their way to child processes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from memory_fixture import played

from paceline.errors import UsageError
from paceline.fields import Rate
from paceline.ops import Call
from paceline.processes.supervisor.pickled_objects import packed, unpacked
from paceline.scheme import Scheme, State, Vector, on_server
from paceline.torch_task import TorchTask


def test_what_is_packed_is_unpacked_by_a_child() -> None:
    width = 3
    descriptor = packed({"double": lambda x: 2 * x + width, "tensor": torch.arange(4.0)})

    def open_it() -> None:
        objects = unpacked(descriptor)
        assert objects["double"](4) == 11
        assert objects["tensor"].tolist() == [0.0, 1.0, 2.0, 3.0]

    played(open_it, open_it)  # each reads it from its beginning
    os.close(descriptor)


def test_a_class_of_the_callers_own_stays_a_scheme() -> None:
    @dataclass(frozen=True)
    class Own(Scheme, name="own"):
        lr: Rate = 0.5

        @on_server
        def push(self, s: State, g: Vector) -> None:
            s.x -= self.lr * g
            s.v += 1

    descriptor = packed({"scheme": Own(lr=0.25)})
    found = unpacked(descriptor)["scheme"]
    os.close(descriptor)
    assert (found.name, found.lr) == ("own", 0.25)
    call = found.push(torch.ones(2))
    assert isinstance(call, Call)
    assert found.methods["push"] is call.method


def test_a_task_of_lambdas() -> None:
    task = TorchTask(
        lambda: torch.nn.Linear(2, 1), lambda out, y: (out - y).square().mean(), (torch.ones(4, 2), torch.ones(4, 1))
    )
    descriptor = packed({"task": task})
    other = unpacked(descriptor)["task"]
    os.close(descriptor)
    assert torch.equal(other.start(3), task.start(3))
    assert other.evaluate(task.start(3)) == task.evaluate(task.start(3))


def test_what_cannot_be_packed_is_told(tmp_path: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    with (tmp_path / "open").open("w") as file, pytest.raises(UsageError, match=r"name it as file\.py:name"):
        packed({"file": file})
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_large_ones() -> None:
    descriptor = packed({"tensor": torch.ones(3_000_000)})
    assert unpacked(descriptor)["tensor"].sum() == 3_000_000
    os.close(descriptor)
