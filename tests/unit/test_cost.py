"""Laws of compute times and the words that name them; wires; speeds."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline import simulate
from paceline.compute_times import ComputeTime, Constant, Exponential, Pareto, Uniform, laws, parse_times
from paceline.errors import UnknownName, UsageError
from paceline.simulator.cost import Cost, NetworkLink, parse_link, parse_links

DRAWS = 20_000

# law: mean, standard deviation, least, most
EXPECTED = {
    "constant:2.5": (2.5, 0.0, 2.5, 2.5),
    "uniform:1,3": (2.0, 2 / math.sqrt(12), 1.0, 3.0),
    "exponential:2": (2.0, 2.0, 0.0, math.inf),
    "shifted-exponential:1,2": (3.0, 2.0, 1.0, math.inf),
    "log-normal:2,0.5": (
        2 * math.exp(0.125),
        2 * math.sqrt((math.exp(0.25) - 1) * math.exp(0.25)),
        0.0,
        math.inf,
    ),
    "pareto:1,4": (4 / 3, math.sqrt(2 / 9), 1.0, math.inf),
    "weibull:2,2": (2 * math.gamma(1.5), 2 * math.sqrt(math.gamma(2) - math.gamma(1.5) ** 2), 0.0, math.inf),
    "gamma:2,0.5": (2.0, 1.0, 0.0, math.inf),
    "slowdown:1,5,0.25": (2.0, 4 * math.sqrt(0.25 * 0.75), 1.0, 5.0),
}


def draws(law: ComputeTime, number: int = DRAWS, seed: int = 4) -> np.ndarray[Any, Any]:
    rng = np.random.default_rng(seed)
    return np.array([law.draw(0, t, rng) for t in range(number)])


def test_every_law_has_a_case() -> None:
    assert {text.partition(":")[0] for text in EXPECTED} | {"trace"} == set(laws())


@pytest.mark.parametrize("text", EXPECTED)
def test_mean_spread_and_support(text: str) -> None:
    mean, deviation, least, most = EXPECTED[text]
    seen = draws(parse_times(text))
    assert abs(seen.mean() - mean) <= 5 * deviation / math.sqrt(DRAWS)
    assert abs(seen.std() - deviation) <= 0.12 * deviation
    assert seen.min() >= least
    assert seen.max() <= most
    if deviation:
        assert len(np.unique(seen)) > 1


@pytest.mark.parametrize("text", [text for text in EXPECTED if not text.startswith("constant")])
def test_equal_streams_give_equal_times(text: str) -> None:
    law = parse_times(text)
    assert np.array_equal(draws(law, 50), draws(law, 50))
    assert not np.array_equal(draws(law, 50), draws(law, 50, seed=5))


def test_values_by_position_by_name_and_by_default() -> None:
    assert parse_times("uniform:0.5,1.5") == parse_times("uniform:low=0.5,high=1.5") == Uniform(0.5, 1.5)
    assert parse_times("pareto:shape=3") == Pareto(1.0, 3.0)
    assert parse_times("exponential") == parse_times("exponential:") == Exponential(1.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("exponental:1", "no compute law 'exponental'; did you mean 'exponential'?"),
        ("zzz", "no compute law 'zzz'; there are: constant, exponential, "),
        ("exponential:fast", "'exponential:fast': mean must be a number, not 'fast'"),
        ("exponential:1,2", "'exponential:1,2' has more values than mean"),
        ("uniform:lo=1", "uniform: no value 'lo'; did you mean 'low'?"),
        ("uniform:3,1", "uniform: low (3) is above high (1)"),
        ("exponential:-1", "exponential: mean must be a finite number of at least 0, not -1"),
        ("constant:nan", "constant: seconds must be a finite number"),
        ("constant:inf", "constant: seconds must be a finite number"),
        ("pareto:1,0", "pareto: shape must be above 0"),
        ("weibull:1,0", "weibull: shape must be above 0"),
        ("gamma:1,0", "gamma: variation must be above 0"),
        ("slowdown:1,5,3", "slowdown: chance is a probability, from 0 to 1, not 3"),
        ("trace", "'trace' needs file: trace:FILE"),
        ("trace:", "needs file"),
        ("trace:a,b", "'trace:a,b' has more values than file"),
    ],
)
def test_wrong_laws_name_what_is_allowed(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_times(text)
    assert str(caught.value).startswith(message) or message in str(caught.value)
    with pytest.raises(UsageError):
        simulate("toy", "async", workers=2, steps=2, compute=text)


def test_a_law_must_draw() -> None:
    with pytest.raises(UsageError, match="is not a law"):
        ComputeTime().draw(0, 0, np.random.default_rng(0))


def trace(tmp_path: Path, text: str) -> ComputeTime:
    (tmp_path / "times.csv").write_text(text)
    return parse_times(f"trace:{tmp_path / 'times.csv'}")


def test_a_trace_gives_each_rank_its_own_lines(tmp_path: Path) -> None:
    law = trace(tmp_path, "rank,seconds\n# measured on a Monday\n0,1.5\n1,2\n0,2.5\n\n1,0\n")
    rng = np.random.default_rng(0)
    assert [law.draw(0, t, rng) for t in range(5)] == [1.5, 2.5, 1.5, 2.5, 1.5]
    assert [law.draw(1, t, rng) for t in range(3)] == [2.0, 0.0, 2.0]
    assert law.draw(2, 1, rng) == 2.5  # more workers than ranks: in turn
    assert law.draw(3, 0, rng) == 2.0


def test_a_trace_of_seconds_alone(tmp_path: Path) -> None:
    law = trace(tmp_path, "0.5\n0.25\n")
    assert [law.draw(rank, t, np.random.default_rng(0)) for rank in (0, 1) for t in (0, 1, 2)] == [0.5, 0.25, 0.5] * 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no times"),
        ("rank,seconds\n", "has no times"),
        ("0,1\n0,fast\n", ":2: expected 'rank,seconds', found ['0', 'fast']"),
        ("0.5,1\n", ":1: expected 'rank,seconds'"),
        ("0,1\n-1,1\n", ":2: ranks and seconds are at least 0"),
        ("0,-1\n", ":1: ranks and seconds are at least 0"),
        ("0,1\n0,inf\n", ":2: ranks and seconds are at least 0"),
        ("0,1\n0,nan\n", ":2: ranks and seconds are at least 0"),
    ],
)
def test_bad_traces_name_their_line_before_the_run(tmp_path: Path, text: str, message: str) -> None:
    law = trace(tmp_path, text)
    with pytest.raises(UsageError) as caught:
        Cost(law).check(2)
    assert message in str(caught.value)


def test_a_missing_trace_is_an_error_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"trace file '.*nowhere.csv' cannot be read"):
        simulate("toy", "async", workers=2, steps=2, compute=f"trace:{tmp_path / 'nowhere.csv'}")
    with pytest.raises(UsageError, match=r"nowhere.csv' cannot be read"):
        Cost(access=parse_times(f"trace:{tmp_path / 'nowhere.csv'}")).check(2)
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="cannot be read"):
        simulate("toy", "async", workers=2, steps=2, compute=f"trace:{tmp_path / 'binary.csv'}")


def test_wires() -> None:
    assert parse_link("") == parse_link("bandwidth=inf") == NetworkLink(0.0, math.inf)
    assert parse_link("0.001,1e9") == parse_link("latency=0.001,bandwidth=1e9") == NetworkLink(0.001, 1e9)
    assert parse_link("8gbit,1ms") == parse_link(" 8e3mbit , 0.001 ") == NetworkLink(0.001, 1e9)  # as in a plan
    assert parse_links(["1:8kbit,2s"]) == {1: NetworkLink(2.0, 1e3)}
    assert NetworkLink(0.5, 100.0).seconds(50) == 1.0
    assert NetworkLink(0.5).seconds(10**12) == 0.5
    cost = Cost(network=NetworkLink(1.0), links={1: NetworkLink(2.0, 8.0)})
    assert cost.message(0, 8) == 1.0
    assert cost.message(1, 8) == 3.0
    assert parse_links(["2:0.1", "0:bandwidth=5"]) == {2: NetworkLink(0.1), 0: NetworkLink(0.0, 5.0)}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("latnecy=1", "network: no value 'latnecy'; did you mean 'latency'?"),
        ("latency=-1", "a link needs a finite latency >= 0 and a bandwidth > 0, not -1, inf"),
        ("bandwidth=0", "a link needs a finite latency >= 0 and a bandwidth > 0, not 0, 0"),
        ("latency=nan", "a link needs a finite latency >= 0"),
        ("latency=inf", "a link needs a finite latency >= 0"),
        ("bandwidth=nan", "a bandwidth > 0"),
        ("latency=slow", "latency must be a number, not 'slow'"),
        ("1gbit,slow", "the latency of the network is a time such as 35ms, 100us or 2s, not 'slow'"),
        ("1ms,1gbit", "the bandwidth of the network is in bit, kbit, mbit, gbit, tbit: BANDWIDTH,LATENCY such as"),
        ("0gbit,1ms", "the bandwidth of the network is above 0"),
        ("1,2,3", "has more values than latency, bandwidth"),
    ],
)
def test_wrong_wires_name_what_is_allowed(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_link(text)
    assert message in str(caught.value)


def test_wires_of_single_workers() -> None:
    for text in ("0.1", "x:0.1", ":0.1", "-1:0.1"):
        with pytest.raises(UsageError, match=f"a link is 'RANK:latency=S,bandwidth=BYTES_PER_SECOND', not '{text}'"):
            parse_links([text])
    with pytest.raises(UsageError, match="link of worker 3: no value 'speed'; there are: bandwidth, latency"):
        parse_links(["3:speed=1"])
    with pytest.raises(UsageError, match="a link was given for worker 2; workers are 0 to 1"):
        Cost(links={2: NetworkLink()}).check(2)


def test_speeds_divide_the_times() -> None:
    cost = Cost(Constant(3.0), speeds=(1.0, 1.5))
    assert [cost.compute(rank, 0, np.random.default_rng(0)) for rank in (0, 1)] == [3.0, 2.0]
    cost.check(2)
    with pytest.raises(UsageError, match="2 speeds were given for 3 workers; give one for each"):
        cost.check(3)
    for wrong in (0.0, -1.0, math.nan):
        with pytest.raises(UsageError, match="speeds must be above 0"):
            Cost(speeds=(1.0, wrong))
    for access in (-0.1, math.inf, math.nan):
        with pytest.raises(UsageError, match="access must be a finite number of at least 0"):
            Cost(access=access)


def test_times_count_in_the_run() -> None:
    """One worker: virtual time is the sum of the times and of two messages each way a step."""
    run = simulate("toy", "async", workers=1, steps=10, compute="constant:2", network="latency=0.25", lr=0.1)
    assert run.virtual_seconds == pytest.approx(10 * (2 + 4 * 0.25) - 0.25)  # the last answer is not waited for
    fast = simulate("toy", "async", workers=1, steps=10, compute="constant:2", speeds=[4.0], lr=0.1)
    assert fast.virtual_seconds == 5.0


def test_a_misspelt_law_is_an_unknown_name() -> None:
    with pytest.raises(UnknownName):
        parse_times("parreto:1")
