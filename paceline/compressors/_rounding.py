"""What compressors have in common that round every coordinate to the nearest of few values."""

from dataclasses import dataclass

from paceline.compressor import Compressor


@dataclass(frozen=True)
class Rounding(Compressor):
    """Rounds to the nearest; `feedback=true` keeps what is lost for the next vector."""

    feedback: bool = False

    @property
    def retained(self) -> float | None:
        return 1.0 if self.feedback else None

    @property
    def points(self) -> bool:
        return not self.feedback
