"""Whole lines out of bytes that arrive in pieces."""

from __future__ import annotations


class LineBuffer:
    """Keeps the beginning of a line until its end has arrived. A line of more than `longest` bytes is dropped."""

    def __init__(self, longest: int | None = None) -> None:
        self.rest = b""  # the line that has not ended yet
        self._longest = longest
        self._dropping = False

    def lines(self, piece: bytes) -> list[bytes]:
        """The lines that end in this piece."""
        *whole, self.rest = (self.rest + piece).split(b"\n")
        if whole and self._dropping:
            del whole[0]
            self._dropping = False
        if self._longest is not None and len(self.rest) > self._longest:
            self.rest, self._dropping = b"", True
        return whole
