"""Source text is parsed by any number of threads."""

from __future__ import annotations

import ast
import gc
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from paceline.syntax import parsed, parsed_expression

TEXT = "\n".join(f"def f{number}(x):\n    return [x, {{'a': (1 + x) * {number}}}]" for number in range(100))


@pytest.fixture
def often_interrupted() -> Iterator[None]:
    """Python's garbage collector runs inside of a parse, and lets another thread go on."""

    def give_way(phase: str, info: dict[str, int]) -> None:
        time.sleep(0)

    threshold = gc.get_threshold()
    gc.callbacks.append(give_way)
    gc.set_threshold(50)
    yield
    gc.set_threshold(*threshold)
    gc.callbacks.remove(give_way)


@pytest.mark.usefixtures("often_interrupted")
def test_threads_may_parse_at_once() -> None:
    with ThreadPoolExecutor(4) as threads:
        trees = list(threads.map(lambda _: parsed(TEXT), range(40)))
    assert {len(tree.body) for tree in trees} == {100}


def test_an_expression() -> None:
    assert ast.unparse(parsed_expression("1 + x")) == "1 + x"
