"""Keras models as tasks: the vectors of torch on every backend, and runs of real processes."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from digits_networks import data
from framework_runs import UPDATES, holds_in_processes, trained

if importlib.util.find_spec("keras") is None or importlib.util.find_spec("tensorflow") is None:
    pytest.skip("keras or tensorflow is not installed", allow_module_level=True)

import keras

import paceline
from paceline import KerasTask, UsageError
from paceline.config import discovery

# TensorFlow's own, with numpy 2
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

FILE = """
import keras
import numpy as np
from sklearn.datasets import load_digits

import paceline


def network():
    dense, norm, drop = keras.layers.Dense, keras.layers.BatchNormalization, keras.layers.Dropout
    return keras.Sequential([keras.Input((64,)), dense(32, activation="relu"), norm(), drop(0.1), dense(10)])


def make(ready: bool = False):
    found = load_digits()
    samples = (found.data / 16).astype(np.float32), found.target.astype(np.int64)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    if ready:
        model = network()
        model.compile("adam", loss, metrics=["accuracy"])
        return paceline.KerasTask(model, train=samples, name="digits")
    return paceline.KerasTask(network, loss, samples, metrics=["accuracy"], name="digits")
"""


@pytest.mark.parametrize("backend", ["jax", "tensorflow", "torch"])
def test_every_scheme_gives_the_vector_of_torch(backend: str) -> None:
    schemes = sorted(discovery.schemes())
    program = Path(__file__).with_name("keras_twin.py")
    environment = os.environ | {"KERAS_BACKEND": backend}
    told = subprocess.run([sys.executable, program, *schemes], env=environment, capture_output=True, text=True)
    assert told.returncode == 0, told.stderr
    found = json.loads(told.stdout.splitlines()[-1])
    assert set(found) == set(schemes)
    assert max(found.values()) < 1e-10, found


def network(rate: float = 0.0) -> keras.Model:
    layers = [keras.Input((64,)), keras.layers.Dense(16), keras.layers.BatchNormalization(), keras.layers.ReLU()]
    return keras.Sequential([*layers, keras.layers.Dropout(rate), keras.layers.Dense(10)])


LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def plain() -> tuple[np.ndarray, np.ndarray]:
    x, y = data()
    return x.astype(np.float32), y


def test_a_batch_gives_the_same_gradient_again_with_dropout() -> None:
    task = KerasTask(lambda: network(0.5), LOSS, plain())
    first, second = (one for one, _ in zip(task.batches(0, 1, 0), range(2), strict=False))
    x = task.start(0)
    mine = task.grad(x, first)[1]
    other = task.grad(x, second)[1]
    assert torch.equal(task.grad(x, first)[1], mine)
    assert not torch.equal(mine, other)
    same_samples = type(first)(first.data, first.size, second.seed)
    assert not torch.equal(task.grad(x, same_samples)[1], mine)


def test_the_gradient_and_the_state_are_those_of_keras() -> None:
    task = KerasTask(network, LOSS, plain())
    batch, x, buffers = next(task.batches(0, 1, 0)), task.start(0), task.buffers()
    _, gradient = task.grad(x, batch, None, buffers)
    model = task.trained_model(x)
    model.compile(keras.optimizers.SGD(1.0), LOSS)
    model.train_on_batch(*(one.numpy() for one in batch.data))
    stepped = np.concatenate([np.ravel(one) for one in model.get_weights()])
    theirs = np.concatenate([np.ravel(keras.ops.convert_to_numpy(one)) for one in model.trainable_variables])
    np.testing.assert_allclose((x - gradient).numpy(), theirs, atol=1e-5)
    moved = [one for one in model.non_trainable_variables if one.name != "seed_generator_state"]
    assert len(buffers) == len(moved) == 2
    for mine, one in zip(buffers.values(), moved, strict=True):
        np.testing.assert_allclose(mine.numpy(), keras.ops.convert_to_numpy(one), atol=1e-6)
    assert len(stepped) == len(x) + sum(one.numel() for one in buffers.values())


def test_regularisers_and_added_losses_count_once() -> None:
    class Small(keras.layers.Layer):
        def call(self, x: object) -> object:
            self.add_loss(0.1 * keras.ops.mean(keras.ops.square(x)))
            return x

    def regularised() -> keras.Model:
        dense = keras.layers.Dense(10, kernel_regularizer=keras.regularizers.L2(0.05))
        return keras.Sequential([keras.Input((64,)), dense, Small()])

    task = KerasTask(regularised, LOSS, plain())
    batch, x = next(task.batches(0, 1, 0)), task.start(0)
    loss, gradient = task.grad(x, batch)
    model = task.trained_model(x)
    model.compile(keras.optimizers.SGD(1.0), LOSS)
    assert abs(loss - float(model.train_on_batch(*(one.numpy() for one in batch.data)))) < 1e-5
    theirs = np.concatenate([np.ravel(keras.ops.convert_to_numpy(one)) for one in model.trainable_variables])
    np.testing.assert_allclose((x - gradient).numpy(), theirs, atol=1e-5)


def test_sample_weights_are_those_of_keras() -> None:
    x, y = plain()
    weights = np.random.default_rng(0).uniform(0, 2, len(x)).astype(np.float32)
    task = KerasTask(network, LOSS, (x, y, weights), metrics=["accuracy"], sample_weights=True)
    batch, start = next(task.batches(0, 1, 0)), task.start(0)
    loss, gradient = task.grad(start, batch)
    model = task.trained_model(start)
    model.compile(keras.optimizers.SGD(1.0), LOSS)
    told = model.train_on_batch(*(one.numpy() for one in batch.data), return_dict=True)
    assert float(told["loss"]) == pytest.approx(loss, abs=1e-5)
    theirs = np.concatenate([np.ravel(keras.ops.convert_to_numpy(one)) for one in model.trainable_variables])
    np.testing.assert_allclose((start - gradient).numpy(), theirs, atol=1e-5)
    result = paceline.simulate(task, "async", workers=2, steps=20, lr=0.1)
    unweighted = KerasTask(network, LOSS, (x, y), metrics=["accuracy"])
    assert unweighted.evaluate(start)["accuracy"] == pytest.approx(task.evaluate(start)["accuracy"])
    assert unweighted.evaluate(start)["loss"] != pytest.approx(task.evaluate(start)["loss"], rel=1e-4)
    assert result.updates == 20


def test_a_compiled_model_brings_its_loss_and_metrics_and_is_not_changed() -> None:
    model = network()
    model.compile("adam", LOSS, metrics=["accuracy"])
    before = [np.array(one) for one in model.get_weights()]
    task = KerasTask(model, train=plain())
    result = paceline.simulate(task, "async", workers=3, steps=150, lr=0.1)
    assert result.metrics["accuracy"] > 0.8
    assert all(np.array_equal(a, b) for a, b in zip(before, model.get_weights(), strict=True))
    told = task.trained_model(result.vector).evaluate(*plain(), verbose=0, return_dict=True)
    assert told["accuracy"] < 1.01  # evaluates as any compiled model


def test_frozen_weights_are_not_trained_and_are_no_buffers() -> None:
    model = network()
    model.layers[0].trainable = False
    task = KerasTask(model, LOSS, plain())
    assert task.start(0).numel() == 2 * 16 + 16 * 10 + 10
    assert len(task.buffers()) == 2
    kept = task.trained_model(task.start(0))
    np.testing.assert_array_equal(kept.layers[0].get_weights()[0], model.layers[0].get_weights()[0])


def test_batches_of_a_pydataset_and_of_tf_data() -> None:
    import tensorflow as tf

    x, y = plain()

    class Parts(keras.utils.PyDataset):
        def __len__(self) -> int:
            return 6

        def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
            return x[100 * index : 100 * index + 100], y[100 * index : 100 * index + 100]

    sources = [Parts(), tf.data.Dataset.from_tensor_slices((x, y)).batch(100)]
    sources.append(lambda: tf.data.Dataset.from_tensor_slices((x, y)).batch(100))
    for source in sources:
        task = KerasTask(network, LOSS, source, plain(), batch=100)
        drawn = [one for one, _ in zip(task.batches(1, 2, 0), range(4), strict=False)]  # of worker 1 of 2
        for one, place in zip(drawn, (1, 3, 5, 1), strict=True):
            np.testing.assert_array_equal(one.data[0].numpy(), x[100 * place : 100 * place + 100])
        assert paceline.simulate(task, "sync", workers=2, steps=20, lr=0.1).updates == 20


def test_wrong_uses_are_refused() -> None:
    with pytest.raises(UsageError, match="give train="):
        KerasTask(network, LOSS)
    with pytest.raises(UsageError, match="not compiled: give loss="):
        KerasTask(network, train=plain()).start(0)
    with pytest.raises(UsageError, match="has no weights yet"):
        KerasTask(keras.Sequential([keras.layers.Dense(1)]), LOSS, plain())
    with pytest.raises(UsageError, match="not a Keras model"):
        KerasTask(lambda: 3, LOSS, plain()).start(0)
    task = KerasTask(network, LOSS, {"x": plain()[0], "y": plain()[1]})
    with pytest.raises(UsageError, match="inputs and a target"):
        task.grad(task.start(0), next(task.batches(0, 1, 0)))


@pytest.mark.parametrize("scheme", UPDATES)
def test_real_processes(scheme: str, tmp_path: Path) -> None:
    file = tmp_path / "digits_task.py"
    file.write_text(FILE)
    holds_in_processes(tmp_path, f"{file}:make", scheme)
    model = paceline.load(tmp_path / "killed")
    assert isinstance(model, keras.Model)
    x, _ = plain()
    scores = paceline.predict(tmp_path / "killed", torch.from_numpy(x[:7]))
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(scores.numpy(), again.predict(x[:7], verbose=0), atol=1e-5)


def test_a_model_that_was_built_in_the_launcher_starts_fresh_interpreters(tmp_path: Path) -> None:
    file = tmp_path / "digits_task.py"
    file.write_text(FILE)
    result, said = trained(tmp_path / "run", f"{file}:make", "sync", steps=40, task_options={"ready": True})
    fresh = [text for text in said if "--start exec" in text]
    assert bool(fresh) == (keras.backend.backend() != "torch")  # which bears a fork
    assert result.updates == 40
    assert paceline.replay(tmp_path / "run").match


def test_a_model_of_the_caller_travels_as_an_archive(tmp_path: Path) -> None:
    model = network()
    model.compile("sgd", LOSS, metrics=["accuracy"])
    task = KerasTask(model, train=plain())
    result, said = trained(tmp_path / "run", task, "sync", steps=30)
    assert not [text for text in said if "--start exec" in text]
    simulated = paceline.simulate(task, "sync", workers=2, steps=30, lr=0.1)
    torch.testing.assert_close(result.vector, simulated.vector, rtol=0, atol=1e-5)
