"""What the server counts: the staleness of gradients, how many it admitted, how many came too late."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.result import Staleness
from paceline.state import State

Numbers = NDArray[np.int64]


class StalenessLedger:
    """Staleness as the server sees it, in cells, so that it is saved and shared like other state.

    `held[i]` is the version that worker i works on, -1 while it has none. It lets tests check the law of conservation
    in any run: with zero communication time, sum of staleness + outstanding = updates * (workers - 1).
    """

    def __init__(self, cells: State) -> None:
        self.cells = cells
        self.caller = 0
        self._histogram = cells.histogram.numpy()
        self._held = cells.held.numpy()
        # numpy writes into the same memory, several times faster; no guard reads these cells
        self._admitted, self._total, self._largest = (cells.cell(n).numpy() for n in ("admitted", "total", "largest"))
        # and single numbers are written twice as fast by their words: admitted, total, largest
        self._words = [one.reshape(-1).data for one in (self._admitted, self._total, self._largest)]
        self._bins, self._holders = self._histogram.data, self._held.data
        self._last = len(self._histogram) - 1

    @classmethod
    def fresh(cls, workers: int, holders: Iterable[int]) -> StalenessLedger:
        """An empty ledger; all holders begin with version 0."""
        # exponential workers make staleness geometric with mean workers - 1: one in e^32 falls past the last bin,
        # which counts "this or more"
        histogram, held = torch.zeros(max(256, 32 * workers), dtype=torch.int64), torch.full((workers,), -1)
        ledger = cls(State(histogram=histogram, held=held, admitted=0, refused=0, total=0, largest=0))
        for holder in holders:
            ledger._held[holder] = 0
        return ledger

    def admit(self, staleness: int) -> None:
        """Count a gradient that enters x; its sender holds no version until it pulls again."""
        admitted, total, largest = self._words
        self._bins[min(max(staleness, 0), self._last)] += 1
        self._holders[self.caller] = -1
        admitted[0] += 1
        total[0] += staleness
        if staleness > largest[0]:
            largest[0] = staleness

    def admit_row(self, holders: Numbers, staleness: Numbers, versions: Numbers) -> None:
        """Count gradients that enter x one after the other; each sender then pulls this version. A sender is once among
        them."""
        bins = np.clip(staleness, 0, len(self._histogram) - 1)
        self._histogram += np.bincount(bins, minlength=len(self._histogram))
        self._held[holders] = versions
        self._admitted[()] += len(staleness)
        self._total[()] += staleness.sum()
        self._largest[()] = max(int(self._largest), int(staleness.max()))

    def refuse(self) -> None:
        self._held[self.caller] = -1
        self.cells.refused += 1

    def pulled(self, holder: int, version: int) -> None:
        self._holders[holder] = version

    def gone(self, holder: int) -> None:
        self._held[holder] = -1

    def outstanding(self, version: int) -> int:
        """The sum of how far the held versions are behind."""
        held = self._held[self._held >= 0]
        return int((version - held).sum())

    def mean(self) -> float:
        admitted: int = self.cells.admitted
        return float(self.cells.total / admitted) if admitted else 0.0

    def histogram(self) -> dict[int, int]:
        """Staleness -> the number of gradients that had it."""
        counts = self._histogram.copy()  # another process may be counting: numpy cannot search an array that changes
        return {int(k): int(counts[k]) for k in counts.nonzero()[0]}

    def saved(self) -> dict[str, Tensor]:
        return self.cells.saved()

    def restore(self, saved: Mapping[str, Tensor]) -> None:
        self.cells.restore(saved)


def staleness_of(ledgers: Sequence[StalenessLedger], updates: int, gradients: int) -> Staleness:
    """The staleness that the server, or workers that write into its vector themselves, have counted. Without a server
    there is no ledger: no worker can be behind, so all `gradients` were fresh."""
    if not ledgers:
        return Staleness(histogram={0: gradients} if gradients else {})
    histogram: Counter[int] = Counter()
    for ledger in ledgers:
        histogram.update(ledger.histogram())
    admitted = sum(ledger.cells.admitted for ledger in ledgers)
    return Staleness(
        mean=sum(ledger.cells.total for ledger in ledgers) / admitted if admitted else 0.0,
        max=max(ledger.cells.largest for ledger in ledgers),
        histogram=dict(sorted(histogram.items())),
        outstanding=ledgers[0].outstanding(updates) if len(ledgers) == 1 else 0,
    )
