"""The command `paceline`: ready for signals first, then everything else is loaded."""

from __future__ import annotations

from paceline import interrupts


def main() -> None:
    """Run the command line."""
    interrupts.part_with("interrupted while starting: nothing was trained\n")
    interrupts.leave_at_once()
    from paceline.cli import main as command  # seconds: it loads torch

    command(alone=True)
