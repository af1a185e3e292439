"""The guides' program with tf.estimator.train_and_evaluate, for a Keras network: every task of the cluster runs it.

TF_CONFIG says who this process is (chief, worker, ps, evaluator), as in the guides; without it all of them are
processes of this machine. All end by themselves.

python examples/from-tensorflow/train_and_evaluate.py

Needs Keras and a backend: pip install 'paceline[keras]'
"""

from __future__ import annotations

import argparse
from pathlib import Path

from paceline import EvalSpec, TrainSpec, train_and_evaluate

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=1000)
parser.add_argument("--workers", type=int, help="without TF_CONFIG, which says it")
parser.add_argument("--dir", default="model")


def main() -> None:
    args = parser.parse_args()
    network = Path(__file__).with_name("keras_softmax.py")
    result = train_and_evaluate(
        TrainSpec(f"{network}:make", "async", max_steps=args.steps, hyper={"lr": 0.2}),
        EvalSpec(metric="accuracy"),
        workers=args.workers,
        directory=args.dir,
        checkpoint_seconds=5,
    )
    print(f"accuracy {result.metrics['accuracy']:.2%} after {result.updates} updates of {result.workers} workers")


if __name__ == "__main__":
    main()
