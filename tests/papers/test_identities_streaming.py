"""Streaming DiLoCo: fragments, overlap, merging, eager updates. Algorithms, section 9: identity 27."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from oracles import EXACT, SEED, bowl, crew, each_task, engine, in_double, network, run
from torch import Tensor

from paceline import Task
from paceline.config.build import scheme_of
from paceline.errors import UsageError
from paceline.result import digest
from paceline.schemes._fragments import fragments, put, taken

LR = 0.05
PLAIN = {"lr": LR, "rule": "sgd", "outer_lr": 0.7}


@each_task
@pytest.mark.parametrize("pattern", ["strided", "sequential"])
def test_one_fragment_without_overlap_is_diloco_bit_for_bit(task: Callable[[], Task], pattern: str) -> None:
    one = {"fragments": 1, "overlap": 0, "merge": 0.0, "pattern": pattern, "outer_lr": 0.7}
    assert run(task(), "streaming-diloco", 3, 6, window=5, **one).digest == run(task(), "diloco", 3, 6, window=5).digest


def by_hand(
    task: Task, parts: list[list[tuple[int, int]]], steps: int, window: int, overlap: int, merge: float
) -> Tensor:
    """Outer Nesterov (0.9) per fragment, with a momentum of its own; the local rule is SGD."""
    workers = 3
    x, gradients = task.start(SEED), crew(task, workers)
    ys, m = [x.clone() for _ in range(workers)], torch.zeros_like(x)
    for k in range(steps):
        mask = torch.zeros_like(x, dtype=torch.bool)
        for low, high in parts[k % len(parts)]:
            mask[low:high] = True
        for s in range(window + 1):
            if s == window - overlap:
                d = sum(x - y for y in ys) / workers
            if s < window:
                ys = [y - LR * g(y) for y, g in zip(ys, gradients, strict=True)]
        moved = 0.9 * m + d
        m = torch.where(mask, moved, m)
        x = torch.where(mask, x - 0.7 * (d + 0.9 * m), x)
        ys = [torch.where(mask, (1 - merge) * x + merge * y, y) for y in ys]
    return x


@pytest.mark.parametrize(("overlap", "merge"), [(0, 0.0), (2, 0.5), (1, 0.0), (4, 1.0)])
@pytest.mark.parametrize("pattern", ["strided", "sequential"])
def test_fragments_overlap_and_merge_as_written_by_hand(overlap: int, merge: float, pattern: str) -> None:
    """The network has the layers 0 (40 numbers) and 2 (27): two fragments."""
    oracle = by_hand(network(), [[(0, 40)], [(40, 67)]], 7, 4, overlap, merge)
    hyper = {**PLAIN, "window": 4, "fragments": 2, "overlap": overlap, "merge": merge, "pattern": pattern}
    torch.testing.assert_close(run(network(), "streaming-diloco", 3, 7, **hyper).vector, oracle, **EXACT)


def test_a_vector_without_layers_is_cut_in_equal_parts() -> None:
    parts = [[(0, 5)], [(5, 11)], [(11, 17)], [(17, 23)]]
    oracle = by_hand(bowl(), parts, 9, 3, 1, 0.5)
    hyper = {**PLAIN, "window": 3, "overlap": 1, "merge": 0.5}
    torch.testing.assert_close(run(bowl(), "streaming-diloco", 3, 9, **hyper).vector, oracle, **EXACT)


BLOCKS = tuple(
    (name, (size,))
    for name, size in [
        ("embed.weight", 7), ("blocks.0.a.weight", 3), ("blocks.0.b.weight", 2), ("blocks.1.a.weight", 3),
        ("blocks.1.b.weight", 2), ("blocks.2.a.weight", 5), ("norm.weight", 1), ("norm.bias", 1), ("head.weight", 6),
    ]
)  # fmt: skip


def test_fragments_follow_the_layers() -> None:
    assert fragments(BLOCKS, 30, 2, "strided") == (((0, 7), (12, 17), (22, 24)), ((7, 12), (17, 22), (24, 30)))
    assert fragments(BLOCKS, 30, 3, "sequential") == (((0, 12),), ((12, 22),), ((22, 30),))
    assert fragments(BLOCKS, 30, 6, "strided")[1] == ((7, 12),)
    assert fragments(BLOCKS, 30, 8, "strided")[0] == ((0, 3),)  # more than layers


@pytest.mark.parametrize("count", range(1, 9))
@pytest.mark.parametrize("pattern", ["strided", "sequential"])
def test_every_number_is_in_one_fragment(count: int, pattern: str) -> None:
    found = fragments(BLOCKS, 30, count, pattern)  # type: ignore[arg-type]
    assert len(found) == count
    v = torch.zeros(30)
    for k, fragment in enumerate(found):
        assert taken(v, fragment).numel() > 0
        put(v, fragment, taken(v, fragment) + k + 1)
    assert sorted(set(v.tolist())) == [float(k + 1) for k in range(count)]
    assert sum(taken(v, fragment).numel() for fragment in found) == 30


@in_double
def test_eager_updates_replace_the_own_part_of_the_last_mean(task: Callable[[], Task]) -> None:
    """Each worker's own centre; the common one goes along the means alone, a window later."""
    workers, window, rounds = 3, 4, 5
    start, gradients = task().start(SEED), crew(task(), workers)
    xs, old = [start.clone() for _ in range(workers)], [torch.zeros_like(start) for _ in range(workers)]
    common = start
    for _ in range(rounds):
        mean = sum(old) / workers
        common = common - 0.7 * mean
        for i, g in enumerate(gradients):
            y = xs[i].clone()
            for _ in range(window):
                y = y - LR * g(y)
            new = xs[i] - y
            xs[i] = xs[i] - 0.7 * (mean + (new - old[i]) / workers)
            old[i] = new
    hyper = {**PLAIN, "outer": "sgd", "window": window, "fragments": 1, "eager": True}
    e = engine(task(), "streaming-diloco", workers, **hyper)
    e.run(park_at=rounds)
    for seat, x in zip(e.seats, xs, strict=True):
        torch.testing.assert_close(seat.worker.state.own_x, x, **EXACT)
        torch.testing.assert_close(e.scheme.model(seat.worker.state), common, **EXACT)
        # without momentum a worker's centre is the common one, but for its own last way
        torch.testing.assert_close(common - 0.7 * seat.worker.state.d / workers, x, **EXACT)


def test_what_cannot_work_is_refused() -> None:
    for hyper in ({"eager": True}, {"overlap": 6, "window": 5}):
        with pytest.raises(UsageError):
            run(bowl(), "streaming-diloco", 2, 2, **hyper)


@pytest.mark.parametrize("network", ["", "latency=0.3,bandwidth=500"])
def test_an_overlap_hides_the_network(network: str) -> None:
    """A mean of 23 doubles takes 2 * (0.3 + 0.4) seconds: two steps of a second each cover it."""
    hyper = {**PLAIN, "window": 4, "fragments": 1, "merge": 0.0}
    hidden = run(bowl(), "streaming-diloco", 3, 5, overlap=2, network=network, **hyper)
    waited = run(bowl(), "streaming-diloco", 3, 5, overlap=0, network=network, **hyper)
    assert hidden.virtual_seconds == pytest.approx(20)
    assert waited.virtual_seconds == pytest.approx(20 + (5 * 1.336 if network else 0))
    assert digest(hidden.vector) == run(bowl(), "streaming-diloco", 3, 5, overlap=2, **hyper).digest


# decoupled


@in_double
@pytest.mark.parametrize(("overlap", "merge"), [(1, 0.5), (3, 0.0)])
def test_decoupled_diloco_of_all_workers_is_streaming_diloco(
    task: Callable[[], Task], overlap: int, merge: float
) -> None:
    """All compute alike: the last push of a fragment merges it, and everybody fetches it after the overlap."""
    hyper = {"window": 5, "overlap": overlap, "merge": merge, "fragments": 2}
    left = run(task(), "decoupled-diloco", 3, 9, least=3, **hyper)
    torch.testing.assert_close(left.vector, run(task(), "streaming-diloco", 3, 9, **hyper).vector, **EXACT)
    assert left.dropped == 0


def test_a_quorum_does_not_wait_for_the_slow() -> None:
    hyper = {"window": 4, "fragments": 2, "lr": 1e-3, "rule": "sgd"}
    speeds = (1, 1, 1, 0.1)
    all_wait = run(bowl(), "decoupled-diloco", 4, 20, speeds=speeds, least=4, **hyper)
    most_do_not = run(bowl(), "decoupled-diloco", 4, 20, speeds=speeds, least=3, grace=0, **hyper)
    assert all_wait.dropped == 0
    assert all_wait.virtual_seconds > 5 * most_do_not.virtual_seconds


def test_grace_grows_with_late_pushes_and_lets_them_in() -> None:
    hyper = {"window": 4, "fragments": 2, "lr": 1e-3, "rule": "sgd", "least": 2}
    speeds = (1, 0.98, 0.9)
    strict = run(bowl(), "decoupled-diloco", 3, 60, speeds=speeds, grace=0, **hyper)
    kind = run(bowl(), "decoupled-diloco", 3, 60, speeds=speeds, grace=3, **hyper)
    assert kind.dropped < strict.dropped / 2


def test_ways_count_by_their_steps() -> None:
    """Two learners of which one has made three times the steps: a quadratic of their own centre each."""
    scheme = scheme_of("decoupled-diloco", {"fragments": 1, "outer": "sgd", "outer_lr": 1.0, "least": 2})
    s = scheme.server(torch.zeros(2, dtype=torch.float64), 2)
    push = type(scheme).push.function  # type: ignore[attr-defined]
    push(scheme, s, torch.full((2,), 4.0, dtype=torch.float64), 30, 0, 0, 0)
    assert s.v == 0
    push(scheme, s, torch.full((2,), 8.0, dtype=torch.float64), 10, 0, 0, 0)
    assert (s.v, s.x.tolist()) == (1, [-5.0, -5.0])
    push(scheme, s, torch.full((2,), 8.0, dtype=torch.float64), 10, 0, 0, 0)  # of an x that is gone
    assert (s.v, s.x.tolist()) == (1, [-5.0, -5.0])


def test_radial_averages_keep_the_length_of_orthogonal_ways() -> None:
    """Mean length times the direction of the summed directions, with weights, for each parameter by itself."""
    hyper = {"fragments": 1, "outer": "sgd", "outer_lr": 1.0, "least": 2, "average": "radial"}
    scheme = scheme_of("decoupled-diloco", hyper).fitted([("a", (2,)), ("b", (3,))])
    ways = torch.tensor([[3.0, 0.0, 1.0, 2.0, 2.0], [0.0, 4.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    s = scheme.server(torch.zeros(5, dtype=torch.float64), 2)
    for way, steps in zip(ways, (30, 10), strict=True):
        type(scheme).push.function(scheme, s, way, steps, 0, 0, 0)  # type: ignore[attr-defined]
    assert s.v == 1
    direction = torch.tensor([0.75, 0.25], dtype=torch.float64)
    a = (0.75 * 3 + 0.25 * 4) * direction / direction.norm()
    b = 0.75 * ways[0, 2:]  # the other way has the length 0 there
    torch.testing.assert_close(-s.x, torch.cat((a, b)), **EXACT)
    assert not s.lengths.any()


@in_double
def test_radial_and_plain_averages_of_one_learner_are_the_same(task: Callable[[], Task]) -> None:
    plain, radial = (run(task(), "decoupled-diloco", 1, 9, window=4, average=how).vector for how in ("plain", "radial"))
    torch.testing.assert_close(radial, plain, **EXACT)
    several = [run(task(), "decoupled-diloco", 3, 9, window=4, average=how).vector for how in ("plain", "radial")]
    assert not torch.allclose(*several)
