"""Gates at their ends, and sizes at which a layer computes another way: values and gradients of float64 loops."""

import math

import pytest
import torch
from torch.nn import functional as F

from scanl import ops
from scanl.layers.memory.hgrn2 import HGRN2
from scanl.layers.rnn.esn import ESN
from scanl.layers.ssm.rglru import RGLRU
from scanl.ops.fused.rglru_gates import rglru_gates

EPS = torch.finfo(torch.float32).eps


def _close(value, exact, roundings):
    """Within this many roundings of the largest number, and finite."""
    assert value.isfinite().all()
    assert (value.double() - exact).abs().max() <= roundings * EPS * exact.abs().max().clamp(min=1e-30)


def _hgrn2(x, weights, bound, heads):
    """Equation of the layer, one step after another, as written."""
    q, f, v = (x @ weights[name].T for name in ("q_proj.weight", "f_proj.weight", "i_proj.weight"))
    forget = bound + (1 - bound) * f.sigmoid()
    enter = (1 - bound) * (-f).sigmoid()
    q, forget, enter, v = (part.unflatten(-1, (heads, -1)) for part in (F.silu(q), forget, enter, v))
    S, ys = x.new_zeros(len(x), heads, q.shape[-1], v.shape[-1]), []
    for t in range(x.shape[1]):
        S = forget[:, t, ..., None] * S + enter[:, t, ..., None] * v[:, t, :, None]
        ys.append((q[:, t, ..., None] * S).sum(-2))
    y = torch.stack(ys, 1).flatten(2) / q.shape[-1] ** 0.5
    y = y * (y.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weights["g_norm.weight"]
    return y @ weights["o_proj.weight"].T


@pytest.mark.parametrize("depth", [None, 0, 1], ids=["alone", "lowest of a stack", "second of a stack"])
@pytest.mark.parametrize(
    "gates", [(-20.0,), (20.0,), (-90.0, 90.0), (-20.0, -0.1, 3.0, 20.0)], ids=["forget", "keep", "ends", "mixed"]
)
def test_hgrn2_with_gates_at_their_ends(gates, depth):
    """The decay is about 2e-9 at -20, and rounds to 0 and 1 further out."""
    torch.manual_seed(0)
    stack = [HGRN2(8, head_dim=4) for _ in range(2)]
    if depth is not None:
        for i, one in enumerate(stack):
            one.enter_stack(i, stack)
    layer = stack[depth or 0]
    x = torch.randn(2, 70, 8)
    x[..., 0] = 1
    with torch.no_grad():
        for name, value in layer.named_parameters():
            value.copy_(torch.randn_like(value) if value.ndim > 1 else 1 + torch.rand_like(value))
            if name == "f_proj.weight":
                value.mul_(0.1)[:, 0] = torch.tensor(gates).repeat(8)[:8]
    bound = layer.lower_bound()
    bound = bound.detach().double() if isinstance(bound, torch.Tensor) else bound
    wide = {name: value.detach().double().requires_grad_() for name, value in layer.named_parameters()}
    given, exact_x = x.clone().requires_grad_(), x.double().requires_grad_()
    y, exact = layer(given)[0], _hgrn2(exact_x, wide, bound, 2)
    _close(y, exact, 200)
    weights = torch.linspace(-1, 1, y.numel()).cos().view_as(y)
    names = [name for name in wide if name != "gamma"]
    found = torch.autograd.grad((y * weights).sum(), [given, *(layer.get_parameter(name) for name in names)])
    expected = torch.autograd.grad((exact * weights.double()).sum(), [exact_x, *(wide[name] for name in names)])
    for a, b in zip(found, expected, strict=True):
        _close(a, b, 2000)


@pytest.mark.parametrize("steps", [5, 4096], ids=["in torch", "in a kernel"])
@pytest.mark.parametrize(("log_decay", "gate"), [(0.0, 0.5), (-1.0, -200.0)], ids=["rate 0", "gate 0"])
def test_rglru_with_a_decay_of_exactly_one(log_decay, gate, steps):
    """a = 1 and sqrt(1 - a²) = 0: the input does not enter. The root's derivative is 1000, so that of u by log a is
    -2000 i x, as 1 - a² = 1 - e^(2 log a) has the derivative -2.
    """
    x = torch.linspace(-1, 1, 2 * steps * 16).view(2, steps, 16).requires_grad_()
    i_gate, r_gate = torch.full_like(x, 0.3).requires_grad_(), torch.full_like(x, gate).requires_grad_()
    rate = torch.full((16,), log_decay, requires_grad=True)
    u, a = rglru_gates(x, i_gate, r_gate, rate, torch.zeros(2, steps, 1))
    assert torch.equal(u, torch.zeros_like(u))
    assert torch.equal(a, torch.ones_like(a))
    dx, di, dr, drate = torch.autograd.grad(u.sum() + 3 * a.sum(), [x, i_gate, r_gate, rate])
    assert not dx.any()
    assert not di.any()
    enter, forget = 1 / (1 + math.exp(-0.3)), 1 / (1 + math.exp(-gate))
    by_log = -2000 * enter * x.detach().double() + 3
    # To many roundings: sums of large numbers of both signs.
    scale = 2000 * x.numel()
    assert dr.isfinite().all()
    assert (dr - by_log * log_decay * forget * (1 - forget)).abs().max() <= 1e-3
    assert (drate - (by_log * forget).sum((0, 1))).abs().max() <= 100 * EPS * scale


def test_rglru_that_keeps_its_state_exactly():
    layer = RGLRU(8, 2)
    with torch.no_grad():
        layer.a_param.fill_(-200.0)  # softplus is 0 in float32, so a = 1
    x = torch.randn(2, 50, 8, requires_grad=True)
    y, state = layer(x)
    enter = torch.sigmoid(layer.input_gate(x[:, 0]))
    torch.testing.assert_close(y, (enter * x[:, 0])[:, None].expand_as(y))  # the first factor is 1, the others are 0
    torch.testing.assert_close(state.recurrent, y[:, -1])
    grads = torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])
    assert all(grad.isfinite().all() for grad in grads)
    assert grads[0][:, 0].any()


@pytest.mark.parametrize("width", [17, 40])
def test_quasi_newton_over_many_channels(width):
    """Jacobians by blocks of channels, more than sixteen of them, with a matrix that couples all channels."""
    torch.manual_seed(0)
    operands = [torch.randn(2, 30, 3, width), torch.randn(3, width, width) / width, torch.randn(3, width)]
    operands = [each.double().requires_grad_() for each in operands]
    x, u, b = operands
    first = torch.randn(2, width, dtype=torch.float64, requires_grad=True)
    wrt = [*operands, first]
    found = ops.gru.solve("quasi_newton", x, u, b, first, tolerance=1e-13)
    exact = ops.gru(x, u, b, first, backend="reference")
    assert found.convergence.iterations > 1
    weights = torch.linspace(-1, 1, exact[0].numel(), dtype=torch.float64).cos().view_as(exact[0])
    for a, e in zip(found[:2], exact, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-9, atol=1e-10)
    losses = [(y * weights).sum() + last.square().sum() for y, last in (found[:2], exact)]
    for a, e in zip(*(torch.autograd.grad(loss, wrt) for loss in losses), strict=True):
        torch.testing.assert_close(a, e, rtol=1e-8, atol=1e-9)


def test_esn_of_more_units_than_have_exact_eigenvalues():
    torch.manual_seed(1)
    layer = ESN(4, 600, spectral_radius=0.9, connectivity=0.1, leak=0.4)
    radius = torch.linalg.eigvals(layer.W.double()).abs().max()
    assert abs(radius - 0.9) <= 0.02 * 0.9
    x = torch.randn(2, 12, 4, requires_grad=True)
    W, Win, bias = layer.W.double(), layer.Win.double(), layer.bias.double()
    exact_x, ys = x.detach().double().requires_grad_(), []
    s = torch.zeros(2, 600, dtype=torch.float64)
    for t in range(12):
        s = 0.6 * s + 0.4 * torch.tanh(s @ W.T + exact_x[:, t] @ Win.T + bias)
        ys.append(s @ layer.readout.weight.double().T + layer.readout.bias.double())
    exact, (y, last) = torch.stack(ys, 1), layer(x)
    _close(y, exact, 50)
    _close(last, s, 50)
    weights = torch.linspace(-1, 1, y.numel()).cos().view_as(y)
    (dx,) = torch.autograd.grad((y * weights).sum(), x)
    (expected,) = torch.autograd.grad((exact * weights.double()).sum(), exact_x)
    _close(dx, expected, 200)
