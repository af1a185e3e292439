"""The tasks that come with paceline."""

from __future__ import annotations

import inspect
import math
from itertools import islice
from typing import get_type_hints

import pytest
import torch
from torch import nn

from paceline.config import discovery
from paceline.datasets import Dataset
from paceline.errors import UsageError
from paceline.task import Batch, Task
from paceline.tasks.char_lm import CharLM, char_lm
from paceline.tasks.cnn import cifar_cnn, colour_net, fashion_cnn, grey_net, mnist_cnn
from paceline.tasks.logistic import logistic
from paceline.tasks.mlp import digits_mlp, mnist_mlp
from paceline.tasks.quadratic import quadratic
from paceline.tasks.toy import toy

NAMES = {
    "toy",
    "quadratic",
    "logistic",
    "digits-mlp",
    "mnist-mlp",
    "mnist-cnn",
    "fashion-cnn",
    "cifar-cnn",
    "char-lm",
}


def built_in() -> dict:
    return {name: found.value for name, found in discovery.tasks().items()}


@pytest.fixture
def _small_pictures(monkeypatch):
    """A few random pictures for the networks that would be slow, or whose data may not be here."""

    def load(name: str, *_: object, **__: object) -> Dataset:
        shape = (20, 3, 32, 32) if name == "cifar" else (20, 28, 28)
        images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
        return Dataset(name, (images, torch.arange(20) % 10), (images, torch.arange(20) % 10), None, "chance")

    monkeypatch.setattr("paceline.tasks.cnn.load", load)


def take(task: Task, n: int = 1, rank: int = 0, workers: int = 1, seed: int = 0) -> list[Batch]:
    return list(islice(task.batches(rank, workers, seed), n))


def test_the_folder_holds_these_tasks():
    assert set(built_in()) >= NAMES


@pytest.mark.usefixtures("_small_pictures")
@pytest.mark.parametrize("name", sorted(NAMES))
class TestEveryTask:
    def test_options_are_simple_and_have_defaults(self, name):
        build = built_in()[name]
        hints = get_type_hints(build)
        for option in inspect.signature(build).parameters.values():
            assert hints[option.name] in (int, float, str, bool, tuple[float, ...])
            assert option.default is not option.empty
        summary, blank, *_ = inspect.getdoc(build).splitlines()
        assert summary.endswith(".")
        assert blank == ""

    def test_contract(self, name):
        task = built_in()[name]().configured(batch=4)
        x = task.start(3)
        assert task.name == name
        assert x.dim() == 1
        assert torch.equal(x, task.start(3))
        assert x.data_ptr() != task.start(3).data_ptr()

        batch, later = take(task, 2, rank=1, workers=2)
        sought = next(task.batches(1, 2, 0, first=1))
        assert (later.seed, later.size) == (sought.seed, sought.size)
        assert all(torch.equal(a, b) for a, b in zip(later.data, sought.data, strict=True))
        assert batch.seed != later.seed

        kept, out = x.clone(), torch.full_like(x, torch.nan)
        loss, g = task.grad(x, batch, out)
        assert g is out
        assert out.isfinite().all()
        assert loss == loss
        assert torch.equal(x, kept)
        assert (loss, g.tolist()) == (task.grad(x, batch)[0], task.grad(x, batch)[1].tolist())

    def test_too_small_a_common_batch_is_refused_at_once(self, name):
        task = built_in()[name]().configured(batch=2, feed="slice")
        with pytest.raises(UsageError, match="one common batch of 2 between 3 workers"):
            task.batches(0, 3, 0)

    def test_slices_average_to_the_common_batch(self, name):
        options = {"dropout": 0.0} if name in ("mnist-cnn", "fashion-cnn") else {}
        task = built_in()[name](**options).configured(batch=5, feed="slice")
        x = task.start(0)
        whole = task.grad(x, take(task)[0], torch.empty_like(x))[1]
        parts = [task.grad(x, take(task, rank=rank, workers=3)[0], torch.empty_like(x))[1] for rank in range(3)]
        assert torch.allclose(torch.stack(parts).mean(0), whole, atol=2e-6, rtol=1e-4)


class TestOptions:
    @pytest.mark.parametrize(
        ("name", "options", "says"),
        [
            ("digits-mlp", {"hidden": 0}, "hidden must be a whole number of at least 1, not 0"),
            ("digits-mlp", {"hidden": -1}, "hidden must be a whole number of at least 1, not -1"),
            ("mnist-mlp", {"hidden": 2.5}, "hidden must be a whole number of at least 1, not 2.5"),
            ("mnist-mlp", {"dtype": "half"}, "dtype must be one of float32, float64, not 'half'"),
            ("mnist-cnn", {"dropout": 2.0}, "dropout must be from 0 to 1, not 2.0"),
            ("mnist-cnn", {"dropout": math.nan}, "dropout must be from 0 to 1, not nan"),
            ("mnist-cnn", {"test_size": -1}, "test_size must be a whole number of at least 0, not -1"),
            ("fashion-cnn", {"dropout": -0.1}, "dropout must be from 0 to 1, not -0.1"),
            ("fashion-cnn", {"test_size": -1}, "test_size must be a whole number of at least 0, not -1"),
            ("cifar-cnn", {"parts": 0}, "parts must be a whole number of at least 1, not 0"),
            ("cifar-cnn", {"test_size": -1}, "test_size must be a whole number of at least 0, not -1"),
            ("char-lm", {"context": 0}, "context must be a whole number of at least 1, not 0"),
            ("char-lm", {"layers": 0}, "layers must be a whole number of at least 1, not 0"),
            ("char-lm", {"heads": -1}, "heads must be a whole number of at least 1, not -1"),
            ("char-lm", {"width": 63}, "width must be a multiple of heads, not 63 with 4 heads"),
            ("char-lm", {"dropout": math.inf}, "dropout must be from 0 to 1, not inf"),
            ("logistic", {"l2": math.nan}, "l2 must be a finite float32 number of at least 0, not nan"),
            ("logistic", {"l2": -1.0}, "l2 must be a finite float32 number of at least 0, not -1.0"),
            ("logistic", {"l2": 1e39}, "l2 must be a finite float32 number of at least 0, not 1e+39"),
            ("quadratic", {"dim": 0}, "dim must be a whole number of at least 1, not 0"),
            ("quadratic", {"noise": math.nan}, "noise must be a finite float32 number of at least 0, not nan"),
            ("quadratic", {"heterogeneity": math.inf}, "heterogeneity must be a finite float32 number of at least 0"),
            ("quadratic", {"condition": math.nan}, "condition must be a finite float32 number of at least 1, not nan"),
            ("quadratic", {"curvature": math.inf}, "curvature must be a finite float32 number above 0, not inf"),
            ("quadratic", {"curvature": 1e-20, "condition": 1e30}, "curvature/condition must be a finite float32"),
            ("quadratic", {"curvatures": (1.0, math.nan)}, "curvatures[1] must be a finite float32 number above 0"),
            ("quadratic", {"centres": (math.inf,)}, "centres[0] must be a finite float32 number, not inf"),
        ],
    )
    def test_what_cannot_be_is_refused_before_data_are_read(self, name, options, says, monkeypatch):
        for module in ("mlp", "cnn", "char_lm", "logistic"):
            monkeypatch.setattr(f"paceline.tasks.{module}.load", None)
        with pytest.raises(UsageError) as caught:
            built_in()[name](**options)
        assert says in str(caught.value)

    def test_the_limits_themselves_are_allowed(self):
        assert digits_mlp(hidden=1).start(0).numel() == 64 + 1 + 10 + 10
        assert logistic(l2=0).curvature() > 0
        assert quadratic(dim=1, curvature=1e39, dtype="float64").curvature() == 1e39


class TestToy:
    @pytest.mark.parametrize("dtype", ["float32", "float64"])
    def test_one_step_shrinks_the_miss_by_a_known_factor(self, dtype):
        task = toy(dtype)
        x = task.start(0)
        assert x.tolist() == [0.0] * 4
        (batch,) = take(task)
        for t in range(5):
            miss = -100.0 * 0.5**t
            loss, g = task.grad(x, batch)
            assert loss == miss**2
            assert g.tolist() == [miss] * 4
            assert task.evaluate(x) == pytest.approx({"loss": miss**2, "distance": -miss})
            x = x - 0.25 * g
        assert task.curvature() == 2.0

    def test_unknown_dtype(self):
        with pytest.raises(UsageError, match="dtype must be one of float32, float64, not 'half'"):
            toy("half")


class TestQuadratic:
    def test_spectrum(self):
        task = quadratic(dim=5, curvature=8.0, condition=16.0, dtype="float64")
        _, g = task.grad(torch.ones(5, dtype=torch.float64), take(task)[0])
        assert g.tolist() == pytest.approx([0.5, 1, 2, 4, 8])
        assert task.curvature() == pytest.approx(8.0)
        assert quadratic(dim=1, curvature=3.0).curvature() == 3.0

    def test_gradient_is_that_of_the_loss(self):
        task = quadratic(dim=4, condition=5.0, heterogeneity=2.0, dtype="float64")
        (batch,) = take(task, rank=1, workers=3)
        x = task.start(0).requires_grad_()
        h, s = batch.data
        loss = 0.5 * (h * (x - s) ** 2).sum()
        (expected,) = torch.autograd.grad(loss, x)
        got = task.grad(x.detach(), batch)
        assert got[0] == pytest.approx(loss.item())
        assert torch.allclose(got[1], expected, atol=1e-12)

    @pytest.mark.parametrize("workers", [1, 2, 7])
    def test_heterogeneous_workers_share_the_origin_as_optimum(self, workers):
        task = quadratic(heterogeneity=3.0, condition=10.0, dtype="float64")
        origin = torch.zeros(10, dtype=torch.float64)
        grads = [
            task.grad(origin, take(task, rank=rank, workers=workers)[0], torch.empty_like(origin))[1]
            for rank in range(workers)
        ]
        assert torch.stack(grads).mean(0).abs().max() < 1e-12
        assert task.evaluate(origin) == {"loss": 0.0, "distance": 0.0}
        if workers > 1:
            assert grads[0].abs().max() > 0.1

    def test_the_spread_of_the_workers_is_the_chosen_one(self):
        task = quadratic(dim=20, heterogeneity=3.0, dtype="float64")
        centres = torch.stack([task.centre(rank, 300) for rank in range(300)])
        assert centres.std().item() == pytest.approx(3.0, rel=0.05)

    def test_workers_given_one_by_one(self):
        task = quadratic(dim=1, curvatures=(1.0, 2.0, 0.5), centres=(0.0, 1.0, 4.0), dtype="float64")
        x = torch.tensor([8 / 7], dtype=torch.float64)
        assert task.evaluate(x)["distance"] < 1e-15
        grads = [task.grad(x, take(task, rank=rank, workers=3)[0])[1].item() for rank in range(3)]
        assert grads == pytest.approx([8 / 7, 2 / 7, 0.5 * (8 / 7 - 4)])
        assert sum(grads) == pytest.approx(0.0, abs=1e-15)
        assert task.curvature() == 2.0
        with pytest.raises(UsageError, match="describes 3 workers one by one, but there are 2"):
            task.batches(0, 2, 0)

    def test_centres_alone_and_curvatures_alone(self):
        assert quadratic(centres=(1.0, 3.0)).evaluate(2 * torch.ones(10))["distance"] == 0.0
        assert quadratic(curvatures=(1.0, 3.0)).evaluate(torch.zeros(10))["distance"] == 0.0

    @pytest.mark.parametrize("size", [1, 16])
    def test_noise_has_the_stated_variance_and_no_bias(self, size):
        task = quadratic(dim=50, noise=2.0, dtype="float64").configured(batch=size)
        zero = torch.zeros(50, dtype=torch.float64)
        noise = torch.stack([task.grad(zero, batch)[1].clone() for batch in take(task, 400)])
        assert noise.std().item() == pytest.approx(2.0 / size**0.5, rel=0.03)
        assert abs(noise.mean().item()) < 4 * 2.0 / size**0.5 / 20_000**0.5

    def test_noise_differs_by_seed_rank_and_count(self):
        task = quadratic(noise=1.0)
        zero = torch.zeros(10)
        places = [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0)]
        drawn = [task.grad(zero, next(task.batches(r, 2, s, first=c)))[1].clone() for s, r, c in places]
        assert len({tuple(g.tolist()) for g in drawn}) == 4

    @pytest.mark.parametrize(
        "options",
        [
            {"dim": 0},
            {"condition": 0.5},
            {"noise": -1.0},
            {"curvature": 0.0},
            {"curvatures": (1.0, 0.0)},
            {"curvatures": (1.0,), "centres": (1.0, 2.0)},
            {"centres": (1.0,), "heterogeneity": 1.0},
            {"curvatures": (1.0,), "condition": 2.0},
        ],
    )
    def test_what_cannot_be_is_refused(self, options):
        with pytest.raises(UsageError):
            quadratic(**options)


class TestLogistic:
    def test_gradient_equals_autograd(self):
        task = logistic(l2=0.1, dtype="float64")
        (batch,) = take(task)
        x = torch.randn(31, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
        rows, labels = batch.data
        loss = nn.functional.binary_cross_entropy_with_logits(rows @ x, (labels + 1) / 2)
        loss = loss + 0.05 * (x**2).sum()
        (expected,) = torch.autograd.grad(loss, x)
        value, g = task.grad(x.detach(), batch)
        assert value == pytest.approx(loss.item(), rel=1e-12)
        assert torch.allclose(g, expected, atol=1e-13)

    def test_curvature_bounds_the_hessian_and_is_reached_at_zero(self):
        task = logistic(l2=0.01, dtype="float64")
        rows = task.train[0]
        hessian = rows.T @ rows / len(rows) / 4 + 0.01 * torch.eye(31, dtype=torch.float64)
        assert task.curvature() == pytest.approx(torch.linalg.eigvalsh(hessian)[-1].item(), rel=1e-10)

    def test_descent_at_the_inverse_curvature_learns(self):
        task = logistic().configured(batch=455)
        x = task.start(0)
        for batch in take(task, 200):
            x = x - task.grad(x, batch)[1] / task.curvature()
        result = task.evaluate(x)
        assert result["objective"] < 0.1
        assert result["accuracy"] > 0.94


class TestModels:
    @pytest.mark.parametrize(
        ("module", "shapes", "parameters"),
        [
            (
                grey_net(0.5),
                [(32, 1, 5, 5), (32,), (64, 32, 5, 5), (64,), (1024, 3136), (1024,), (10, 1024), (10,)],
                3_274_634,
            ),
            (
                colour_net(),
                [
                    *((64, 3, 5, 5), (64,), (64, 64, 5, 5), (64,)),
                    *((384, 4096), (384,), (192, 384), (192,), (10, 192), (10,)),
                ],
                1_756_426,
            ),
        ],
    )
    def test_convolutional_networks(self, module, shapes, parameters):
        assert [tuple(p.shape) for p in module.parameters()] == shapes
        assert sum(p.numel() for p in module.parameters()) == parameters
        channels = shapes[0][1]
        assert module(torch.zeros(2, channels, *[28 if channels == 1 else 32] * 2)).shape == (2, 10)

    def test_small_networks(self):
        assert digits_mlp().start(0).numel() == 64 * 32 + 32 + 32 * 10 + 10
        assert mnist_mlp().start(0).numel() == 784 * 128 + 128 + 128 * 10 + 10
        assert mnist_mlp(hidden=16).start(0).numel() == 784 * 16 + 16 + 160 + 10

    def test_character_model(self):
        module = CharLM(65, 64, 64, 2, 4, 0.0)
        block = 2 * 2 * 64 + (64 * 192 + 192) + (64 * 64 + 64) + (64 * 256 + 256) + (256 * 64 + 64)
        assert sum(p.numel() for p in module.parameters()) == 65 * 64 + 64 * 64 + 2 * block + 128 + 65 * 64 + 65
        tokens = torch.arange(20).view(2, 10)
        changed = tokens.clone()
        changed[:, 6:] = 0
        with torch.no_grad():
            assert module(tokens).shape == (2, 10, 65)
            assert torch.allclose(module(tokens)[:, :6], module(changed)[:, :6], atol=1e-6)

    def test_characters_are_predicted_from_those_before(self):
        task = char_lm(context=8)
        for batch in take(task, 20):
            inputs, target = batch.data
            assert inputs.shape == target.shape == (32, 8)
            assert torch.equal(inputs[:, 1:], target[:, :-1])
        result = task.evaluate(task.start(0))
        assert result["bits"] == pytest.approx(result["loss"] / 0.6931471805599453)
        assert result["bits"] == pytest.approx(6.02, abs=0.3)

    @pytest.mark.parametrize("options", [{"width": 63}, {"context": 0}, {"context": 200_000}])
    def test_impossible_character_models(self, options):
        with pytest.raises(UsageError):
            char_lm(**options)

    def test_digits_are_learnt(self):
        task = digits_mlp()
        x = task.start(0)
        for batch in take(task, 400):
            x -= 0.3 * task.grad(x, batch)[1]
        assert task.evaluate(x)["accuracy"] > 0.9

    def test_a_notice_reaches_the_task(self, monkeypatch):
        small = (torch.zeros(4, 28, 28, dtype=torch.uint8), torch.arange(4))
        stand_in = Dataset("mnist", small, small, None, "nowhere", "NOT REAL")
        monkeypatch.setattr("paceline.tasks.mlp.load", lambda *_: stand_in)
        monkeypatch.setattr("paceline.tasks.cnn.load", lambda *_, **__: stand_in)
        assert {mnist_mlp().notice, mnist_cnn().notice, fashion_cnn().notice} == {"NOT REAL"}

    def test_pictures_in_colour_are_standardised(self, monkeypatch):
        small = (torch.zeros(4, 3, 32, 32, dtype=torch.uint8), torch.arange(4))
        monkeypatch.setattr("paceline.tasks.cnn.load", lambda *_, **__: Dataset("cifar", small, small, None, "nowhere"))
        task = cifar_cnn(test_size=2).configured(batch=2)
        images = take(task)[0].data[0]
        assert images[0, :, 0, 0].tolist() == pytest.approx([-0.4914 / 0.24703, -0.48216 / 0.24349, -0.44653 / 0.26159])
        assert task.grad(task.start(0), take(task)[0])[1].isfinite().all()
        assert task.test.length == 2
