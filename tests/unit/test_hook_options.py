"""Options of hooks are held to their types and bounds, and mistakes are told with the hook's name."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.config.build import hook_of
from paceline.errors import UsageError
from paceline.hooks.log import Log
from paceline.hooks.stop_at_step import StopAtStep
from paceline.hooks.target import Target


@pytest.mark.parametrize("name", ["log", "step-counter", "checkpoint-saver", "validation"])
def test_steps_and_seconds_exclude_each_other(name: str) -> None:
    with pytest.raises(UsageError, match=f"^{name}: give one of every, seconds, not every=5, seconds=2.5$"):
        hook_of(f"{name}:every=5,seconds=2.5")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("stop-at-step", "stop-at-step: give one of last_step, num_steps, not none of them"),
        ("stop-at-step:last_step=5,num_steps=3", "not last_step=5, num_steps=3"),
        ("stop-at-step:last_step=0", "last_step must be at least 1"),
        ("log:values=los", "no value of log 'los'; did you mean 'loss'"),
        ("log:seconds=-1", "seconds must be at least 0"),
        ("nan-guard:action=ignore", "action must be one of fail, stop, not 'ignore'"),
        ("learning-rate", "learning-rate: give base=RATE"),
        ("learning-rate:base=0.1,kind=cosine", "kind=cosine needs over=UPDATES"),
        ("learning-rate:base=0.1,kind=wild", "kind must be one of constant, step"),
        ("learning-rate:base=-1", "base must be at least 0"),
        ("weight-ema:decay=1.5", "decay must be from 0 to 1"),
        ("profiler:steps=5,every=2", "profiler: steps=5 do not fit between traces every=2"),
        ("global-step-waiter:ranks=-1", "ranks must be at least 0"),
        ("early-stop:patience=0", "patience must be at least 1"),
        ("feed-function", "'' names no function of feed-function; write file.py:NAME"),
        ("feed-function:function=absent.py:f", "no file 'absent.py' for the function"),
        ("feed-function:function=absent_module:f", "no module 'absent_module' for the function"),
        ("feed-function:function=json:dupms", "no function of feed-function in json 'dupms'; did you mean 'dumps'"),
        ("feed-function:function=json:dumps,mode=mix", "mode must be one of replace, add"),
    ],
)
def test_mistakes_are_told(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        hook_of(text)


def test_python_is_held_to_the_same_rules() -> None:
    given: list[tuple[Any, dict[str, Any], str]] = [
        (Target, {"every": 0}, "target: every must be at least 1, not 0"),
        (Target, {"value": "much"}, "target: value must be a number"),
        (StopAtStep, {"last_step": 2.5}, "stop-at-step: last_step must be a whole number"),
        (StopAtStep, {}, "stop-at-step: give one of"),
    ]
    for hook, options, said in given:
        with pytest.raises(UsageError, match=said):
            hook(**options)
    assert Log(every="5").every == 5  # type: ignore[arg-type]
