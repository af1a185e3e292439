"""The two consoles of all commands."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape

screen, messages = Console(highlight=False), Console(stderr=True, highlight=False)


def say(text: str) -> None:
    """Print a line on stderr."""
    messages.print(escape(text), soft_wrap=True)


def warn(text: str, word: str = "warning") -> None:
    """Print a line on stderr that begins with a yellow word."""
    messages.print(f"[bold yellow]{word}:[/bold yellow] {escape(text)}", soft_wrap=True)
