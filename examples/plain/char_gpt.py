"""A character model in the style of nanoGPT: AdamW with groups, warm-up and cosine, clipping, accumulation, bf16."""

import argparse
import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

from paceline.datasets import load

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=2000)
parser.add_argument("--micro", type=int, default=4, help="micro-batches of a step")
parser.add_argument("--batch", type=int, default=16)
parser.add_argument("--context", type=int, default=128)
parser.add_argument("--width", type=int, default=128)
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--out", default="char_gpt.pt")
args = parser.parse_args()
warmup = max(1, args.steps // 20)
torch.manual_seed(1337)

text = load("shakespeare")
tokens = text.train[0].long()


class Block(nn.Module):
    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, length, width = x.shape
        parts = self.qkv(self.norm1(x)).view(n, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(n, length, width))
        return x + self.mlp(self.norm2(x))


class CharGPT(nn.Module):
    def __init__(self, characters: int, width: int, layers: int, context: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(characters, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, characters, bias=False)
        self.head.weight = self.token.weight
        nn.init.normal_(self.token.weight, std=0.02)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.token(ids) + self.place(torch.arange(ids.shape[1]))
        return F.cross_entropy(self.head(self.norm(self.blocks(x))).flatten(0, 1), targets.flatten())


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    starts = torch.randint(len(tokens) - args.context - 1, (args.batch,))
    pieces = torch.stack([tokens[start : start + args.context + 1] for start in starts.tolist()])
    return pieces[:, :-1], pieces[:, 1:]


def scale(step: int) -> float:
    """Of the rate: it grows in the warm-up, then falls along half a cosine."""
    if step < warmup:
        return (step + 1) / warmup
    done = min(1.0, (step - warmup) / (args.steps - warmup))
    return 0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2


def groups(model: nn.Module) -> list[dict[str, object]]:
    """Matrices decay, biases and norms do not."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


model = CharGPT(len(text.characters), args.width, args.layers, args.context)
optimizer = torch.optim.AdamW(groups(model), lr=1e-3, betas=(0.9, 0.95))
schedule = LambdaLR(optimizer, scale)

for step in range(args.steps):
    for _ in range(args.micro):
        ids, targets = batch()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(ids, targets) / args.micro
        loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
    if step % 100 == 0:
        print(f"step {step}: loss {loss.item() * args.micro:.3f}")

torch.save(model.state_dict(), args.out)
