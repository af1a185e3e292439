"""Record the staleness of the gradients."""

import json
from dataclasses import asdict, dataclass

from paceline.fields import Count
from paceline.hook import Session
from paceline.hooks._periodic import Periodic


@dataclass
class StalenessRecord(Periodic):
    """Records mean and largest staleness so far every `every` updates; at the end the histogram.

    The histogram goes to `staleness.json` in the run directory; where there is none it is printed.
    """

    every: Count = 100

    def act(self, session: Session) -> None:
        staleness = session.staleness
        session.record({"staleness_mean": staleness.mean, "staleness_max": staleness.max})

    def end(self, session: Session) -> None:
        staleness = session.staleness
        if session.directory is not None:
            text = json.dumps(asdict(staleness), indent=2) + "\n"
            (session.directory / "staleness.json").write_text(text, encoding="utf-8")
            return
        counts = ", ".join(f"{age}: {count}" for age, count in sorted(staleness.histogram.items()))
        session.say(f"staleness mean {staleness.mean:.4g}, max {staleness.max}; gradients by staleness: {counts}")
