"""Calls inside one process: a script that runs alone is its own server."""

from __future__ import annotations

from typing import Any

import torch

from paceline import config, snapshots
from paceline.desk import Desk
from paceline.errors import Deadlock
from paceline.ops import Call
from paceline.stage import Stage
from paceline.transports.shared import SAVE, SET


class InProcess:
    """The only worker's way to the desk beside it."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.device = torch.device("cpu")
        self.desk = Desk(stage.scheme, stage.server_state(), 1, stage.ledger("ledger.0."))

    def call(self, call: Call[Any]) -> Any:
        answers = self.desk.submit(0, call, call)
        for answer in answers:
            if answer.ticket is call:
                return answer.result
        raise Deadlock(f"the only worker waits for {self.desk.explain(call)}")

    def post(self, call: Call[Any]) -> Any:
        return [self.call(call)]

    def collect(self, posted: Any) -> Any:
        return posted[0]

    def special(self, kind: int, *args: Any) -> None:
        self.ask(kind, *args)

    def ask(self, kind: int, *args: Any) -> Any:
        if kind == SAVE:
            snapshots.keep_shard(self.stage, 0)
        elif kind == SET:
            hyper = dict(zip(args[::2], args[1::2], strict=True))
            self.stage.save_overrides(self.stage.load_overrides() | hyper)
            self.stage.scheme = self.desk.scheme = config.scheme_of(self.stage.scheme, hyper)

    def ready(self, _: Any) -> bool:
        return True

    def forget(self) -> None: ...
