"""A worker of the row `TensorFlow mirrored` in bench.py: prints its samples per second. TF_CONFIG says which it is."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np
import tensorflow as tf

LAYERS = {"mnist-mlp": (128,), "wide-mlp": (2816, 2720)}
SAMPLES = 20_000


def model_of(name: str) -> Any:
    layers = tf.keras.layers
    if name == "mnist-cnn":
        inner = []
        for filters in (32, 64):
            inner += [layers.Conv2D(filters, 5, padding="same", activation="relu"), layers.MaxPool2D()]
        inner += [layers.Flatten(), layers.Dense(1024, activation="relu"), layers.Dropout(0.5)]
        return tf.keras.Sequential([tf.keras.Input((28, 28, 1)), *inner, layers.Dense(10)])
    inner = [layers.Dense(width, activation="relu") for width in LAYERS[name]]
    return tf.keras.Sequential([tf.keras.Input((28, 28, 1)), layers.Flatten(), *inner, layers.Dense(10)])


def main() -> None:
    told = json.loads(sys.argv[1])
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model, optimizer = model_of(told["model"]), tf.keras.optimizers.SGD(told["lr"])
    random = np.random.default_rng(0)
    images, labels = random.random((SAMPLES, 28, 28, 1), dtype=np.float32), random.integers(0, 10, SAMPLES)

    def batches(_: Any) -> Any:
        return tf.data.Dataset.from_tensor_slices((images, labels)).shuffle(SAMPLES).repeat().batch(told["batch"])

    data = iter(strategy.distribute_datasets_from_function(batches))

    @tf.function
    def step(batch: Any) -> None:
        def one(x: Any, y: Any) -> None:
            with tf.GradientTape() as tape:
                losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x, training=True))
                loss = tf.reduce_mean(losses) / strategy.num_replicas_in_sync
            optimizer.apply_gradients(
                zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True)
            )

        strategy.run(one, args=batch)

    def lap(steps: int) -> float:
        began = time.perf_counter()
        for _ in range(steps):
            step(next(data))
        return time.perf_counter() - began

    lap(told["warm"])
    each = lap(told["warm"]) / told["warm"]
    mean = strategy.run(lambda: tf.constant(each, tf.float32))
    agreed = float(strategy.reduce(tf.distribute.ReduceOp.MEAN, mean, axis=None))  # all must make as many steps
    steps = max(5, int(told["seconds"] / agreed))
    print(steps * told["batch"] / lap(steps))


if __name__ == "__main__":
    main()
