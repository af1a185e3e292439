"""A ResNet with BatchNorm on CIFAR-10: SGD with momentum and weight decay, a linear rate, flips and crops."""

import argparse

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.datasets import load

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=24_000)
parser.add_argument("--batch", type=int, default=128)
parser.add_argument("--width", type=int, default=16)
parser.add_argument("--blocks", type=int, default=3, help="of each of three stages: 3 is ResNet-20")
parser.add_argument("--synthetic", type=int, default=0, help="that many made-up images instead of CIFAR-10")
parser.add_argument("--out", default="resnet.pt")
args = parser.parse_args()
torch.manual_seed(1)


def data() -> tuple[torch.Tensor, torch.Tensor]:
    if not args.synthetic:
        return load("cifar").train
    labels = torch.arange(args.synthetic) % 10
    shades = torch.randint(0, 256, (10, 3, 1, 1))  # each class has a colour
    return (shades[labels] + torch.randint(-40, 40, (args.synthetic, 3, 32, 32))).clamp(0, 255).byte(), labels


def augmented(images: torch.Tensor) -> torch.Tensor:
    """Each batch is flipped or not, and cut out of a frame of 4 black pixels."""
    images = images.float() / 127.5 - 1
    x, y = torch.randint(0, 9, (2,)).tolist()
    images = F.pad(images, (4, 4, 4, 4))[:, :, y : y + 32, x : x + 32]
    return images.flip(3) if torch.rand(()) < 0.5 else images


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(outputs) for _ in range(2))
        self.skip = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norms[0](self.first(x)))
        return F.relu(self.norms[1](self.second(y)) + self.skip(x))


def resnet(width: int, blocks: int) -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    inputs = width
    for stage in range(3):
        for number in range(blocks):
            outputs = width << stage
            layers.append(Block(inputs, outputs, 2 if stage and not number else 1))
            inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 10))


loader = DataLoader(TensorDataset(*data()), args.batch, shuffle=True, drop_last=True)
model = resnet(args.width, args.blocks)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)


def schedule(optimizer: torch.optim.Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 1 - step / args.steps)


with paceline.attach(model, "sync", optimizer=optimizer, schedule=schedule, steps=args.steps) as pace:
    for images, labels in pace.share(loader):
        pace.step(F.cross_entropy(model(augmented(images)), labels))

if pace.chief:
    torch.save(model.state_dict(), args.out)
