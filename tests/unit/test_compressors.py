"""Compressors: what holds for every one of the family, a new one too, and what each says of itself."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from paceline.compressor import Compressor
from paceline.compressors.dgc import DGC
from paceline.compressors.fp4 import FP4
from paceline.compressors.onebit import OneBit
from paceline.compressors.powersgd import PowerSGD
from paceline.compressors.qsgd import QSGD
from paceline.compressors.randk import RandK
from paceline.compressors.signsgd import SignSGD
from paceline.compressors.terngrad import TernGrad
from paceline.compressors.topk import TopK, largest
from paceline.config import build, discovery
from paceline.errors import UnknownName, UsageError
from paceline.ops import nbytes
from paceline.state import State

SHAPES = ((30, 20), (30,), (10, 30), (10,))
LENGTH = sum(math.prod(shape) for shape in SHAPES)
FAMILY = {name: member.value for name, member in discovery.compressors().items()}


def vector(seed: int, length: int = LENGTH) -> Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def made(kind: type[Compressor], **options: object) -> Compressor:
    """With error feedback wherever there is a choice."""
    known = {field.name for field in dataclasses.fields(kind)}
    return kind(**({"feedback": True} if "feedback" in known else {}) | options).fitted(SHAPES)


def state(compressor: Compressor, like: Tensor) -> State:
    return State(**compressor.cells(like), v=0, workers=4)


def test_the_family_is_that_of_the_documents() -> None:
    known = {"topk", "randk", "dgc", "signsgd", "ef-sign", "onebit", "qsgd", "terngrad", "powersgd"}
    assert known | {"int8", "fp8", "fp4", "bf16"} <= FAMILY.keys()


@pytest.mark.parametrize("name", FAMILY)
def test_a_docstring_has_a_citation_an_equation_and_what_is_sent(name: str) -> None:
    text = FAMILY[name].__doc__ or ""
    assert re.search(r"arXiv|Interspeech", text)
    assert re.search(r"^    .*(<-|send )", text, re.M)
    assert "Sent: " in text


@pytest.mark.parametrize("name", FAMILY)
@pytest.mark.parametrize("length", [1, 7, LENGTH])
def test_a_payload_decodes_alike_everywhere_and_is_smaller(name: str, length: int) -> None:
    compressor = FAMILY[name]().fitted(SHAPES)
    v = vector(1, length).float()
    s = state(compressor, v)
    payload, sent = compressor.pack(s, v.clone(), seed=5)
    assert sent.shape == v.shape
    assert sent.dtype == v.dtype
    assert torch.equal(sent, compressor.decode(payload, torch.empty_like(v)))
    assert all(isinstance(one, Tensor | int | float) for one in payload)
    if length == LENGTH:
        assert nbytes(payload) < 0.75 * nbytes(v)


@pytest.mark.parametrize("name", FAMILY)
def test_the_vector_that_is_given_does_not_change_and_seeds_decide(name: str) -> None:
    compressor = FAMILY[name]().fitted(SHAPES)
    v = vector(1)
    before = v.clone()
    first, second = (compressor.pack(state(compressor, v), v, seed=5)[1] for _ in range(2))
    assert torch.equal(v, before)
    assert torch.equal(first, second)


def with_feedback() -> list[str]:
    return [name for name, kind in FAMILY.items() if made(kind).retained is not None]


@pytest.mark.parametrize("name", with_feedback())
def test_what_was_sent_and_what_is_kept_are_what_was_given(name: str) -> None:
    """Identity 32 of error feedback: the sum of decoded vectors, plus the error, is the sum of the vectors."""
    kind = FAMILY[name]
    compressor = made(kind, momentum=0.0) if kind is DGC else made(kind)
    given = [vector(seed) for seed in range(20)]
    s = state(compressor, given[0])
    sent = [compressor.pack(s, v, seed)[1] for seed, v in enumerate(given)]
    assert torch.allclose(sum(sent) + s.error, sum(given), atol=1e-10)  # type: ignore[arg-type]
    assert not torch.allclose(sum(sent), sum(given), atol=1e-3)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [name for name in with_feedback() if FAMILY[name].pieces is not Compressor.pieces])
def test_a_mean_in_pieces_keeps_the_invariant_over_workers(name: str) -> None:
    kind = FAMILY[name]
    compressor = made(kind)
    workers = [[vector(100 * rank + t) for t in range(10)] for rank in range(3)]
    states = [state(compressor, workers[0][0]) for _ in workers]
    total = torch.zeros(LENGTH, dtype=torch.float64)
    for t in range(10):
        runs = [compressor.pieces(s, vectors[t], seed=t) for s, vectors in zip(states, workers, strict=True)]
        parts = [next(run) for run in runs if run is not None]
        results: list[Tensor] = []
        while not results:
            mean = torch.stack(parts).mean(0)
            parts = []
            for run in runs:
                assert run is not None
                try:
                    parts.append(run.send(mean))
                except StopIteration as end:
                    results.append(end.value)
        assert all(torch.equal(one, results[0]) for one in results)
        total += results[0]
    errors = torch.stack([s.error for s in states]).mean(0)
    given = torch.stack([torch.stack(vectors).sum(0) for vectors in workers]).mean(0)
    assert torch.allclose(total + errors, given, atol=1e-9)


@pytest.mark.parametrize("name", [name for name, kind in FAMILY.items() if kind.unbiased])
def test_the_mean_of_many_decoded_vectors_is_the_vector(name: str) -> None:
    compressor = FAMILY[name](fraction=0.1) if name == "randk" else FAMILY[name]()
    v = vector(3, 50)
    rounds = 5_000
    s = state(compressor, v)
    decoded = [compressor.pack(s, v, seed)[1] for seed in range(rounds)]
    mean, spread = torch.stack(decoded).mean(0), torch.stack(decoded).std(0)
    assert ((mean - v).abs() <= 5 * spread / math.sqrt(rounds) + 1e-12).all()


@pytest.mark.parametrize("compressor", [TopK(1.0), RandK(1.0), RandK(1.0, feedback=True), DGC(1.0, momentum=0.0)])
def test_all_coordinates_are_no_compression(compressor: Compressor) -> None:
    v = vector(1)
    assert torch.allclose(compressor.pack(state(compressor, v), v, seed=2)[1], v, atol=1e-12)


def test_qsgd_with_more_levels_comes_closer() -> None:
    v = vector(1)
    errors = [float((QSGD(levels).pack(state(QSGD(), v), v, 3)[1] - v).norm()) for levels in (1, 7, 127)]
    assert errors[0] > 2 * errors[1] > 20 * errors[2]
    bound = min(v.numel() / 7**2, math.sqrt(v.numel()) / 7)
    whole = QSGD(7, bucket=0)
    mean = torch.stack([(whole.pack(state(whole, v), v, k)[1] - v).square().sum() for k in range(200)]).mean()
    assert mean <= bound * v.square().sum()


def test_powersgd_is_exact_for_matrices_of_its_rank() -> None:
    shape = (20, 30)
    compressor = PowerSGD(3).fitted([shape])
    left, right = vector(1, 60).view(20, 3), vector(2, 90).view(3, 30)
    v = (left @ right).view(-1)
    s = state(compressor, v)
    assert torch.allclose(compressor.pack(s, v, 0)[1], v, atol=1e-9)
    assert s.error.abs().max() < 1e-9


def test_powersgd_sends_vectors_whole_and_starts_warm() -> None:
    shapes = ((40, 40), (40,))
    compressor = PowerSGD(2).fitted(shapes)
    matrix = torch.tensor([20.0, 18.0] + [1.0] * 38, dtype=torch.float64)
    v = torch.cat((torch.diag(matrix).view(-1), vector(1, 40)))
    s = state(compressor, v)
    errors = []
    for _ in range(6):
        s.error = 0
        _, sent = compressor.pack(s, v, 0)
        assert torch.equal(sent[-40:], v[-40:])
        errors.append(float((sent - v).norm()))
    assert errors[-1] < 0.8 * errors[0]  # the power method comes closer with each vector
    assert errors[-1] == pytest.approx(float(matrix[2:].norm()), rel=0.05)


def test_dgc_with_all_coordinates_is_momentum_without_masking_and_plain_with_it() -> None:
    given = [vector(seed) for seed in range(6)]
    masked, unmasked = DGC(1.0), DGC(1.0, masking=False)
    for compressor in (masked, unmasked):
        s, u, sent = state(compressor, given[0]), torch.zeros_like(given[0]), []
        for v in given:
            u = 0.9 * u + v
            sent.append(compressor.pack(s, v, 0)[1])
            assert torch.allclose(sent[-1], v if compressor is masked else u, atol=1e-12)
    assert not torch.allclose(sent[-1], given[-1])


def test_dgc_clips_by_the_share_of_a_worker_and_warms_up() -> None:
    v = vector(1) * 100
    clipped = DGC(1.0, momentum=0.0, clip=2.0)
    assert clipped.pack(state(clipped, v), v, 0)[1].norm() == pytest.approx(2.0 / math.sqrt(4))
    warm = DGC(0.001, warm_up=10)
    assert [warm.share(version) for version in (0, 10, 20, 30, 40)] == [0.25, 0.0625, 0.015625, 0.004, 0.001]


def test_topk_keeps_the_largest_of_all_or_of_each_chunk() -> None:
    v = torch.tensor([9.0, -8.0, 7.0, 0.1, -0.2, 0.3, 0.0, 0.25])
    assert TopK(0.25).pack(state(TopK(), v), v, 0)[1].tolist() == [9.0, -8.0, 0, 0, 0, 0, 0, 0]
    chunked = TopK(0.25, chunk=4).pack(state(TopK(), v), v, 0)[1]
    assert torch.equal(chunked, torch.tensor([9.0, 0, 0, 0, 0, 0.3, 0, 0]))


def test_topk_of_two_bits_has_four_values_a_chunk() -> None:
    v, compressor = vector(1).float(), TopK(0.25, chunk=128, bits=2, decay=0.95)
    payload, sent = compressor.pack(state(compressor, v), v, 0)
    assert len(set(sent[:128].tolist()) - {0.0}) <= 4
    kept = sent != 0
    assert (sent[kept].sign() == v[kept].sign()).all()
    assert nbytes(payload) < nbytes(TopK(0.25, chunk=128).encode(state(compressor, v), v, 0)) / 2


def test_signsgd_votes() -> None:
    given = torch.tensor([[1.0, -2], [3, -1], [-1, 0]])
    votes = [SignSGD().decode(SignSGD().encode(State(v=0), v, 0), v) for v in given]
    assert [vote.tolist() for vote in votes] == [[1, -1], [1, -1], [-1, 1]]
    assert SignSGD().combined(torch.stack(votes).mean(0)).tolist() == [1, -1]
    assert SignSGD().combined(torch.stack(votes[1:]).mean(0)).tolist() == [0, 0]


def test_onebit_sends_two_means_for_each_row() -> None:
    compressor = OneBit().fitted([(2, 3)])
    v = torch.tensor([1.0, 2, -3, -1, -2, -3])
    assert compressor.pack(state(compressor, v), v, 0)[1].tolist() == [1.5, 1.5, -3, -2, -2, -2]


def test_ef_sign_of_one_coordinate_is_exact() -> None:
    compressor = FAMILY["ef-sign"]()
    v = torch.tensor([-0.3])
    assert torch.equal(compressor.pack(state(compressor, v), v, 0)[1], v)


def test_terngrad_has_three_values_for_each_parameter() -> None:
    compressor = TernGrad().fitted([(4, 2), (3,)])
    v = vector(1, 11)
    sent = compressor.pack(state(compressor, v), v, 7)[1]
    assert set(sent[:8].abs().tolist()) <= {0.0, float(v[:8].abs().max())}
    assert set(sent[8:].abs().tolist()) <= {0.0, float(v[8:].abs().max())}


def test_fp4_rounds_to_the_nearest_code() -> None:
    compressor = FP4(bucket=0)
    v = torch.tensor([6.0, -3.4, 0.2, 0.8, -5.1, 2.6])
    assert compressor.pack(state(compressor, v), v, 0)[1].tolist() == [6.0, -3.0, 0.0, 1.0, -6.0, 3.0]
    powers = FP4(bucket=0, format="e3m0")
    assert powers.pack(state(powers, v), torch.tensor([16.0, -7.0]), 0)[1].tolist() == [16.0, -8.0]


@pytest.mark.parametrize(
    ("name", "count"),
    [  # section by section what each says that it sends, for 10,000 coordinates of 4 bytes
        ("topk:0.01", 100 * (4 + 2)),
        ("dgc:0.01", 100 * (4 + 4)),
        ("randk:0.01", 100 * 4 + 8),
        ("signsgd", 1250),
        ("ef-sign", 1250 + 4),
        ("qsgd:4", 5000 + 20 * 4 + 120),  # the last bucket is filled up
        ("terngrad", 2500 + 4),
        ("int8", 10_240 + 10 * 4),
        ("bf16", 20_000),
    ],
)
def test_the_bytes_that_are_sent(name: str, count: int) -> None:
    compressor = build.compressor_of(name)
    assert compressor is not None
    v = vector(1, 10_000).float()
    assert nbytes(compressor.pack(state(compressor, v), v, 0)[0]) == count


def test_powersgd_sends_rank_times_rows_and_columns() -> None:
    compressor = PowerSGD(4).fitted([(100, 80), (100,)])
    v = vector(1, 8100).float()
    assert nbytes(compressor.pack(state(compressor, v), v, 0)[0]) == 4 * (4 * (100 + 80) + 100)


def test_compressors_by_text(tmp_path: Path) -> None:
    assert build.compressor_of("none") is None
    assert build.compressor_of("topk") == TopK()
    assert build.compressor_of("topk:0.2") == TopK(0.2)
    assert build.compressor_of("topk:0.2,chunk=64,bits=2") == TopK(0.2, 64, 2)
    assert build.compressor_of("randk:feedback=true") == RandK(feedback=True)
    assert str(build.compressor_of("topk:0.2,chunk=64")) == "topk:fraction=0.2,chunk=64"
    own = tmp_path / "mine.py"
    own.write_text(
        "from dataclasses import dataclass\nfrom paceline import Compressor\n\n\n@dataclass(frozen=True)\n"
        "class Half(Compressor):\n    '''Half of everything.'''\n\n    share: float = 0.5\n\n"
        "    def encode(self, s, v, seed):\n        return (v * self.share,)\n\n"
        "    def decode(self, payload, like):\n        return payload[0]\n"
    )
    assert vars(build.compressor_of(f"{own}:Half") or ()) == {"share": 0.5}
    assert vars(build.compressor_of(f"{own}:Half:0.25") or ()) == {"share": 0.25}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("topq", "no compressor 'topq'; did you mean 'topk'?"),
        ("topk:0", "compressor topk: fraction must be from 0 to 1|above 0"),
        ("topk:2", "fraction must be"),
        ("topk:part=0.1", "no option of compressor topk 'part'"),
        ("bits:2", "no compressor 'bits'"),
        ("signsgd:3", "compressor signsgd has no options, not '3'"),
        ("paceline.schemes.sync:SyncSGD", "is not a compressor"),
    ],
)
def test_what_is_no_compressor_is_refused(text: str, words: str) -> None:
    with pytest.raises((UsageError, UnknownName), match=words):
        build.compressor_of(text)


LONG = 300_001  # several blocks, and long enough for a threshold by a sample


def long_vector(kind: str) -> Tensor:
    rng = torch.Generator().manual_seed(7)
    v = torch.randn(LONG, generator=rng)
    match kind:
        case "equal magnitudes":
            return v.to(torch.bfloat16).float()
        case "mostly zeros":
            return v * (torch.rand(LONG, generator=rng) < 0.005)
        case "one layer has all":
            return torch.where(torch.arange(LONG) < 4000, v, 1e-6 * v)
        case "not a number":
            return torch.where(torch.arange(LONG) == 1234, torch.nan, v)
        case "zeros":
            return torch.zeros(LONG)
    return v


@pytest.mark.parametrize(
    "kind", ["normal", "equal magnitudes", "mostly zeros", "one layer has all", "not a number", "zeros"]
)
@pytest.mark.parametrize("k", [1, 3000, 18_000])
def test_the_largest_are_those_of_a_plain_search(kind: str, k: int) -> None:
    v = long_vector(kind)
    expected = v.abs().topk(k, sorted=False).indices.sort().values
    assert torch.equal(largest(v, k), expected)
    assert torch.equal(largest(v.view(1, -1), k), expected.view(1, -1))


def test_long_vectors_are_encoded_in_blocks_by_the_equations_of_the_docstrings() -> None:
    """All at once here: the blocks of the compressors change no bit."""
    v = long_vector("normal")
    state_of = State(x=v, v=0, workers=2)
    rows = torch.cat((v, v.new_zeros(-LONG % 512))).view(-1, 512)
    norms = rows.norm(dim=1, keepdim=True)
    u = torch.rand(rows.shape, generator=torch.Generator().manual_seed(9))
    steps = (rows.abs() * (4 / norms) + u).floor().clamp(max=4) * rows.sign()
    wanted = (steps * (norms / 4)).view(-1)[:LONG]
    assert torch.equal(QSGD(4).decode(QSGD(4).encode(state_of, v, 9), v), wanted)

    rows = torch.cat((v, v.new_zeros(-LONG % 32))).view(-1, 32)
    scales = rows.abs().amax(1, keepdim=True) / 6
    known = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    codes = torch.bucketize(rows.abs() / scales, (known[1:] + known[:-1]) / 2)
    wanted = (known[codes] * rows.sign() * scales).view(-1)[:LONG]
    assert torch.equal(FP4().decode(FP4().encode(state_of, v, 0), v), wanted)

    u = torch.rand(LONG, generator=torch.Generator().manual_seed(3))
    wanted = (u < v.abs() / v.abs().max()).float() * v.sign() * v.abs().max()
    assert torch.equal(TernGrad().decode(TernGrad().encode(state_of, v, 3), v), wanted)
