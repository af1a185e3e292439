"""Keras scripts that keep their own loop, and model.fit with a callback: by themselves, and in real processes.

This process has the TensorFlow backend; the others are tested in processes of their own."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from framework_scripts import DATA, EXAMPLES, KILL, launched, python

import paceline
from paceline.api.script.keras_gradients import COMPILED
from paceline.errors import UsageError

os.environ["KERAS_BACKEND"] = "tensorflow"
tf = pytest.importorskip("tensorflow", reason="needs TensorFlow: pip install 'paceline[keras]'")
keras = pytest.importorskip("keras", reason="needs Keras: pip install 'paceline[keras]'")

LR = 0.1
BACKENDS = [name for name in ("jax", "torch") if importlib.util.find_spec(name)]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def data(number: int = 10) -> list[tuple[Any, Any]]:
    chance = np.random.default_rng(0)
    return [(chance.normal(size=(16, 8)).astype("float32"), chance.integers(0, 3, 16)) for _ in range(number)]


def made(*more: Any) -> Any:
    keras.utils.set_random_seed(0)
    layers = keras.layers
    return keras.Sequential([keras.Input((8,)), layers.Dense(6, activation="tanh"), *more, layers.Dense(3)])


def cost(y: Any, found: Any) -> Any:
    return keras.ops.mean(keras.losses.sparse_categorical_crossentropy(y, found, from_logits=True))


def by_hand(model: Any, items: Any) -> list[Any]:
    for x, y in items:
        with tf.GradientTape() as tape:
            loss = cost(y, model(x, training=True))
        for one, grad in zip(model.trainable_variables, tape.gradient(loss, model.trainable_variables), strict=True):
            one.assign_sub(LR * tf.convert_to_tensor(grad))
    return model.get_weights()


def far(a: list[Any], b: list[Any]) -> float:
    return max(float(abs(one - other).max()) for one, other in zip(a, b, strict=True))


class TestLoop:
    @pytest.mark.parametrize("compiled", [False, True])
    def test_one_worker_is_the_plain_loop(self, compiled: bool) -> None:
        model = made(keras.layers.BatchNormalization())

        def loss_of(x: Any, y: Any) -> Any:
            return cost(y, model(x, training=True))

        with paceline.attach(model, "sgd", lr=LR) as pace:
            for x, y in pace.share(data(), epochs=1):
                assert pace.step(loss_of, x, y) if compiled else pace.step(lambda x=x, y=y: loss_of(x, y))
        # the moving averages of the batch normalisation too
        assert far(model.get_weights(), by_hand(made(keras.layers.BatchNormalization()), data())) < 1e-6
        assert pace.updates == 10

    def test_float64(self) -> None:
        keras.config.set_dtype_policy("float64")
        try:
            model = made()
            with paceline.attach(model, "sgd", lr=LR) as pace:
                for x, y in pace.share(data(), epochs=1):
                    pace.step(lambda x=x, y=y: cost(y, model(x)))
            assert model.get_weights()[0].dtype == np.float64
            assert far(model.get_weights(), by_hand(made(), data())) < 1e-10
        finally:
            keras.config.set_dtype_policy("float32")

    def test_sparse_gradients_of_an_embedding(self) -> None:
        def embedded() -> Any:
            keras.utils.set_random_seed(0)
            return keras.Sequential(
                [
                    keras.Input((4,), dtype="int32"),
                    keras.layers.Embedding(20, 5),
                    keras.layers.Flatten(),
                    keras.layers.Dense(3),
                ]
            )

        chance = np.random.default_rng(0)
        items = [(chance.integers(0, 20, (8, 4)), chance.integers(0, 3, 8)) for _ in range(5)]
        model = embedded()
        with paceline.attach(model, "sgd", lr=LR) as pace:
            for x, y in pace.share(items, epochs=1):
                pace.step(lambda x=x, y=y: cost(y, model(x)))
        assert far(model.get_weights(), by_hand(embedded(), items)) < 1e-6

    def test_evaluate_sees_the_centre_and_changes_nothing(self) -> None:
        def trained(**settings: Any) -> Any:
            model = made(keras.layers.BatchNormalization(), keras.layers.Dropout(0.5))
            with paceline.attach(model, "downpour", lr=LR, window=2, **settings) as pace:
                for x, y in pace.share(data(), epochs=1):
                    pace.step(lambda x=x, y=y: cost(y, model(x, training=True)))
            return model.get_weights()

        def evaluate(model: Any) -> dict[str, float]:
            model(data(1)[0][0], training=True)  # moves averages, and draws random numbers
            return {"weight": float(abs(model.get_weights()[0]).sum())}

        assert far(trained(evaluate=evaluate, hooks=["validation:every=1"]), trained()) == 0

    def test_frozen_layers_stay(self) -> None:
        model = made(keras.layers.Dense(4))
        model.layers[0].trainable = False
        before = model.layers[0].get_weights()
        with paceline.attach(model, "sgd", lr=LR) as pace:
            assert [name for name, _ in pace._task.parameters()] == [one.path for one in model.trainable_variables]
            assert pace._task.buffers() == {}
            for x, y in pace.share(data(), epochs=1):
                pace.step(lambda x=x, y=y: cost(y, model(x)))
        assert far(model.layers[0].get_weights(), before) == 0


class TestMistakes:
    def test_a_model_without_weights(self) -> None:
        with pytest.raises(UsageError, match="has no weights yet: call it on a batch"):
            paceline.attach(keras.Sequential([keras.layers.Dense(3)]), "sgd", lr=LR)

    def test_a_model_with_nothing_to_train(self) -> None:
        model = made()
        model.trainable = False
        with pytest.raises(UsageError, match="nothing to train"):
            paceline.attach(model, "sgd", lr=LR)

    def test_a_constraint(self) -> None:
        with pytest.raises(UsageError, match="has a constraint on"):
            paceline.attach(made(keras.layers.Dense(4, kernel_constraint="non_neg")), "sgd", lr=LR)

    def test_an_optimizer(self) -> None:
        with pytest.raises(UsageError, match="for a torch model"):
            paceline.attach(made(), "sgd", optimizer=keras.optimizers.SGD(0.1))

    @pytest.mark.parametrize(
        ("given", "text"),
        [
            ((), "was given nothing"),
            ((tf.constant(1.0),), "needs the loss as a function"),
            ((lambda: None,), "must give the loss, a scalar tensor"),
            ((lambda: tf.ones(3),), r"the loss has the shape \(3,\)"),
            ((lambda: tf.constant(1.0),), "does not depend on the model"),
        ],
    )
    def test_a_step_without_a_loss(self, given: tuple[Any, ...], text: str) -> None:
        with pytest.raises(UsageError, match=text), paceline.attach(made(), "sgd", lr=LR) as pace:
            pace.step(*given)

    def test_a_new_function_at_every_step(self) -> None:
        model = made()
        x, y = data(1)[0]
        with paceline.attach(model, "sgd", lr=LR) as pace:
            for _ in range(COMPILED):
                pace.step(lambda x, y: cost(y, model(x)), x, y)
            with pytest.raises(UsageError, match="define it once"):
                pace.step(lambda x, y: cost(y, model(x)), x, y)

    def test_freezing_inside_the_block(self) -> None:
        model = made()
        x, y = data(1)[0]
        with paceline.attach(model, "sgd", lr=LR) as pace:
            model.layers[0].trainable = False
            with pytest.raises(UsageError, match="was changed inside the block"):
                pace.step(lambda: cost(y, model(x)))

    def test_a_second_attach_inside_the_block(self) -> None:
        with pytest.raises(UsageError, match="called a second time"), paceline.attach(made(), "sgd", lr=LR):
            paceline.attach(made(), "sgd", lr=LR)


def compiled(model: Any, **settings: Any) -> Any:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.SGD(LR), loss=loss, metrics=["accuracy"], **settings)
    return model


def samples() -> tuple[Any, Any]:
    xs, ys = zip(*data(), strict=True)
    return np.concatenate(xs), np.concatenate(ys)


class TestFit:
    def test_one_worker_is_plain_fit(self) -> None:
        x, y = samples()
        model, plain = (compiled(made(keras.layers.BatchNormalization())) for _ in range(2))
        own = model.optimizer
        pace = paceline.keras.Pace("sgd", lr=LR)
        settings = {"batch_size": 16, "epochs": 2, "shuffle": False, "verbose": 0}
        ours = model.fit(x, y, callbacks=[pace], **settings)
        theirs = plain.fit(x, y, **settings)
        assert far(model.get_weights(), plain.get_weights()) < 1e-6
        assert ours.history["loss"] == pytest.approx(theirs.history["loss"], rel=1e-5)
        assert ours.history["accuracy"] == pytest.approx(theirs.history["accuracy"])
        assert pace.loop.updates == 20
        assert sum(pace.loop._board.samples) == 320
        # afterwards the model trains with its own optimizer again
        assert model.optimizer is own
        assert far(_fitted(model, x, y), _fitted(plain, x, y)) < 1e-6

    def test_a_train_step_of_the_script(self) -> None:
        class Doubled(keras.Model):
            def __init__(self) -> None:
                super().__init__()
                self.inner = made()

            def call(self, x: Any, training: bool = False) -> Any:
                return self.inner(x, training=training)

            def train_step(self, data: Any) -> dict[str, Any]:
                x, y = data
                with tf.GradientTape() as tape:
                    loss = 2 * self.compute_loss(y=y, y_pred=self(x, training=True))
                weights = self.trainable_variables
                self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
                return {"loss": loss}

        x, y = samples()
        models = [Doubled() for _ in range(2)]
        for model in models:
            model.compile(keras.optimizers.SGD(LR), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
            model(x[:1])  # Keras builds a model with a train step of its own no earlier than at its first batch
        for model, callbacks in zip(models, ([paceline.keras.Pace("sgd", lr=LR)], []), strict=True):
            model.fit(x, y, batch_size=16, shuffle=False, verbose=0, callbacks=callbacks)
        assert far(*(model.get_weights() for model in models)) < 1e-6

    def test_the_end_of_the_run_ends_fit(self) -> None:
        x, y = samples()
        pace = paceline.keras.Pace("downpour", lr=LR, window=2, steps=3)
        history = compiled(made()).fit(x, y, batch_size=16, epochs=50, verbose=0, callbacks=[pace])
        assert pace.loop.updates == 3
        assert len(history.history["loss"]) == 1

    @pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of Keras itself
    def test_a_fit_that_raises_fails_its_run_and_another_one_can_follow(self) -> None:
        x, y = samples()
        model = compiled(made())
        with pytest.raises(UsageError, match="learning rate of the optimizer"):
            model.fit(
                x,
                y,
                verbose=0,
                callbacks=[
                    keras.callbacks.LearningRateScheduler(lambda epoch: 0.5),
                    paceline.keras.Pace("sgd", lr=LR, directory="failed"),
                ],
            )
        pace = paceline.keras.Pace("sgd", lr=LR)
        compiled(made()).fit(x, y, verbose=0, callbacks=[pace])
        assert pace.loop.updates == 5
        assert "error" in Path("failed/result.json").read_text()
        assert isinstance(model.optimizer, keras.optimizers.SGD)

    @pytest.mark.parametrize(
        ("model", "text"),
        [
            (lambda: compiled(made(), steps_per_execution=4), "steps_per_execution must be 1"),
            (lambda: compiled(made(keras.layers.Dense(4, bias_constraint="non_neg"))), "has a constraint on"),
        ],
    )
    def test_models_that_would_train_something_else(self, model: Any, text: str) -> None:
        with pytest.raises(UsageError, match=text):
            model().fit(*samples(), verbose=0, callbacks=[paceline.keras.Pace("sgd", lr=LR)])

    def test_a_callback_before_its_fit(self) -> None:
        with pytest.raises(UsageError, match="has no run yet"):
            _ = paceline.keras.Pace("sgd").loop


def _fitted(model: Any, x: Any, y: Any) -> list[Any]:
    model.fit(x, y, batch_size=16, shuffle=False, verbose=0)
    found: list[Any] = model.get_weights()
    return found


class TestShares:
    def test_of_arrays_datasets_and_batches(self) -> None:
        from paceline.keras.data_shares import _share

        numbers = np.arange(10)
        assert _share(numbers, 1, 3).tolist() == [1, 4, 7]
        assert {name: one.tolist() for name, one in _share({"a": numbers}, 2, 3).items()} == {"a": [2, 5, 8]}
        assert [int(one) for one in _share(tf.data.Dataset.from_tensor_slices(numbers), 0, 3)] == [0, 3, 6, 9]

        class Batches(keras.utils.PyDataset):
            def __len__(self) -> int:
                return 5

            def __getitem__(self, index: int) -> Any:
                return np.full(2, index)

        mine = _share(Batches(), 1, 2)
        assert [mine[index][0] for index in range(len(mine))] == [1, 3]

    def test_of_something_else(self) -> None:
        from paceline.keras.data_shares import _share

        with pytest.raises(UsageError, match="or a PyDataset, not a generator"):
            _share((one for one in range(3)), 0, 2)
        with pytest.raises(UsageError, match="too few for 4 workers"):
            _share(np.arange(3), 0, 4)


MODEL = """
import keras
import paceline, paceline.keras

def made():
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((8,)), keras.layers.Dense(6, activation="tanh"),
                             keras.layers.BatchNormalization(), keras.layers.Dense(3)])

model = made()
cost = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

def loss_of(x, y):
    return cost(y, model(x, training=True))
"""
OTHER_BACKEND = (
    DATA
    + MODEL
    + """
assert keras.backend.backend() == sys.argv[1] if len(sys.argv) > 1 else True
def far(a, b):
    return max(float(abs(one - other).max()) for one, other in zip(a, b))

def fitted(model, callbacks):
    model.compile(optimizer=keras.optimizers.SGD(0.1), loss=cost)
    model.fit(X, Y, batch_size=32, epochs=2, shuffle=False, verbose=0, callbacks=callbacks)
    return model.get_weights()

plain = fitted(made(), [])
print("fit", far(plain, fitted(made(), [paceline.keras.Pace("sgd", lr=0.1)])))
for form in ("compiled", "as it is"):
    model = made()
    with paceline.attach(model, "sgd", lr=0.1) as pace:
        for x, y in pace.share(items, epochs=2):
            pace.step(loss_of, x, y) if form == "compiled" else pace.step(lambda: loss_of(x, y))
    print(form, far(plain, model.get_weights()))
tracked = keras.metrics.Mean()
def tracks():
    loss = loss_of(*items[0])
    tracked.update_state(loss)
    return loss
try:
    with paceline.attach(model, "sgd", lr=0.1) as pace:
        pace.step(tracks)
    print("metric taken")
except paceline.UsageError as error:
    print("metric refused", error)
"""
)


@pytest.mark.parametrize("backend", BACKENDS)
def test_other_backends_are_the_plain_loop_too(tmp_path: Path, backend: str) -> None:
    printed = python(OTHER_BACKEND, tmp_path, backend).splitlines()
    found = {
        line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in printed if "e-0" in line or " 0.0" in line
    }
    assert found.keys() == {"fit", "compiled", "as it is"}
    assert max(found.values()) < 2e-6
    last = printed[-1]
    assert last.startswith(
        "metric refused the loss function changes a variable" if backend == "jax" else "metric taken"
    )


LOOP = (
    DATA
    + KILL
    + MODEL
    + """
with paceline.attach(model, "async", lr=0.2, steps=60) as pace:
    for x, y in pace.share(items):
        perhaps_die(pace)
        pace.step(loss_of, x, y)
keep(f"{pace.rank}.npy", model.get_weights())
if pace.chief:
    keep("losses.npy", [keras.ops.convert_to_numpy(cost(Y, one(X))) for one in (made(), model)])
"""
)
FIT = (
    DATA
    + KILL
    + MODEL
    + """
class Fault(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        perhaps_die(pace.loop)

model.compile(optimizer="adam", loss=cost)
x, y = paceline.keras.share(X, Y)
pace = paceline.keras.Pace("async", lr=0.2, steps=60)
model.fit(x, y, batch_size=32, epochs=1000, verbose=0, callbacks=[pace, Fault()])
keep(f"{pace.rank}.npy", model.get_weights())
if pace.chief:
    keep("losses.npy", [keras.ops.convert_to_numpy(cost(Y, one(X))) for one in (made(), model)])
"""
)


@pytest.mark.parametrize(("script", "backend"), [(LOOP, "tensorflow"), (FIT, "tensorflow"), (FIT, "jax")])
def test_two_workers_train_and_a_killed_one_is_back(tmp_path: Path, script: str, backend: str) -> None:
    if backend not in ("tensorflow", *BACKENDS):
        pytest.skip(f"needs {backend}")
    result = launched(script, tmp_path, "--servers", "1", backend=backend)
    assert (result["updates"], result["restarts"]) == (60, 1)
    ends = [np.load(tmp_path / f"{rank}.npy") for rank in range(2)]
    assert (ends[0] == ends[1]).all()
    before, after = np.load(tmp_path / "losses.npy")
    assert after < before / 2
    if script is FIT and backend == "jax":
        assert launched(script, tmp_path, "--resume", "--dir", "run", "--steps", "90", backend=backend)["updates"] == 90


def test_tensorflow_has_as_many_threads_as_torch(tmp_path: Path) -> None:
    count = """
names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
np.save(f"threads{pace.rank}.npy", names.count("tf_Compute"))
"""
    launched(LOOP.replace("        perhaps_die(pace)\n", "") + count, tmp_path, "--threads", "1")
    assert [int(np.load(tmp_path / f"threads{rank}.npy")) for rank in range(2)] == [1, 1]


@pytest.mark.parametrize(
    ("name", "options"), [("keras_loop", "--steps 20 --width 8"), ("keras_fit", "--epochs 2 --width 8")]
)
def test_the_examples_train(tmp_path: Path, name: str, options: str) -> None:
    result = launched(EXAMPLES / f"{name}.py", tmp_path, "--", *options.split())
    assert result["updates"] > 0
    assert result["metrics"]["loss"] < 2.6
