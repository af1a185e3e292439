"""A recommender: embeddings of users and films, and a small network that says whether a user likes a film."""

import argparse

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--batch", type=int, default=256)
parser.add_argument("--users", type=int, default=2000)
parser.add_argument("--films", type=int, default=500)
parser.add_argument("--ratings", type=int, default=200_000)
parser.add_argument("--width", type=int, default=16)
parser.add_argument("--sparse", action="store_true", help="sparse gradients of the embeddings")
parser.add_argument("--out", default="recommender.pt")
args = parser.parse_args()
torch.manual_seed(6)


class Recommender(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(args.users, args.width, sparse=args.sparse)
        self.films = nn.Embedding(args.films, args.width, sparse=args.sparse)
        for table in (self.users, self.films):
            nn.init.normal_(table.weight, std=0.1)
        self.mix = nn.Sequential(nn.Linear(2 * args.width, args.width), nn.ReLU(), nn.Linear(args.width, 1))

    def forward(self, user: torch.Tensor, film: torch.Tensor) -> torch.Tensor:
        u, f = self.users(user), self.films(film)
        return (u * f).sum(1) + self.mix(torch.cat([u, f], 1)).squeeze(1)


def ratings() -> TensorDataset:
    """Made up: users and films have hidden tastes, and films differ in how often they are seen."""
    tastes, kinds = torch.randn(args.users, 4), torch.randn(args.films, 4)
    users = torch.randint(args.users, (args.ratings,))
    films = (args.films * torch.rand(args.ratings) ** 2).long()
    likes = (tastes[users] * kinds[films]).sum(1) + 0.5 * torch.randn(args.ratings) > 0
    return TensorDataset(users, films, likes.float())


loader = DataLoader(ratings(), args.batch, shuffle=True)
model = Recommender()
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)

for epoch in range(args.epochs):
    for users, films, likes in loader:
        loss = F.binary_cross_entropy_with_logits(model(users, films), likes)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: loss {loss.item():.3f}")

torch.save(model.state_dict(), args.out)
