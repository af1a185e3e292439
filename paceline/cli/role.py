"""The command `paceline role`: one role of a run as a process of its own. Launchers start it."""

import typer

from paceline.cli.commands import RoleOptions
from paceline.processes.supervisor import exec_role


def role(asked: RoleOptions) -> None:
    raise typer.Exit(exec_role.play(asked.name, asked.handle))
