"""Which cases of tests with very many of them run before each change; `make matrix` runs the others.

A case costs seconds where real processes are started. What is omitted here repeats what is kept with another scheme or
another combination; `.ci/run` also runs the random faults of tests/chaos under every scheme.
"""

from __future__ import annotations

import pytest

# schemes of every kind: the others share their operations and most of their server's side with these
KINDS = frozenset(
    {
        *("sgd", "sync", "allreduce", "async", "hogwild", "agn", "averaging", "aeasgd", "groups"),
        *("k-async", "ringmaster"),  # quorums, stopped gradients
        *("streaming-diloco", "ad-psgd", "gosgd"),  # fragments, meetings, messages
    }
)


def of_a_kind(item: pytest.Item) -> bool:
    """Whether a case is of no scheme, or of one of KINDS."""
    given = getattr(item, "callspec", None)
    named = [given.params[name] for name in ("name", "team", "scheme", "unordered") if name in given.params]
    return not named or named[0] in KINDS


def one_in(item: pytest.Item, number: int) -> bool:
    """Every value of each parameter is in some of these cases."""
    return sum(getattr(item, "callspec").indices.values()) % number == 0  # noqa: B009
