"""The command `paceline`: a table of commands, each loaded when it is chosen."""

import signal
from functools import cache
from typing import Annotated, Any

import typer

import paceline
from paceline import signals
from paceline.cli.commands import COMMANDS
from paceline.cli.signature import TextCommand, TextGroup, function_of
from paceline.errors import PacelineError, RunError
from paceline.processes import resource_limits

EXIT_CODES = (
    "Exit codes: 0 done; 1 the run failed (NaN loss, deadlock, an error in a scheme or task); "
    "2 wrong usage (unknown name, value not allowed); 3 data missing or damaged; 130 interrupted."
)

app = typer.Typer(
    name="paceline",
    cls=TextGroup,
    help="Data-parallel training in which how the workers keep pace is one argument.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    rich_markup_mode=None,  # plain text: rich would triple the time of --help
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        typer.echo(f"paceline {paceline.__version__}")
        raise typer.Exit


for one in COMMANDS:
    register = app.command(one.name, cls=TextCommand, help=one.options.__doc__, epilog=EXIT_CODES, hidden=one.hidden)
    register(function_of(one))


@cache
def _built() -> Any:
    """The table with every option of every command. A process that calls `main` again does not build it again."""
    return typer.main.get_command(app)


def main(argv: list[str] | None = None, *, alone: bool = False) -> None:
    """Run the command line; an error of paceline becomes one line and an exit code. `alone`: the process ends with the
    command, and no signal may come between."""
    handlers = {number: signal.getsignal(number) for number in signals.ASKED}
    if not alone:  # else `paceline.__main__` leaves at once until the command is loaded
        signals.raise_while_working()
    try:
        _built()(argv)
    except signals.Interrupted:
        typer.echo("interrupted", err=True)
        raise
    except PacelineError as error:
        _tell(str(error))
        for note in getattr(error, "__notes__", ()):
            typer.echo(f"  {note}", err=True)
        reached = error.result if isinstance(error, RunError) else None
        if reached is not None and reached.updates:
            typer.echo(f"reached: {reached.updates:,} updates, {reached.samples:,} samples", err=True)
        raise SystemExit(error.exit_code) from None
    except (OSError, MemoryError, RuntimeError) as error:
        reason = resource_limits.explained(error)
        if reason is None:
            raise
        _tell(reason)
        raise SystemExit(1) from None
    finally:
        if alone:
            signals.ignore()
        else:
            for number, handler in handlers.items():
                signal.signal(number, handler)


def _tell(error: str) -> None:
    typer.echo(typer.style("error:", fg=typer.colors.RED, bold=True) + f" {error}", err=True)
