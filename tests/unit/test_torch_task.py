"""Tasks made of PyTorch models."""

from __future__ import annotations

from itertools import islice

import pytest
import torch
from small_models import DATA, by_hand, first_batch, net, normed, task
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from paceline.errors import UsageError
from paceline.task import Batch
from paceline.torch_task import TorchTask, accuracy, seeded


class TestGradient:
    def test_equals_autograd_bit_for_bit(self):
        t = task()
        x, batch = t.start(4), first_batch(t)
        loss, g = t.grad(x, batch)
        with seeded(4):
            module = net()
        assert (loss, g.tolist()) == (by_hand(module, batch)[0], by_hand(module, batch)[1].tolist())

    def test_is_written_into_out(self):
        t = task()
        x, batch = t.start(0), first_batch(t)
        out = torch.full_like(x, torch.nan)
        _, g = t.grad(x, batch, out)
        assert g is out
        assert torch.equal(out, t.grad(x, batch)[1])

    def test_is_pure_in_x(self):
        t = task()
        batch = first_batch(t)
        a, b = t.start(0), t.start(1)
        kept = a.clone(), b.clone()
        alone = t.grad(a, batch, torch.empty_like(a))
        t.grad(b, batch, torch.empty_like(b))
        t.evaluate(b)
        again = t.grad(a, batch, torch.empty_like(a))
        assert alone[0] == again[0]
        assert torch.equal(alone[1], again[1])
        assert torch.equal(a, kept[0])
        assert torch.equal(b, kept[1])

    def test_works_inside_no_grad_and_leaves_it(self):
        t = task()
        x, batch = t.start(0), first_batch(t)
        expected = t.grad(x, batch)[1].clone()
        with torch.no_grad():
            assert torch.equal(t.grad(x, batch)[1], expected)
            assert not torch.is_grad_enabled()

    def test_slices_average_to_the_common_batch(self):
        t = task(batch=10, feed="slice", dtype=torch.float64)
        x = t.start(0)
        loss, g = t.grad(x, first_batch(t), torch.empty_like(x))
        parts = [t.grad(x, first_batch(t, rank, 4), torch.empty_like(x)) for rank in range(4)]
        assert sum(part[0] for part in parts) / 4 == pytest.approx(loss, abs=1e-14)
        assert torch.allclose(torch.stack([part[1] for part in parts]).mean(0), g, atol=1e-14)

    def test_users_errors_name_the_task(self):
        def broken(output, target):
            raise ValueError("no such loss")

        t = TorchTask(net, broken, DATA, name="mine")
        with pytest.raises(ValueError, match="no such loss") as caught:
            t.grad(t.start(0), first_batch(t))
        assert caught.value.__notes__ == ["in task 'mine'"]

    @pytest.mark.parametrize(
        ("loss", "says"),
        [
            (lambda a, b: cross_entropy(a, b, reduction="none"), r"of one number, .* not a Tensor of shape \(8,\)"),
            (lambda a, b: cross_entropy(a, b).item(), r"of one number, .* not a float\b"),
            (lambda a, b: cross_entropy(a.detach(), b), "does not depend on the model's weights"),
        ],
    )
    def test_a_loss_that_is_not_one_number_to_descend_is_refused(self, loss, says):
        t = TorchTask(net, loss, DATA, batch=8)
        with pytest.raises(UsageError, match=says):
            t.grad(t.start(0), first_batch(t))

    def test_a_loss_of_many_numbers_is_refused_when_evaluating_too(self):
        t = TorchTask(net, nn.CrossEntropyLoss(reduction="none"), DATA)
        with pytest.raises(UsageError, match=r"not a Tensor of shape \(60,\)"):
            t.evaluate(t.start(0))

    def test_unused_parameters_have_no_gradient(self):
        class Partly(nn.Module):
            def __init__(self):
                super().__init__()
                self.used, self.unused = nn.Linear(5, 3), nn.Linear(2, 2)

            def forward(self, a):
                return self.used(a)

        t = task(Partly)
        _, g = t.grad(t.start(0), first_batch(t), torch.full((24,), torch.nan))
        assert (g[-6:] == 0).all()
        assert g[:-6].isfinite().all()


class TestRandomness:
    def dropping(self) -> nn.Module:
        return nn.Sequential(nn.Linear(5, 50), nn.Dropout(0.5), nn.Linear(50, 3))

    def test_dropout_is_drawn_from_the_batch(self):
        t = task(self.dropping)
        x = t.start(0)
        data = first_batch(t).data
        one, same, other = (t.grad(x, Batch(data, 8, seed))[0] for seed in (1, 1, 2))
        assert one == same
        assert one != other

    def test_evaluation_drops_nothing(self):
        t = task(self.dropping)
        assert t.evaluate(t.start(0)) == t.evaluate(t.start(0))

    def test_the_global_generator_is_left_alone(self):
        before = torch.random.get_rng_state()
        t = task(self.dropping, prepare=lambda a, b: (a + torch.randn_like(a), b))
        x = t.start(3)
        t.grad(x, first_batch(t))
        t.evaluate(x)
        assert torch.equal(torch.random.get_rng_state(), before)

    def test_a_random_preparation_is_a_function_of_seed_rank_and_count(self):
        t = task(prepare=lambda a, b: (a + torch.randn_like(a), b))
        run = list(islice(t.batches(1, 2, 9), 5))
        sought = next(t.batches(1, 2, 9, first=4))
        assert torch.equal(run[4].data[0], sought.data[0])
        assert not torch.equal(run[3].data[0], sought.data[0])

    def test_start_is_a_function_of_the_seed(self):
        t = task()
        assert torch.equal(t.start(5), t.start(5))
        assert not torch.equal(t.start(5), t.start(6))

    def test_a_module_starts_from_its_weights_and_is_left_alone(self):
        module = net()
        weights = nn.utils.parameters_to_vector(module.parameters()).detach()
        t = task(module)
        x = t.start(1)
        assert torch.equal(x, weights)
        t.grad(x + 1, first_batch(t))
        assert torch.equal(nn.utils.parameters_to_vector(module.parameters()), weights)
        assert all(p.grad is None for p in module.parameters())


class TestKindsOfModels:
    def test_batch_norm_state_belongs_to_the_caller(self):
        t = task(normed)
        x, batch = t.start(0), first_batch(t)
        mine, yours = t.buffers(), t.buffers()
        t.grad(x, batch, buffers=mine)
        t.grad(x, batch, buffers=mine)
        t.grad(x, batch)
        assert mine["1.num_batches_tracked"].item() == 2
        assert not torch.equal(mine["1.running_mean"], yours["1.running_mean"])
        assert all(torch.equal(yours[name], fresh) for name, fresh in t.buffers().items())
        assert t.evaluate(x, mine)["loss"] != t.evaluate(x, yours)["loss"]
        assert t.evaluate(x, yours) == t.evaluate(x)

    def test_buffers_assigned_anew_come_back_too(self):
        class Counting(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(5, 3)
                self.register_buffer("seen", torch.zeros(1))

            def forward(self, a):
                self.seen = self.seen + len(a)
                return self.layer(a)

        t = task(Counting)
        mine = t.buffers()
        for _ in range(3):
            t.grad(t.start(0), first_batch(t), buffers=mine)
        assert mine["seen"].item() == 24

    def test_buffers_must_be_the_models(self):
        t = task(normed)
        with pytest.raises(UsageError, match="running_mean"):
            t.grad(t.start(0), first_batch(t), buffers={"mean": torch.zeros(7)})

    def test_tied_weights_lie_in_the_vector_once(self):
        class Tied(nn.Module):
            def __init__(self):
                super().__init__()
                self.there, self.back, self.out = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3)
                self.back.weight = self.there.weight

            def forward(self, a):
                return self.out(self.back(self.there(a).tanh()))

        t = task(Tied)
        x, batch = t.start(2), first_batch(t)
        assert x.numel() == 25 + 5 + 5 + 15 + 3
        with seeded(2):
            module = Tied()
        assert torch.equal(t.grad(x, batch)[1], by_hand(module, batch)[1])

    def test_frozen_weights_stay_out_of_the_vector(self):
        def half_frozen():
            module = net()
            module[0].requires_grad_(False)
            return module

        t = task(half_frozen)
        with seeded(0):
            module = half_frozen()
        x, batch = t.start(0), first_batch(t)
        assert x.numel() == 24
        assert torch.equal(t.grad(x, batch)[1], by_hand(module, batch)[1])
        t.grad(x + 1, batch)
        assert torch.equal(t.module(x)[0].weight, module[0].weight)

    def test_several_inputs(self):
        pairs = (*DATA[:1], 2 * DATA[0], DATA[0].sum(1, keepdim=True))
        t = TorchTask(nn.Bilinear(5, 5, 1), mse_loss, pairs, batch=4)
        loss, g = t.grad(t.start(0), first_batch(t))
        assert loss > 0
        assert g.isfinite().all()

    def test_dtype_casts_model_and_inputs(self):
        t = task(net(), dtype=torch.float64)
        x, batch = t.start(0), first_batch(t)
        assert (x.dtype, batch.data[0].dtype, batch.data[1].dtype) == (*[torch.float64] * 2, torch.int64)
        assert t.grad(x, batch)[1].dtype == torch.float64

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("given", [True, False])
    def test_sixteen_bits_train(self, dtype, given):
        """Whether the model comes in them or is cast, data in 32 bits fit."""
        t = task(normed, dtype=dtype) if given else task(lambda: normed().to(dtype))
        x, batch, buffers = t.start(0), first_batch(t), t.buffers()
        assert (x.dtype, batch.data[0].dtype) == (dtype, dtype)
        before = t.grad(x, batch, buffers=buffers)[0]
        for _ in range(20):
            x -= 0.3 * t.grad(x, batch, buffers=buffers)[1]
        assert t.grad(x, batch, buffers=buffers)[0] < before / 2
        assert t.evaluate(x, buffers)["loss"] > 0
        assert t.module(x, buffers)[0].weight.dtype == dtype

    def test_the_model_at_x_is_a_copy(self):
        t = task(normed)
        x, buffers = t.start(1), t.buffers()
        module = t.module(x, buffers)
        module(DATA[0])
        with torch.no_grad():
            module[0].weight.zero_()
        assert torch.equal(t.start(1), x)
        assert all(torch.equal(buffers[name], fresh) for name, fresh in t.buffers().items())


class Squares(Dataset):
    def __init__(self, n: int = 60) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int):
        return DATA[0][index], int(DATA[1][index])


class Endless(IterableDataset):
    def __iter__(self):
        yield DATA[0][0], 0


class Unmeasured(Dataset):
    def __getitem__(self, index: int):
        return DATA[0][index], int(DATA[1][index])


class TestData:
    @pytest.mark.parametrize("data", [Squares(), TensorDataset(*DATA), list(DATA)])
    def test_any_data_set_equals_tensors(self, data):
        plain, other = task(), TorchTask(net, cross_entropy, data, batch=8)
        for a, b in zip(islice(plain.batches(1, 3, 7), 20), other.batches(1, 3, 7), strict=False):
            assert (a.seed, a.size, a.weight) == (b.seed, b.size, b.weight)
            assert all(torch.equal(one, two) for one, two in zip(a.data, b.data, strict=True))
        assert plain.evaluate(plain.start(0)) == other.evaluate(other.start(0))

    def test_evaluation_in_chunks_is_the_mean_over_samples(self, monkeypatch):
        t = task(test=tuple(part[:25] for part in DATA), metrics={"accuracy": accuracy})
        x = t.start(0)
        whole = t.evaluate(x)
        monkeypatch.setattr("paceline.torch_task.EVALUATION_CHUNK", 7)
        assert t.evaluate(x) == pytest.approx(whole, rel=1e-6)
        output = t.module(x)(DATA[0][:25])
        assert whole["loss"] == pytest.approx(cross_entropy(output, DATA[1][:25]).item())
        assert whole["accuracy"] == pytest.approx((output.argmax(1) == DATA[1][:25]).float().mean().item())

    def test_without_test_data_the_training_data_count(self):
        assert task().evaluate(task().start(0)) == task(test=DATA).evaluate(task().start(0))

    def test_another_batch_size_is_another_task(self):
        t = task()
        other = t.configured(batch=3, feed="shard", shuffle=False)
        assert (first_batch(other).size, first_batch(t).size) == (3, 8)
        assert torch.equal(first_batch(other, 1, 2).data[0], DATA[0][[1, 3, 5]])

    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            ((net, cross_entropy, (DATA[0][:0], DATA[1][:0])), "the train data set is empty"),
            ((net, cross_entropy, ()), "the train data set is empty"),
            ((net, cross_entropy, DATA, Squares(0)), "the test data set is empty"),
            ((net, cross_entropy, (DATA[0], DATA[1][:9])), r"train tensors must be equally long, not \[60, 9\]"),
            ((nn.ReLU, cross_entropy, DATA), "ReLU has no trainable parameters"),
            ((lambda: 3, cross_entropy, DATA), "model must be a torch.nn.Module or a function that builds one, not 3"),
            ((None, cross_entropy, DATA), "model must be a torch.nn.Module or a function that builds one, not None"),
            ((net, cross_entropy, Endless()), r"train has no length, .*: give test data"),
            ((net, cross_entropy, Unmeasured()), r"a length \(__len__\) and .*, not Unmeasured"),
            ((net, cross_entropy, (torch.tensor(1.0), torch.tensor(1))), "train tensors must have a first dimension"),
        ],
    )
    def test_what_cannot_be_is_refused(self, arguments, says):
        with pytest.raises(UsageError, match=says):
            TorchTask(*arguments)

    def test_words_that_mean_nothing_are_refused(self):
        with pytest.raises(UsageError, match="buffer_policy must be one of average, chief, not 'foo'"):
            task(buffer_policy="foo")
        with pytest.raises(
            UsageError, match=r"dtype must be a floating-point type, such as torch.float64, not torch.int"
        ):
            task(dtype=torch.int32)

    def test_a_batch_needs_a_target(self):
        with pytest.raises(UsageError, match="must hold inputs and a target"):
            first_batch(TorchTask(net, cross_entropy, DATA[:1]))

    def test_samples_must_hold_tensors(self):
        class Named(Squares):
            def __getitem__(self, index: int):
                return DATA[0][index], f"sample {index}"

        with pytest.raises(UsageError, match="collated it is"):
            first_batch(TorchTask(net, cross_entropy, Named()))


def test_a_model_is_built_once_for_each_seed_in_a_row() -> None:
    built: list[int] = []

    def build() -> nn.Module:
        built.append(1)
        return nn.Linear(3, 2)

    task = TorchTask(build, nn.functional.mse_loss, (torch.zeros(4, 3), torch.zeros(4, 2)))
    starts = {seed: [task.start(seed) for _ in range(2)] for seed in (0, 7, 7, 0)}
    assert len(built) == 3
    assert all(torch.equal(first, second) for first, second in starts.values())
    assert not torch.equal(starts[0][0], starts[7][0])
    starts[0][0].zero_()
    assert task.start(0).any()
