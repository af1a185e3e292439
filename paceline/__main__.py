"""The command `paceline`, also as `python -m paceline`: signal handlers first, then everything else is loaded."""

from paceline import signals


def main() -> None:
    """Run the command line."""
    signals.part_with("interrupted while starting: nothing was trained\n")
    signals.leave_at_once()
    from paceline.cli.main import main as command  # seconds: it loads torch

    command(alone=True)


if __name__ == "__main__":
    main()
