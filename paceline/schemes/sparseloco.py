"""SparseLoCo: DiLoCo without outer momentum, whose deltas are sent as a few large coordinates with error feedback."""

from dataclasses import dataclass

from paceline.fields import Steps
from paceline.rules import SGD, Rule
from paceline.scheme import Rate
from paceline.schemes.diloco import DiLoCo


@dataclass(frozen=True)
class SparseLoCo(DiLoCo):
    """SparseLoCo: workers train alone for a window, and send the largest coordinates of their deltas.

    Sarfi et al. 2025 (arXiv 2508.15706), Algorithm 1.

    worker:  `window` times: y <- y - lr * rule(gradient(y));  e <- decay * e + (x - y);  d <- 2 bits (top-k of e)
             e <- e - d;  x <- x - outer_lr * mean of d over the workers;  y <- x

    The compressor keeps e: `compress=topk:0.015625,chunk=4096,bits=2,decay=0.95` is the default; another one may be
    given, and compress=none sends whole deltas: with outer_lr=1 that is local SGD up to rounding. Rule and values are
    those of the authors' code (templar): 64 of 4096 coordinates, 30 steps, outer_lr=1. Differs from it: chunks follow
    each other in the vector, there they are blocks of 64 x 64 of a matrix; the code book for 2 bits is ours, there four
    bins of 1.5 standard deviations; indices take 16 bits, there 12; deltas longer than the median are clipped there.
    """

    window: Steps = 30
    outer: Rule = SGD()
    outer_lr: Rate = 1.0
    compresses = ("mean",)
    compression = "topk:0.015625,chunk=4096,bits=2,decay=0.95"
    family = "local updates"
    good_for = "language models over the internet: the fewest bytes per gradient"
    volume = "2 / window"
    limit = "top-k contracts by k / d: a large outer_lr needs a large share"
    equals = "compress=none rule=sgd is local-sgd, up to rounding; compress=none is diloco outer=sgd outer_lr=1"
