"""Callbacks of Keras in runs of a KerasTask: what they are told and when, and which are refused."""

from __future__ import annotations

import csv
import importlib.util
from collections.abc import Callable
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from digits_networks import data
from framework_runs import trained

if importlib.util.find_spec("keras") is None or importlib.util.find_spec("tensorflow") is None:
    pytest.skip("keras or tensorflow is not installed", allow_module_level=True)

import keras

import paceline
import paceline.keras
from paceline import KerasTask, UsageError

# TensorFlow's own, with numpy 2
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

FILE = """
import keras
import numpy as np
from sklearn.datasets import load_digits

import paceline


def network():
    return keras.Sequential([keras.Input((64,)), keras.layers.Dense(32, activation="relu"), keras.layers.Dense(10)])


def make():
    found = load_digits()
    samples = (found.data / 16).astype(np.float32), found.target.astype(np.int64)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return paceline.KerasTask(network, loss, samples, metrics=["accuracy"], name="digits")


def callbacks():
    return [keras.callbacks.CSVLogger("log.csv"), keras.callbacks.ModelCheckpoint("epoch{epoch:02d}.keras")]
"""


class Told(keras.callbacks.Callback):
    """Notes what it is called with, and the weights of the model at the end of each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, Any]] = []
        self.logs: list[dict[str, float]] = []
        self.weights: list[np.ndarray] = []

    def on_train_begin(self, logs: Any = None) -> None:
        self.calls.append(("train", self.params["steps"]))

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.calls.append(("epoch", epoch))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.calls.append(("batch", batch))
        self.logs.append(logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.calls.append(("epoch ends", epoch))
        self.logs.append(logs)
        self.weights.append(np.concatenate([one.ravel() for one in self.model.get_weights()]))

    def on_train_end(self, logs: Any = None) -> None:
        self.calls.append(("train ends", None))


class Changes(keras.callbacks.Callback):
    """Does something to the model at the end of an epoch."""

    def __init__(self, deed: Callable[[keras.Model], Any]) -> None:
        super().__init__()
        self._deed = deed

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._deed(self.model)


@cache
def task() -> KerasTask:
    x, y = data()
    network = keras.Sequential([keras.Input((64,)), keras.layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return KerasTask(network, loss, (x.astype(np.float32), y), metrics=["accuracy"])


def simulated(*callbacks: Any, every: int = 4, **settings: Any) -> paceline.Result:
    hook = paceline.keras.Callbacks(callbacks, every=every)
    quiet = {"say": lambda _: None, "warn": lambda _: None}
    return paceline.simulate(
        task(), "allreduce", hooks=[hook], **{"workers": 2, "steps": 10, "lr": 0.1} | quiet | settings
    )


def test_they_are_told_of_epochs_batches_and_the_end() -> None:
    told = Told()
    result = simulated(told)
    batches = [
        [("epoch", n), *(("batch", k) for k in range(size)), ("epoch ends", n)] for n, size in enumerate((4, 4, 2))
    ]
    assert told.calls == [("train", 4), *chain(*batches), ("train ends", None)]
    losses, ends = [one for one in told.logs if len(one) == 1], [one for one in told.logs if len(one) > 1]
    assert [set(one) for one in ends] == [{"loss", "val_loss", "val_accuracy"}] * 3
    assert ends[0]["loss"] == pytest.approx(np.mean([one["loss"] for one in losses[:4]]))
    assert ends[-1]["val_loss"] == pytest.approx(result.metrics["loss"])
    np.testing.assert_array_equal(told.weights[-1], result.vector.numpy())
    again = Told()
    assert simulated(again).digest == paceline.simulate(task(), "allreduce", workers=2, steps=10, lr=0.1).digest


def test_stop_training_ends_the_run() -> None:
    early = keras.callbacks.EarlyStopping(monitor="val_loss", min_delta=10.0, patience=1)
    result = simulated(early, steps=100)
    assert result.updates == 8
    assert simulated(Changes(lambda model: setattr(model, "stop_training", True)), steps=100).updates == 4


def test_what_changes_the_model_is_refused() -> None:
    made = {
        "optimizer of the model makes no updates": keras.callbacks.LearningRateScheduler(lambda _: 0.1),
        "give the schedule to the scheme": keras.callbacks.ReduceLROnPlateau(),
        "--evaluator keeps the best": keras.callbacks.EarlyStopping(restore_best_weights=True),
        "weight-ema": keras.callbacks.SwapEMAWeights(),
        "--resume": keras.callbacks.BackupAndRestore("kept"),
        "is for model.fit": paceline.keras.Pace(),
        "not a callback of Keras": lambda: None,
    }
    for told, one in made.items():
        with pytest.raises(UsageError, match=told):
            paceline.keras.Callbacks([one])
    with pytest.raises(UsageError, match="has changed weights of the model"):
        simulated(Changes(lambda model: model.set_weights([one + 1 for one in model.get_weights()])))
    with pytest.raises(UsageError, match="has changed the learning rate"):
        simulated(Changes(lambda model: setattr(model.optimizer, "learning_rate", 0.5)))
    with pytest.raises(UsageError, match="use a KerasTask"):
        paceline.simulate("digits-mlp", "sync", steps=3, hooks=[paceline.keras.Callbacks([Told()])])
    with pytest.raises(UsageError, match="no_such_file"):
        paceline.keras.Callbacks("no_such_file.py:callbacks")


def test_real_processes_and_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The callbacks are named in a file, as on a command line."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digits_task.py").write_text(FILE)
    hook = "paceline.keras:Callbacks:callbacks=digits_task.py:callbacks,every=40"
    result, said = trained(tmp_path / "run", "digits_task.py:make", "sync", steps=120, hooks=[hook])
    assert not [text for text in said if "--start exec" in text]
    with (tmp_path / "log.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["epoch"] for row in rows] == ["0", "1", "2"]
    assert float(rows[-1]["val_accuracy"]) == pytest.approx(result.metrics["accuracy"])
    saved = keras.saving.load_model(tmp_path / "epoch03.keras")
    flat = np.concatenate([one.ravel() for one in saved.get_weights()])
    np.testing.assert_array_equal(flat, result.vector.numpy())
    trained(tmp_path / "run", "digits_task.py:make", "sync", steps=160, resume=True, hooks=[hook])
    assert (tmp_path / "epoch04.keras").is_file()
    assert paceline.replay(tmp_path / "run").match


def test_tensorboard_as_an_object(tmp_path: Path) -> None:
    board = paceline.keras.Callbacks(keras.callbacks.TensorBoard(str(tmp_path / "board"), histogram_freq=1), every=20)
    trained(tmp_path / "run", task(), "async", steps=60, hooks=[board])
    assert list((tmp_path / "board" / "train").iterdir())
    assert list((tmp_path / "board" / "validation").iterdir())
