"""One worker of paceline beside the own loop of a framework: the MNIST CNN of the guides, SGD, batch 100.

    python benchmarks/frameworks.py [--steps 300] [--rounds 3] [--threads 1] [--clock wall] [--only jax ...] [--json]

`own` is the framework's loop: `train_on_batch` of a compiled Keras model, a jitted step of JAX or a `tf.function` of
TensorFlow with its own update, on batches that are in memory. `paceline` is a real run of `sgd` with one worker, with
its batches, order log and hooks. Each is a process of its own; own and paceline alternate. Prints samples per second
and their ratio, medians of rounds. `--clock cpu` counts the CPU time of the process that trains, all its threads, in
place of the time that passes: what can be compared on a machine that is busy with other work.
Needs Keras, TensorFlow and JAX: pip install 'paceline[keras,tensorflow,jax]'
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import paceline
from paceline.datasets import load
from paceline.hook import Hook, Session

CONTENDERS = ("keras-tensorflow", "keras-jax", "keras-torch", "tensorflow", "jax")
WARM, BATCH, RATE = 30, 100, 0.05
SHAPES = {"c1": (5, 5, 1, 32), "c2": (5, 5, 32, 64), "d1": (7 * 7 * 64, 1024), "d2": (1024, 10)}
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
NOW = CLOCKS[os.environ.get("FRAMEWORKS_CLOCK", "wall")]  # roles of a run inherit it


class Clock(Hook):
    """Writes the seconds per step of the chief, after the first steps, to a file."""

    def __init__(self, path: Path) -> None:
        self.path, self.steps, self.began, self.last = path, 0, 0.0, 0.0

    def after_step(self, session: Session) -> None:
        self.steps, self.last = self.steps + 1, NOW()
        if self.steps == WARM:
            self.began = self.last

    def end(self, session: Session) -> None:
        self.path.write_text(repr((self.last - self.began) / (self.steps - WARM)), encoding="ascii")


def images() -> tuple[Any, Any]:
    pictures, digits = load("mnist").train
    return pictures.reshape(-1, 28, 28, 1).float().numpy() / 255, digits.numpy()


def keras_network() -> Any:
    import keras

    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Conv2D(32, 5, padding="same", activation="relu"),
            layers.MaxPooling2D(2),
            layers.Conv2D(64, 5, padding="same", activation="relu"),
            layers.MaxPooling2D(2),
            layers.Flatten(),
            layers.Dense(1024, activation="relu"),
            layers.Dense(10),
        ]
    )


def jax_init(key: Any) -> dict[str, Any]:
    import jax

    keys = jax.random.split(key, len(SHAPES))
    kernels = {
        name: jax.random.normal(one, shape) * 0.05 for one, (name, shape) in zip(keys, SHAPES.items(), strict=True)
    }
    return kernels | {f"b{name}": jax.numpy.zeros(shape[-1]) for name, shape in SHAPES.items()}


def jax_output(w: dict[str, Any], x: Any) -> Any:
    import jax

    for name in ("c1", "c2"):
        x = jax.lax.conv_general_dilated(x, w[name], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        x = jax.lax.reduce_window(
            jax.nn.relu(x + w[f"b{name}"]), -jax.numpy.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"
        )
    hidden = jax.nn.relu(x.reshape(len(x), -1) @ w["d1"] + w["bd1"])
    return hidden @ w["d2"] + w["bd2"]


def jax_loss(w: dict[str, Any], x: Any, y: Any) -> Any:
    import jax

    scores = jax.nn.log_softmax(jax_output(w, x))
    return -jax.numpy.take_along_axis(scores, y[:, None], 1).mean()


def tensorflow_variables() -> list[Any]:
    import tensorflow as tf

    kernels = [tf.Variable(tf.random.normal(shape) * 0.05, name=name) for name, shape in SHAPES.items()]
    return kernels + [tf.Variable(tf.zeros(shape[-1]), name=f"b{name}") for name, shape in SHAPES.items()]


def tensorflow_loss(held: list[Any], x: Any, y: Any) -> Any:
    import tensorflow as tf

    kernels, biases = held[: len(SHAPES)], held[len(SHAPES) :]
    for kernel, bias in zip(kernels[:2], biases[:2], strict=True):
        x = tf.nn.max_pool2d(tf.nn.relu(tf.nn.conv2d(x, kernel, 1, "SAME") + bias), 2, 2, "VALID")
    hidden = tf.nn.relu(tf.reshape(x, (-1, SHAPES["d1"][0])) @ kernels[2] + biases[2])
    scores = hidden @ kernels[3] + biases[3]
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, scores))


def task_of(contender: str) -> paceline.Task:
    if contender == "jax":
        return paceline.JaxTask(jax_init, jax_loss, images(), batch=BATCH)
    if contender == "tensorflow":
        return paceline.TensorFlowTask(tensorflow_loss, tensorflow_variables, images(), batch=BATCH)
    import keras

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return paceline.KerasTask(keras_network, loss, images(), batch=BATCH)


def by_paceline(contender: str, steps: int, threads: int) -> float:
    """Seconds per step of a run with one worker."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "seconds"
        task, hooks = task_of(contender), [Clock(found)]
        place = Path(folder) / "run"
        paceline.train(
            task, "sgd", workers=1, steps=WARM + steps, threads=threads, hooks=hooks, directory=place, lr=RATE
        )
        return float(found.read_text(encoding="ascii"))


def by_own_loop(contender: str, steps: int, threads: int) -> float:
    """Seconds per step of the framework's own loop."""
    torch.set_num_threads(threads)
    from paceline.framework_tasks import framework_start  # the same number of threads for both

    if contender.endswith("jax"):
        import jax

        framework_start.start_jax(jax)
    if contender.endswith("tensorflow"):
        import tensorflow

        framework_start.start_tensorflow(tensorflow)
    x, y = images()
    batches = [(x[at : at + BATCH], y[at : at + BATCH]) for at in range(0, 50 * BATCH, BATCH)]
    step = {"jax": jax_loop, "tensorflow": tensorflow_loop}.get(contender, keras_loop)()
    for number in range(WARM):
        step(*batches[number % len(batches)])
    began = NOW()
    for number in range(steps):
        step(*batches[number % len(batches)])
    return (NOW() - began) / steps


def keras_loop() -> Any:
    import keras

    model = keras_network()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(RATE), loss)
    return model.train_on_batch


def jax_loop() -> Any:
    import jax

    weights = jax_init(jax.random.key(0))

    @jax.jit
    def updated(w: Any, x: Any, y: Any) -> Any:
        loss, g = jax.value_and_grad(jax_loss)(w, x, y)
        return loss, jax.tree.map(lambda one, slope: one - RATE * slope, w, g)

    def step(x: Any, y: Any) -> float:
        nonlocal weights
        loss, weights = updated(weights, x, y)
        return float(loss)

    return step


def tensorflow_loop() -> Any:
    import tensorflow as tf

    held = tensorflow_variables()

    @tf.function
    def updated(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tensorflow_loss(held, x, y)
        for one, slope in zip(held, tape.gradient(loss, held), strict=True):
            one.assign_sub(RATE * slope)
        return loss

    return lambda x, y: float(updated(tf.constant(x), tf.constant(y)))


def measured(contender: str, way: str, given: argparse.Namespace) -> float:
    """Samples per second, in a process of its own."""
    words = [sys.executable, __file__, "--child", contender, way, "--steps", str(given.steps)]
    environment = dict(os.environ, TF_CPP_MIN_LOG_LEVEL="3", FRAMEWORKS_CLOCK=given.clock)
    if contender.startswith("keras-"):
        environment["KERAS_BACKEND"] = contender.removeprefix("keras-")
    words += ["--threads", str(given.threads)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{contender}, {way}:\n{done.stderr}")
    return BATCH / float(done.stdout.split()[-1])


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--steps", type=int, default=300)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--clock", choices=CLOCKS, default="wall")
    options.add_argument("--only", nargs="+", choices=CONTENDERS, default=CONTENDERS)
    options.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options.add_argument("--json", action="store_true")
    given = options.parse_args()
    if given.child:
        contender, way = given.child
        measure = by_paceline if way == "paceline" else by_own_loop
        print(measure(contender, given.steps, given.threads))
        return
    rows = {}
    for contender in given.only:
        rounds = [[measured(contender, way, given) for way in ("own", "paceline")] for _ in range(given.rounds)]
        own, ours = (statistics.median(column) for column in zip(*rounds, strict=True))
        rows[contender] = {"own": own, "paceline": ours, "ratio": statistics.median(p / o for o, p in rounds)}
    if given.json:
        print(json.dumps({"steps": given.steps, "threads": given.threads, "clock": given.clock, "rows": rows}))
        return
    table = Table(title=f"MNIST CNN, batch {BATCH}, one worker: samples per second", title_justify="left")
    for column in ("", "own loop", "paceline", "ratio"):
        table.add_column(column, justify="right" if column else "left")
    for name, row in rows.items():
        table.add_row(name, f"{row['own']:,.0f}", f"{row['paceline']:,.0f}", f"{row['ratio']:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
