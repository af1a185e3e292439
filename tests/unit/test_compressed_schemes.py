"""Compression in simulated runs: identities, what crosses the network, and what is refused."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from beds.short_windows import short
from small_models import task as small_task

from paceline import Result, State, Vector, Worker, on_server, simulate
from paceline.compressed_sites import Site
from paceline.config import build, discovery
from paceline.errors import UsageError
from paceline.result import digest
from paceline.scheme import Scheme
from paceline.schemes.allreduce import AllReduce
from paceline.simulator.cost import Cost
from paceline.simulator.engine import SimulationEngine
from paceline.tasks.quadratic import quadratic

SCHEMES = {name: one.value for name, one in discovery.schemes().items() if one.value.compresses}
GOSSIP = [name for name, one in SCHEMES.items() if "meet" in one.compresses]  # models are compressed, not steps
COMPRESSED = [name for name in SCHEMES if name not in GOSSIP]
COMPRESSORS = list(discovery.compressors())
TASK: dict[str, Any] = {"task_options": {"dim": 40, "noise": 0.1}, "workers": 4, "steps": 30, "lr": 0.02}


@pytest.fixture(autouse=True)
def _without_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def run(scheme: str = "allreduce", **options: Any) -> Result:
    return simulate("quadratic", scheme, **TASK | short(scheme) | options)


def engine(scheme: Scheme, compress: str, steps: int, workers: int = 3) -> SimulationEngine:
    task = quadratic(dim=12, noise=0.3)
    made = SimulationEngine(task, build.compressing(scheme, compress), workers=workers, seed=3, cost=Cost())
    made.run(park_at=steps)
    return made


PAIRS = [(scheme, "topk:0.2") for scheme in COMPRESSED]
PAIRS += [(scheme, compress) for scheme in GOSSIP for compress in ("bf16", "int8", "fp8", "fp4", "qsgd:127")]
PAIRS += [(scheme, compress) for scheme in ("allreduce", "sync", "groups") for compress in COMPRESSORS]


@pytest.mark.parametrize(("scheme", "compress"), PAIRS)
def test_every_scheme_takes_every_compressor_and_repeats_its_bits(scheme: str, compress: str) -> None:
    first, second = (run(scheme, compress=compress, steps=10) for _ in range(2))
    assert first.digest == second.digest
    assert first.compress.partition(":")[0] == compress.partition(":")[0]
    assert sum(first.traffic["sent"]) <= sum(first.traffic["uncompressed"])  # type: ignore[index]


@pytest.mark.parametrize("scheme", COMPRESSED)
def test_all_coordinates_are_the_uncompressed_run(scheme: str) -> None:
    """Identity 31, bit for bit: nothing is left to feed back."""
    plain = run(scheme, compress="none", steps=10)
    assert run(scheme, compress="topk:1", steps=10).digest == plain.digest
    assert torch.allclose(run(scheme, compress="randk:1", steps=10).vector, plain.vector)


@pytest.mark.parametrize(
    "compress", ["topk:0.1", "randk:0.2,feedback=true", "ef-sign", "onebit", "int8:true", "fp4:true"]
)
def test_x_less_the_mean_error_follows_exact_steps(compress: str) -> None:
    """Identity 32: what was not sent is in the errors, so x - lr * mean e is x0 - lr * the sum of mean gradients."""

    @dataclass(frozen=True)
    class Summed(AllReduce, name="summed"):
        def worker(self, x0: Vector, workers: int) -> State:
            return State(x=x0, total=torch.zeros_like(x0))

        async def step(self, w: Worker) -> None:
            g = await w.grad(w.x)
            w.total += g
            self.rule.apply(w.state, await w.mean(g), self.lr)
            w.v += 1

    made = engine(Summed(lr=0.05), compress, 25)
    states = [seat.worker.state for seat in made.seats]
    error = torch.stack([state.cell(Site.of("mean").cell("error")) for state in states]).mean(0)
    total = torch.stack([state.total for state in states]).mean(0)
    start = quadratic(dim=12, noise=0.3).start(3)
    assert torch.allclose(states[0].x - 0.05 * error, start - 0.05 * total, atol=1e-5)
    assert error.abs().max() > 1e-4


def test_the_server_and_the_workers_vote_alike() -> None:
    by_server, by_workers = (run(scheme, compress="signsgd", lr=0.01) for scheme in ("sync", "allreduce"))
    assert by_server.digest == by_workers.digest
    moved = (by_workers.vector - quadratic(dim=40, noise=0.1).start(0)) / 0.01
    assert torch.allclose(moved, moved.round(), atol=1e-3)  # a vote is -1, 0 or 1


@pytest.mark.parametrize("compress", ["topk:0.1", "dgc:0.1", "ef-sign", "qsgd:4", "int8", "fp4", "bf16"])
def test_a_push_and_a_mean_of_compressed_gradients_are_the_same_step(compress: str) -> None:
    """Not of compressors whose seeds, or whose common matrices, depend on who takes the mean."""
    if compress != "qsgd:4":
        assert run("sync", compress=compress).digest == run("allreduce", compress=compress).digest
    assert torch.allclose(run("sync", compress=compress).vector, run("allreduce", compress=compress).vector, atol=0.2)


def test_more_than_a_gradient_of_each_worker_is_not_compressed_twice() -> None:
    """`whole` means, and means of other lengths, stay as they are."""

    @dataclass(frozen=True)
    class Checked(AllReduce, name="checked"):
        async def step(self, w: Worker) -> None:
            g = await w.grad(w.x)
            plain = await w.mean(g, whole=True)
            short = await w.mean(g[:5])
            assert torch.equal(short, plain[:5])
            coarse = await w.mean(g)
            assert int((coarse != 0).sum()) <= 6
            pending = await w.start(w.mean(g))
            assert int(((await pending) != 0).sum()) <= 6
            self.rule.apply(w.state, plain, self.lr)
            w.v += 1

    engine(Checked(), "topk:0.1", 3)


def test_a_vector_of_weight_0_leaves_the_error_as_it_is() -> None:
    @dataclass(frozen=True)
    class Sampled(AllReduce, name="sampled"):
        async def step(self, w: Worker) -> None:
            g = await w.grad(w.x)
            g = await w.mean(g, weight=float(w.rank != 1))
            self.rule.apply(w.state, g, self.lr)
            w.v += 1

    for compress in ("topk:0.1", "randk:0.1,feedback=true", "powersgd:1"):
        made = engine(Sampled(), compress, 5)
        errors = [seat.worker.state.cell(Site.of("mean").cell("error")) for seat in made.seats]
        assert torch.equal(errors[1], torch.zeros_like(errors[1]))
        if compress != "powersgd:1":  # the quadratic has no matrix
            assert errors[0].abs().max() > 0


def test_the_network_sees_the_compressed_bytes() -> None:
    slow = {"network": "latency=0,bandwidth=1000", "steps": 1}
    whole, small = (run("sync", compress=c, **slow) for c in ("", "topk:0.1"))
    assert whole.virtual_seconds is not None
    assert small.virtual_seconds is not None
    payload = 4 * (4 + 2)
    assert whole.virtual_seconds - small.virtual_seconds == pytest.approx((40 * 4 - payload) / 1000)
    # a mean: the payload out, and those of the three others in
    whole, small = (run("allreduce", compress=c, **slow) for c in ("", "topk:0.1"))
    assert whole.virtual_seconds == pytest.approx(1 + 2 * 160 / 1000)
    assert small.virtual_seconds == pytest.approx(1 + 4 * payload / 1000)


@pytest.mark.parametrize(
    ("scheme", "sent", "received"),
    [("sync", 160 + 8 + 8 + 8, 160 + 8), ("allreduce", 160, 160), ("async", 160 + 8, 160 + 8)],
)
def test_the_counted_bytes_are_those_of_the_reference(scheme: str, sent: int, received: int) -> None:
    """Vectors: two for each gradient, one out and one in; besides them ranks and versions of 8 bytes."""
    result = run(scheme, workers=1, steps=10, batch=1)
    assert result.traffic is not None
    assert result.traffic["sent"][0] == result.traffic["uncompressed"][0] == sent * 10
    assert result.traffic["received"][0] in (received * 10, received * 9)  # the last mean may be under way


def test_compressed_bytes_are_counted_beside_those_of_the_whole_vectors() -> None:
    result = run("async", workers=2, steps=10, compress="signsgd")
    assert result.traffic is not None
    pushes = [one // 168 for one in result.traffic["uncompressed"]]
    assert sum(pushes) >= 10
    assert result.traffic["sent"] == [(5 + 8) * one for one in pushes]
    assert ("compressor", "signsgd") in list(result.rows())
    assert any("of" in text for name, text in result.rows() if name == "sent by a worker, on average")


def test_payloads_are_gathered_only_while_they_are_shorter_than_the_vector() -> None:
    few, many = (run("allreduce", workers=n, compress="bf16", steps=2).traffic for n in (3, 4))
    assert few is not None
    assert many is not None
    assert few["sent"][0] == 2 * 80
    assert many["sent"][0] == 2 * 160


PARAMETERS = {"averaging", "local-sgd", "slowmo", "hierarchical", "daso", "easgd", "aeasgd", "aeamsgd", "fedasync"}


def test_all_other_schemes_can_be_compressed() -> None:
    assert discovery.schemes().keys() - SCHEMES.keys() == PARAMETERS | {"sgd"}


@pytest.mark.parametrize("scheme", [*sorted(PARAMETERS), "sgd"])
def test_parameters_are_not_compressed(scheme: str) -> None:
    with pytest.raises(UsageError, match=f"{scheme} sends no gradients.*Schemes that can be compressed: .*allreduce"):
        simulate("quadratic", scheme, compress="topk:0.1")


def test_exact_runs_are_compressed_with_the_same_bits_in_any_number_of_processes() -> None:
    given = {"exact": True, "micro": 4, "batch": 8, "steps": 10, "compress": "topk:0.1"}
    digests = {simulate("digits-mlp", "allreduce", workers=n, **given).digest for n in (1, 2, 4)}
    assert len(digests) == 1


def test_a_killed_worker_keeps_its_error_and_returns() -> None:
    fault = {"faults": ["kill:1@step=3,back=2"], "steps": 20}
    for scheme in ("sync", "async", "allreduce"):
        for compress in ("topk:0.1", "randk:0.1", "powersgd:2", "dgc:0.1"):
            first, second = (run(scheme, compress=compress, **fault) for _ in range(2))
            assert first.updates == 20
            assert first.digest == second.digest


def test_a_scheme_may_have_a_compressor_of_its_own() -> None:
    @dataclass(frozen=True)
    class Sparse(AllReduce, name="sparse"):
        compression = "topk:0.1"

    own, none, other = (simulate("quadratic", Sparse, **TASK, compress=c) for c in ("", "none", "int8"))
    assert own.digest == run("allreduce", compress="topk:0.1").digest
    assert none.digest == run("allreduce").digest
    assert other.compress == "int8"


def test_two_arguments_have_errors_of_their_own() -> None:
    @dataclass(frozen=True)
    class Two(Scheme, name="two"):
        compresses = ("push.g", "push.h")

        @on_server
        def pull(self, s: State) -> tuple[Vector, int]:
            return s.x, s.v

        @on_server
        def push(self, s: State, g: Vector, v: int, h: Vector) -> None:
            s.admit(v)
            s.x -= 0.01 * (g + h)
            s.v += 1

        async def step(self, w: Worker) -> None:
            w.x, w.v = await self.pull()
            g = await w.grad(w.x)
            await self.push(g, w.v, -0.5 * g)

    made = engine(Two(), "topk:0.1", 10, workers=1)
    state = made.seats[0].worker.state
    one, other = (state.cell(Site.of(f"push.{name}").cell("error")) for name in "gh")
    assert torch.allclose(one, -2 * other)
    assert digest(one) != digest(other)


FRAGMENTED = {"streaming-diloco": "mean", "decoupled-diloco": "push.d"}


@pytest.mark.parametrize("scheme", FRAGMENTED)
@pytest.mark.parametrize(
    "compress",
    [
        *("topk:0.1", "topk:0.1,chunk=16,bits=2", "dgc:0.1,momentum=0", "randk:0.2,feedback=true", "ef-sign", "onebit"),
        *("powersgd:1", "int8:true", "fp8:true", "fp4:true", "bf16:true"),
    ],
)
def test_every_fragment_has_an_error_of_its_own(scheme: str, compress: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was sent of a fragment, and its error, are together all that was to be sent of it."""
    missing: dict[int, torch.Tensor] = {}  # by the memory of an error: what was to be sent less what was
    count = 0
    compressor = build.compressor_of(compress)
    assert compressor is not None
    real = type(compressor).pack

    def noting(self: Any, s: State, v: Vector, seed: int) -> Any:
        nonlocal count
        payload, sent = real(self, s, v, seed)
        place = s.cell("error").data_ptr()
        missing[place] = missing.get(place, torch.zeros(len(v), dtype=torch.float64)) + v.double() - sent.double()
        count += 1
        return payload, sent

    monkeypatch.setattr(type(compressor), "pack", noting)
    given = build.scheme_of(scheme, {"window": 3, "fragments": 2, "lr": 0.01})
    made = SimulationEngine(small_task(), build.compressing(given, compress), workers=2, seed=3, cost=Cost())
    made.run(park_at=8)
    site = Site.of(FRAGMENTED[scheme])
    assert count >= 12
    assert len(missing) == 4
    for seat in made.seats:
        lengths = []
        for number in range(2):
            error = seat.worker.state.cell(site.cell("error", number))
            torch.testing.assert_close(error.double(), missing[error.data_ptr()], atol=1e-5, rtol=1e-4)
            assert error.abs().max() > 0
            lengths.append(len(error))
        assert sum(lengths) == len(seat.worker.state.x)
        assert seat.worker.state.cell(site.cell("sent")) == count // 2


def test_a_compressor_knows_the_parameters_in_a_fragment() -> None:
    """Of a fragment that cuts a matrix none: it is one parameter."""
    whole = build.compressor_of("powersgd:1")
    assert whole is not None
    fitted = whole.fitted([(8, 4), (8,), (2, 8), (2,)])
    assert fitted.fitted_to(((0, 40),)).shapes == ((8, 4), (8,))
    assert fitted.fitted_to(((0, 32), (40, 56))).shapes == ((8, 4), (2, 8))
    assert fitted.fitted_to(((0, 36),)).shapes == ()


@pytest.mark.parametrize("scheme", FRAGMENTED)
def test_one_fragment_is_the_whole_vector(scheme: str) -> None:
    """With the cells, and so the checkpoints, of vectors that are sent whole."""
    given = build.compressing(build.scheme_of(scheme, {"fragments": 1}), "topk:0.1")
    cells = set(given.worker_state(torch.zeros(20), 2))
    site = Site.of(FRAGMENTED[scheme])
    assert {site.cell("error"), site.cell("sent")} == {name for name in cells if name.startswith("compress_")} - {
        "compress_shapes"
    }


@pytest.mark.parametrize("scheme", GOSSIP)
def test_compressed_models_are_mixed_and_their_sum_stays(scheme: str) -> None:
    """What the others do not get of a model stays with its worker: nothing is lost, and the models come together."""
    hyper = {"lr": 0.0} | {"gosgd": {"p": 0.8}, "noloco": {"window": 1}}.get(scheme, {})
    made = build.compressing(build.scheme_of(scheme, hyper), "int8")
    held = SimulationEngine(quadratic(dim=12), made, workers=4, seed=3, cost=Cost())
    rng = torch.Generator().manual_seed(5)
    for seat in held.seats:
        seat.worker.x = torch.randn(12, generator=rng)
        if scheme == "noloco":
            seat.worker.slow = seat.worker.x

    def total() -> Vector:
        """Of the models; of weight * model where weights travel with them (sgp has that product in x)."""
        weights = [seat.worker.state.weight if scheme == "gosgd" else 1.0 for seat in held.seats]
        return torch.stack([one * seat.worker.x for one, seat in zip(weights, held.seats, strict=True)]).sum(0)

    def spread() -> float:
        models = torch.stack([made.model(seat.worker.state) for seat in held.seats])
        return float((models - models.mean(0)).norm())

    before, apart = total(), spread()
    held.run(park_at=30)
    torch.testing.assert_close(total(), before, atol=1e-5, rtol=1e-5)
    assert spread() < 0.05 * apart
    received = [seat.driver.traffic.received for seat in held.seats]
    assert sum(received) == sum(seat.driver.traffic.sent for seat in held.seats) > 0


@pytest.mark.parametrize("compress", [*COMPRESSORS, "int8:true", "bf16:true"])
def test_models_are_compressed_by_precise_compressors_only(compress: str) -> None:
    """By the error of a normal vector, which a worker would have in its neighbours' models at every meeting."""
    compressor = build.compressor_of(compress)
    assert compressor is not None
    v = torch.randn(4096, generator=torch.Generator().manual_seed(1))
    _, sent = compressor.pack(State(**compressor.cells(v), v=0, workers=4), v, 1)
    error = float((sent - v).norm() / v.norm())
    assert compressor.points == (error <= 0.2 and compressor.retained is None)
    if compressor.points:
        run("d-psgd", compress=compress, steps=2)
    else:
        with pytest.raises(UsageError, match=r"give each other their models.*bf16, fp4, fp8, int8"):
            run("d-psgd", compress=compress)


def test_the_network_sees_the_bytes_of_compressed_models() -> None:
    slow = {"network": "latency=0,bandwidth=1000", "steps": 1, "topology": "ring", "order": "atc"}
    whole, small = (run("d-psgd", compress=c, **slow) for c in ("none", "bf16"))
    assert whole.virtual_seconds == pytest.approx(1 + 4 * 160 / 1000)  # to two neighbours, and from them
    assert small.virtual_seconds == pytest.approx(1 + 4 * 80 / 1000)
    assert small.traffic is not None
    assert small.traffic == {"sent": [160] * 4, "received": [160] * 4, "uncompressed": [320] * 4}


def test_a_worker_that_gives_to_nobody_loses_nothing() -> None:
    @dataclass(frozen=True)
    class OneWay(Scheme, name="one-way"):
        decentralised = True
        compresses = ("meet",)

        async def step(self, w: Worker) -> None:
            met = await w.meet(w.x, of=[0] if w.rank else [], to=[] if w.rank else [1])
            assert (met.lost is None) == bool(w.rank)
            await w.grad(w.x)
            w.v += 1

    made = engine(OneWay(), "bf16", 3, workers=2)
    counted = [(seat.driver.traffic.sent, seat.driver.traffic.received) for seat in made.seats]
    assert counted == [(3 * 24, 0), (0, 3 * 24)]


def test_a_gradient_after_a_vote_is_a_gradient() -> None:
    """signsgd changes the result of the mean before it, and nothing else."""

    @dataclass(frozen=True)
    class Twice(AllReduce, name="twice"):
        async def step(self, w: Worker) -> None:
            vote = await w.mean(await w.grad(w.x))
            assert set(vote.tolist()) <= {-1.0, 0.0, 1.0}
            g = await w.grad(w.x)
            assert len(set(g.abs().tolist())) > 6
            self.rule.apply(w.state, vote, self.lr)
            w.v += 1

    engine(Twice(lr=0.01), "signsgd", 4)


def test_hooks_of_a_simulated_run_see_the_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    run("allreduce", workers=2, steps=10, compress="topk:0.1", hooks=["log:every=10,values=update,sent"])
    assert f"update 10  sent {2 * 10 * 24} B" in capsys.readouterr().err
