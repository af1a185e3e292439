"""Send values to Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Literal

from paceline.hook import Session
from paceline.hooks._tracker import Tracker, package


@dataclass
class Wandb(Tracker):
    """Sends loss, learning rate, gradient norm, speed and staleness of the chief to Weights & Biases.

    Every `every` updates (100 if neither is given) or `seconds`; with `evaluate=N` also the metrics on test data, every
    N updates and at the end. `run` is its name there (default: that of the run directory). `mode=offline` writes files
    into the run directory, which `wandb sync` sends later. A resumed run continues its run there. The settings of
    plan.json are its config. It needs `pip install 'paceline[wandb]'`; WANDB_API_KEY and the like mean what they always
    mean.
    """

    project: str = "paceline"
    mode: Literal["online", "offline", "default"] = "default"

    def open(self, session: Session, name: str, plan: dict[str, Any]) -> None:
        wandb = package("wandb", "wandb")
        given: dict[str, Any] = {} if self.mode == "default" else {"mode": self.mode}
        if session.directory is not None:
            place = str(session.directory.resolve())
            given |= {"dir": place, "id": f"{blake2b(place.encode(), digest_size=6).hexdigest()}"}
            given |= {} if self.mode == "offline" else {"resume": "allow"}  # it cannot ask while offline
        settings = wandb.Settings(console="off", silent=True)
        self._run = wandb.init(project=self.project, name=name, config=plan, settings=settings, **given)
        self._run.define_metric("update")
        self._run.define_metric("*", step_metric="update")  # updates may fall: the run returns to a checkpoint

    def send(self, session: Session, values: Mapping[str, float]) -> None:
        self._run.log({"update": session.updates, "samples": session.samples, **values})

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))
