"""A module whose parameters and gradients are views of flat vectors."""

from __future__ import annotations

import pytest
import torch
from small_models import DATA, net, normed, task
from torch import nn

from paceline.errors import UsageError
from paceline.torch_task import FlatModule


class TestFlatModule:
    def test_parameters_are_views_not_copies(self):
        flat = FlatModule(net())
        x, out = torch.zeros(flat.size), torch.zeros(flat.size)
        flat.bind(x, out)
        x.fill_(3.0)
        out.fill_(5.0)
        assert all((p == 3.0).all() and (p.grad == 5.0).all() for p in flat.module.parameters())
        assert flat.module[0].weight.data_ptr() == x.data_ptr()

    def test_binding_again_elsewhere_leaves_the_old_vectors(self):
        flat = FlatModule(net())
        first, second, out = (torch.full((flat.size,), float(i)) for i in range(3))
        for x in (first, second, first):
            flat.bind(x, out)
            assert torch.equal(flat.vector(), x)
        assert (first == 0).all()
        assert (second == 1).all()

    def test_vector_goes_round(self):
        flat = FlatModule(net())
        x = flat.vector()
        flat.bind(x.clone(), torch.zeros_like(x))
        assert torch.equal(flat.vector(), x)

    def test_gradients_of_autograd_s_own_are_taken(self):
        flat, twin = FlatModule(net()), FlatModule(net())
        x, out, expected = flat.vector(), torch.full((flat.size,), 7.0), torch.zeros(flat.size)
        for each, g in ((flat, out), (twin, expected)):
            each.bind(x, g)
        for _ in range(2):
            expected.zero_()
            flat.release_gradients()
            inputs = torch.randn(5, flat.module[0].in_features)
            for each in (flat, twin):
                (each.module(inputs) ** 2).sum().backward()
            flat.take_gradients(out)
            assert torch.equal(out, expected)
            assert flat.gradients_in_place()
            flat.bind(x, out)
        flat.bind(x, other := torch.zeros(flat.size))
        (flat.module(inputs) ** 2).sum().backward()
        assert torch.equal(other, expected)

    def test_taken_gradients_of_parameters_without_one_are_0_and_sparse_ones_are_dense(self):
        module = nn.ModuleDict({"table": nn.Embedding(4, 3, sparse=True), "unused": nn.Linear(2, 2)})
        flat = FlatModule(module)
        x, out = flat.vector(), torch.full((flat.size,), 7.0)
        flat.bind(x, out)
        flat.release_gradients()
        module["table"](torch.tensor([1, 1])).sum().backward()
        flat.take_gradients(out)
        assert out.tolist() == [0.0] * 3 + [2.0] * 3 + [0.0] * 6 + [0.0] * 6

    def test_a_pass_that_fails_after_the_release_leaves_no_parameter_without_a_place(self):
        flat = FlatModule(net())
        x, out = flat.vector(), torch.zeros(flat.size)
        flat.bind(x, out)
        flat.release_gradients()
        flat.bind(x, out)
        assert flat.gradients_in_place()

    def test_a_part_of_a_bound_vector_is_not_mistaken_for_it(self):
        flat = FlatModule(net())
        long, out = torch.zeros(flat.size + 1), torch.zeros(flat.size)
        flat.bind(long[:-1], out)
        with pytest.raises(UsageError, match="x must be a contiguous vector of"):
            flat.bind(long, out)

    @pytest.mark.parametrize(
        "wrong",
        [lambda n: torch.zeros(n + 1), lambda n: torch.zeros(n).double(), lambda n: torch.zeros(2 * n)[::2]],
    )
    def test_wrong_vectors_are_refused(self, wrong):
        flat = FlatModule(net())
        with pytest.raises(UsageError, match="out must be a contiguous vector"):
            flat.bind(torch.zeros(flat.size), wrong(flat.size))

    def test_mixed_kinds_are_refused(self):
        with pytest.raises(UsageError, match=r"mixes parameters of torch.float32 on cpu, torch.float64 on cpu"):
            FlatModule(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double()))

    @pytest.mark.filterwarnings("ignore:Lazy modules")
    @pytest.mark.parametrize(
        ("lazy", "names"),
        [
            (lambda: nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 3)), "0.weight, 0.bias"),
            (lambda: nn.Sequential(nn.Linear(5, 3), nn.LazyBatchNorm1d(affine=False)), "1.running_mean, 1.running_var"),
        ],
    )
    def test_weights_without_a_size_are_refused(self, lazy, names):
        with pytest.raises(UsageError) as caught:
            task(lazy())
        assert f"Sequential has weights without a size yet ({names}): run the model once" in str(caught.value)
        with pytest.raises(UsageError, match="run the model once on a batch first"):
            task(lazy)
        known = lazy()
        known(DATA[0])
        assert task(known).start(0).numel() >= 18  # once run, it is like any other

    def test_buffers_that_are_not_saved_stay_in_the_module(self):
        module = normed()
        module.register_buffer("mask", torch.ones(3), persistent=False)
        assert set(FlatModule(module).buffers()) == {
            "1.running_mean",
            "1.running_var",
            "1.num_batches_tracked",
        }
