"""Compressed runs in processes, on one node and on several: bits of the simulator, kills, resumes, replays, bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from nodes import nodes
from processes import finished, leaving_nothing, run

from paceline import TorchTask
from paceline.api.simulate import simulate
from paceline.config import build
from paceline.errors import UsageError
from paceline.network.calls.tcp_connection import TcpConnection
from paceline.network.means.group import HEAD
from paceline.network.means.tcp_group import TcpGroup
from paceline.network.secure.channel import Channel
from paceline.processes.memory.payload_codec import to_bytes
from paceline.runs.replay.replay import replay
from paceline.state import State

TASK = "digits-mlp"


def digest(scheme: str, **settings: Any) -> str:
    return simulate(TASK, scheme, **settings).digest


@pytest.mark.parametrize(
    ("scheme", "compress"),
    [("allreduce", "topk:0.1"), ("allreduce", "powersgd:2"), ("sync", "onebit"), ("groups", "randk:0.1")],
)
@pytest.mark.parametrize("collective", ["shared", "tcp"])
def test_the_bits_are_those_of_the_simulator(tmp_path: Path, scheme: str, compress: str, collective: str) -> None:
    settings: dict[str, Any] = {"workers": 2, "steps": 20, "compress": compress}
    with leaving_nothing():
        story = run(tmp_path / "run", TASK, scheme, collective=collective, **settings)
    assert finished(story, 20).digest == digest(scheme, **settings)
    assert replay(tmp_path / "run").match


@pytest.mark.parametrize(
    ("scheme", "compress", "servers"),
    [("sync", "topk:0.1", 1), ("sync", "bf16", 2), ("sync", "powersgd:2", 1), ("allreduce", "ef-sign", 0)],
)
def test_several_nodes_have_the_bits_of_the_simulator(tmp_path: Path, scheme: str, compress: str, servers: int) -> None:
    settings: dict[str, Any] = {"workers": 2, "steps": 20, "compress": compress}
    more: dict[str, Any] = {"servers": servers} if servers else {"collective": "tcp"}
    with leaving_nothing(), nodes() as made:
        story = run(tmp_path / "run", TASK, scheme, launcher=made.launcher, **settings, **more)
    result = finished(story, 20)
    assert result.digest == digest(scheme, **settings)
    assert result.traffic is not None
    assert all(
        0 < sent < whole for sent, whole in zip(result.traffic["sent"], result.traffic["uncompressed"], strict=True)
    )


@pytest.mark.parametrize(
    ("scheme", "compress", "collective", "hyper"),
    [
        ("d-psgd", "int8", "shared", {}),
        ("d-psgd", "fp4", "tcp", {"order": "atc"}),
        ("sgp", "bf16", "tcp", {"overlap": True}),
        ("ad-psgd", "fp8", "shared", {}),
        ("gosgd", "qsgd:127", "shared", {"p": 0.5}),
    ],
)
def test_compressed_models_have_the_bits_of_the_simulator(
    tmp_path: Path, scheme: str, compress: str, collective: str, hyper: dict[str, Any]
) -> None:
    settings: dict[str, Any] = {"workers": 3, "steps": 20, "compress": compress}
    with leaving_nothing():
        story = run(tmp_path / "run", TASK, scheme, collective=collective, hyper=hyper, **settings)
    result, told = finished(story, 20), simulate(TASK, scheme, **settings, **hyper)
    assert (result.digest, result.traffic) == (told.digest, told.traffic)
    assert replay(tmp_path / "run").match


@pytest.mark.parametrize(("scheme", "collective"), [("sgp", "tcp"), ("gosgd", "shared")])
def test_compressed_meetings_survive_kills(tmp_path: Path, scheme: str, collective: str) -> None:
    kills = ["worker:1", "chief"]
    with leaving_nothing():
        settings: dict[str, Any] = {"workers": 3, "steps": 200, "compress": "int8", "collective": collective}
        story = run(tmp_path / "run", TASK, scheme, kills=kills, **settings)
    assert finished(story, 200).restarts == len(kills)
    assert replay(tmp_path / "run").match


@pytest.mark.parametrize(
    ("scheme", "compress", "kills"),
    [
        ("async", "topk:0.1", ["worker:1", "server:0", "chief"]),
        ("async", "topk:0.01", ["worker:1"]),
        ("allreduce", "topk:0.1", ["worker:1", "chief"]),
        ("allreduce", "topk:0.01", ["worker:1"]),
        ("allreduce", "powersgd:2", ["worker:1", "chief"]),
    ],
)
def test_killed_workers_keep_their_errors_and_the_run_is_replayed(
    tmp_path: Path, scheme: str, compress: str, kills: list[str]
) -> None:
    with leaving_nothing():
        story = run(tmp_path / "run", TASK, scheme, workers=2, steps=300, compress=compress, kills=kills)
    assert finished(story, 300).restarts == len(kills)
    again = replay(tmp_path / "run")
    assert again.match, again.difference


def test_a_resumed_run_has_the_bits_of_one_that_was_not_interrupted(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"workers": 2, "compress": "topk:0.05"}
    finished(run(tmp_path / "run", TASK, "allreduce", steps=10, **settings), 10)
    result = finished(run(tmp_path / "run", TASK, "allreduce", steps=20, resume=True, **settings), 20)
    assert result.digest == digest("allreduce", steps=20, **settings)
    refused = run(tmp_path / "run", TASK, "allreduce", steps=30, resume=True, workers=2, compress="topk:0.1").error
    assert isinstance(refused, UsageError)
    assert "compress 'topk:fraction=0.05'; it cannot resume with 'topk:fraction=0.1'" in str(refused)


def test_the_bytes_are_a_curve_in_tensorboard_and_in_the_history(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    hooks = ["summary-saver:every=5", "step-counter:every=5"]
    settings: dict[str, Any] = {"workers": 2, "steps": 20, "compress": "topk:0.1"}
    result = finished(run(tmp_path / "run", TASK, "allreduce", hooks=hooks, **settings), 20)
    length = len(result.vector)
    payload = round(0.1 * length) * (4 + 2)
    events = EventAccumulator(str(tmp_path / "run" / "summaries"))
    events.Reload()
    for curve in ("bytes_sent", "bytes_received"):
        points = [(point.step, point.value) for point in events.Scalars(curve)]
        assert [step for step, _ in points] == [5, 10, 15, 20]
        for step, value in points:  # the other worker may not have counted its last step yet
            assert value in (2 * step * payload, (2 * step - 1) * payload)
    recorded = [
        (point.update, point.metrics["bytes_sent"]) for point in result.history if "bytes_sent" in point.metrics
    ]
    assert [update for update, _ in recorded] == [5, 10, 15, 20]
    assert all(sent in (2 * step * payload, (2 * step - 1) * payload) for step, sent in recorded)


class Wide(torch.nn.Module):
    """200,000 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2000, 100)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x)
        return out


def wide() -> TorchTask:
    rng = torch.Generator().manual_seed(1)
    x, y = torch.randn(32, 2000, generator=rng), torch.randint(0, 100, (32,), generator=rng)
    return TorchTask(Wide, torch.nn.functional.cross_entropy, (x, y), (x, y), batch=8)


@pytest.mark.parametrize(("scheme", "settings"), [("sync", {}), ("allreduce", {"collective": "tcp"})])
def test_fewer_bytes_cross_the_connections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str, settings: dict[str, Any]
) -> None:
    """Counted where they are sent: roles are forks, so each adds up in a file of its own."""
    real = Channel.send

    def counting(self: Channel, kind: int, *parts: Any) -> None:
        with (tmp_path / "bytes").open("a") as file:
            file.write(f"{sum(memoryview(part).nbytes for part in parts)}\n")
        real(self, kind, *parts)

    really = TcpConnection.send

    def counting_pieces(self: TcpConnection, message: Any, pieces: Any = (), data: Any = None) -> None:
        with (tmp_path / "bytes").open("a") as file:
            file.write(f"{sum(size for _, size in pieces)}\n")
        really(self, message, pieces, data)

    monkeypatch.setattr(Channel, "send", counting)
    monkeypatch.setattr(TcpConnection, "send", counting_pieces)
    totals = {}
    for number, compress in enumerate(("", "onebit")):
        (tmp_path / "bytes").write_text("")
        with leaving_nothing(), nodes() as made:
            story = run(
                tmp_path / f"run{number}",
                wide(),
                scheme,
                workers=2,
                steps=10,
                compress=compress,
                checkpoint_seconds=3600,  # else a slow run sends one more than the other
                launcher=made.launcher,
                **settings,
            )
        finished(story, 10)
        totals[compress] = sum(map(int, (tmp_path / "bytes").read_text().split()))
    vector = 4 * 200_100
    saved = totals[""] - totals["onebit"]
    assert saved > 0.7 * 2 * 10 * vector * 31 / 32, totals


@pytest.mark.parametrize("compress", ["none", "onebit", "topk:0.01"])
def test_a_mean_over_connections_takes_the_bytes_of_its_frames(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compress: str
) -> None:
    """Each of two workers sends one message for each mean: a header, and the vector or the payload in bytes."""
    real = TcpGroup._send

    def counting(self: TcpGroup, peer: Any, kind: int, *parts: Any) -> None:
        with (tmp_path / "bytes").open("a") as file:
            file.write(f"{sum(memoryview(part).nbytes for part in parts)}\n")
        real(self, peer, kind, *parts)

    monkeypatch.setattr(TcpGroup, "_send", counting)
    settings: dict[str, Any] = {"workers": 2, "steps": 10, "compress": compress, "collective": "tcp"}
    finished(run(tmp_path / "run", wide(), "allreduce", **settings), 10)
    length = 200_100
    compressor = build.compressor_of(compress)
    size = 4 * length
    if compressor is not None:
        fitted, v = compressor.fitted([(100, 2000), (100,)]), torch.randn(length)
        size = to_bytes(fitted.pack(State(**fitted.cells(v), v=0, workers=2), v, 1)[0]).numel()
        assert size < 4 * length / 20
    assert list(map(int, (tmp_path / "bytes").read_text().split())) == [HEAD + size] * 2 * 10


def test_a_large_payload_is_gathered_in_slices(tmp_path: Path) -> None:
    """More than 2 MB of all members together go in several messages."""
    x = torch.randn(16, 1500, generator=torch.Generator().manual_seed(1))
    y = torch.zeros(16, dtype=torch.int64)

    def task() -> TorchTask:
        return TorchTask(
            lambda: torch.nn.Linear(1500, 1500), torch.nn.functional.cross_entropy, (x, y), (x, y), batch=4
        )

    settings: dict[str, Any] = {"workers": 2, "steps": 4, "compress": "int8"}
    story = run(tmp_path / "run", task(), "allreduce", collective="tcp", **settings)
    assert finished(story, 4).digest == simulate(task(), "allreduce", **settings).digest
