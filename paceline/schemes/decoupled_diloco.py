"""Decoupled DiLoCo: learners that never wait; a syncer merges a fragment when enough of them have sent it."""

from dataclasses import dataclass
from typing import Literal

import torch

from paceline.compressor import Fragment
from paceline.errors import UsageError
from paceline.fields import Natural
from paceline.rules import AdamW, Nesterov, Rule
from paceline.scheme import Count, Fraction, Rate, Scheme, State, Vector, on_server
from paceline.schemes._fragments import Pattern, fragments, put, taken, tensors
from paceline.schemes._local import local_steps, outer_cells
from paceline.worker import Worker


@dataclass(frozen=True)
class DecoupledDiLoCo(Scheme):
    """Decoupled DiLoCo: asynchronous fragments; a quorum and an adaptive grace window say when one is merged.

    Google DeepMind, Decoupled DiLoCo, 2026 (arXiv 2604.21428).

    worker:  `window` times: y <- y - lr * rule(gradient(y));  `overlap` steps before the end, for fragment p = t mod P:
                 push(x_p - y_p, steps since x_p came, p), once for each x_p
             q, x_q <- fetch(), a fragment that was merged since x_q came:  y_q <- (1 - merge) * x_q + merge * y_q
    server:  push: keep it, if it is of the newest x_p;  with `least` of them, and after `grace_p` further pushes of
             any fragment, or when all are here:  d <- mean, weighted by steps;  x_p <- outer(x_p, d);  v <- v + 1

    Without `least` more than half of the workers are enough. The grace window of a fragment counts pushes: it grows by
    one when a push of that fragment came too late, up to `grace`, and shrinks by one when nothing came in it. grace=0
    merges at the quorum. least = workers is `streaming-diloco` where all compute alike. `average=radial` takes the mean
    length of the deltas of each parameter, and the direction of the sum of their directions: deltas of many learners
    are nearly orthogonal, and their plain mean is the shorter the more there are.

    Checked against public summaries and reimplementations of the paper, not its text. Differs from them: grace is
    counted in pushes, not in seconds, so that a run can be replayed; the plain mean is the default (the paper has it
    for embeddings, else radial); weights are steps, which is tokens * tokens / steps where all batches are alike; a
    learner takes the mean of a new x_q and its own (merge=0 overwrites it, as there); fragments are layers, not tensors
    packed to equal sizes; late deltas are dropped.
    """

    lr: Rate = 4e-4
    rule: Rule = AdamW(weight_decay=0.1)
    window: Count = 20
    fragments: Count = 4
    pattern: Pattern = "strided"
    overlap: Natural = 1
    merge: Fraction = 0.5
    least: Count | None = None
    grace: Natural = 2
    average: Literal["plain", "radial"] = "plain"
    outer: Rule = Nesterov()
    outer_lr: Rate = 0.4
    asynchronous = True
    compresses = ("push.d[p]",)
    family = "local updates"
    good_for = "language models on many uneven machines that come and go"
    volume = "2 / window / fragments"
    limit = "the outer momentum moves x outer_lr / (1 - momentum) as far in the long run"
    equals = "least=workers is streaming-diloco, up to rounding, if all workers compute alike"

    def server(self, x0: Vector, workers: int) -> State:
        parts = self.fragments_of(len(x0))
        outer: dict[str, torch.Tensor] = {}
        for p, fragment in enumerate(parts):
            outer |= outer_cells(self.outer, taken(x0, fragment), f"part{p}_")
        count = torch.zeros(len(parts), dtype=torch.int64)
        if self.average == "radial":
            most = max(len(self._tensors(len(x0), p)) for p in range(len(parts)))
            outer["lengths"] = torch.zeros(len(parts), most, dtype=torch.float64)  # sums of those of the deltas
        return State(
            x=x0,
            total=torch.zeros_like(x0),  # sums of what has come of each fragment
            steps=count.double(),  # and of their weights
            came=count,
            waited=count,  # pushes since the quorum was there
            grace=count,
            merged=count,  # how often each fragment was
            present=workers,
            **outer,
        )

    def worker(self, x0: Vector, workers: int) -> State:
        count = torch.zeros(len(self.fragments_of(len(x0))), dtype=torch.int64)
        # of each fragment: which x_p it is at, which it has pushed for, and steps since that came
        return State(x=x0, centre=x0, at=count, pushed=count - 1, since=count, **self.rule.cells(x0))

    @on_server
    def push(self, s: State, d: Vector, steps: int, p: int, at: int, v: int) -> None:
        late = at < s.merged[p]
        if late:
            s.refuse()
            s.grace[p] = min(int(s.grace[p]) + 1, self.grace)
        else:
            s.admit(v)
            part = self.fragments_of(len(s.x))[p]
            d = self._directions(s, d, steps, p) if self.average == "radial" else d
            put(s.total, part, taken(s.total, part) + steps * d)
            s.steps[p] += steps
            s.came[p] += 1
        s.waited += (s.came >= self._quorum(s)).long()
        if not late:
            s.waited[p] = max(int(s.waited[p]) - 1, 0)  # its own push does not count against it
        self._merge_ready(s)

    @on_server
    def fetch(self, s: State, at: Vector, first: int) -> tuple[int, Vector, int, int]:
        """A fragment that is newer than the learner's, its x_p, how often it was merged, and the version of x."""
        s.lend(s.v)
        parts = self.fragments_of(len(s.x))
        for p in (*range(first, len(parts)), *range(first)):
            if s.merged[p] > at[p]:
                return p, taken(s.x, parts[p]), int(s.merged[p]), s.v
        return -1, s.x[:0], 0, s.v

    def _tensors(self, length: int, p: int) -> tuple[tuple[int, int], ...]:
        return tensors(self.parameters, length, self.fragments_of(length)[p])

    def _directions(self, s: State, d: Vector, steps: int, p: int) -> Vector:
        """A delta whose part for each parameter has the length 1, or 0. The lengths are added up beside it."""
        d = d.clone()
        for k, (low, high) in enumerate(self._tensors(len(s.x), p)):
            length = float(d[low:high].norm())
            s.lengths[p][k] += steps * length
            d[low:high] /= length or 1.0
        return d

    def _quorum(self, s: State) -> int:
        present: int = s.present
        return min(self.least or present // 2 + 1, present)

    def _merge_ready(self, s: State) -> None:
        changed = False
        for p, fragment in enumerate(self.fragments_of(len(s.x))):
            came = int(s.came[p])
            if came < max(1, self._quorum(s)) or (came < s.present and s.waited[p] < s.grace[p]):
                continue
            if s.waited[p] and came == self._quorum(s):
                s.grace[p] = max(int(s.grace[p]) - 1, 0)  # it has waited for nobody
            self._merge(s, p, fragment)
            changed = True
        s.v += int(changed)

    def _merge(self, s: State, p: int, fragment: Fragment) -> None:
        cells = {name.removeprefix(f"part{p}_"): s.cell(name) for name in s if name.startswith(f"part{p}_")}
        centre = State.over({"x": taken(s.x, fragment).clone(), "v": s.cell("v"), **cells})
        d = taken(s.total, fragment) / s.steps[p].item()
        if self.average == "radial":
            for k, (low, high) in enumerate(self._tensors(len(s.x), p)):
                length = float(d[low:high].norm())
                d[low:high] *= float(s.lengths[p][k]) / s.steps[p].item() / length if length else 0.0
            s.lengths[p] = 0
        self.outer.apply(centre, d, self.outer_lr)
        put(s.x, fragment, centre.x)
        put(s.total, fragment, torch.zeros_like(centre.x))
        s.steps[p] = 0
        s.came[p] = 0
        s.waited[p] = 0
        s.merged[p] += 1

    async def step(self, w: Worker) -> None:
        parts = self.fragments_of(len(w.x))
        p = w.t % len(parts)
        await self._local(w, self.window - self.overlap)
        if w.pushed[p] < w.at[p] and w.since[p]:  # without a step it has nothing to say
            d = taken(w.centre, parts[p]) - taken(w.x, parts[p])
            await self.push(d, int(w.since[p]), p, int(w.at[p]), w.v)
            w.pushed[p] = w.at[p]
        await self._local(w, self.overlap)
        q, x, merged, w.v = await self.fetch(w.at, p)
        if q >= 0:
            put(w.centre, parts[q], x)
            put(w.x, parts[q], torch.lerp(x, taken(w.x, parts[q]), self.merge))
            w.at[q], w.since[q] = merged, 0

    async def _local(self, w: Worker, count: int) -> None:
        now = self.rates_at(w.state)
        await local_steps(w, now.rule, now.lr, count)
        w.since += count

    def left(self, s: State, rank: int) -> None:
        s.present -= 1
        if s.present:
            self._merge_ready(s)

    def joined(self, s: State, rank: int) -> None:
        s.present += 1

    def fragments_of(self, length: int) -> tuple[Fragment, ...]:
        return fragments(self.parameters, length, self.fragments, self.pattern)

    def whole(self) -> str | None:
        return "its fragments are layers, which shards would cut"

    def check(self, workers: int) -> None:
        if self.least and self.least > workers:
            raise UsageError(f"decoupled-diloco: least is {self.least}, but there are {workers} workers")
        if self.overlap > self.window:
            raise UsageError(f"decoupled-diloco: overlap is {self.overlap}, but a window has {self.window} steps")
