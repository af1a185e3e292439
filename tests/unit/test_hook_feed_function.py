"""A function of the user's feeds the workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hook_session import FakeSession

from paceline.config.build import hook_of
from paceline.errors import UsageError
from paceline.hooks.feed_function import FeedFunction
from paceline.task import Batch

BATCH = Batch((torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64)), size=4, seed=7, weight=0.5)


def fed(hook: FeedFunction) -> Batch:
    session = FakeSession()
    hook.begin(session)
    return hook.feed(session, BATCH)


def given(value: Any, mode: str = "replace") -> Batch:
    return fed(FeedFunction(lambda batch, session: value, mode=mode))  # type: ignore[arg-type]


def test_tensors_replace_the_data_and_keep_the_rest() -> None:
    batch = given((torch.ones(2, 3), torch.ones(2, dtype=torch.int64)))
    assert (batch.size, batch.seed, batch.weight) == (2, 7, 0.5)
    assert batch.data[0].sum() == 6


def test_a_batch_replaces_the_batch_and_none_leaves_it() -> None:
    other = Batch((torch.ones(1),), size=1)
    assert given(other) is other
    assert given(None) is BATCH
    assert given(None, "add") is BATCH


def test_added_samples_enlarge_the_batch() -> None:
    more = (torch.ones(2, 3), torch.ones(2, dtype=torch.int64))
    for value in (more, list(more), Batch(more, size=2)):
        batch = given(value, "add")
        assert batch.size == 6
        assert [len(part) for part in batch.data] == [6, 6]
        assert torch.equal(batch.data[1], torch.tensor([0, 0, 0, 0, 1, 1]))


def test_what_does_not_fit_is_refused() -> None:
    for value, mode, said in [
        ("text", "replace", "the function gave a str"),
        ((1, 2), "replace", "it must give a tuple of tensors"),
        ((torch.ones(2, 3), torch.ones(5)), "replace", "unequal length"),
        ((torch.ones(2, 3),), "add", "cannot be added"),
        ((torch.ones(2, 5), torch.ones(2)), "add", "equal in all dimensions but the first"),
    ]:
        with pytest.raises(UsageError, match=said):
            given(value, mode)


def test_a_function_is_found_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def twice(batch, session):\n    return tuple(2 + part for part in batch.data)\n", encoding="utf-8")
    hook = hook_of(f"feed-function:function={path}:twice,mode=add")
    assert isinstance(hook, FeedFunction)
    assert fed(hook).data[0].sum() == 24
    with pytest.raises(UsageError, match="did you mean 'twice'"):
        FeedFunction(f"{path}:twise")


def test_a_dictionary_is_replaced_as_a_whole() -> None:
    named = Batch(({"a": torch.zeros(4, 3), "labels": torch.zeros(4)},), size=4, seed=7)

    def feed(value: Any, mode: str = "replace") -> Batch:
        hook = FeedFunction(lambda batch, session: value, mode=mode)  # type: ignore[arg-type]
        hook.begin(FakeSession())
        return hook.feed(FakeSession(), named)

    batch = feed({"a": torch.ones(2, 3), "labels": torch.ones(2)})
    assert (batch.size, batch.seed, batch.data[0]["a"].sum()) == (2, 7, 6)
    for value, mode in (((torch.ones(2, 3),), "replace"), ({"a": torch.ones(2, 3)}, "add")):
        with pytest.raises(UsageError, match="let the function give a dictionary"):
            feed(value, mode)
