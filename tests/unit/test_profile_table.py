"""The closing table of `--profile`, as people see it."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from rich.console import Console

from paceline.processes.roles.stopwatch import CATEGORIES
from paceline.report.profile_table import profile_table
from paceline.result import Evaluations, Profile, Result, Staleness, share


def shown(profile: Profile, width: int = 80) -> list[str]:
    file = io.StringIO()
    console = Console(file=file, width=width, _environ={})
    for part in profile_table(profile, "runs/mnist-async-001"):
        console.print(part, soft_wrap=True)
    return [line.rstrip() for line in file.getvalue().splitlines()]


def times(**seconds: float) -> dict[str, float]:
    return dict.fromkeys(CATEGORIES, 0.0) | seconds


PROFILE = Profile(
    {
        "worker:0": times(gradient=30.0, update=5.0, wait=14.96, signal=0.04, trace=0.5),
        "server:0": times(update=1.0, wait=49.0),
    },
    ["profile/worker-0.trace.json.gz", "profile/worker-1.trace.json.gz"],
    ["no times of worker:1: no step was begun there"],
)


def test_a_row_per_role_and_a_column_per_category_that_took_time() -> None:
    assert shown(PROFILE) == [
        "profile",
        "role     seconds gradient update wait signal",
        "worker:0    50.0      60%    10%  30%   0.1%",
        "server:0    50.0            2.0%  98%",
        "not counted: 0.5 s for traces",
        "no times of worker:1: no step was begun there",
        "trace: runs/mnist-async-001/profile/worker-0.trace.json.gz and 1 more",
        "open a trace at ui.perfetto.dev, or in Chrome at chrome://tracing",
    ]


def test_it_can_be_printed() -> None:
    assert str(PROFILE).splitlines() == shown(PROFILE)[1:6]


def test_the_widest_table_fits_80_columns_and_nothing_is_cut() -> None:
    roles = {role: dict.fromkeys(CATEGORIES, 100_000.0) for role in ("worker:0", "worker:63", "server:0")}
    roles["worker:63"] = times(gradient=9_999_999.0)
    lines = shown(Profile(roles))
    assert max(map(len, lines)) <= 80
    assert lines[1].split() == ["role", "seconds", *("save" if n == "checkpoint" else n for n in CATEGORIES[:-1])]
    assert lines[3].split() == ["worker:63", "9999999", "100%"]


@pytest.mark.parametrize(
    ("part", "text"), [(0.0, ""), (0.0001, "0%"), (0.05, "0.1%"), (9.94, "9.9%"), (9.96, "10%"), (100.0, "100%")]
)
def test_shares(part: float, text: str) -> None:
    assert share(part, 100.0) == text


def test_it_survives_the_result_file_and_is_shown_in_notebooks() -> None:
    given: dict[str, Any] = {"scheme": "async", "task": "toy", "workers": 1, "updates": 1, "gradients": 1, "samples": 1}
    result = Result(
        **given,
        virtual_seconds=None,
        staleness=Staleness(),
        metrics={},
        vector=torch.zeros(2),
        history=Evaluations(),
        wall_seconds=1.0,
        profile=PROFILE,
    )
    told = result.as_dict()
    assert Result.from_dict(told, torch.zeros(2)).profile == PROFILE
    assert "<td>server:0</td>" in result._repr_html_()
    assert "no times of worker:1" in result._repr_html_()
