"""JAX scripts that keep their own loop: by themselves, and in real processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from framework_scripts import DATA, EXAMPLES, KILL, launched

import paceline
from paceline.errors import UsageError

jax = pytest.importorskip("jax", reason="needs JAX: pip install 'paceline[jax]'")
jnp = jax.numpy

LR = 0.1


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def first(kind: Any = None) -> dict[str, Any]:
    """A tree with a dictionary, a list and a tuple."""
    chance = np.random.default_rng(1)
    shapes = {"layers": [(8, 5), (5, 3)], "shifts": ((5,), (3,))}
    return jax.tree_util.tree_map(
        lambda shape: jnp.asarray(chance.normal(size=shape), dtype=kind),
        shapes,
        is_leaf=lambda one: isinstance(one, tuple) and isinstance(one[0], int),
    )


def loss_of(params: Any, x: Any, y: Any) -> Any:
    hidden = jnp.tanh(x @ params["layers"][0] + params["shifts"][0])
    return ((hidden @ params["layers"][1] + params["shifts"][1] - y) ** 2).mean()


def batches(number: int, kind: Any = np.float32) -> list[tuple[Any, Any]]:
    chance = np.random.default_rng(2)
    return [(chance.normal(size=(16, 8)).astype(kind), chance.normal(size=(16, 3)).astype(kind)) for _ in range(number)]


def trained(params: Any, items: Any, **settings: Any) -> Any:
    differentiated = jax.jit(jax.value_and_grad(loss_of))
    with paceline.attach(params, "sgd", lr=LR, **settings) as pace:
        for x, y in pace.share(items, epochs=1):
            loss, grads = differentiated(pace.params, x, y)
            pace.step(grads, loss)
    return pace


def by_hand(params: Any, items: Any) -> Any:
    for x, y in items:
        grads = jax.grad(loss_of)(params, x, y)
        params = jax.tree_util.tree_map(lambda p, g: p - LR * g, params, grads)
    return params


def far(a: Any, b: Any) -> float:
    apart = jax.tree_util.tree_map(lambda one, other: float(abs(one - other).max()), a, b)
    return max(jax.tree_util.tree_leaves(apart))


@pytest.mark.parametrize(("kind", "nearness"), [("float32", 1e-6), ("float64", 1e-10)])
def test_one_worker_is_the_plain_loop(kind: str, nearness: float) -> None:
    jax.config.update("jax_enable_x64", kind == "float64")
    try:
        items = batches(12, kind)
        pace = trained(first(kind), items)
        assert jax.tree_util.tree_leaves(pace.params)[0].dtype == kind
        assert far(pace.params, by_hand(first(kind), items)) < nearness
        assert far(pace.params, first(kind)) > 0.01
        assert pace.updates == 12
    finally:
        jax.config.update("jax_enable_x64", False)


def test_bfloat16_has_the_same_bits() -> None:
    params = {"w": jnp.asarray(np.arange(6.0).reshape(2, 3) / 7, dtype=jnp.bfloat16)}
    with paceline.attach(params, "sgd", lr=0.0, steps=1) as pace:
        pace.step({"w": jnp.ones((2, 3), dtype=jnp.bfloat16)}, 1.0)
    assert pace.params["w"].dtype == jnp.bfloat16
    assert bool((pace.params["w"] == params["w"]).all())


def test_arrays_that_a_step_gave_do_not_change_later() -> None:
    differentiated = jax.value_and_grad(loss_of)
    with paceline.attach(first(), "sgd", lr=LR) as pace:
        kept, copies = [], []
        for x, y in batches(6):
            loss, grads = differentiated(pace.params, x, y)
            params = pace.step(grads, loss)
            kept.append(params)
            copies.append(jax.tree_util.tree_map(lambda one: np.array(one, copy=True), params))
    assert all(far(one, other) == 0 for one, other in zip(kept, copies, strict=True))
    assert far(kept[0], kept[-1]) > 0


def test_evaluate_gets_the_tree_and_the_record_the_loss() -> None:
    seen = []

    def evaluate(params: Any) -> dict[str, float]:
        seen.append(jax.tree_util.tree_structure(params))
        return {"norm": float(abs(params["layers"][0]).sum())}

    pace = trained(first(), batches(6), evaluate=evaluate, hooks=["validation:every=2"], directory="run")
    assert seen
    assert set(seen) == {jax.tree_util.tree_structure(first())}
    result = json.loads(Path("run/result.json").read_text())
    assert result["updates"] == pace.updates == 6
    assert result["metrics"]["norm"] == pytest.approx(float(abs(pace.params["layers"][0]).sum()), rel=1e-6)
    assert result["metrics"]["loss"] > 0


class TestMistakes:
    @pytest.mark.parametrize(
        ("grads", "text"),
        [
            (lambda tree: {"layers": tree["layers"]}, "without shifts.0, shifts.1"),
            (lambda tree: {**tree, "more": jnp.ones(2)}, "with more"),
            (lambda tree: jax.tree_util.tree_map(lambda one: one[:1], tree), "has the shape"),
            (lambda tree: None, "there is no gradient to give"),
            (lambda tree: lambda: 0.0, "takes gradients, not a function"),
        ],
    )
    def test_gradients_of_another_structure(self, grads: Any, text: str) -> None:
        with pytest.raises(UsageError, match=text), paceline.attach(first(), "sgd", lr=LR) as pace:
            pace.step(grads(first()), 1.0)

    @pytest.mark.parametrize(
        ("params", "text"),
        [
            (lambda: {}, "without arrays"),
            (lambda: {"w": jnp.ones(2), "f": jnp.tanh}, "leaf f is a"),
            (lambda: {"w": jnp.ones(2), "n": jnp.arange(2)}, "only floating-point"),
            (lambda: {"w": jnp.ones(2), "h": jnp.ones(2, dtype=jnp.float16)}, "mixes parameters of float16, float32"),
            (lambda: None, "not a NoneType"),
        ],
    )
    def test_parameters_that_cannot_train(self, params: Any, text: str) -> None:
        with pytest.raises(UsageError, match=text):
            paceline.attach(params(), "sgd", lr=LR)

    def test_an_optimizer_of_torch(self) -> None:
        with pytest.raises(UsageError, match="for a torch model"):
            paceline.attach(first(), "sgd", optimizer=lambda model: None)

    def test_a_second_attach_inside_the_block(self) -> None:
        with (
            pytest.raises(UsageError, match="called a second time"),
            paceline.attach(first(), "sgd", lr=LR),
        ):
            paceline.attach(first(), "sgd", lr=LR)


LOOP = (
    DATA
    + KILL
    + """
import jax, jax.numpy as jnp
import paceline

def loss_of(p, x, y):
    return -jnp.take_along_axis(jax.nn.log_softmax(x @ p["w"] + p["b"]), y[:, None], 1).mean()

differentiated = jax.jit(jax.value_and_grad(loss_of))
with paceline.attach({"w": jnp.zeros((8, 3)), "b": jnp.zeros(3)}, "async", lr=0.2, steps=60) as pace:
    for x, y in pace.share(items):
        loss, grads = differentiated(pace.params, x, y)
        perhaps_die(pace)
        pace.step(grads, loss)
keep(f"{pace.rank}.npy", [pace.params["b"], pace.params["w"]])
if pace.chief:
    zeros = {"w": jnp.zeros((8, 3)), "b": jnp.zeros(3)}
    keep("losses.npy", [loss_of(zeros, X, Y), loss_of(pace.params, X, Y)])
"""
)


def test_two_workers_train_and_a_killed_one_is_back(tmp_path: Path) -> None:
    result = launched(LOOP, tmp_path, "--servers", "1")
    assert (result["updates"], result["restarts"]) == (60, 1)
    ends = [np.load(tmp_path / f"{rank}.npy") for rank in range(2)]
    assert (ends[0] == ends[1]).all()
    before, after = np.load(tmp_path / "losses.npy")
    assert after < before / 2
    more = launched(LOOP, tmp_path, "--resume", "--dir", "run", "--steps", "90")
    assert more["updates"] == 90


def test_jax_has_as_many_threads_as_torch(tmp_path: Path) -> None:
    count = """
names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
np.save(f"threads{pace.rank}.npy", names.count("tf_XLAEigen"))
"""
    for threads in (1, 2):
        launched(
            LOOP.replace("        perhaps_die(pace)\n", "") + count,
            tmp_path,
            "--dir",
            f"{threads}",
            "--threads",
            f"{threads}",
        )
        assert [int(np.load(tmp_path / f"threads{rank}.npy")) for rank in range(2)] == [threads] * 2


def test_the_example_trains(tmp_path: Path) -> None:
    result = launched(EXAMPLES / "jax_loop.py", tmp_path, "--", "--steps", "30", "--width", "16")
    assert result["updates"] == 30
