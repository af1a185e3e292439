"""Updates of big vectors in blocks, on several threads, have the bits of updates of the whole vector."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.config.plan import Plan
from paceline.processes.roles import spare_cores
from paceline.processes.roles.spare_cores import SpareCores
from paceline.rules import SGD, Rule, blocks, rules
from paceline.state import State

PREPARED = sorted((rule for rule in rules().values() if rule.prepared), key=lambda rule: rule.name)
CASES: list[Rule] = [*(rule() for rule in PREPARED), *(rule(weight_decay=0.1) for rule in PREPARED)]  # type: ignore[call-arg]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    yield
    spare_cores.use(1)


def after(rule: Rule, length: int, steps: int = 3, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(length)
    x = torch.randn(length, generator=generator, dtype=dtype)
    state = State(x=x, **rule.cells(x))
    for _ in range(steps):
        rule.apply(state, torch.randn(length, generator=generator, dtype=dtype), 0.05)
    return state.saved()


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one | other)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("rule", CASES, ids=str)
def test_neither_blocks_nor_threads_change_a_bit(rule: Rule, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for length, block in ((1003, 101), (4097, 1000), (777, 64), (130, 33)):
        whole = after(rule, length)
        with monkeypatch.context() as patched:
            patched.setattr(blocks, "BLOCK", block)
            spare_cores.use(threads)
            cut = after(rule, length)
            spare_cores.use(1)
        assert equal(cut, whole)


@pytest.mark.parametrize("name", ["sgd", "momentum", "adam"])
def test_a_vector_of_real_size(name: str) -> None:
    length = 4 * blocks.BLOCK + 12345
    whole = after(rules()[name](), length, steps=2)
    spare_cores.use(3)
    assert equal(after(rules()[name](), length, steps=2), whole)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types_of_numbers(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    rule = rules()["adamw"]()
    whole = after(rule, 1003, dtype=dtype)
    monkeypatch.setattr(blocks, "BLOCK", 100)
    spare_cores.use(2)
    assert equal(after(rule, 1003, dtype=dtype), whole)


@pytest.mark.parametrize("threads", [1, 3])
def test_a_window_in_blocks_has_the_same_sum(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(1)
    x, *gradients = (torch.randn(1001, generator=generator) for _ in range(5))

    def walked() -> tuple[torch.Tensor, torch.Tensor]:
        state = State(x=x)
        window = SGD().window(state, 0.1)
        for g in gradients:
            window.step(g)
        return state.x, window.sum

    whole = walked()
    monkeypatch.setattr(blocks, "BLOCK", 100)
    spare_cores.use(threads)
    assert all(torch.equal(one, other) for one, other in zip(walked(), whole, strict=True))


def test_the_version_of_x_counts_an_update_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK", 100)
    spare_cores.use(2)
    state = State(x=torch.zeros(1000))
    before = state.changes("x")
    SGD(weight_decay=0.1).apply(state, torch.ones(1000), 0.1)
    assert state.changes("x") != before


def test_every_block_is_worked_on_once_and_an_error_is_raised() -> None:
    done: list[int] = []
    cores = SpareCores(4)
    cores.perform(done.append, 100)
    assert sorted(done) == list(range(100))

    def broken(number: int) -> None:
        if number == 50:
            raise ValueError("block 50")

    with pytest.raises(ValueError, match="block 50"):
        cores.perform(broken, 100)
    cores.close()


def test_threads_leave_torchs_own_number_as_it_is() -> None:
    torch.set_num_threads(2)
    seen: list[int] = []
    cores = SpareCores(3)
    cores.perform(lambda _: seen.append(torch.get_num_threads()), 50)
    cores.close()
    assert torch.get_num_threads() == 2
    assert set(seen) <= {1, 2}


@pytest.mark.parametrize(
    ("methods", "direct", "locked", "serves", "hosts", "servers", "cores", "expected"),
    [
        (True, False, False, True, 2, 1, 16, 14),  # the server has the cores that two workers leave
        (True, False, False, True, 2, 2, 16, 7),
        (True, False, False, True, 2, 1, 2, 1),  # fewer cores than processes
        (True, False, False, False, 2, 1, 16, 1),  # workers of a server's scheme compute gradients
        (False, False, False, False, 2, 0, 16, 8),  # without a server each worker updates its own vector
        (True, True, True, False, 4, 1, 16, 3),  # hogwild: workers update the server's vector
        (True, True, True, True, 4, 1, 16, 1),
        (False, False, False, False, 1, 0, 3.5, 3),  # a quota
        (True, False, True, False, 2, 1, 16, 15),  # one worker at a time performs a call, under the lock
        (True, False, True, True, 2, 1, 16, 1),
        (True, False, True, False, 2, 1, 2, 1),
    ],
)
def test_the_share_of_the_free_cores(
    methods: bool, direct: bool, locked: bool, serves: bool, hosts: int, servers: int, cores: float, expected: int
) -> None:
    board = SimpleNamespace(node=[0] * hosts, server_node=[0] * servers, servers=servers)
    plan = Plan(workers=hosts)
    scheme = SimpleNamespace(methods={"push": None} if methods else {})
    memory: Any = SimpleNamespace(plan=plan, board=board, scheme=scheme, node=SimpleNamespace(number=0))
    memory.direct, memory.locked_calls = lambda: direct, lambda: locked
    assert spare_cores.share(memory, serves=serves, available=cores) == expected


def test_the_processes_inside_workers_have_cores_too() -> None:
    memory: Any = SimpleNamespace(
        plan=Plan(workers=2, inside="ddp:3", threads=2),
        board=SimpleNamespace(node=[0, 0], server_node=[], servers=0),
        scheme=SimpleNamespace(methods={}),
        node=SimpleNamespace(number=0),
        direct=lambda: False,
        locked_calls=lambda: False,
    )
    assert spare_cores.share(memory, serves=False, available=16) == 3  # 16 - 2 * 3 * 2 are free
    assert not spare_cores.for_batches(memory, 12)
    assert spare_cores.for_batches(memory, 13)


def test_workers_in_threads_of_one_process_have_one_core() -> None:
    board = SimpleNamespace(node=[0], server_node=[], servers=0)
    plan = Plan(workers=4, processes=1)
    memory: Any = SimpleNamespace(
        plan=plan,
        board=board,
        scheme=SimpleNamespace(methods={}),
        node=SimpleNamespace(number=0),
        direct=lambda: False,
        locked_calls=lambda: False,
    )
    assert spare_cores.share(memory, serves=False, available=16) == 1
