"""Plans: what is asked for, as plain data, and what cannot work."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.config.plan import Plan
from paceline.config.validate import check, planned
from paceline.errors import UnknownName, UsageError
from paceline.hooks.log import Log
from paceline.processes.roles.roles import roles_of
from paceline.schemes.sync import SyncSGD
from paceline.tasks.toy import toy


class TestPlain:
    def test_it_survives_json(self) -> None:
        plan = Plan(task="toy", scheme="sync", hyper={"lr": 0.1}, steps=5, hooks=["log"], task_options={"dtype": "x"})
        assert Plan.from_dict(json.loads(plan.to_json())) == plan
        assert Plan.from_dict(json.loads(Plan().to_json())) == Plan()

    def test_every_field_has_a_default_and_is_plain(self) -> None:
        for field in dataclasses.fields(Plan):
            value = getattr(Plan(), field.name)
            assert json.loads(json.dumps(value)) == value

    def test_keys_of_another_version_are_refused(self) -> None:
        with pytest.raises(UsageError, match="unknown keys: colour, shape; another version wrote it"):
            Plan.from_dict({"task": "toy", "shape": 1, "colour": 2})


class TestPlanned:
    def test_names_stay_names_and_objects_go_beside(self) -> None:
        plan, scheme, objects = planned("toy", "sync", hooks=["log:every=3"], hyper={"lr": "0.5"}, steps=3)
        assert (plan.task, plan.scheme, plan.hooks, plan.hyper) == ("toy", "sync", ["log:every=3"], {"lr": "0.5"})
        assert (scheme, objects) == (SyncSGD(lr=0.5), {})
        task, hook = toy(), Log(every=3)
        plan, scheme, objects = planned(task, SyncSGD, hooks=[hook, "log"], hyper={"lr": 0.5})
        assert (plan.task, plan.scheme, plan.hyper, plan.hooks) == (None, None, {}, ["log"])
        assert objects["task"] is task
        assert objects["scheme"] == scheme == SyncSGD(lr=0.5)
        assert objects["hooks"] == [hook]

    def test_how_many_there_are(self) -> None:
        for scheme, workers, servers in (("sync", 2, 1), ("sgd", 1, 0), ("allreduce", 2, 0)):
            plan, made, _ = planned("toy", scheme)
            assert (plan.workers, plan.servers) == (workers, servers)
            kinds = [part.kind for part in roles_of(plan, made)]
            assert kinds == ["chief", *["worker"] * (workers - 1), *["server"] * servers]
        plan, made, _ = planned("toy", "sync", evaluator=True)
        assert str(roles_of(plan, made)[-1]) == "evaluator"

    def test_servers_of_a_scheme_without_a_server_are_refused(self) -> None:
        with pytest.raises(UsageError, match="allreduce has no server: 3 were asked for; omit --servers"):
            planned("toy", "allreduce", servers=3)
        assert planned("toy", "allreduce", servers=1)[0].servers == 0  # the default

    def test_values_become_what_they_should_be(self) -> None:
        plan, _, _ = planned("toy", "sync", workers="3", patience=2, throttle=None)
        assert (plan.workers, plan.patience, plan.throttle) == (3, 2.0, 0.0)

    @pytest.mark.parametrize(
        ("settings", "said"),
        [
            ({"workers": 2.5}, "workers must be a whole number"),
            ({"seed": "x"}, "seed must be a whole number"),
            ({"patience": "long"}, "patience must be a number"),
            ({"evaluator": "maybe"}, "evaluator must be true or false"),
            ({"device": "cuda:"}, "device must be cpu, cuda or cuda:K"),
            ({"patience": float("nan")}, "patience must be above 0"),
            ({"seconds": -1}, "seconds must be above 0"),
        ],
        ids=str,
    )
    def test_others_are_refused(self, settings: dict[str, Any], said: str) -> None:
        with pytest.raises(UsageError, match=said):
            planned("toy", "sync", **settings)

    def test_hooks_are_made_once_to_see_that_they_can_be(self) -> None:
        with pytest.raises(UnknownName, match="did you mean 'log'"):
            planned("toy", "sync", hooks="logg")

    def test_a_vector_that_must_stay_whole(self) -> None:
        @dataclasses.dataclass(frozen=True)
        class Whole(SyncSGD, name="whole"):
            def whole(self) -> str:
                return "it sorts the vector"

        planned("toy", Whole)
        with pytest.raises(UsageError, match="cannot be sharded over 2 servers: it sorts the vector; use --servers 1"):
            planned("toy", Whole, servers=2)


def test_a_script_has_no_evaluator(tmp_path: Path) -> None:
    plan = Plan(script=["a.py"], evaluator=True, directory=str(tmp_path))
    check(plan, SyncSGD())
    with pytest.raises(UsageError, match="only the script knows its data"):
        roles_of(plan, SyncSGD())


def test_the_threads_of_torch_are_left_alone() -> None:
    torch.set_num_threads(2)
    planned("toy", "sync", threads=3)
    assert torch.get_num_threads() == 2
