"""A small transformer that predicts the next character of Shakespeare."""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

from paceline.datasets import load
from paceline.errors import UsageError
from paceline.task import Task
from paceline.tasks._options import fraction, whole
from paceline.torch_task import TorchTask, accuracy
from paceline.torch_task.random_numbers import draws_nothing

TEST_WINDOWS = 256


class Block(nn.Module):
    """Causal attention, then two linear layers; each with a residual connection and a LayerNorm before it."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_layers = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project, self.merge = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, h: Tensor) -> Tensor:
        h = h + self.dropout(self.attention(self.before_attention(h)))
        wide = gelu(self.widen(self.before_layers(h)))
        result: Tensor = h + self.dropout(self.narrow(wide))
        return result

    def attention(self, h: Tensor) -> Tensor:
        batch, length, width = h.shape
        parts = self.project(h).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = scaled_dot_product_attention(query, key, value, is_causal=True)
        merged: Tensor = self.merge(seen.transpose(1, 2).reshape(batch, length, width))
        return merged


class CharLM(nn.Module):
    """Embeddings of characters and positions, some blocks, and a score for every possible next character."""

    def __init__(self, characters: int, context: int, width: int, layers: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(characters, width)
        self.place = nn.Parameter(torch.empty(context, width))
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm, self.score = nn.LayerNorm(width), nn.Linear(width, characters)
        for weight in (self.embed.weight, self.place):
            nn.init.normal_(weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embed(tokens) + self.place[: tokens.shape[1]]
        scores: Tensor = self.score(self.norm(self.blocks(h)))
        return scores


def _loss(scores: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(scores.flatten(0, 1), target.flatten())


def _bits(scores: Tensor, target: Tensor) -> float:
    return _loss(scores, target).item() / math.log(2)


def char_lm(context: int = 64, width: int = 64, layers: int = 2, heads: int = 4, dropout: float = 0.0) -> Task:
    """Tiny Shakespeare, the next character by a small transformer; needs no download.

    Data: 1,115,394 characters, the last tenth to test. A decoder that normalises first, as GPT-2 does, with
    `context` characters in view. Batches are random windows of the text; evaluated on 256 fixed windows spread
    evenly over the test text. `bits` is the loss in bits per character.
    """
    whole(1, context=context, width=width, layers=layers, heads=heads)
    fraction(dropout=dropout)
    if width % heads:
        raise UsageError(f"width must be a multiple of heads, not {width} with {heads} heads")
    data = load("shakespeare")
    text = torch.cat((*data.train, *data.test)).long()
    begin, end = len(data.train[0]), len(text) - context - 1
    if context >= end - begin:
        raise UsageError(f"context must be below {end - begin}, the length of the test text, not {context}")
    reach = torch.arange(context + 1)

    @draws_nothing
    def window(starts: Tensor) -> tuple[Tensor, Tensor]:
        tokens = text[starts[:, None] + reach]
        return tokens[:, :-1], tokens[:, 1:]

    return TorchTask(
        lambda: CharLM(len(data.characters), context, width, layers, heads, dropout),
        _loss,
        (torch.arange(begin - context),),
        (torch.linspace(begin, end, TEST_WINDOWS, dtype=torch.float64).long(),),
        batch=32,
        name="char-lm",
        metrics={"accuracy": accuracy, "bits": _bits},
        prepare=window,
    )
