"""How fast a run goes, measured between two moments of it."""

from __future__ import annotations

from paceline.hook import Session


class Speed:
    """Updates and samples per second since it was last asked."""

    def __init__(self, session: Session) -> None:
        self._remember(session)

    def measure(self, session: Session) -> dict[str, float]:
        """Named rates; none while no time has passed."""
        elapsed = session.seconds - self._seconds
        if not elapsed > 0:
            return {}
        rates = {
            "updates_per_second": (session.updates - self._updates) / elapsed,
            "samples_per_second": (session.samples - self._samples) / elapsed,
        }
        self._remember(session)
        return rates

    def _remember(self, session: Session) -> None:
        self._seconds, self._updates, self._samples = session.seconds, session.updates, session.samples
