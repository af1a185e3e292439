"""Who is waited for at the start of a run on several nodes, what people hear of it, and what happens in the end."""

from __future__ import annotations

import pytest

from paceline.errors import UsageError
from paceline.network.nodes.join import JoinWait, Verdict, rejoin_time
from paceline.network.nodes.participate import Network

ROLES = ["chief", "worker:1", "worker:2", "server:0", "evaluator"]


def gathering(policy: str = "fail", join: float = 20.0) -> JoinWait:
    return JoinWait(ROLES, {"chief"}, join=join, policy=policy, began=100.0)


def test_it_is_complete_when_everybody_but_the_evaluator_is_there() -> None:
    one, said = gathering(), []
    assert one.look({"worker:2", "evaluator"}, 101, said.append) is Verdict.WAIT
    assert not said
    one.came |= {"worker:1", "worker:2", "server:0"}
    assert one.look({"evaluator"}, 102, said.append) is Verdict.COMPLETE
    assert said == ["all 4 roles have joined"]


def test_people_hear_every_few_seconds_who_is_missing() -> None:
    one, said = gathering(join=600), []
    for second in range(100, 160):
        one.look(["worker:2", "server:0"], second, said.append)
    assert said[0] == "waiting for worker:2, server:0: 2 of 4 roles have joined (5 of 600 s)"
    assert 10 <= len(said) <= 12


@pytest.mark.parametrize(
    ("policy", "verdict"), [("fail", Verdict.FAIL), ("go-on", Verdict.WITHOUT), ("wait", Verdict.WAIT)]
)
def test_when_the_time_has_passed_the_policy_decides(policy: str, verdict: Verdict) -> None:
    one = gathering(policy)
    assert one.look(["worker:1"], 119, lambda _: None) is Verdict.WAIT
    assert one.look(["worker:1"], 121, lambda _: None) is verdict


def test_who_never_came_is_known_and_who_came_and_went_is_not_among_them() -> None:
    one = gathering()
    one.came.add("worker:1")
    assert one.never_came() == ["worker:2", "server:0"]


def test_a_lost_hub_is_looked_for_longer_than_it_takes_to_notice_its_loss() -> None:
    assert rejoin_time(patience=30, join=600) == 150
    assert rejoin_time(patience=2, join=600) == 60
    assert rejoin_time(patience=30, join=20) == 20  # not longer than for a hub that was never there


@pytest.mark.parametrize("wrong", [{"join": 0.0}, {"join_policy": "maybe"}])
def test_wrong_settings_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="--join"):
        Network(**wrong)  # type: ignore[arg-type]
