"""A training script of one's own under any scheme: the loop stays, five lines change.

paceline run examples/attach_mnist.py --workers 4       four workers and a server
python examples/attach_mnist.py                         by itself: one worker that is its own server
"""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.datasets import load

data = load(sys.argv[1] if len(sys.argv) > 1 else "mnist")  # or digits, which needs no download
(images, labels), (test_images, test_labels) = ((x.flatten(1).float(), y) for x, y in (data.train, data.test))
scale = images.max()
loader = DataLoader(TensorDataset(images / scale, labels), batch_size=32, shuffle=True)
model = nn.Sequential(nn.Linear(images.shape[1], 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 10))


def evaluate(model: nn.Module) -> dict[str, float]:
    output = model(test_images / scale)
    return {
        "loss": cross_entropy(output, test_labels).item(),
        "accuracy": (output.argmax(1) == test_labels).double().mean().item(),
    }


with paceline.attach(
    model, scheme="downpour", lr=0.02, window=5, steps=1000, evaluate=evaluate, hooks=["validation:every=250"]
) as pace:
    for batch, target in pace.share(loader):
        pace.step(cross_entropy(model(batch), target))

model.eval()
with torch.no_grad():
    accuracy = evaluate(model)["accuracy"]
if pace.chief:  # every worker's model holds the same weights now
    pace.say(f"{data.name}: accuracy {accuracy:.2%} after {pace.updates:,} updates of {pace.workers} workers")
