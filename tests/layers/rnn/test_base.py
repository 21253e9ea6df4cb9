"""Cells of torch: how they start, and that torch's kernels and ours give the same numbers."""

import pytest
import torch

from by_hand import DIM, assert_orthogonal, assert_uniform
from scanl.layers import GRU, LSTM, Elman
from scanl.layers import state as states


def test_init_of_the_cells_of_torch():
    for layer, count in ((Elman(64), 1), (LSTM(64), 4), (GRU(64), 3)):
        for name, parameter in layer.named_parameters():
            assert parameter.shape[0] == 64 * count, name
            assert_uniform(parameter, -1 / 8, 1 / 8)
    assert_orthogonal(Elman(16, init="orthogonal").weight_hh_l0, 1)
    irnn = Elman(16, "relu", init="identity")
    torch.testing.assert_close(irnn.weight_hh_l0.detach(), torch.eye(16))
    assert not irnn.bias_ih_l0.any()
    assert not irnn.bias_hh_l0.any()
    kept = LSTM(16, forget_bias=1.0)
    total = (kept.bias_ih_l0 + kept.bias_hh_l0).view(4, 16)
    torch.testing.assert_close(total[1], torch.ones(16))
    assert total[0].abs().max() <= 2 / 4
    chrono = LSTM(20_000 // 8, t_max=100)
    total = (chrono.bias_ih_l0 + chrono.bias_hh_l0).view(4, -1)
    assert_uniform(total[1].exp() - 50, -49.0 + 1e-4, 49.0 + 1e-4)  # U(1, 99)
    torch.testing.assert_close(total[0], -total[1])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "make",
    [GRU, LSTM, Elman, lambda dim: GRU(dim, bias=False), lambda dim: LSTM(dim, bias=False),
     lambda dim: Elman(dim, "relu", bias=False)],
    ids=["gru", "lstm", "elman", "gru-unbiased", "lstm-unbiased", "relu-unbiased"],
)  # fmt: skip
def test_cells_and_kernels_of_pytorch_give_the_same_numbers(make, packed, monkeypatch):
    layer, x = make(DIM).double(), torch.randn(1, 9, DIM, dtype=torch.float64) if packed else torch.randn(3, 4, DIM)
    x = x.double().requires_grad_()
    before = layer.init_state(3, dtype=torch.float64)
    before = states.map_leaves(lambda each: torch.randn_like(each).requires_grad_(), before)
    cu_seqlens = torch.tensor([0, 2, 2, 9]) if packed else None
    found = []
    for cell in (True, False):
        monkeypatch.setattr(type(layer), "_runs_cell", lambda *_, cell=cell: cell)
        y, after = layer(x, before, cu_seqlens=cu_seqlens)
        after = [each for _, each in states.leaves(after)]
        loss = y.square().sum() + sum(each.sin().sum() for each in after)
        given = [x, *(each for _, each in states.leaves(before)), *layer.parameters()]
        found.append([y, *after, *torch.autograd.grad(loss, given)])
    torch.testing.assert_close(*found)


def test_the_faster_one_runs():
    x, cu_seqlens = torch.randn(1, 5, DIM), torch.tensor([0, 2, 5])
    assert GRU(DIM)._runs_cell(x, None)
    assert Elman(DIM)._runs_cell(x, None)
    assert not GRU(DIM)._runs_cell(x.to("meta"), None)
    assert not LSTM(DIM)._runs_cell(x, None)
    assert not LSTM(DIM)._runs_cell(x, cu_seqlens[:2])
    assert LSTM(DIM)._runs_cell(x, cu_seqlens)


@pytest.mark.parametrize(("entering", "restarts"), [(False, False), (True, True)])
@pytest.mark.parametrize(
    "make", [GRU, LSTM, lambda dim: LSTM(dim, bias=False), lambda dim: Elman(dim, "relu", width=21)],
    ids=["gru", "lstm", "lstm-unbiased", "relu"],
)  # fmt: skip
def test_kernel_of_the_whole_layer_gives_the_numbers_of_the_cell(make, entering, restarts):
    x, begins = torch.randn(5, 60, 19), torch.rand(5, 60) < 0.05
    begins[0, 0] = begins[1, -1] = True
    layer = make(19)
    exact = make(19).double()
    exact.load_state_dict(layer.state_dict())
    found = []
    for each in (layer, exact):
        like = next(each.parameters())
        given = x.to(like, copy=True).requires_grad_()
        torch.manual_seed(3)
        before = states.map_leaves(lambda leaf: torch.randn(leaf.shape).to(leaf), each.init_state(5))
        before = states.map_leaves(lambda leaf: leaf.requires_grad_(), before)
        assert each._has_kernel(given, before) == (each is layer)
        inputs = [given, *each.parameters(), *(leaf for _, leaf in states.leaves(before) if entering)]
        y, after = each(given, before if entering else None, starts=begins if restarts else None)
        outputs = [y, *(leaf for _, leaf in states.leaves(after))]
        gradients = torch.autograd.grad(sum(output.sin().sum() for output in outputs), inputs, create_graph=True)
        twice = torch.autograd.grad(gradients[0].square().sum(), inputs[:2])
        with torch.no_grad():
            again, _ = each(given, before if entering else None, starts=begins if restarts else None)
        found.append([tensor.detach().double() for tensor in (*outputs, *gradients, *twice, again)])
    for ours, expected in zip(*found, strict=True):
        size = float(expected.abs().max())
        torch.testing.assert_close(ours / size, expected / size, rtol=0, atol=32 * torch.finfo(torch.float32).eps)
