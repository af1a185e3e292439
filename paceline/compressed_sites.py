"""Where a scheme's vectors are compressed: which of its operations, which fragments, and the cells of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from paceline.compressor import Compressor, Fragment
from paceline.state import Cell, Vector

MEAN, MEET, SEND = "mean", "meet", "send"
_ONE = torch.zeros(1)


@dataclass(frozen=True)
class Site:
    """One of a scheme's `compresses`: its means (`mean`), its meetings (`meet`), its messages (`send`), or the argument
    g of its method push (`push.g`); `push.g[p]` if g is a fragment of the vector, and the argument p its number."""

    name: str  # without the fragment
    method: str  # empty: not an argument
    argument: str
    number: str  # the argument with the number of the fragment; empty: none

    @classmethod
    def of(cls, text: str) -> Site:
        name, _, number = text.partition("[")
        method, _, argument = name.partition(".")
        return cls(name, method if argument else "", argument, number.removesuffix("]"))

    def cell(self, name: str, fragment: int | None = None) -> str:
        """The worker's cell in which the compressor keeps something of the vectors, or of a fragment, sent here."""
        part = "" if fragment is None else f"part{fragment}_"
        return f"compress_{self.name.replace('.', '_')}_{part}{name}"


class CompressedSites:
    """The sites of a scheme with a compressor. A scheme that sends fragments has a compressor for each: of the shapes
    in it, and with cells of its own."""

    def __init__(self, compressor: Compressor, compresses: Sequence[str], fragments: Sequence[Fragment]) -> None:
        """`fragments`: a single one, or none at all, is the whole vector."""
        self.sites = [Site.of(text) for text in compresses]
        self._whole = compressor
        self._fragments = fragments if len(fragments) > 1 else ()
        self._fitted = [compressor.fitted_to(fragment) for fragment in self._fragments]

    def fragment(self, number: int | None) -> int | None:
        """The number of a fragment; None for the whole vector."""
        return number if self._fragments else None

    def fragments(self) -> Iterator[int | None]:
        yield from range(len(self._fragments)) if self._fragments else (None,)

    def compressor(self, fragment: int | None) -> Compressor:
        return self._whole if fragment is None else self._fitted[fragment]

    def length(self, fragment: int | None, whole: int) -> int:
        """The numbers of a fragment; `whole`: those of the vector."""
        return whole if fragment is None else sum(high - low for low, high in self._fragments[fragment])

    def cells(self, x0: Vector, workers: int) -> dict[str, Cell]:
        """What a worker keeps for its compressor, at the start. A message is for one worker, and what was left out of
        it has to reach the same one: of messages there is a row of each cell for each receiver."""
        found: dict[str, Cell] = {}
        for site in self.sites:
            if site.name == SEND:
                own = self._whole.cells(x0).items()
                found |= {site.cell(name): torch.stack([torch.as_tensor(cell)] * workers) for name, cell in own}
                found[site.cell("sent")] = 0
                continue
            for number in self.fragments():
                v = x0 if number is None else torch.cat([x0[low:high] for low, high in self._fragments[number]])
                found |= {site.cell(name, number): cell for name, cell in self.compressor(number).cells(v).items()}
            found[site.cell("sent")] = 0  # how many vectors, for their seeds
        return found

    def own_cells(self) -> frozenset[str]:
        """The cells that are not the same for all workers."""
        found = {site.cell("sent") for site in self.sites}
        found |= {site.cell(name) for site in self.sites if site.name == SEND for name in self._whole.cells(_ONE)}
        for number in self.fragments():
            compressor = self.compressor(number)
            names = {*compressor.cells(_ONE)} - {*compressor.shared}
            found |= {site.cell(name, number) for site in self.sites if site.name != SEND for name in names}
        return frozenset(found)
