"""One worker: whatever the scheme, it is sequential training. Algorithms, section 9: identities 1, 2, 3, 5."""

from __future__ import annotations

import pytest
import torch
from oracles import EXACT, SEED, Gradients, bowl, by_torch, descent, network, run

from paceline.config import discovery
from paceline.result import digest
from paceline.rules import TorchRule

LR = 0.07

# what makes a scheme that communicates after every single gradient; None: it never is sequential SGD
PLAIN = {
    "ace": None,  # to rounding: test_identities_stale.py
    "dana": {"momentum": 0.0},
    "dc-asgd": {},
    "delay-adaptive": {},
    "drop-stale": {},
    "fedasync": None,
    "gap-aware": {},
    "k-async": {},
    "k-batch-async": {},
    "k-batch-sync": {},
    "k-sync": {},
    "m-sync": {},
    "malenia": {},
    "mindflayer": {},
    "ormo": {"momentum": 0.0},
    "rennala": {},
    "rescaled": {},
    "ringleader": {},
    "ringmaster": {},
    "softsync": {},
    "ssp": {},
    "ad-psgd": {},
    "adag": {"window": 1},
    "agn": {"window": 1},
    "allreduce": {},
    "async": {},
    "async-diloco": None,
    "averaging": {"window": 1},
    "d-psgd": {},
    "daso": {},
    "decoupled-diloco": None,
    "diloco": None,
    "downpour": {"server_rule": "sgd"},
    "downpour-easy": {"window": 1},
    "dynsgd": {"window": 1},
    "fedavg": None,
    "fedbuff": {"window": 1, "buffer": 1},
    "fedopt": None,
    "fedprox": None,
    "gosgd": {},
    "groups": {},
    "halos": None,
    "hierarchical": {},
    "hogwild": {},
    "local-sgd": {"window": 1},
    "noloco": None,
    "sagn": {"window": 1},
    "sgd": {},
    "sgp": {},
    "slowmo": None,
    "sparseloco": None,
    "streaming-diloco": None,
    "sync": {},
    "sync-rates": {},
    "sync-repeat": {},
    "easgd": None,
    "aeasgd": None,
    "aeamsgd": None,
}
SEQUENTIAL = [name for name, hyper in PLAIN.items() if hyper is not None]
TASKS = {
    "quadratic": lambda: bowl(dim=37, dtype="float32"),
    "quadratic in double": lambda: bowl(dim=37),
    "network": lambda: network(torch.float32),
    "network in double": network,
    "digits-mlp": lambda: discovery.task("digits-mlp")(),
}


def test_every_scheme_is_placed_here() -> None:
    assert PLAIN.keys() == discovery.schemes().keys(), "a new scheme: is it sequential SGD with one worker?"


@pytest.mark.parametrize("task", TASKS)
def test_one_worker_is_sequential_sgd_bit_for_bit(task: str) -> None:
    made, steps = TASKS[task](), 25
    oracle = digest(descent(made, steps, LR))
    found = {name: run(made, name, 1, steps, lr=LR, **PLAIN[name]).digest for name in SEQUENTIAL}
    assert found == dict.fromkeys(SEQUENTIAL, oracle)


@pytest.mark.parametrize("compute", ["exponential:1", "pareto:1,1.5"])
@pytest.mark.parametrize("name", SEQUENTIAL)
def test_with_one_worker_times_and_messages_change_nothing(name: str, compute: str) -> None:
    slow = run(network(), name, 1, 15, lr=LR, compute=compute, network="0.1,1000", **PLAIN[name])
    assert slow.digest == digest(descent(network(), 15, LR))


@pytest.mark.parametrize("chunks", [1, 2, 8, 67, 1000])
def test_hogwild_alone_is_sgd_however_finely_its_vector_is_cut(chunks: int) -> None:
    assert run(network(), "hogwild", 1, 30, lr=LR, chunks=chunks).digest == digest(descent(network(), 30, LR))


@pytest.mark.parametrize("window", [1, 2, 5, 12])
@pytest.mark.parametrize("name", ["downpour-easy", "downpour", "averaging", "dynsgd"])
def test_a_lone_worker_that_adds_its_whole_window_is_sequential_sgd(name: str, window: int) -> None:
    hyper = {"server_rule": "sgd"} if name == "downpour" else {}
    x = run(network(), name, 1, 8, lr=LR, window=window, **hyper).vector
    torch.testing.assert_close(x, descent(network(), 8 * window, LR), **EXACT)


@pytest.mark.parametrize("initial", [0.0, 0.1])
def test_downpour_alone_is_sequential_adagrad(initial: float) -> None:
    task = network()
    x = run(task, "downpour", 1, 40, lr=LR, server_initial_accumulator_value=initial).vector
    sequential = by_torch(task, 40, lambda p: torch.optim.Adagrad(p, lr=LR, initial_accumulator_value=initial))
    torch.testing.assert_close(x, sequential, **EXACT)


def test_tensorflows_adagrad_starts_its_sum_at_a_tenth() -> None:
    task, steps = bowl(), 30
    x, g, total = task.start(SEED), Gradients(task), 0.1
    for _ in range(steps):
        gradient = g(x)
        total = total + gradient**2
        x = x - LR * gradient / (total**0.5 + 1e-10)
    tensorflow = {"rule": "adagrad", "rule.initial_accumulator_value": 0.1, "lr": LR}
    torch.testing.assert_close(run(task, "sgd", 1, steps, **tensorflow).vector, x, **EXACT)
    torch.testing.assert_close(run(task, "async", 1, steps, **tensorflow).vector, x, **EXACT)
    usual = run(task, "sgd", 1, steps, lr=LR, rule="adagrad").vector
    assert (usual - x).abs().max() > 1e-3


@pytest.mark.parametrize("window", [1, 3, 12])
def test_agn_alone_is_lookahead(window: int) -> None:
    """Lookahead(k, a): fast weights make k steps from the slow ones, which then go the share a of that way."""
    task, rounds = network(), 10
    slow, g = task.start(SEED), Gradients(task)
    for _ in range(rounds):
        fast = slow.clone()
        for _ in range(window):
            fast = fast - LR * g(fast)
        slow = slow + (fast - slow) / window
    x = run(task, "agn", 1, rounds, lr=LR, window=window).vector
    torch.testing.assert_close(x, slow, **EXACT)
    torch.testing.assert_close(run(task, "sagn", 1, rounds, lr=LR, window=window).vector, slow, **EXACT)


def test_agn_with_another_local_rule_is_lookahead_around_it() -> None:
    task, rounds, window = network(), 10, 4
    slow, g, momentum = task.start(SEED), Gradients(task), torch.zeros(67, dtype=torch.float64)
    for _ in range(rounds):
        fast = slow.clone()
        for _ in range(window):
            momentum = 0.9 * momentum + g(fast)
            fast = fast - LR * momentum
        slow = slow + (fast - slow) / window
    x = run(task, "agn", 1, rounds, lr=LR, window=window, rule="momentum").vector
    torch.testing.assert_close(x, slow, **EXACT)


RULES = {
    "sgd": lambda p: torch.optim.SGD(p, lr=LR),
    "momentum": lambda p: torch.optim.SGD(p, lr=LR, momentum=0.9),
    "nesterov": lambda p: torch.optim.SGD(p, lr=LR, momentum=0.9, nesterov=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=LR),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=LR),
    "adam": lambda p: torch.optim.Adam(p, lr=LR),
    "adamw": lambda p: torch.optim.AdamW(p, lr=LR),
}


def test_every_rule_with_arithmetic_of_its_own_has_its_oracle_here() -> None:
    """The others run torch's optimizer itself: tests/unit/test_optimizers.py."""
    found = discovery.FAMILIES["rules"]()
    assert RULES.keys() == {name for name, one in found.items() if not issubclass(one.value, TorchRule)}


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_is_torchs_optimiser_of_that_name(rule: str) -> None:
    oracle = digest(by_torch(network(), 30, RULES[rule]))
    for name in ("sgd", "async", "sync", "hogwild", "groups", "allreduce"):
        assert run(network(), name, 1, 30, lr=LR, rule=rule).digest == oracle, name


class TestToy:
    """a + b should be 100; one step of rate eta leaves 1 - 2 eta of what is missing."""

    @pytest.mark.parametrize("lr", [0.05, 0.25, 0.8])
    @pytest.mark.parametrize(
        ("name", "workers"), [("sgd", 1), ("async", 1), ("sync", 1), ("sync", 6), ("allreduce", 3)]
    )
    def test_what_is_missing_shrinks_by_one_minus_two_eta(self, name: str, workers: int, lr: float) -> None:
        result = run("toy", name, workers, 25, lr=lr, task_options={"dtype": "float64"})
        a, b = result.vector[:2], result.vector[2:]
        missing = torch.full((2,), -100.0 * (1 - 2 * lr) ** 25, dtype=torch.float64)
        torch.testing.assert_close(a + b - 100, missing, **EXACT)
        assert a.equal(b)

    def test_half_is_the_rate_that_solves_it_in_one_step(self) -> None:
        assert run("toy", "sgd", 1, 1, lr=0.5).final == [50.0] * 4

    @pytest.mark.parametrize("workers", [2, 3, 5])
    def test_asynchronous_workers_in_turn_follow_a_delayed_recursion(self, workers: int) -> None:
        lr, missing, seen = 0.03, -100.0, [-100.0] * workers
        for k in range(40):
            missing -= 2 * lr * seen[k % workers]
            seen[k % workers] = missing  # it pulls right after its push
        result = run("toy", "async", workers, 40, lr=lr, task_options={"dtype": "float64"})
        assert (result.vector[:2] + result.vector[2:] - 100).tolist() == pytest.approx([missing] * 2, abs=1e-10)
