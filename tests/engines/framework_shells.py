"""Clusters of old guides: a shell for each task, which its TF_CONFIG tells what it is; each is a node of its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shells import Shells, free_ports

SHELLS = ("chief:0", "worker:0", "worker:1", "ps:0", "evaluator:0")
LIMIT = 400.0  # ten processes import TensorFlow, on two cores perhaps


def begin(run: Callable[..., Any], folder: Path, roles: tuple[str, ...] = SHELLS) -> None:
    """`run`: of a name and variables of the environment, starts a shell."""
    inside = [role for role in roles if role != "evaluator:0"]  # which is outside of the cluster
    ports = free_ports(len(inside))
    cluster: dict[str, list[str]] = {}
    for role in inside:
        cluster.setdefault(role.partition(":")[0], []).append(f"localhost:{ports.pop()}")
    for role in roles:
        kind, _, index = role.partition(":")
        config = {"cluster": cluster, "task": {"type": kind, "index": int(index)}}
        nowhere = str(folder / "none")
        variables = {"PACELINE_OFFLINE": "1", "PACELINE_CACHE": nowhere, "TF_CPP_MIN_LOG_LEVEL": "3"}
        run(role, TF_CONFIG=json.dumps(config), **variables)


def all_end(made: Shells) -> None:
    """Each shell ends by itself, without an error."""
    for shell in made.shells:
        assert shell.ended(LIMIT) == 0, made.said()
