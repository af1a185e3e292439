"""The result of `compare`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.experiments.prose import paragraphs
from paceline.experiments.rows import HEADINGS, rows_of
from paceline.experiments.summary import ArmSummary, Findings


@dataclass(frozen=True)
class Comparison:
    """A finished comparison. `page`: the report; `figures`: PNG and SVG files; `tables`: CSV files."""

    directory: str
    page: str
    figures: list[str]
    tables: list[str]
    findings: Findings

    @property
    def found(self) -> str:
        """What was found, and what was not significant, in words."""
        return "\n\n".join(paragraphs(self.findings))

    @property
    def best(self) -> ArmSummary | None:
        """The arm with the best metric at the end, or the first one at a target; the difference to the next need not be
        significant."""
        return self.findings.ranked[0] if self.findings.ranked else None

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "task": self.findings.task,
            "metric": self.findings.metric,
            "directory": self.directory,
            "page": self.page,
            "found": self.found,
            "rows": [dict(zip(HEADINGS, row, strict=True)) for row in rows_of(self.findings)],
        }

    def _repr_html_(self) -> str:
        """The page, which notebooks show in a frame."""
        from html import escape

        text = Path(self.page).read_text(encoding="utf-8")
        return f'<iframe srcdoc="{escape(text)}" width="100%" height="700" style="border:0"></iframe>'
