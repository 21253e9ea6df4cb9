"""LiGRU: its equation step by step, what only it knows, and what it refuses."""

import pytest
import torch

from by_hand import DIM, T, layer_norm, sigmoid
from scanl import layers
from scanl.layers.rnn.ligru import LiGRU

pytestmark = pytest.mark.cells_by_loop


def ligru(layer, xs):
    """With batch norm: the statistics that it has kept."""
    h, ys = torch.zeros(DIM), []
    for x in xs:
        raw = layer.w.weight @ x
        if layer.variant == "batchnorm":
            scaled = (raw - layer.norm.running_mean) / torch.sqrt(layer.norm.running_var + layer.norm.eps)
            raw = scaled * layer.norm.weight + layer.norm.bias
        else:
            raw = layer_norm(raw, layer.norm)
        a, z = (raw + layer.u.weight @ h).split(DIM)
        h = sigmoid(z) * h + (1 - sigmoid(z)) * torch.where(a > 0, a, 0)
        ys.append(h)
    return ys


def in_use(layer):
    """The layer in evaluation mode, its batch norm with other statistics than those at the start."""
    layer.norm.running_mean.normal_()
    layer.norm.running_var.uniform_(0.5, 2)
    return layer.eval()


EQUATIONS = {"ligru": (lambda: in_use(LiGRU(DIM)), ligru), "ligru_layernorm": (lambda: LiGRU(DIM, "layernorm"), ligru)}

REFUSED = [
    (lambda: LiGRU(8, "batch"), r"ligru: unknown variant 'batch'; did you mean 'batchnorm'\?"),
    (lambda: layers.build("ligru", 0), "ligru: dim is 0, expected at least 1"),
]


@pytest.mark.usefixtures("double")
def test_batch_norm_of_ligru_learns_the_statistics_of_all_steps():
    layer, x = LiGRU(DIM), torch.randn(3, T, DIM)
    raw = (x @ layer.w.weight.T).flatten(0, 1).detach()
    normed = (raw - raw.mean(0)) / torch.sqrt(raw.var(0, correction=0) + 1e-5)
    expected, h = [], torch.zeros(3, DIM)
    for given in normed.view(3, T, -1).unbind(1):
        a, z = (given + h @ layer.u.weight.T).split(DIM, -1)
        h = sigmoid(z) * h + (1 - sigmoid(z)) * a.relu()
        expected.append(h)
    torch.testing.assert_close(layer(x)[0], torch.stack(expected, 1))
    torch.testing.assert_close(layer.norm.running_mean, 0.05 * raw.mean(0))
    torch.testing.assert_close(layer.norm.running_var, 0.95 + 0.05 * raw.var(0))
    layer(x[:1, :1])  # one step has no variance: the statistics that were kept are used, and stay
    torch.testing.assert_close(layer.norm.running_mean, 0.05 * raw.mean(0))
    assert not torch.equal(layer.eval()(x)[0], torch.stack(expected, 1))


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("steps", [0, 1])
def test_one_row_of_ligru_in_training_is_normalised_as_in_evaluation_and_hooks_see_it(steps):
    layer, x, calls = in_use(LiGRU(DIM)), torch.randn(1, steps, DIM, dtype=torch.float64, requires_grad=True), []
    evaluated, _ = layer.eval()(x)
    before = [value.clone() for value in layer.norm.buffers()]
    layer.train().norm.register_forward_hook(lambda *_: calls.append(1))
    y, _ = layer(x)
    (y * y).sum().backward()
    assert calls == [1]
    torch.testing.assert_close(y, evaluated)
    assert all(map(torch.equal, layer.norm.buffers(), before))
    assert x.grad is not None
    assert x.grad.isfinite().all()
    assert x.grad.any() == bool(steps)


@pytest.mark.usefixtures("double")
def test_two_rows_of_ligru_in_training_have_statistics():
    layer, x = LiGRU(DIM), torch.randn(1, 2, DIM)
    first, second = (x[0] @ layer.w.weight.T).detach()
    layer(x)
    torch.testing.assert_close(layer.norm.running_mean, 0.05 * (first + second) / 2)
    torch.testing.assert_close(layer.norm.running_var, 0.95 + 0.05 * (first - second).square() / 2)


def test_gate_penalty_of_ligru_is_the_mean_of_its_gates():
    layer, x, h, penalty = LiGRU(DIM, "layernorm"), torch.randn(1, T, DIM), torch.randn(1, DIM), []
    found = layer.gate_penalty(x, h)
    for step in x.unbind(1):
        a, z = (layer.norm(layer.w(step)) + layer.u(h)).chunk(2, -1)
        z = torch.sigmoid(z)
        h = z * h + (1 - z) * torch.relu(a)
        penalty.append(4 * z * (1 - z))
    torch.testing.assert_close(found, torch.stack(penalty).mean())
    with torch.no_grad():
        layer.norm.weight[DIM:] = 1e6  # gates of 0 and 1
    assert layer.gate_penalty(x) < 1e-6
