"""The signature of a command, as typer reads it, from the dataclasses that declare its options.

Typer splits the command line into texts. `paceline.fields` converts them, by the declared types: an error has one form
on the command line and in Python, and typer's own conversion would cost 0.1 s, which is more than all the rest.
"""

import inspect
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import MISSING
from importlib import import_module
from pathlib import Path
from typing import Any, get_origin

import typer
from typer.core import TyperCommand, TyperGroup

from paceline import signals
from paceline.cli.commands import Command
from paceline.cli.options import print_json
from paceline.config.options import Declared, checked, declared
from paceline.errors import RunError, UsageError

METAVARS = {int: "INTEGER", float: "NUMBER", Path: "PATH"}


class TextCommand(TyperCommand):
    """A command whose options are texts and flags, with a section of --help for each panel."""

    def get_params(self, ctx: Any) -> list[Any]:
        return [_unconverted(one) for one in super().get_params(ctx)]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        several = {flag for one in self.get_params(ctx) if str(one.metavar).endswith("...") for flag in one.opts}
        return super().parse_args(ctx, list(_repeated(args, several)))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for one in self.get_params(ctx):
            record = one.get_help_record(ctx)
            if record is not None:
                first = "Arguments" if one.param_type_name == "argument" else "Options"
                sections.setdefault(getattr(one, "rich_help_panel", None) or first, []).append(record)
        for heading, records in sections.items():
            with formatter.section(heading):
                formatter.write_dl(records)


class TextGroup(TyperGroup):
    """The group of all commands; its own options are flags."""

    def get_params(self, ctx: Any) -> list[Any]:
        return [_unconverted(one) for one in super().get_params(ctx)]


def _repeated(args: list[str], several: set[str]) -> Iterator[str]:
    """`--set a=1 b=2` as `--set a=1 --set b=2`: such an option takes all KEY=VALUE words that follow it."""
    taking = ""
    for number, word in enumerate(args):
        if word == "--":
            yield from args[number:]
            return
        if word in several or word.partition("=")[0] in several:
            taking = word.partition("=")[0]
            yield word
        elif taking and "=" in word and not word.startswith("-"):
            yield from (word,) if args[number - 1] == taking else (taking, word)
        else:
            taking = ""
            yield word


def _unconverted(parameter: Any) -> Any:
    """A parameter that keeps its text, and is checked only for being there."""

    def process(ctx: Any, value: Any) -> Any:
        if parameter.required and value in (None, (), []):
            name = parameter.metavar or parameter.opts[0]
            raise UsageError(f"{name} is missing; see {ctx.command_path} --help")
        return value if parameter.callback is None else parameter.callback(ctx, parameter, value)

    parameter.process_value = process
    return parameter


def function_of(command: Command) -> Callable[..., None]:
    """A function with the command's signature. The body is loaded when the function is called."""
    own = declared(command.options)

    def call(**_given: Any) -> None:
        asked = {name: value for name, value in _given.items() if value not in (None, (), [])}
        options = {name: asked.pop(name) for name in own if name in asked}
        taken: list[Any] = [command.options(**checked(command.name, command.options, options))]
        if command.settings is not None:
            taken.append(checked(command.name, command.settings, asked))
        module, _, name = command.body.partition(":")
        body = getattr(import_module(module), name)  # seconds: most bodies load torch
        if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # `main` handles signals
            signals.raise_while_working()
        if getattr(taken[0], "data", None) is not None:
            os.environ["PACELINE_DATA"] = taken[0].data
        try:
            body(*taken)
        except RunError as error:
            if getattr(taken[0], "as_json", False) and error.result is not None:  # what was reached is not lost
                print_json(error.result.as_dict() | {"error": str(error)})
            raise

    parameters = [_parameter(one) for one in options_of(command)]
    setattr(call, "__signature__", inspect.Signature(parameters))  # noqa: B010  mypy knows no such attribute
    return call


def options_of(command: Command) -> Iterator[Declared]:
    """What a command takes, in the order of --help: its own options of the first panel, the settings, the rest."""
    own = declared(command.options).values()
    yield from (one for one in own if not one.option.panel)
    if command.settings is not None:
        settings = declared(command.settings).values()
        yield from (one for one in settings if one.option.run or command.name != "run")
    yield from (one for one in own if one.option.panel)


def _parameter(one: Declared) -> inspect.Parameter:
    """None stands for an option that was not given: with --resume the plan has its value."""
    option, kind = one.option, one.kind
    listed = get_origin(kind) is list
    annotation: Any = bool | None if kind is bool else list[str] | None if listed else str | None
    metavar = option.metavar or (one.name.upper() if option.positional else METAVARS.get(kind, "TEXT"))
    default = f"Default: {one.shown_default}." if one.shown_default else ""
    needed = one.default is MISSING
    looks: dict[str, Any] = {
        "help": f"{option.help} {default}".strip(),
        "metavar": None if kind is bool else metavar,
        "hidden": option.hidden,
        "rich_help_panel": option.panel or None,
        "show_default": False,
    }
    first = ... if needed else None
    info = typer.Argument(first, **looks) if option.positional else typer.Option(first, *one.flags, **looks)
    return inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY, default=info, annotation=annotation)
