"""JAX's pytrees as tasks: the vectors of torch under every scheme, and runs of real processes."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from digits_networks import data, steps_of, torch_task, weights
from framework_runs import UPDATES, holds_in_processes, trained

if importlib.util.find_spec("jax") is None:
    pytest.skip("jax is not installed", allow_module_level=True)

import jax
import jax.numpy as jnp
from beds.short_windows import short

import paceline
from paceline import JaxTask, UsageError
from paceline.config import discovery

FILE = """
import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits

import paceline


def init(key):
    first, second = jax.random.split(key)
    return {"in": jax.random.normal(first, (64, 32)) / 8, "out": jax.random.normal(second, (32, 10)) / 6}


def output(weights, x):
    return jax.nn.relu(x @ weights["in"]) @ weights["out"]


def loss(weights, x, y, key=None):
    hidden = x if key is None else x * jax.random.bernoulli(key, 0.9, x.shape)
    chosen = jnp.take_along_axis(jax.nn.log_softmax(output(weights, hidden)), y[:, None], 1)
    return -chosen.mean()


def make():
    found = load_digits()
    samples = (found.data / 16).astype(np.float32), found.target.astype(np.int64)
    right = lambda scores, y: (scores.argmax(-1) == y).mean()
    return paceline.JaxTask(init, loss, samples, predict=output, metrics={"accuracy": right}, name="digits")
"""


def network(tree: list[jax.Array], x: jax.Array) -> jax.Array:
    return jax.nn.relu(x @ tree[0] + tree[1]) @ tree[2] + tree[3]


def loss(tree: list[jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
    return -jnp.take_along_axis(jax.nn.log_softmax(network(tree, x)), y[:, None], 1).mean()


def jax_task(**settings: object) -> JaxTask:
    return JaxTask(weights(), loss, data(), dtype="float64", **settings)


TASK = jax_task()


@pytest.mark.parametrize("name", sorted(discovery.schemes()))
def test_every_scheme_gives_the_vector_of_torch(name: str) -> None:
    alone = discovery.scheme(name).alone
    settings = {"workers": 1 if alone else 4, "steps": steps_of(name)}
    quiet = {"warn": lambda _: None, "compute": "exponential:1.0"} | short(name)
    theirs = paceline.simulate(torch_task(), name, **settings, **quiet)
    ours = paceline.simulate(TASK, name, **settings, **quiet)
    assert ours.updates == theirs.updates
    torch.testing.assert_close(ours.vector, theirs.vector, rtol=0, atol=1e-10)
    assert abs(ours.metrics["loss"] - theirs.metrics["loss"]) < 1e-10


def test_sixty_four_bits_are_the_task_s_alone() -> None:
    assert TASK.start(0).dtype is torch.float64
    assert jnp.ones(1).dtype == jnp.float32


def test_a_key_of_the_batch_gives_the_same_gradient_again() -> None:
    def noisy(tree: list[jax.Array], x: jax.Array, y: jax.Array, key: jax.Array | None = None) -> jax.Array:
        return loss(tree, x if key is None else x * jax.random.bernoulli(key, 0.5, x.shape), y)

    task = JaxTask(weights(), noisy, data(), dtype="float64")
    x, (first, second) = task.start(0), [one for one, _ in zip(task.batches(0, 1, 0), range(2), strict=False)]
    assert torch.equal(task.grad(x, first)[1], task.grad(x, first)[1])
    plain = jax_task()
    assert not torch.allclose(task.grad(x, second)[1], plain.grad(x, second)[1])
    assert task.evaluate(x) == plain.evaluate(x)  # without a key: no dropout


def test_leaves_that_are_no_weights_stay_as_they_are() -> None:
    tree = {"w": np.ones((64, 10)), "power": np.int64(2), "act": jnp.tanh}

    def loss_of(tree: dict, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.mean(tree["act"](x @ tree["w"]) ** tree["power"])

    task = JaxTask(tree, loss_of, data(), dtype="float64")
    assert task.parameters() == [("['w']", [64, 10])]
    model = task.trained_model(task.start(0) * 2)
    assert float(model["w"][0, 0]) == 2.0
    assert model["act"] is jnp.tanh


def test_an_equinox_module_is_a_pytree_too() -> None:
    eqx = pytest.importorskip("equinox")

    def loss_of(model: object, x: jax.Array, y: jax.Array) -> jax.Array:
        scores = jax.vmap(model)(x)
        return -jnp.take_along_axis(jax.nn.log_softmax(scores), y[:, None], 1).mean()

    task = JaxTask(lambda key: eqx.nn.MLP(64, 10, 16, 1, key=key), loss_of, data())
    assert not torch.equal(task.start(0), task.start(1))
    before = task.evaluate(task.start(0))["loss"]
    result = paceline.simulate(task, "async", workers=2, steps=200, lr=0.1)
    assert result.metrics["loss"] < before / 2


def test_wrong_uses_are_refused() -> None:
    with pytest.raises(UsageError, match="give predict="):
        jax_task(metrics={"accuracy": lambda *_: 1.0})
    with pytest.raises(UsageError, match="a function of a PRNG key"):
        JaxTask(3, loss, data())
    with pytest.raises(UsageError, match="must have one type"):
        JaxTask([np.ones(2, np.float32), np.ones(2)], loss, data()).start(0)
    task = JaxTask(weights(), lambda tree, x, y: network(tree, x)[:, 0], data())
    with pytest.raises(UsageError, match="must be one number"):
        task.grad(task.start(0), next(task.batches(0, 1, 0)))


@pytest.mark.parametrize("scheme", UPDATES)
def test_real_processes(scheme: str, tmp_path: Path) -> None:
    file = tmp_path / "digits_task.py"
    file.write_text(FILE)
    holds_in_processes(tmp_path, f"{file}:make", scheme)
    tree = paceline.load(tmp_path / "killed")
    assert set(tree) == {"in", "out"}
    inputs = torch.rand(5, 64)
    scores = paceline.predict(tmp_path / "killed", inputs)
    own = np.maximum(inputs.numpy() @ np.asarray(tree["in"]), 0) @ np.asarray(tree["out"])
    np.testing.assert_allclose(scores.numpy(), own, atol=1e-4)


def test_a_task_made_here_where_jax_has_computed(tmp_path: Path) -> None:
    """It is pickled without anything of JAX: the launcher is clean, and forks."""
    TASK.start(0)
    result, said = trained(tmp_path / "run", TASK, "sync", steps=30)
    assert not [text for text in said if "--start exec" in text]
    simulated = paceline.simulate(TASK, "sync", workers=2, steps=30, lr=0.1)
    torch.testing.assert_close(result.vector, simulated.vector, rtol=0, atol=1e-12)
