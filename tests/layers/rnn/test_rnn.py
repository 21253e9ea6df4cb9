"""Gated cells: each layer against its equation, step by step, how it starts, and what only it knows."""

import math

import pytest
import torch
from torch.nn import functional as F

from by_hand import DIM, T, assert_orthogonal, assert_uniform, channels, layer_norm, sigmoid, silu
from scanl import layers
from scanl.errors import ConfigError
from scanl.layers import GRU, HGRN, LSTM, SLSTM, Elman, MinGRU
from scanl.layers import state as states
from scanl.models import Stack


def slstm(layer, xs):
    """Equations (8) to (14), without the stabiliser."""
    H, K = layer.num_heads, DIM // layer.num_heads
    inputs = xs
    if layer.conv1d is not None:
        weight, inputs = layer.conv1d.conv.weight[:, 0].flip(1), []
        for t in range(len(xs)):
            v = layer.conv1d.conv.bias + sum(weight[:, j] * xs[t - j] for j in range(min(t + 1, weight.shape[1])))
            inputs.append(v * sigmoid(v))
    kernel, bias = layer.slstm_cell._recurrent_kernel_.view(H, 4, K, K), layer.slstm_cell._bias_.view(4, H, K)
    h, c, n, ys = torch.zeros(H, K), torch.zeros(H, K), torch.zeros(H, K), []
    for x, u in zip(xs, inputs, strict=True):
        new_h, new_c, new_n = torch.zeros(H, K), torch.zeros(H, K), torch.zeros(H, K)
        for head in range(H):
            part = slice(head * K, (head + 1) * K)
            i, f, z, o = (
                gate.weight[head] @ seen[part] + kernel[head, slot] @ h[head] + bias[slot, head]
                for slot, (gate, seen) in enumerate(
                    [(layer.fgate, u), (layer.igate, u), (layer.zgate, x), (layer.ogate, x)]
                )
            )
            i, f = torch.exp(i), sigmoid(f) if layer.variant == "sigmoid" else torch.exp(f)
            new_c[head] = f * c[head] + i * torch.tanh(z)
            new_n[head] = f * n[head] + i
            new_h[head] = sigmoid(o) * new_c[head] / new_n[head]
        h, c, n = new_h, new_c, new_n
        normed = (h - h.mean(1, keepdim=True)) / torch.sqrt(h.var(1, keepdim=True, correction=0) + 1e-5)
        ys.append(normed.flatten() * (1 + layer.group_norm.weight))
    return ys


def gates(layer, x, h, count):
    """What reaches each gate from the input and from the state."""
    from_x, from_h = layer.weight_ih_l0 @ x, layer.weight_hh_l0 @ h
    if layer.bias:
        from_x, from_h = from_x + layer.bias_ih_l0, from_h + layer.bias_hh_l0
    return from_x.view(count, -1), from_h.view(count, -1)


def elman(layer, xs):
    h, ys = torch.zeros(layer.width), []
    for x in xs:
        raw = sum(gates(layer, x, h, 1))[0]
        h = torch.tanh(raw) if layer.activation == "tanh" else torch.where(raw > 0, raw, 0)
        ys.append(h if layer.readout is None else layer.readout.weight @ h + layer.readout.bias)
    return ys


def lstm(layer, xs):
    h, c, ys = torch.zeros(DIM), torch.zeros(DIM), []
    for x in xs:
        i, f, g, o = sum(gates(layer, x, h, 4))
        c = sigmoid(f) * c + sigmoid(i) * torch.tanh(g)
        h = sigmoid(o) * torch.tanh(c)
        ys.append(h)
    return ys


def gru(layer, xs):
    h, ys = torch.zeros(DIM), []
    for x in xs:
        from_x, from_h = gates(layer, x, h, 3)
        r, z = sigmoid(from_x[0] + from_h[0]), sigmoid(from_x[1] + from_h[1])
        h = (1 - z) * torch.tanh(from_x[2] + r * from_h[2]) + z * h
        ys.append(h)
    return ys


def hgrn(layer, xs, gamma=0.0):
    h, ys = torch.zeros(layer.dim, dtype=torch.complex128), []
    for x in xs:
        parts = silu(layer.input_proj.weight @ x + layer.input_proj.bias)
        c = torch.complex(parts[0::2], parts[1::2])
        keep = gamma + (1 - gamma) * sigmoid(layer.lambda_proj.weight @ x + layer.lambda_proj.bias)
        h = keep * torch.exp(1j * layer.theta[0, 0]) * h + (1 - keep) * c
        normed = layer_norm(torch.cat([h.real, h.imag]), layer.norm)
        gate = silu(layer.gate.weight @ x + layer.gate.bias)
        ys.append(layer.out_proj.weight @ (normed * gate) + layer.out_proj.bias)
    return ys


def mingru(layer, xs):
    h, ys = torch.zeros(layer.width), []
    for x in xs:
        v, z = (layer.to_hidden_and_gate.weight @ x + layer.to_hidden_and_gate.bias).split(layer.width)
        # log_g of the authors' appendix, exponentiated
        g = torch.exp(torch.where(v >= 0, torch.log(F.relu(v) + 0.5), -F.softplus(-v)))
        h = (1 - sigmoid(z)) * h + sigmoid(z) * g
        ys.append(layer.to_out.weight @ h + layer.to_out.bias)
    return ys


EQUATIONS = {
    "slstm": (lambda: SLSTM(DIM, 2), slstm),
    "slstm_without_conv": (lambda: SLSTM(DIM, 4, None, "exp"), slstm),
    "elman": (lambda: Elman(DIM), elman),
    "elman_of_its_own_width": (lambda: Elman(DIM, width=5), elman),
    "elman_relu": (lambda: Elman(DIM, "relu", False, "orthogonal"), elman),
    "lstm": (lambda: LSTM(DIM, forget_bias=1.0), lstm),
    "lstm_without_bias": (lambda: LSTM(DIM, False), lstm),
    "gru": (lambda: GRU(DIM), gru),
    "gru_without_bias": (lambda: GRU(DIM, False), gru),
    "hgrn": (lambda: HGRN(DIM), hgrn),
    "mingru": (lambda: MinGRU(DIM, 1.5), mingru),
}


@pytest.mark.usefixtures("double")
def test_lower_bound_of_hgrn_rises_with_depth():
    stack = [HGRN(DIM) for _ in range(4)]
    for index, layer in enumerate(stack):
        layer.enter_stack(index, stack)
    assert [name for layer in stack for name, _ in layer.named_parameters() if "gamma" in name] == ["gamma"]
    for depth, layer in enumerate(stack):
        torch.testing.assert_close(torch.as_tensor(layer.lower_bound()).expand(DIM), torch.full((DIM,), depth / 4))
    torch.nn.init.normal_(stack[0].gamma)
    share = stack[0].gamma.softmax(0)
    for depth, layer in enumerate(stack):
        bound = share.cumsum(0)[depth] - share[0]
        x = torch.randn(1, T, DIM)
        torch.testing.assert_close(layer(x)[0][0], torch.stack(hgrn(layer, list(x[0]), bound)))
    assert torch.as_tensor(stack[3].lower_bound() > stack[2].lower_bound()).all()


# --- initialisation


def test_init_of_slstm():
    stack = Stack(64, 3, "slstm")
    for place, block in enumerate(stack.blocks):
        layer = block.mixer
        bias = layer.slstm_cell._bias_.view(4, 4, 16)
        expected = channels(lambda j, a=place / 2: 5 - 12 * (j / 15) ** (0.3 + 1.3 * a), 16)
        torch.testing.assert_close(bias[1], expected.expand(4, 16))
        assert not bias[[0, 2, 3]].any()
        assert not layer.slstm_cell._recurrent_kernel_.any()
        assert not layer.group_norm.weight.any()
        for gate in (layer.fgate, layer.igate, layer.zgate, layer.ogate):
            assert gate.weight.shape == (4, 16, 16)
            deviation = math.sqrt(2 / (5 * 64))
            assert abs(gate.weight.mean()) < 5 * deviation / 32
            assert abs(gate.weight.std() - deviation) < 5 * deviation / math.sqrt(2 * 1024)
        assert_uniform(layer.conv1d.conv.weight, -0.5, 0.5)


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


def test_init_of_hgrn_and_mingru():
    layer = HGRN(32)
    torch.testing.assert_close(layer.theta[0, 0], 10000 ** (-2 * torch.arange(32) / 32))
    gru = MinGRU(64, 2)
    assert_uniform(gru.to_hidden_and_gate.weight, -1 / 8, 1 / 8)
    assert gru.to_out.weight.shape == (64, 128)


# --- options

WRONG = [
    (lambda: layers.build("slstm", 8, num_heads=3), "slstm: num_heads is 3, expected a divisor of dim=8"),
    (lambda: SLSTM(8, 2, 0), "slstm: conv_size is 0, expected at least 1"),
    (lambda: SLSTM(8, 2, variant="sigmoi"), r"slstm: unknown variant 'sigmoi'; did you mean 'sigmoid'\?"),
    (lambda: Elman(8, "rel"), r"elman: unknown activation 'rel'; did you mean 'relu'\?"),
    (lambda: Elman(8, init="identit"), r"elman: unknown init 'identit'; did you mean"),
    (lambda: GRU(0), "gru: dim is 0, expected at least 1"),
    (lambda: LSTM(8, False, 1.0), "lstm: forget_bias is 1.0, expected None because of bias=False"),
    (lambda: LSTM(8, forget_bias=1.0, t_max=9), "lstm: t_max is 9, expected None because of forget_bias=1.0"),
    (lambda: LSTM(8, t_max=2), "lstm: t_max is 2, expected at least 3"),
]


@pytest.mark.parametrize(("build", "message"), WRONG)
def test_wrong_options_are_refused(build, message):
    with pytest.raises(ConfigError, match=message):
        build()


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
