"""Large products of rows by a weight: oneDNN gives what torch does, in a layer alone, and in its thread alone."""

import threading
import time

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from scanl import layers, ops
from scanl.ops.products import by_onednn

pytestmark = pytest.mark.skipif(
    not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="this torch has no product by oneDNN"
)


@pytest.mark.parametrize(("rows", "terms", "columns"), [(1300, 33, 96), (600, 96, 17), (512, 64, 64), (5, 9, 8)])
def test_it_is_the_product_in_value_and_gradients(rows, terms, columns):
    """Each of the terms is rounded, and so is each sum."""
    x, w, b = torch.randn(rows, terms), torch.randn(columns, terms), torch.randn(columns)
    operands = [tensor.requires_grad_() for tensor in (x, w, b)]
    y = by_onednn.linear(x.view(1, rows, terms), w, b)
    dy = torch.randn(rows, columns)
    gradients = torch.autograd.grad(y, operands, dy[None])
    eps = torch.finfo(torch.float32).eps
    wide = [tensor.detach().double() for tensor in (x, w, b, dy)]
    products = [(wide[0], wide[1].T, y[0] - b), (wide[3], wide[1], gradients[0]), (wide[3].T, wide[0], gradients[1])]
    for left, right, found in products:
        bound = (left.shape[1] + 2) * eps * (left.abs() @ right.abs() + wide[2].abs().max())
        assert ((found - left @ right).abs() <= bound).all()
    torch.testing.assert_close(gradients[2], dy.sum(0))


@pytest.mark.parametrize("groups", [(), (3,)])
def test_products_of_rows_are_added(groups):
    """512 rows are enough for oneDNN, 5 are not."""
    for rows in (512, 5):
        total, a, b = torch.randn(*groups, 64, 96), torch.randn(*groups, rows, 64), torch.randn(*groups, rows, 96)
        expected = total.double() + a.double().mT @ b.double()
        by_onednn.add_transposed(total, a, b)
        bound = (rows + 1) * torch.finfo(torch.float32).eps * (a.abs().mT @ b.abs() + total.abs())
        assert ((total - expected).abs() <= bound).all()


def test_rows_that_lie_apart_take_no_longer():
    """oneDNN has a loop of its own for them, which takes a thousand times as long."""
    x, w = torch.randn(512, 512), torch.randn(512, 512)
    seconds = []
    for operands in [(x[:, :256].contiguous(), w[:, :256].contiguous()), (x[:, :256], w[:, :256])]:
        begin = time.process_time()
        by_onednn.linear(*operands, None)
        seconds.append(time.process_time() - begin)
    assert seconds[1] < 20 * seconds[0]


def test_gradients_of_gradients_are_those_of_torch():
    x, w = torch.randn(40, 16, requires_grad=True), torch.randn(24, 16, requires_grad=True)

    def second(linear):
        y = linear(x, w, None).square()
        dx, dw = torch.autograd.grad(y.sum(), (x, w), create_graph=True)
        return torch.autograd.grad(dx.square().sum() + dw.sin().sum(), (x, w))

    torch.testing.assert_close(second(by_onednn.linear), second(F.linear), rtol=1e-4, atol=1e-3)


class Waiting(nn.Linear):
    """A map that waits, inside the call of its layer, for `left`."""

    inside, left = threading.Event(), threading.Event()

    def forward(self, x):  # pyright: ignore[reportIncompatibleMethodOverride]
        self.inside.set()
        assert self.left.wait(10)
        return super().forward(x)


def test_a_layer_takes_it_for_many_rows_and_other_threads_do_not(monkeypatch):
    original = F.linear
    taken = []
    monkeypatch.setattr(by_onednn, "_is_faster", lambda: True)
    monkeypatch.setattr(by_onednn, "linear", lambda *operands: taken.append(1) or original(*operands))
    layer, x = layers.build("mingru", 64), torch.randn(4, 256, 64)
    layer.to_out, weight = Waiting(64, 64), torch.randn(64, 64)
    thread = threading.Thread(target=lambda: layer(x))
    thread.start()
    assert Waiting.inside.wait(10)
    before = len(taken)
    F.linear(x, weight)
    with ops.exact():
        F.linear(x, weight)
    assert len(taken) == before > 0
    Waiting.left.set()
    thread.join()
    assert len(taken) > before
    layer(x[:, :3])
    with ops.exact():
        layer(x)
    with torch.autocast("cpu"):
        layer(x)
    assert len(taken) == before + 1
    assert F.linear is original


def test_a_solver_of_states_takes_no_gradient_of_weights(monkeypatch):
    """It asks some twenty times for the gradient of the state alone; then once for that of each weight."""
    torch.manual_seed(0)
    layer, x, counted = layers.build("implicit", 64), torch.randn(1, 600, 64), []
    expected = torch.autograd.grad(layer.double()(x.double())[0].sum(), list(layer.parameters()))
    layer.float()
    monkeypatch.setattr(by_onednn, "_is_faster", lambda: True)
    backward = by_onednn._Linear.backward

    def count(ctx, dy):
        gradients = backward(ctx, dy)
        counted.append(gradients[1] is not None)
        return gradients

    monkeypatch.setattr(by_onednn._Linear, "backward", staticmethod(count))
    found = torch.autograd.grad(layer(x)[0].sum(), list(layer.parameters()))
    assert len(counted) > 10
    assert sum(counted) < 5
    for gradient, value in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient.double(), value, rtol=0, atol=1e-5 * value.abs().max().item())
