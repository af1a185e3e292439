"""Send values to MLflow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.hook import Session
from paceline.hooks._tracker import Tracker, package

LONGEST = 500  # characters of a parameter that every version takes
TAG = "paceline.directory"


@dataclass
class Mlflow(Tracker):
    """Sends loss, learning rate, gradient norm, speed and staleness of the chief to MLflow.

    Every `every` updates (100 if neither is given) or `seconds`; with `evaluate=N` also the metrics on test data, every
    N updates and at the end. `run` is its name there (default: that of the run directory), `uri` the tracking server or
    `file:` folder (default: MLFLOW_TRACKING_URI, or MLflow's own). A resumed run continues its run there. The settings
    of plan.json are its parameters. It needs `pip install 'paceline[mlflow]'`.
    """

    experiment: str = "paceline"
    uri: str = ""

    def open(self, session: Session, name: str, plan: dict[str, Any]) -> None:
        self._mlflow = mlflow = package("mlflow", "mlflow")
        if self.uri:
            mlflow.set_tracking_uri(self.uri)
        self._client = client = mlflow.MlflowClient()
        found = client.get_experiment_by_name(self.experiment)
        experiment = client.create_experiment(self.experiment) if found is None else found.experiment_id
        run = None
        if session.directory is not None:
            place = str(session.directory.resolve())
            known = client.search_runs([experiment], f"tags.`{TAG}` = '{place}'", max_results=1)
            run = known[0] if known else client.create_run(experiment, run_name=name, tags={TAG: place})
        run = run or client.create_run(experiment, run_name=name)
        self._run = run.info.run_id
        client.update_run(self._run, status="RUNNING")
        new = {key: str(value)[:LONGEST] for key, value in plan.items() if key not in run.data.params}
        client.log_batch(self._run, params=[mlflow.entities.Param(key, value) for key, value in new.items()])

    def send(self, session: Session, values: Mapping[str, float]) -> None:
        self._mlflow.log_metrics({"samples": session.samples, **values}, step=session.updates, run_id=self._run)

    def close(self, *, failed: bool) -> None:
        self._client.set_terminated(self._run, "FAILED" if failed else "FINISHED")
