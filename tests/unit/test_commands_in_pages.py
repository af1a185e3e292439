"""Every `paceline` command in README and docs is one: its options, schemes, hyper-parameters and names exist."""

from __future__ import annotations

import re
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import typer
from beds.pages import Block, blocks, commands, pages

from paceline.cli.commands import COMMANDS
from paceline.cli.main import app
from paceline.config import build, discovery
from paceline.config.options import checked, declared
from paceline.errors import UsageError

BLOCKS = [block for page in pages() for block in blocks(page)]
LANGUAGES = {"", "text", "sh", "python", "py", "diff", "toml", "yaml", "json"}
# commands that are not ours
OTHERS = {".", "docker", "export", "jupyter", "make", "openssl", "pip", "python", "python3"}


def check(words: list[str]) -> None:
    """Raises what the command itself would say before it begins anything."""
    name, *rest = words
    (command,) = [one for one in COMMANDS if one.name == name]
    group: Any = typer.main.get_command(app)
    given = group.commands[name].make_context(name, rest).params
    asked = {key: value for key, value in given.items() if value not in (None, (), [])}
    own = {key: asked.pop(key) for key in declared(command.options) if key in asked}
    options: Any = command.options(**checked(name, command.options, own))
    if command.settings is not None:
        checked(name, command.settings, asked)
    task = getattr(options, "task", None)
    if task is not None and ".py:" not in task and task not in discovery.tasks():
        raise UsageError(f"no task {task!r}")
    hyper = {key: value for key, value in build.pairs(getattr(options, "words", ())).items() if ".py:" not in value}
    if name == "compare":
        for scheme in options.schemes.split(","):
            own = {key: value for key, value in hyper.items() if key.startswith(f"{scheme}.")}
            build.scheme_of(scheme, {key.removeprefix(f"{scheme}."): value for key, value in own.items()})
    elif getattr(options, "scheme", None) is not None:
        build.scheme_of(options.scheme, {key: value for key, value in hyper.items() if not key.startswith("task.")})


@pytest.mark.parametrize("block", [block for block in BLOCKS if any(commands(block))], ids=lambda block: block.place)
def test_its_commands_are_commands(block: Block) -> None:
    refused = "\nerror:" in block.text  # a listing that shows how a command is refused
    for words in commands(block):
        if words == ["--version"]:
            continue
        with suppress(UsageError) if refused else nullcontext():
            check(words)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("train digits-mlp --scheme async --no-such-option", "--no-such-option"),
        ("train digits-mlp --scheme asynk", "asynk"),
        ("train digits-mpl --scheme async", "digits-mpl"),
        ("train digits-mlp --scheme async --workers many", "many"),
        ("simulate digits-mlp allreduce", "allreduce"),
        ("simulate digits-mlp -s agn windw=8", "windw"),
        ("compare digits-mlp --schemes sync,agn agn.windw=8", "windw"),
    ],
)
def test_a_wrong_command_would_be_found(wrong: str, said: str) -> None:
    with pytest.raises(Exception, match=said):
        check(wrong.split())


def test_every_block_is_of_a_kind_that_is_tested() -> None:
    assert {block.language for block in BLOCKS} <= LANGUAGES
    for block in BLOCKS:
        if block.language == "sh":
            lines = re.sub(r"\\\n\s*", " ", block.text).splitlines()
            unknown = [line for line in lines if line and "paceline " not in line and line.split()[0] not in OTHERS]
            assert unknown == [], block.place
