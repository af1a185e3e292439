"""SparseLoCo: sparse ways with error feedback. Algorithms, section 6.9."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from oracles import EXACT, SEED, bowl, crew, each_task, in_double, network, run
from torch import Tensor

from paceline import Task

LR = 0.05


@each_task
def test_without_a_compressor_it_is_diloco_without_outer_momentum_bit_for_bit(task: Callable[[], Task]) -> None:
    left = run(task(), "sparseloco", 3, 6, window=5, compress="none")
    assert left.digest == run(task(), "diloco", 3, 6, window=5, outer="sgd", outer_lr=1.0).digest


@in_double
@pytest.mark.parametrize("compress", ["none", "topk:1"])
def test_with_all_coordinates_it_is_local_sgd(task: Callable[[], Task], compress: str) -> None:
    left = run(task(), "sparseloco", 3, 8, window=4, rule="sgd", lr=LR, compress=compress)
    torch.testing.assert_close(left.vector, run(task(), "local-sgd", 3, 8, window=4, lr=LR).vector, **EXACT)


def by_hand(task: Task, workers: int, rounds: int, window: int, k: int, decay: float) -> Tensor:
    x, gradients = task.start(SEED), crew(task, workers)
    errors = [torch.zeros_like(x) for _ in range(workers)]
    for _ in range(rounds):
        sent = []
        for i, g in enumerate(gradients):
            y = x.clone()
            for _ in range(window):
                y = y - LR * g(y)
            e = decay * errors[i] + (x - y)
            d = torch.zeros_like(x)
            places = e.abs().argsort(descending=True)[:k]
            d[places] = e[places]
            errors[i] = e - d
            sent.append(d)
        x = x - 0.8 * sum(sent) / workers
    return x


@pytest.mark.parametrize(("task", "k"), [(bowl, 5), (network, 13)])
@pytest.mark.parametrize("decay", [1.0, 0.9])
def test_the_largest_coordinates_are_sent_and_the_rest_is_kept(task: Callable[[], Task], k: int, decay: float) -> None:
    hyper = {"window": 4, "rule": "sgd", "lr": LR, "outer_lr": 0.8, "compress": f"topk:0.2,decay={decay}"}
    found = run(task(), "sparseloco", 3, 10, **hyper).vector
    torch.testing.assert_close(found, by_hand(task(), 3, 10, 4, k, decay), **EXACT)


def test_the_papers_compressor_is_the_default_and_sends_less() -> None:
    told: dict[str, int] = {}
    for compress in (None, "none", "topk:0.015625,chunk=4096,bits=2,decay=0.95"):
        hyper = {} if compress is None else {"compress": compress}
        result = run("digits-mlp", "sparseloco", 2, 4, window=4, **hyper)
        told[str(compress)] = result.digest  # type: ignore[assignment]
    assert told["None"] == told["topk:0.015625,chunk=4096,bits=2,decay=0.95"] != told["none"]
