"""An advantage actor-critic that learns to balance a pole on a cart, in several carts at once."""

import argparse

import torch
from torch import nn
from torch.nn import functional as F

import paceline

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=1500)
parser.add_argument("--carts", type=int, default=16)
parser.add_argument("--length", type=int, default=32, help="moves between two updates")
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--out", default="actor_critic.pt")
args = parser.parse_args()
torch.manual_seed(5)


class Carts:
    """Poles on carts, as Barto, Sutton and Anderson (1983) describe them. A pole that falls is set up again."""

    def __init__(self, number: int) -> None:
        self.state = torch.rand(number, 4) / 10 - 0.05  # position, speed, angle, turn
        self.age = torch.zeros(number)

    def move(self, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Push each cart to the right or the left: rewards, and which poles have fallen."""
        position, speed, angle, turn = self.state.unbind(1)
        push = (20 * right - 10 + 0.05 * turn**2 * angle.sin()) / 1.1
        spin = (9.8 * angle.sin() - angle.cos() * push) / (0.5 * (4 / 3 - 0.1 * angle.cos() ** 2 / 1.1))
        pull = push - 0.05 * spin * angle.cos() / 1.1
        moved = torch.stack([position + 0.02 * speed, speed + 0.02 * pull, angle + 0.02 * turn, turn + 0.02 * spin], 1)
        self.age += 1
        fallen = (moved[:, 0].abs() > 2.4) | (moved[:, 2].abs() > 0.21) | (self.age >= 500)
        fresh = torch.rand(len(moved), 4) / 10 - 0.05
        self.state = torch.where(fallen[:, None], fresh, moved)
        self.age *= ~fallen
        return torch.ones(len(moved)), fallen


def network(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(4, args.width), nn.Tanh(), nn.Linear(args.width, outputs))


model = nn.ModuleDict({"actor": network(2), "critic": network(1)})
optimizer = torch.optim.RMSprop(model.parameters(), lr=2e-3, alpha=0.99, eps=1e-5)

with paceline.attach(model, "async", optimizer=optimizer, steps=args.steps) as pace:
    carts, mean_age = Carts(args.carts), 0.0  # here each worker has random numbers of its own
    while not pace.done:
        chances, values, rewards, falls = [], [], [], []
        for _ in range(args.length):
            choice = torch.distributions.Categorical(logits=model["actor"](carts.state))
            values.append(model["critic"](carts.state).squeeze(1))
            move = choice.sample()
            chances.append((choice.log_prob(move), choice.entropy()))
            reward, fallen = carts.move(move.float())
            rewards.append(reward)
            falls.append(fallen)
        with torch.no_grad():
            gain, gains = model["critic"](carts.state).squeeze(1), []
            for reward, fallen in zip(reversed(rewards), reversed(falls), strict=True):
                gain = reward + 0.99 * gain * ~fallen
                gains.insert(0, gain)
        gains, values = torch.stack(gains), torch.stack(values)
        likely, entropy = (torch.stack(parts) for parts in zip(*chances, strict=True))
        loss = -(likely * (gains - values).detach()).mean() + 0.5 * F.mse_loss(values, gains) - 0.01 * entropy.mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        pace.step(loss.detach(), size=args.carts * args.length)
        mean_age = 0.9 * mean_age + 0.1 * carts.age.mean().item()
        if pace.chief and pace.updates % 100 == 0:
            pace.say(f"update {pace.updates}: poles stand for {mean_age:.0f} moves so far")

if pace.chief:
    torch.save(model.state_dict(), args.out)
