"""The networks of old guides, in Keras and as graphs of TensorFlow 1: examples/from-tensorflow and its commands."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from beds.pages import Block, blocks, commands
from framework_runs import trained
from framework_shells import all_end, begin
from shells import result_of, shells

if importlib.util.find_spec("keras") is None or importlib.util.find_spec("tensorflow") is None:
    pytest.skip("keras or tensorflow is not installed", allow_module_level=True)

os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import paceline
from paceline import user_code

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # TensorFlow's arrays

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "from-tensorflow"
NETWORKS = ("toy", "softmax", "mnist", "cifar")
TASKS = [f"{kind}_{network}" for kind in ("keras", "graph") for network in NETWORKS]
MADE_UP = {"cifar": {"synthetic": 200}}


@pytest.fixture(autouse=True)
def _small_digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MNIST as it is without a network and without files: enlarged small digits."""
    (tmp_path / "none").mkdir()
    for name in ("PACELINE_DATA", "PACELINE_CACHE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))


def task(name: str) -> Any:
    options = MADE_UP.get(name.partition("_")[2], {})
    return user_code.file("task", FOLDER / f"{name}.py").make(**options)


def written(path: Path) -> list[list[str]]:
    """The commands in a docstring."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    return list(commands(Block(path.name, 1, "sh", text or "", "")))


def on_the_page() -> list[list[str]]:
    found = [words for block in blocks("docs/from-tensorflow.md") for words in commands(block)]
    return [words for words in found if any("examples/from-tensorflow" in word for word in words)]


def test_the_files_are_those_that_are_tried() -> None:
    made = {path.stem for path in FOLDER.glob("*.py") if "def make(" in path.read_text(encoding="utf-8")}
    assert made == set(TASKS)
    assert on_the_page()


@pytest.mark.parametrize("name", TASKS)
def test_its_schemes_train_in_the_simulator(name: str) -> None:
    """Every command of the docstring, and of the page, for a few updates."""
    of_page = [words for words in on_the_page() if any(f"/{name}.py:make" in word for word in words)]
    asked = [*written(FOLDER / f"{name}.py"), *of_page]
    assert asked
    large = name.endswith(("mnist", "cifar"))
    one, steps = (task(name).configured(batch=10), 3) if large else (task(name), 200)
    first = one.evaluate(one.start(0))["loss"]
    for words in asked:
        assert words[1] == f"examples/from-tensorflow/{name}.py:make"
        hyper = dict(word.split("=") for word in words if re.fullmatch(r"[a-z_]+=\S+", word))
        scheme, workers = words[words.index("--scheme") + 1], 4
        if "--workers" in words:
            workers = int(words[words.index("--workers") + 1])
        found = paceline.simulate(one, scheme, workers=workers, steps=steps, **hyper)
        assert found.updates == steps
        assert torch.isfinite(found.vector).all()
        if "mnist" not in name:  # whose first steps from wide weights go up and down
            assert found.metrics["loss"] < first, words


@pytest.mark.parametrize("network", NETWORKS)
def test_keras_and_the_graph_are_one_network(network: str) -> None:
    ours, theirs = task(f"keras_{network}"), task(f"graph_{network}")
    x = ours.start(3)
    assert [shape for _, shape in ours.parameters()] == [shape for _, shape in theirs.parameters()]
    mine, other = ours.evaluate(x), theirs.evaluate(x)
    assert mine == pytest.approx(other, rel=1e-4)
    if network == "mnist":  # dropout draws other numbers
        return
    gradients = [one.grad(x, next(one.batches(0, 1, 0)))[1] for one in (ours, theirs)]
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-5)


def test_the_toy_is_paceline_s_own() -> None:
    settings = {"workers": 3, "steps": 20, "lr": 0.05}
    for scheme in ("sync", "async", "downpour-easy"):
        theirs = paceline.simulate("toy", scheme, **settings)
        for kind in ("keras", "graph"):
            ours = paceline.simulate(task(f"{kind}_toy"), scheme, **settings)
            torch.testing.assert_close(ours.vector, theirs.vector, rtol=1e-5, atol=1e-4)


def test_dropout_of_a_graph_draws_from_the_batch_and_rests_in_an_evaluation() -> None:
    one = task("graph_mnist").configured(batch=20)
    x = one.start(0)
    first, second = (batch for batch, _ in zip(one.batches(0, 1, 0), range(2), strict=False))
    mine = one.grad(x, first)[1].clone()
    assert torch.equal(one.grad(x, first)[1], mine)
    assert not torch.equal(one.grad(x, type(first)(first.data, first.size, second.seed))[1], mine)
    pictures = torch.rand(6, 28, 28, 1)
    model = one.trained_model(x)
    assert torch.equal(one.outputs(model, (pictures,)), one.outputs(model, (pictures,)))
    alone = one.outputs(model, (pictures[:1],))  # a mask would depend on the shape
    torch.testing.assert_close(one.outputs(model, (pictures,))[:1], alone, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("name", "scheme"), [("graph_softmax", "sync"), ("keras_softmax", "hogwild")])
def test_real_processes(name: str, scheme: str, tmp_path: Path) -> None:
    settings = {"workers": 3, "steps": 200, "lr": 0.2} | ({"aggregate": 2} if scheme == "sync" else {})
    result, _ = trained(tmp_path / "run", f"{FOLDER / name}.py:make", scheme, **settings)
    assert 200 <= result.updates < 203  # of hogwild each worker may be inside one more
    assert result.metrics["accuracy"] > 0.85


def test_five_shells_train_a_graph(tmp_path: Path) -> None:
    """As the guides have it: a chief, two workers, a ps and an evaluator; all end by themselves."""
    words = f"train {FOLDER}/graph_softmax.py:make --scheme async lr=0.1 --steps 400 --evaluator --dir run"
    with shells(tmp_path) as made:
        begin(lambda name, **told: made(name, *shlex.split(words), **told), tmp_path)
        all_end(made)
    result = result_of(tmp_path / "run")
    assert (result["workers"], result["servers"], result["updates"]) == (3, 1, 400)
    assert result["metrics"]["accuracy"] > 0.85
    assert (tmp_path / "run" / "best").is_dir()  # the evaluator's


def test_five_shells_run_the_program_of_train_and_evaluate(tmp_path: Path) -> None:
    program = (sys.executable, str(FOLDER / "train_and_evaluate.py"), "--steps", "400", "--dir", "run")
    with shells(tmp_path) as made:
        begin(lambda name, **told: made.program(name, *program, **told), tmp_path)
        all_end(made)
        (chief,) = [shell for shell in made.shells if shell.name == "chief:0"]
    assert re.search(r"accuracy \d\d\.\d+% after 400 updates of 3 workers", chief.out), chief.out
    assert result_of(tmp_path / "run")["metrics"]["accuracy"] > 0.85
    assert (tmp_path / "run" / "best").is_dir()
