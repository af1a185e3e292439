"""Every example trains in two processes; with one worker it has the bits of the plain script that it comes from."""

from __future__ import annotations

import dataclasses
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from attached import PRELUDE
from attached import launch as launch_script
from torch import Tensor

from paceline.api.execute import execute
from paceline.config.from_plan import scheme_of
from paceline.config.plan import Plan
from paceline.result import Result
from paceline.runs import checkpoint
from paceline.runs.run_directory import RunDirectory

__all__ = ["launch_script"]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
# small settings of each, and the updates that two workers make together
TINY = {
    "mnist": ("--data digits --width 4 --epochs 2 --batch-size 128", 24),
    "resnet_cifar": ("--steps 12 --batch 16 --width 4 --blocks 1 --synthetic 160", 12),
    "char_gpt": ("--steps 12 --micro 2 --batch 4 --context 16 --width 16 --layers 1", 12),
    "token_file": (
        "--max_iters=12 --warmup_iters=3 --eval_interval=5 --eval_iters=2 --batch_size=3 --block_size=8 --n_embd=16",
        12,
    ),
    "fine_tune": ("--epochs 2 --batch 32 --examples 256 --width 16", 16),
    "gan": ("--epochs 2 --batch 128 --width 16", 22),
    "actor_critic": ("--steps 15 --carts 4 --length 8 --width 16", 15),
    "recommender": ("--epochs 2 --batch 100 --users 60 --films 20 --ratings 1000 --width 4", 20),
}
Launch = Callable[..., tuple[Result, dict[str, Tensor]]]


@pytest.fixture(autouse=True)
def tokens(tmp_path: Path) -> None:
    """The files that `token_file` reads."""
    (tmp_path / "tokens").mkdir()
    numbers = np.random.default_rng(0).integers(0, 11, 600).astype(np.uint16)
    numbers[:500].tofile(tmp_path / "tokens" / "train.bin")
    numbers[500:].tofile(tmp_path / "tokens" / "val.bin")


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Launch:
    """Run an example as `paceline run` does: its result, and the model that it saves."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def run(name: str, options: str, workers: int) -> tuple[Result, dict[str, Tensor]]:
        directory = RunDirectory.create(tmp_path / f"run-{workers}", "run")
        script = [str(EXAMPLES / f"{name}.py"), *options.split(), "--out=trained.pt"]
        plan = Plan(script=script, workers=workers, directory=str(directory.path), title="test")
        directory.write_plan(dataclasses.asdict(plan))
        result = execute(plan, scheme_of(plan, {}), {}, tell=lambda *_: None, watch=lambda _: None)
        return result, torch.load("trained.pt", weights_only=True)

    return run


@pytest.fixture
def plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], dict[str, Tensor]]:
    """The model of the plain script."""

    def run(name: str, options: str) -> dict[str, Tensor]:
        monkeypatch.chdir(tmp_path)
        path = EXAMPLES / "plain" / f"{name}.py"
        monkeypatch.setattr(sys, "argv", [str(path), *options.split(), "--out=plain.pt"])
        runpy.run_path(str(path), run_name="__main__")
        return torch.load("plain.pt", weights_only=True)

    return run


def different(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    """The parameters and buffers of two models that are not the same bits."""
    assert a.keys() == b.keys()
    return [name for name in a if a[name].numpy().tobytes() != b[name].numpy().tobytes()]


def test_every_example_with_a_plain_script_is_tried() -> None:
    assert {path.stem for path in (EXAMPLES / "plain").glob("*.py")} == TINY.keys()


@pytest.mark.parametrize("name", TINY)
def test_one_worker_has_the_bits_of_the_plain_script(name: str, launch: Launch, plain) -> None:
    options, _ = TINY[name]
    _, ours = launch(name, options, workers=1)
    assert not different(ours, plain(name, options))


@pytest.mark.parametrize("name", TINY)
def test_two_workers_train(name: str, launch: Launch, plain) -> None:
    options, updates = TINY[name]
    result, ours = launch(name, options, workers=2)
    assert (result.workers, result.updates) == (2, updates)
    if name != "mnist":  # its loop does not say its loss
        assert torch.tensor(result.metrics["loss"]).isfinite()
    saved = checkpoint.newest(Path("run-2/checkpoints"), lambda _: None)
    assert saved is not None
    trained = {parameter for parameter, _ in saved.numbers["parameters"]}
    changed = set(different(ours, plain(name, options)))
    assert all(value.isfinite().all() for value in ours.values())
    assert trained <= changed  # by other gradients than the plain script's
    if name == "fine_tune":  # the frozen base neither travels nor changes
        assert trained == {f"head.{part}" for part in ("0.weight", "0.bias", "3.weight", "3.bias")}
        assert changed == trained


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_sparse_gradients_of_embeddings_are_made_dense(launch: Launch, plain) -> None:
    options = TINY["recommender"][0] + " --sparse"
    _, ours = launch("recommender", options, workers=1)
    theirs = plain("recommender", options)  # other rounding: a sparse update of torch divides first, a dense one last
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_a_sparse_gradient_after_zero_grad_is_the_dense_one(launch_script) -> None:
    """zero_grad() frees the dense gradient, into which autograd would have added the sparse one."""
    script = """
table = nn.Embedding(20, 3, sparse=SPARSE)
with attach(table, "sync", lr=0.1, steps=5) as pace:
    while not pace.done:
        table.zero_grad()
        table(torch.tensor([[1, 2, 2], [4, 1, 7]])).square().sum().backward()
        pace.step(size=2)
keep(f"{SPARSE}.weights", table)
"""
    for sparse in ("True", "False"):
        launch_script(script.replace("SPARSE", sparse))
    assert Path("True.weights").read_bytes() == Path("False.weights").read_bytes()


def test_steps_of_one_network_at_a_time_alternate_under_plain_sgd(launch_script) -> None:
    """A network without a gradient stays as it is."""
    first = """
one, two = nn.Linear(64, 8), nn.Linear(8, 10)
both = nn.ModuleDict({"one": one, "two": two})
def steps(step):
    for images, labels in items[:6]:
        for network in (one, two):
            F.cross_entropy(two(one(images).relu()), labels).backward(inputs=list(network.parameters()))
            step(network)
"""
    plain = """
optimizers = {network: torch.optim.SGD(network.parameters(), lr=0.1) for network in (one, two)}
def step(network):
    optimizers[network].step()
    both.zero_grad()
steps(step)
weights = torch.cat([p.detach().reshape(-1) for p in both.parameters()]).numpy().tobytes()
"""
    paced = """
with attach(both, "sync", lr=0.1) as pace:
    steps(lambda network: pace.step(size=32))
keep("ours.weights", both)
"""
    launch_script(first + paced, workers=1)
    scope: dict[str, bytes] = {}
    exec(PRELUDE + first + plain, scope)
    assert Path("ours.weights").read_bytes() == scope["weights"]


@pytest.mark.parametrize("scheme", ["allreduce", "async"])
def test_a_killed_worker_continues_with_the_state_of_its_optimizer_and_schedule(scheme: str, launch_script) -> None:
    first = """
from torch.optim.lr_scheduler import LambdaLR
images, labels = items[0]  # always the same batch: a restarted script starts its data from the beginning
groups = [{"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
          {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=0.05)
scheduled = lambda optimizer: LambdaLR(optimizer, lambda step: (step + 1) / 4 if step < 4 else 0.9 ** step)
def backward():
    loss = F.cross_entropy(model(images), labels)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    return loss.detach()
"""
    plain = """
schedule = scheduled(optimizer)
for _ in range(15):
    backward()
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
weights = torch.cat([p.detach().reshape(-1) for p in model.parameters()]).numpy().tobytes()
"""
    paced = f"""
with attach(model, "{scheme}", optimizer=optimizer, schedule=scheduled, steps=15) as pace:
    while not pace.done:
        loss = backward()
        if pace.updates == 7 and not pace.resumed:
            os.kill(os.getpid(), signal.SIGKILL)
        pace.step(loss, size=32)
keep("ours.weights", model)
"""
    result = launch_script(first + paced, workers=1)
    assert (result.updates, result.restarts) == (15, 1)
    scope: dict[str, bytes] = {}
    exec(PRELUDE + first + plain, scope)
    assert Path("ours.weights").read_bytes() == scope["weights"]
