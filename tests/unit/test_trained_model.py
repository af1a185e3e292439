"""Trained models back from their runs, in Python and on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from small_models import DATA, net, normed, task
from torch import nn
from torch.nn.functional import cross_entropy
from typer.testing import CliRunner

from paceline.cli.main import app
from paceline.config import build
from paceline.errors import DataError, PacelineError, UsageError
from paceline.runs import checkpoint
from paceline.runs.run_directory import RunDirectory
from paceline.runs.trained_model import evaluate, load, predict
from paceline.torch_task import TorchTask


def parameters(module: nn.Module) -> list:
    return [[name, list(p.shape)] for name, p in module.named_parameters() if p.requires_grad]


def trained(path: Path, made: TorchTask, name: str | None = None, steps=(100, 200), **options) -> Path:
    """A run of which only the checkpoints are real: at step s the weights are the start of seed s."""
    run = RunDirectory.create(path / "run", "x")
    run.write_plan({"task": name, "task_options": options, "batch": 8, "feed": None, "shuffle": None})
    for step in steps:
        tensors = {"model": made.start(step), "hook.ema": made.start(step + 1), "server.x": torch.ones(3)}
        tensors |= {f"model_buffer.{key}": value + step for key, value in made.buffers().items()}
        checkpoint.save(run.checkpoints, step, tensors, {"parameters": parameters(made.flat.module)})
    return run.path


def weights(module: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in module.parameters() if p.requires_grad])


class Tied(nn.Module):
    """A frozen layer, and one weight used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(5, 3).requires_grad_(False)
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(self.first(self.frozen(x)))


class TestLoad:
    def test_newest_best_and_a_step(self, tmp_path):
        made = task()
        path = trained(tmp_path, made)
        step = path / "checkpoints" / "0000000100"
        checkpoint.keep_best(path, checkpoint.load(step), {"loss": 1.0}, "loss", smaller_is_better=True)
        for which, seed in (("newest", 200), ("best", 100), (100, 100), ("200", 200)):
            module = load(path, which, task=made)
            assert torch.equal(weights(module), made.start(seed))
            assert not module.training
        assert torch.equal(weights(load(path, task=made, ema=True)), made.start(201))

    def test_into_a_given_model_which_stays_as_it_is(self, tmp_path):
        path, mine = trained(tmp_path, task()), net()
        before = weights(mine)
        module = load(path, model=mine)
        assert torch.equal(weights(module), task().start(200))
        assert torch.equal(weights(mine), before)
        assert mine.training

    def test_the_weights_are_its_own(self, tmp_path):
        made = task()
        path = trained(tmp_path, made)
        one, two = load(path, task=made), load(path, task=made)
        with torch.no_grad():
            for parameter in one.parameters():
                parameter.zero_()
        assert torch.equal(weights(two), made.start(200))
        assert torch.equal(weights(load(path, task=made)), made.start(200))
        assert all(p.grad is None and p.untyped_storage().nbytes() == 4 * p.numel() for p in two.parameters())

    def test_buffers(self, tmp_path):
        made = task(normed)
        module = load(trained(tmp_path, made), model=normed())
        assert module[1].running_mean.tolist() == [200.0] * 7
        assert module[1].num_batches_tracked == 200

    def test_tied_and_frozen_weights(self, tmp_path):
        made, mine = task(Tied), Tied()
        module = load(trained(tmp_path, made), model=mine)
        assert torch.equal(weights(module), made.start(200))
        assert module.first.weight is module.second.weight
        assert torch.equal(module.frozen.weight, mine.frozen.weight)

    def test_the_task_is_made_again_from_the_plan(self, tmp_path):
        made = build.task_of("digits-mlp", {"hidden": 5})
        path = trained(tmp_path, made, "digits-mlp", hidden=5)
        assert torch.equal(weights(load(path)), made.start(200))
        assert evaluate(path) == made.evaluate(made.start(200))
        assert evaluate(path, 100, ema=True) == made.evaluate(made.start(101))

    def test_damaged_ones_are_passed_over_aloud(self, tmp_path, capsys):
        made = task()
        path = trained(tmp_path, made)
        (path / "checkpoints/0000000200/manifest.json").unlink()
        assert torch.equal(weights(load(path, task=made)), made.start(100))
        assert "passed over: checkpoint" in capsys.readouterr().err
        with pytest.raises(DataError, match="0000000200 is damaged"):
            load(path, 200, task=made)

    @pytest.mark.parametrize(
        ("model", "told"),
        [
            (nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)), r"it has 0\.weight \(8, 5\) where that has"),
            (nn.Sequential(nn.Linear(5, 7)), r"it has 2 parameters, not 4"),
            (net().double(), r"numbers are torch\.float64, not torch\.float32; convert it with"),
            (normed(), r"it has 1\.weight \(7,\) where that has 2\.weight \(3, 7\)"),
            ("net", "model must be a torch.nn.Module, not a str"),
        ],
    )
    def test_a_model_that_does_not_fit(self, tmp_path, model, told):
        with pytest.raises(UsageError, match=told):
            load(trained(tmp_path, task()), model=model)

    def test_what_is_not_there(self, tmp_path):
        made = task()
        path = trained(tmp_path, made)
        with pytest.raises(UsageError, match=r"no checkpoint of step 150; there are: 100, 200"):
            load(path, 150, task=made)
        with pytest.raises(UsageError, match="has kept no best checkpoint"):
            load(path, "best", task=made)
        with pytest.raises(UsageError, match="which must be newest, best or the step"):
            load(path, "latest", task=made)
        with pytest.raises(UsageError, match=r"made in Python.*give task=, or to load a model, model="):
            load(path)
        with pytest.raises(UsageError, match="trains a plain vector"):
            load(path, task=build.task_of("toy", {}))
        with pytest.raises(UsageError, match=r"has 4 numbers, not 66"):
            evaluate(path, task=build.task_of("toy", {}))
        empty = RunDirectory.create(tmp_path / "empty", "x")
        with pytest.raises(UsageError, match="has no checkpoint yet"):
            load(empty.path, task=made)
        checkpoint.save(empty.checkpoints, 1, {"model": made.start(0)}, {})
        with pytest.raises(UsageError, match="no averaged weights; train with --hook weight-ema"):
            load(empty.path, task=made, ema=True)
        assert torch.equal(weights(load(empty.path, task=made)), made.start(0))  # a checkpoint may lack the names


class TestPredict:
    def test_equals_the_module(self, tmp_path):
        made = task()
        path = trained(tmp_path, made)
        expected = load(path, task=made)(DATA[0]).detach()
        assert torch.equal(predict(path, DATA[0], task=made), expected)
        assert predict(path, DATA[0][3], task=made).shape == (1, 3)

    def test_prepares_as_training_did(self, tmp_path):
        made = task(prepare=lambda x, y: (x * 3, y))
        path = trained(tmp_path, made)
        assert torch.equal(predict(path, (DATA[0],), task=made), load(path, task=made)(DATA[0] * 3).detach())

    def test_many_samples(self, tmp_path):
        made = task(dtype=torch.float64)
        many = torch.randn(1201, 5, generator=torch.Generator().manual_seed(0))
        assert predict(trained(tmp_path, made), many, task=made).shape == (1201, 3)

    def test_where_prepare_looks_the_inputs_up(self, tmp_path):
        made = TorchTask(net, cross_entropy, (torch.arange(60),), batch=8, prepare=lambda i: (DATA[0][i], DATA[1][i]))
        path = trained(tmp_path, made)
        assert torch.equal(predict(path, DATA[0], task=made), load(path, task=made)(DATA[0]).detach())

    def test_samples_that_do_not_fit(self, tmp_path):
        made = build.task_of("digits-mlp", {})
        path = trained(tmp_path, made, "digits-mlp")
        with pytest.raises(UsageError, match=r"shape \(8, 8\), so N samples have \(N, 8, 8\); these have \(3, 8, 7\)"):
            predict(path, torch.zeros(3, 8, 7))
        with pytest.raises(UsageError, match=r"samples of uint8 numbers, .* \(from 0\.5 to 0\.5\)"):
            predict(path, torch.full((3, 8, 8), 0.5))
        with pytest.raises(UsageError, match="takes 1 inputs, not 2"):
            predict(path, (torch.zeros(3, 8, 8), torch.zeros(3)))
        with pytest.raises(UsageError, match="no samples"):
            predict(path, torch.zeros(0, 8, 8))


@pytest.fixture(scope="module")
def digits(tmp_path_factory) -> Path:
    made = build.task_of("digits-mlp", {})
    return trained(tmp_path_factory.mktemp("digits"), made, "digits-mlp")


def command(*words: object):
    return CliRunner().invoke(app, [str(word) for word in words])


class TestCommands:
    images = build.task_of("digits-mlp", {}).test.tensors[0][:4]

    def test_evaluate(self, digits):
        told = json.loads(command("evaluate", digits, "--json", "--which", "100").stdout)
        assert told == {"run": "run", "step": 100, "metrics": evaluate(digits, 100)}
        assert "accuracy" in command("evaluate", digits).stdout

    @pytest.mark.parametrize("kind", ["npy", "npz", "safetensors", "csv", "flat.npy"])
    def test_every_kind_of_file_gives_the_same(self, digits, tmp_path, kind):
        path, images = tmp_path / f"samples.{kind}", self.images.numpy()
        if kind == "npy":
            np.save(path, images)
        elif kind == "npz":
            np.savez(path, images)
        elif kind == "safetensors":
            save_file({"x": self.images.clone()}, path)
        elif kind == "csv":
            np.savetxt(path, images.reshape(4, 64), delimiter=",", fmt="%d")
        else:
            np.save(path, images.reshape(4, 64))
            with pytest.raises(UsageError, match=r"a sample of task 'digits-mlp' has shape \(8, 8\)"):
                raise command("predict", digits, path).exception
            return
        ran = command("predict", digits, path)
        expected = predict(digits, self.images).double()
        lines = [json.loads(line) for line in ran.stdout.splitlines()]
        assert [line["index"] for line in lines] == [0, 1, 2, 3]
        assert [line["label"] for line in lines] == expected.argmax(1).tolist()
        assert [line["scores"] for line in lines] == expected.tolist()
        assert ran.stderr == ""

    def test_images(self, digits, tmp_path):
        paths = [tmp_path / f"{number}.png" for number in range(4)]
        for path, image in zip(paths, self.images, strict=True):
            Image.fromarray(image.numpy()).save(path)
        out = tmp_path / "out.npy"
        ran = command("predict", digits, *paths, "--output", out)
        assert ran.stdout == ""
        assert np.array_equal(np.load(out), predict(digits, self.images).double().numpy())
        Image.new("RGB", (8, 8), (200, 200, 200)).save(paths[0])
        warned = command("predict", digits, paths[0]).stderr
        assert "the numbers range from 200 to 200; the training data range from 0 to 16" in " ".join(warned.split())

    @pytest.mark.parametrize(
        ("name", "content", "told"),
        [
            ("a.txt", b"hello", r"\.txt is none of \.npy, \.npz, \.safetensors, \.csv, \.jpeg, \.jpg, \.png"),
            ("a", b"", "a file without an ending is none of"),
            ("a.npy", b"garbage", "cannot be read"),
            ("a.npy", b"", "cannot be read"),
            ("a.npz", b"garbage", "cannot be read"),
            ("a.safetensors", b"garbage", "cannot be read"),
            ("a.csv", b"1,2\n3\n", "the same number of numbers"),
            ("a.csv", b"", "the same number of numbers"),
            ("a.csv", b"x,y\n1,2\n", "numbers only, and no header line"),
            ("a.csv", b"1,2\n", r"has shape \(8, 8\)"),
            ("a.png", b"garbage", "cannot be read as an image"),
        ],
    )
    def test_files_that_cannot_be_used(self, digits, tmp_path, name, content, told):
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(PacelineError, match=told):
            raise command("predict", digits, path).exception

    def test_pickles_are_not_opened(self, digits, tmp_path):
        path = tmp_path / "a.npy"
        np.save(path, np.array([{"a": 1}], dtype=object), allow_pickle=True)
        with pytest.raises(DataError, match="allow_pickle=False"):
            raise command("predict", digits, path).exception

    def test_images_of_another_size_and_no_file(self, digits, tmp_path):
        path = tmp_path / "large.png"
        Image.new("L", (28, 14)).save(path)
        with pytest.raises(UsageError, match=r"has 28 x 14 pixels; a sample has 8 x 8, shape \(8, 8\)"):
            raise command("predict", digits, path).exception
        with pytest.raises(UsageError, match="no file"):
            raise command("predict", digits, tmp_path / "none.npy").exception
        with pytest.raises(UsageError, match=r"must be a \.npy file"):
            raise command("predict", digits, path, "-o", "out.txt").exception
