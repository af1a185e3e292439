"""A worker that is two processes: torch's DistributedDataParallel inside, DiLoCo between the workers.

paceline run examples/inside_ddp.py --workers 2       two workers of two processes each
python examples/inside_ddp.py                         by itself: one worker of two processes

Rank 0 of each worker has the data and calls attach. Before every gradient it sends the parameters and the batch to the
other rank; both compute a half of the batch, and DistributedDataParallel averages the gradients.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.datasets import load

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--window", type=int, default=20)
args = parser.parse_args()

rank = paceline.inner_rank(2)  # from here on two processes run this script
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
ddp = DistributedDataParallel(model)


def half(images: Tensor, labels: Tensor) -> Tensor:
    """The loss of this rank's half of the batch."""
    return cross_entropy(ddp(images[rank::2]), labels[rank::2])


def lead() -> None:
    data = load("digits")
    (images, labels), (test_images, test_labels) = ((x.flatten(1).float() / 16, y) for x, y in (data.train, data.test))
    loader = DataLoader(TensorDataset(images, labels), batch_size=32, shuffle=True, drop_last=True)

    def evaluate(model: nn.Module) -> dict[str, float]:
        return {"accuracy": (model(test_images).argmax(1) == test_labels).double().mean().item()}

    hyper = {"window": args.window, "lr": 0.1, "rule": "sgd"}
    with paceline.attach(model, "diloco", steps=args.steps, evaluate=evaluate, **hyper) as pace:
        for images, labels in pace.share(loader):
            dist.broadcast(torch.tensor(len(images)), src=0)
            for sent in (parameters_to_vector(model.parameters()).detach(), images, labels):
                dist.broadcast(sent, src=0)
            pace.step(half(images, labels))
    dist.broadcast(torch.tensor(0), src=0)  # the others may end
    if pace.chief:
        pace.say(f"accuracy {evaluate(model)['accuracy']:.2%} after {pace.updates} updates")


def follow() -> None:
    size, x = torch.tensor(0), parameters_to_vector(model.parameters()).detach()
    while True:
        dist.broadcast(size, src=0)
        if not size:
            return
        images, labels = torch.empty(int(size), 64), torch.empty(int(size), dtype=torch.long)
        for received in (x, images, labels):
            dist.broadcast(received, src=0)
        vector_to_parameters(x, model.parameters())
        model.zero_grad()
        half(images, labels).backward()


lead() if rank == 0 else follow()
