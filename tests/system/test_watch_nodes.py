"""A run on several nodes, seen from the chief's run directory: the page has the roles of all nodes while it trains and
afterwards, and the timeline has the workers of all nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from nodes import nodes
from processes import finished, leaving_nothing, run

from paceline.processes.supervisor.status import Status
from paceline.report.web.watched_runs import WatchedRuns
from paceline.runs.run_directory import RunDirectory
from paceline.runs.run_trace import timeline_of

ROLES = ["chief", "worker:1", "worker:2", "server:0"]


@pytest.mark.parametrize("one_disk", [True, False])
def test_all_nodes_are_shown(tmp_path: Path, one_disk: bool) -> None:
    pages: list[dict[str, Any]] = []
    watched = WatchedRuns([], [tmp_path])

    def look(status: Status) -> None:
        watched._kept.clear()  # what was read a moment ago
        pages.append(watched.overview([]))

    with leaving_nothing(), nodes("server:0", one_disk=one_disk) as made:
        story = run(tmp_path / "run", "digits-mlp", "async", steps=400, workers=3, launcher=made.launcher, watch=look)
    result = finished(story, 400, over=8)
    during = pages[-1]
    assert [one["state"] for one in during["runs"]] == ["running"]
    (seen,) = during["shown"].values()
    assert [role["name"] for role in seen["roles"]] == seen["names"] == ROLES
    watched._kept.clear()
    after = watched.overview([])
    assert [one["state"] for one in after["runs"]] == ["done"]
    (final,) = after["shown"].values()
    nodes_of = {role["name"]: role["node"] for role in final["roles"]}
    assert list(nodes_of) == ROLES
    assert len({nodes_of["chief"], nodes_of["worker:1"], nodes_of["worker:2"]}) == 3
    assert nodes_of["server:0"] == nodes_of["chief"]
    assert all(role["step"] > 0 for role in final["roles"])
    assert {"chief.log", "worker-1.log", "worker-2.log"} <= set(final["logs"])
    timeline = timeline_of(RunDirectory.open(tmp_path / "run"))
    assert timeline.roles[:3] == ["worker:0", "worker:1", "worker:2"]
    assert timeline.count("gradient") >= result.gradients
    assert result.updates - 3 <= timeline.count("update") <= result.updates  # a call may not have been answered
