"""The command `paceline list`. It reads source texts, and loads torch only if one of them is not plain."""

import shutil
import textwrap

import typer

from paceline.cli.commands import ListOptions
from paceline.config.listing import FAMILIES, SCHEME_FAMILIES, listed
from paceline.errors import UnknownName


def list_members(asked: ListOptions) -> None:
    if asked.family is not None and asked.family not in FAMILIES:
        raise UnknownName("family", asked.family, FAMILIES)
    width = shutil.get_terminal_size().columns
    for family in [asked.family] if asked.family else FAMILIES:
        members = listed(family)
        if family == "schemes":  # in families, and by name in each
            members.sort(key=lambda one: SCHEME_FAMILIES.index(one.family))
        indent = max((len(one.name) for one in members), default=0) + 2
        typer.echo(typer.style(family, italic=True))
        before = ""
        for name, summary, kind in members:
            if kind != before:
                typer.echo(typer.style(f"{kind}:", dim=True))
                before = kind
            lines = textwrap.wrap(summary, max(width - indent, 20)) or [""]
            text = f"\n{'':{indent}}".join(lines)
            typer.echo(f"{typer.style(name, bold=True)}{'':{indent - len(name)}}{text}")
        typer.echo()
