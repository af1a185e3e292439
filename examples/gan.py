"""A GAN on 8 x 8 digits. Both networks are updated at once, each by the gradient of its own loss."""

import argparse

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.datasets import load

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=100)
parser.add_argument("--batch", type=int, default=64)
parser.add_argument("--width", type=int, default=128)
parser.add_argument("--out", default="gan.pt")
args = parser.parse_args()
torch.manual_seed(4)

images = load("digits").train[0].float().flatten(1)
loader = DataLoader(TensorDataset(images / 8 - 1), args.batch, shuffle=True, drop_last=True)
noise = 16
generator = nn.Sequential(
    nn.Linear(noise, args.width), nn.BatchNorm1d(args.width), nn.ReLU(), nn.Linear(args.width, 64), nn.Tanh()
)
critic = nn.Sequential(nn.Linear(64, args.width), nn.LeakyReLU(0.2), nn.Linear(args.width, 1))
both = nn.ModuleDict({"generator": generator, "critic": critic})
optimizer = torch.optim.Adam(both.parameters(), lr=2e-4, betas=(0.5, 0.999))


def says(samples: torch.Tensor, real: bool) -> torch.Tensor:
    """The loss of the critic's opinion on samples that are, or are not, real."""
    scores = critic(samples)
    return F.binary_cross_entropy_with_logits(scores, torch.full_like(scores, float(real)))


with paceline.attach(both, "async", optimizer=optimizer) as pace:
    for epoch in range(args.epochs):
        for (real,) in pace.share(loader, epochs=1):
            fake = generator(torch.randn(len(real), noise))
            judged = says(real, True) + says(fake.detach(), False)
            fooled = says(fake, True)
            judged.backward(inputs=list(critic.parameters()))
            fooled.backward(inputs=list(generator.parameters()))
            pace.step(judged.detach())
        if epoch % 10 == 0:
            print(f"epoch {epoch}: critic {judged.item():.3f}, generator {fooled.item():.3f}")

if pace.chief:
    torch.save(both.state_dict(), args.out)
