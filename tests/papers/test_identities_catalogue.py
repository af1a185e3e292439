"""What docs/schemes.md says that schemes equal at the limits of their hyper-parameters: every phrase of it has a row
here, or names its test. Bit for bit, except where the phrase says "up to rounding"."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from oracles import EXACT, SCHEMES, bowl, network, run

LR, RANDOM, EVEN = 0.02, "exponential:1", "constant:1"
HERE = Path(__file__).parent


class Same(NamedTuple):
    """A scheme with these words is the other scheme with those."""

    words: Mapping[str, Any]
    other: str
    its_words: Mapping[str, Any] = {}
    workers: int = 4
    compute: str = RANDOM
    steps: int = 20
    its_steps: int = 20


def alone(words: Mapping[str, Any] | None = None, **its_words: Any) -> Same:
    return Same(words or {}, "sgd", its_words, workers=1)


ONE = {"workers=1 is sgd": alone()}
PLAIN = {"rule": "sgd", "window": 4, "outer": "sgd", "outer_lr": 1.0}
REGION = {"size": 8, "pushes": 1, "merge": 1.0, "local_lr": 1.0, "local_momentum": 0.0, "local_buffer": 1}
HALOS = {**REGION, "global_lr": 1.0, "global_momentum": 0.0, "global_buffer": 1, "rule": "sgd", "window": 4}
HEAVY = {"outer": "momentum", "outer.momentum": 0.5, "outer_lr": 0.7, "window": 3}

ROWS: dict[str, dict[str, Same | str]] = {
    "ace": {"workers=1 is sgd, up to rounding": alone()},
    "ad-psgd": ONE | {"workers=2 is d-psgd with topology=ring": Same({}, "d-psgd", {"topology": "ring"}, workers=2)},
    "adag": {
        "a large gamma is downpour-easy": Same({"gamma": 1e30, "window": 3}, "downpour-easy", {"window": 3}),
        "normalise=true and a large gamma is agn": Same(
            {"gamma": 1e30, "window": 3, "normalise": True}, "agn", {"window": 3}
        ),
    },
    "aeamsgd": {"delta=0 is aeasgd": Same({"delta": 0.0}, "aeasgd")},
    "aeasgd": {"alpha=0 is sgd on each worker, the centre at rest": "elastic.py::test_alpha_zero_is_independent_sgd"},
    "agn": {"window=1 is async": Same({"window": 1}, "async")},
    "allreduce": ONE | {"the same bits as sync with all workers": Same({}, "sync")},
    "async": ONE,
    "async-diloco": {
        "buffer=1 with one worker is diloco, up to rounding": Same(
            {"buffer": 1, "window": 4}, "diloco", {"window": 4}, workers=1
        )
    },
    "averaging": {"window=1 with sgd is allreduce, up to rounding": Same({"window": 1}, "allreduce")},
    "d-psgd": ONE
    | {
        "order=atc topology=full is sync, up to rounding": Same({"order": "atc", "topology": "full"}, "sync"),
        "topology=alone are independent runs": "decentralised.py::test_d_psgd_without_neighbours_is_independent_sgd",
    },
    "dana": {
        "momentum=0 is async": Same({"momentum": 0.0}, "async"),
        "workers=1 is sgd with rule=nesterov": alone(rule="nesterov"),
        "variant=zero and slim, up to rounding": "stale.py::test_the_look_ahead_of_dana_zero_is_the_x_of_dana_slim",
    },
    "daso": {
        "skip=1 wait=0 is averaging with window=1": Same({"skip": 1, "wait": 0}, "averaging", {"window": 1}),
        "one node is averaging with window=wait": Same({"size": 4, "skip": 4, "wait": 2}, "averaging", {"window": 2}),
    },
    "dc-asgd": ONE | {"lam=0 is async": Same({"lam": 0.0}, "async")},
    "decoupled-diloco": {
        "least=workers is streaming-diloco, up to rounding, if all workers compute alike": (
            "streaming.py::test_decoupled_diloco_of_all_workers_is_streaming_diloco"
        )
    },
    "delay-adaptive": ONE | {"a large bound is async": Same({"bound": 10**6}, "async")},
    "diloco": {"outer=sgd outer_lr=1 rule=sgd is local-sgd, up to rounding": Same(PLAIN, "local-sgd", {"window": 4})},
    "downpour": {"server.rule=sgd, window=1 is async": Same({"server.rule": "sgd"}, "async")},
    "downpour-easy": {"window=1 is async": Same({"window": 1}, "async")},
    "drop-stale": ONE
    | {
        "a large bound is async": Same({"bound": 10**6}, "async"),
        "ringmaster with threshold = bound + 1 and stop=false": Same(
            {"bound": 2}, "ringmaster", {"threshold": 3, "stop": False}
        ),
    },
    "dynsgd": {
        "workers=1, window=1 is sgd": alone({"window": 1}),
        "weight=constant, window=1 is async at lr / workers": Same(
            {"weight": "constant", "window": 1}, "async", {"lr": LR / 4}
        ),
    },
    "easgd": {"alpha=0 is sgd on each worker, the centre at rest": "elastic.py::test_alpha_zero_is_independent_sgd"},
    "fedasync": {"workers=1, alpha=1, window=1 is sgd, up to rounding": alone({"alpha": 1.0, "window": 1})},
    "fedavg": {"fraction=1 is local-sgd, up to rounding": Same({"window": 4}, "local-sgd", {"window": 4})},
    "fedbuff": {"buffer=1 power=0 window=1 is async": Same({"buffer": 1, "power": 0.0, "window": 1}, "async")},
    "fedopt": {"server.rule=sgd server.lr=1 is fedavg": Same({"server.rule": "sgd", "server.lr": 1.0}, "fedavg")},
    "fedprox": {"mu=0 is fedavg": Same({"mu": 0.0}, "fedavg")},
    "gap-aware": ONE,
    "gosgd": ONE | {"p=0 are independent runs": "decentralised.py::test_gosgd_that_never_sends_is_independent_sgd"},
    "groups": {"size=workers is sync": Same({"size": 4}, "sync"), "size=1 is async": Same({"size": 1}, "async")},
    "halos": {
        "one region, pushes=1 merge=1, buffers 1, momenta 0, rates 1 and rule=sgd is downpour-easy, up to rounding": (
            Same(HALOS, "downpour-easy", {"window": 4})
        )
    },
    "hierarchical": {
        "sizes= windows=10 is averaging with window=10": Same(
            {"sizes": (), "windows": (10,)}, "averaging", {"window": 10}
        ),
        "windows that are all 1, with sgd, are allreduce, up to rounding": Same(
            {"sizes": (2,), "windows": (1, 1)}, "allreduce"
        ),
    },
    "hogwild": ONE | {"chunks=1 is async": Same({"chunks": 1}, "async")},
    "k-async": {"k=workers is sync": Same({"k": 4}, "sync"), "k=1 is async": Same({"k": 1}, "async")},
    "k-batch-async": {
        "k=1 is async": Same({"k": 1}, "async"),
        "softsync with weight=constant and n = workers / k": Same({"k": 2}, "softsync", {"weight": "constant", "n": 2}),
    },
    "k-batch-sync": {
        "workers=1, k=1 is sgd": alone({"k": 1}),
        "the same as rennala": Same({"k": 3}, "rennala", {"k": 3}),
    },
    "k-sync": {
        "k=workers is sync": Same({"k": 4}, "sync"),
        "cancel=false is sync with aggregate=k": Same({"k": 3, "cancel": False}, "sync", {"aggregate": 3}),
    },
    "local-sgd": {
        "post_local=0 with a constant window is averaging": Same({"window": 4}, "averaging", {"window": 4}),
        "window=1 with sgd is allreduce, up to rounding": Same({"window": 1}, "allreduce"),
    },
    "m-sync": {
        "the same as k-sync": Same({"k": 3}, "k-sync", {"k": 3}),
        "k=workers is sync": Same({"k": 4}, "sync"),
    },
    "malenia": {"workers=1, k=1 is sgd": alone({"k": 1}), "equal times are sync": Same({}, "sync", compute=EVEN)},
    "mindflayer": {
        "deadline=0 is sync of tries * workers gradients, up to rounding": (
            "stale.py::test_mindflayer_without_a_deadline_is_sync_of_all_tries"
        ),
        "workers=1, tries=1 is sgd": alone({"tries": 1}),
    },
    "noloco": {
        "workers=1 and workers=2 are diloco with outer=momentum, up to rounding": Same(
            {"window": 3, "rule": "sgd"}, "diloco", {**HEAVY, "rule": "sgd"}, workers=2
        ),
        "size=1 are independent runs": "hierarchies.py::test_alone_without_momentum_a_window_is_taken_as_it_is",
    },
    "ormo": {
        "momentum=0 is async": Same({"momentum": 0.0}, "async"),
        "workers=1 is sgd with rule=momentum, and in order sync with reduce=sum, up to rounding": (
            "stale.py::test_ormo_in_order_is_synchronous_momentum_on_sums"
        ),
    },
    "rennala": {
        "the same as k-batch-sync": Same({"k": 5}, "k-batch-sync", {"k": 5}),
        "workers=1, k=1 is sgd": alone({"k": 1}),
    },
    "rescaled": {"equal times are async": Same({}, "async", compute=EVEN)},
    "ringleader": ONE,
    "ringmaster": ONE
    | {
        "a large threshold is async": Same({"threshold": 10**6}, "async"),
        "threshold=1 is sgd on whichever gradient comes first": (
            "stale.py::test_a_threshold_of_one_is_sgd_on_whichever_gradient_comes_first"
        ),
    },
    "sagn": {"window=1 is sync": Same({"window": 1}, "sync")},
    "sgd": {},
    "sgp": ONE
    | {
        "topology=full is sync, up to rounding": Same({"topology": "full"}, "sync"),
        "2^k workers average exactly in k steps": "decentralised.py::test_sgp_averages_exactly_in_k_steps",
    },
    "slowmo": {
        "alpha=1 beta=0 is local-sgd, up to rounding": Same({"beta": 0.0, "window": 4}, "local-sgd", {"window": 4}),
        "a constant lr is diloco with outer=momentum, up to rounding": Same(
            {"beta": 0.5, "alpha": 0.7, "window": 3}, "diloco", {**HEAVY, "rule": "sgd"}
        ),
    },
    "softsync": ONE | {"n=workers, weight=constant is async": Same({"n": 4, "weight": "constant"}, "async")},
    "sparseloco": {
        "compress=none rule=sgd is local-sgd, up to rounding": Same(
            {"compress": "none", "rule": "sgd", "window": 4}, "local-sgd", {"window": 4}
        ),
        "compress=none is diloco outer=sgd outer_lr=1": Same(
            {"compress": "none", "window": 4}, "diloco", {"outer": "sgd", "outer_lr": 1.0, "window": 4}
        ),
    },
    "ssp": {
        "bound=0 is sync at lr * workers, up to rounding": Same({"bound": 0}, "sync", {"lr": 4 * LR}, its_steps=5),
        "bound=none is async": Same({"bound": None}, "async"),
    },
    "streaming-diloco": {
        "fragments=1 overlap=0 merge=0 is diloco with the same outer_lr": Same(
            {"fragments": 1, "overlap": 0, "merge": 0.0, "window": 4}, "diloco", {"outer_lr": 0.4, "window": 4}
        )
    },
    "sync": ONE | {"aggregate=workers is allreduce": Same({"aggregate": 4}, "allreduce")},
    "sync-rates": {
        "rates all lr and reduce=mean is sync": Same({"rates": (LR,) * 4, "reduce": "mean"}, "sync"),
    },
    "sync-repeat": {"workers=1, aggregate=1 is sgd": alone({"aggregate": 1})},
}
HELD = [(name, phrase, row) for name, rows in ROWS.items() for phrase, row in rows.items()]


def test_every_phrase_of_the_catalogue_has_a_row() -> None:
    said = {name: set(filter(None, scheme.equals.split("; "))) for name, scheme in SCHEMES.items()}
    assert said == {name: set(rows) for name, rows in ROWS.items()}


@pytest.mark.parametrize(("name", "phrase", "row"), HELD, ids=[f"{name}: {phrase}" for name, phrase, _ in HELD])
def test_it_holds(name: str, phrase: str, row: Same | str) -> None:
    if isinstance(row, str):
        file, _, test = row.partition("::")
        assert f"def {test}" in (HERE / f"test_identities_{file}").read_text(encoding="utf-8")
        return
    rounded = "up to rounding" in phrase
    for task in (bowl(), network()) if rounded else (bowl(dtype="float32"), network(torch.float32)):
        ours = run(task, name, row.workers, row.steps, compute=row.compute, **{"lr": LR, **row.words})
        theirs = run(task, row.other, row.workers, row.its_steps, compute=row.compute, **{"lr": LR, **row.its_words})
        if rounded:
            torch.testing.assert_close(ours.vector, theirs.vector, **EXACT)
        else:
            assert ours.digest == theirs.digest
