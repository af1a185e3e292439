"""The server's side of schemes that make an update of the mean of several gradients."""

import math
from dataclasses import dataclass
from typing import Any

import torch

from paceline import stability
from paceline.fields import Natural
from paceline.rules import SGD, Rule
from paceline.scheme import Count, Rate, Scheme, State, Vector, on_server
from paceline.schemes.sync import in_order
from paceline.worker import Worker


@dataclass(frozen=True)
class Collected(Scheme):
    """Gradients are kept until there are `k`; their mean, added in the order of ranks, makes the update.

    `adapt_every=n` is AdaSync (Dutta, Wang, Joshi 2020, arXiv 2003.10579): every n updates k grows as the loss falls,
    k <- min(workers, ceil(first k * sqrt(first loss / loss))), and never falls. A loss is the mean of what the workers
    report with their gradients since the last change of k. The root of the ratio of losses, and the limit of all
    workers, were checked against public code of another author for K-async SGD, not against the paper's text. That code
    rounds to the nearest number, where ceil is used here; its losses are of the whole training set, the first one
    before any update; it changes k after equal times, not equal numbers of updates, and k may fall again.
    """

    lr: Rate = 0.1
    rule: Rule = SGD()
    k: Count | None = None
    adapt_every: Natural = 0
    rule_at_server = True
    compresses = ("push.g",)
    warnings = stability.synchronous

    def wanted(self, workers: int) -> int:
        """k, or half of the workers."""
        return self.k or -(-workers // 2)

    def server(self, x0: Vector, workers: int) -> State:
        return State(x=x0, **self.kept_cells(x0, workers), **self.rule.cells(x0))

    def kept_cells(self, x0: Vector, workers: int) -> dict[str, Any]:
        """The cells of the gradients that wait for their update, and of a k that adapts."""
        need = self.wanted(workers)
        rows = max(need, workers) if self.adapt_every else need
        kept, whose = torch.zeros(rows, len(x0), dtype=x0.dtype), torch.zeros(rows, dtype=torch.int64)
        adapts = {"first_k": need, "most": need, "first_loss": 0.0, "losses": 0.0, "reports": 0}
        return {"need": need, "got": 0, "kept": kept, "whose": whose} | (adapts if self.adapt_every else {})

    @on_server
    def report(self, s: State, loss: float) -> None:
        s.losses += loss
        s.reports += 1

    async def reported(self, w: Worker) -> None:
        """Tell the server the loss of the gradient that is about to be pushed, if k depends on it."""
        if self.adapt_every:
            await self.report(w.loss)

    def keep(self, s: State, g: Vector, rank: int) -> bool:
        """Keep a gradient, or make the update with it if it is the last; True after an update."""
        if s.got + 1 < s.need:
            s.write("kept", s.got, g)
            s.write("whose", s.got, rank)
            s.got += 1
            return False
        self.update(s, (rank, g))
        return True

    def update(self, s: State, *last: tuple[int, Vector]) -> None:
        """Make an update of the gradients that are kept, and of the last one, which needs no copy."""
        self.rule.apply(s, self.combined(in_order(s, *last)), self.lr)
        s.v += 1
        s.got = 0
        if self.adapt_every and s.v % self.adapt_every == 0 and s.reports:
            loss = s.losses / s.reports
            s.first_loss = s.first_loss or loss
            grown = math.ceil(s.first_k * math.sqrt(s.first_loss / loss)) if s.first_loss * loss > 0 else 0
            s.most = max(s.most, min(grown, len(s.whose)))
            s.losses, s.reports = 0.0, 0
            s.need = self.needed(s)

    def needed(self, s: State) -> int:
        """The number of gradients that make the next update: k as it is now."""
        return s.most if self.adapt_every else len(s.whose)

    def gradients_per_update(self, workers: int) -> float | None:
        return None if self.adapt_every else self.wanted(workers)
