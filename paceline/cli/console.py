"""The two consoles of all commands."""

from collections.abc import Iterable

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.text import Text

screen, messages = Console(highlight=False), Console(stderr=True, highlight=False)


def show(parts: Iterable[RenderableType]) -> None:
    """Print tables and lines on stdout; a line is not wrapped."""
    for part in parts:
        screen.print(part, soft_wrap=isinstance(part, Text))


def say(text: str) -> None:
    """Print a line on stderr."""
    messages.print(escape(text), soft_wrap=True)


def warn(text: str, word: str = "warning") -> None:
    """Print a line on stderr that begins with a yellow word."""
    messages.print(f"[bold yellow]{word}:[/bold yellow] {escape(text)}", soft_wrap=True)
