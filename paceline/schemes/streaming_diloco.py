"""Streaming DiLoCo: one fragment of the model after the other is exchanged, while the workers compute."""

from dataclasses import dataclass

import torch

from paceline.compressor import Fragment
from paceline.errors import UsageError
from paceline.fields import Natural, Steps
from paceline.rules import AdamW, Nesterov, Rule
from paceline.schedules import Schedule
from paceline.scheme import Count, Fraction, Rate, Scheme, State, Vector
from paceline.schemes._fragments import Pattern, fragments, put, taken
from paceline.schemes._local import local_steps, outer_cells, whole
from paceline.worker import Worker


@dataclass(frozen=True)
class StreamingDiLoCo(Scheme):
    """Streaming DiLoCo: every window one fragment of the parameters is exchanged, overlapped with local steps.

    Douillard et al. 2025 (arXiv 2501.18512); eager updates: Kale, Douillard, Donchev 2025 (arXiv 2502.12996).

    worker:  `window` times: y <- y - lr * rule(gradient(y));  `overlap` steps before the end, for one fragment p:
                 start d <- mean of x_p - y_p over the workers
             m_p <- momentum * m_p + d;  x_p <- x_p - outer_lr * (d + momentum * m_p)
             y_p <- (1 - merge) * x_p + merge * y_p

    Fragments take turns, so that each is exchanged every window * fragments steps (H in the paper): layers by the names
    of their parameters, every n-th to a fragment (`pattern=strided`) or neighbours together (`sequential`). A model
    with fewer layers is cut in equal parts. What is evaluated is x. fragments=1, overlap=0, merge=0 is `diloco`. With
    `eager` (fragments=1) a mean takes a whole window. Each worker goes on at once along the last mean, in which its own
    new delta replaces its old one, from a centre z of its own; x goes along the means alone:

    worker:  start e <- mean of d over the workers;  y <- z;  `window` local steps;  n <- z - y
             outer step of x along e;  outer step of z along e + (n - d) / workers;  d <- n

    The 4 bits of the paper are `compress=fp4:format=e3m0`. The arithmetic was checked against torchft (local_sgd.py),
    whose fragment_sync_delay is overlap and fragment_update_alpha merge; overlap=1, merge=0.5 and fragments of layers
    (of a transformer 3, H of 30 or 100) against public summaries of the paper; the words of eager updates against one
    of theirs; outer_lr is recalled. Differs from the paper: without compress deltas are not rounded.
    """

    lr: Rate = 4e-4
    rule: Rule = AdamW(weight_decay=0.1)
    window: Steps = 20
    fragments: Count = 4
    pattern: Pattern = "strided"
    overlap: Natural = 1
    merge: Fraction = 0.5
    eager: bool = False
    outer: Rule = Nesterov()
    outer_lr: Rate = 0.4
    fixed_order = True
    compresses = ("mean",)
    family = "local updates"
    good_for = "language models over slow links: lower peaks than diloco, and no wait for the network"
    volume = "2 / window / fragments"
    limit = "the outer momentum moves x outer_lr / (1 - momentum) as far in the long run"
    equals = "fragments=1 overlap=0 merge=0 is diloco with the same outer_lr"

    def worker(self, x0: Vector, workers: int) -> State:
        cells = {"x": x0, **self.rule.cells(x0)}
        if self.eager:
            cells |= {"d": torch.zeros_like(x0), "own_x": x0, **outer_cells(self.outer, x0, "own_")}
        for p, fragment in enumerate(self.fragments_of(len(x0))):
            x = taken(x0, fragment).clone()
            cells |= {f"part{p}_x": x, **outer_cells(self.outer, x, f"part{p}_")}
        return State(**cells)

    async def step(self, w: Worker) -> None:
        await (self._eager_step(w) if self.eager else self._streaming_step(w))

    async def _streaming_step(self, w: Worker) -> None:
        parts = self.fragments_of(len(w.x))
        p = w.v % len(parts)
        centre = w.state.under(f"part{p}_")
        overlap = min(self.overlap, whole(self.window))
        await local_steps(w, self.rule, self.lr, whole(self.window) - overlap)
        pending = await w.start(w.mean(centre.x - taken(w.x, parts[p]), fragment=p))
        await local_steps(w, self.rule, self.lr, overlap)
        d = await pending
        self.outer.apply(centre, d, self.outer_lr)
        put(w.x, parts[p], torch.lerp(centre.x, taken(w.x, parts[p]), self.merge))
        w.v += 1

    async def _eager_step(self, w: Worker) -> None:
        centre, own = w.state.under("part0_"), w.state.under("own_")
        w.x = own.x
        pending = await w.start(w.mean(w.d))
        await local_steps(w, self.rule, self.lr, whole(self.window))
        new = own.x - w.x
        e = await pending
        self.outer.apply(centre, e, self.outer_lr)
        self.outer.apply(own, e + (new - w.d) / w.workers, self.outer_lr)
        w.d = new
        w.v += 1

    def model(self, s: State) -> Vector:
        x: Vector = s.x.clone()
        for p, fragment in enumerate(self.fragments_of(len(s.x))):
            put(x, fragment, s.cell(f"part{p}_x"))
        return x

    def fragments_of(self, length: int) -> tuple[Fragment, ...]:
        return fragments(self.parameters, length, self.fragments, self.pattern)

    def check(self, workers: int) -> None:
        if self.eager and self.fragments != 1:
            raise UsageError("streaming-diloco: eager updates are of the whole vector; give fragments=1 with eager")
        if self.overlap > self.window:
            raise UsageError(
                f"streaming-diloco: overlap is {self.overlap}, but a window has {self.window:g} steps; "
                "one fragment is under way at a time"
            )

    def gradients_per_update(self, workers: int) -> float | None:
        return None if isinstance(self.window, Schedule) else workers * self.window
