"""AFT: its equation step by step, how it starts, what only it knows, and what it refuses."""

import math

import pytest
import torch

from by_hand import DIM, T, assert_uniform, shaken, sigmoid
from scanl import layers
from scanl.errors import ConfigError, ShapeError
from scanl.layers import AFT
from scanl.layers import state as states


def aft(layer, xs):
    """Sums over all steps up to the present, with the matrix w written out."""
    T = len(xs)
    w = torch.zeros(T, T, layer.width)  # "simple"
    for t in range(T):
        for i in range(t + 1):
            if layer.variant == "full" or (layer.variant == "local" and t - i < layer.window):
                w[t, i] = layer.wbias[t, i]
            elif layer.variant == "conv" and t - i < layer.window:
                for h, kernel in enumerate(layer.wbias):
                    deviation = torch.sqrt(((kernel - kernel.mean()) ** 2).sum() / (len(kernel) - 1))
                    share = layer.width // len(layer.wbias)
                    value = layer.gamma[h] * (kernel[t - i] - kernel.mean()) / deviation + layer.beta[h]
                    w[t, i, h * share : (h + 1) * share] = value
    q, k, v = ([linear.weight @ x + linear.bias for x in xs] for linear in (layer.to_q, layer.to_k, layer.to_v))
    k = [each.repeat_interleave(layer.width // len(each)) for each in k]
    ys = []
    for t in range(T):
        p = sum(torch.exp(k[i] + w[t, i]) * v[i] for i in range(t + 1))
        z = sum(torch.exp(k[i] + w[t, i]) for i in range(t + 1))
        ys.append(layer.project.weight @ (sigmoid(q[t]) * p / z) + layer.project.bias)
    return ys


def exact_averages(layer, x):
    """AFT, each pair of positions on its own: a softmax over the steps, in each channel."""
    T = x.shape[1]
    back = torch.arange(T)[:, None] - torch.arange(T)
    if layer.variant == "conv":
        deviation = layer.wbias.std(1, keepdim=True)
        kernel = layer.gamma[:, None] * (layer.wbias - layer.wbias.mean(1, keepdim=True)) / deviation
        w = (kernel + layer.beta[:, None])[:, back.clamp(0, layer.window - 1)].permute(1, 2, 0)
        w = w.repeat_interleave(layer.width // len(kernel), 2)
    else:
        w = layer.wbias[:T, :T, None]
    w = torch.where((back < (T if layer.variant == "full" else layer.window))[..., None], w, 0)
    k = layer.to_k(x).repeat_interleave(layer.width // layer.to_k.out_features, 2)
    logits = (k[:, None] + w).masked_fill((back < 0)[..., None], -math.inf)
    o = (logits.softmax(2) * layer.to_v(x)[:, None]).sum(2)
    return layer.project(sigmoid(layer.to_q(x)) * o)


EQUATIONS = {
    "aft": (lambda: AFT(DIM, width=6), aft),
    "aft_simple": (lambda: layers.build("aft_simple", DIM, width=6), aft),
    "aft_full": (lambda: layers.build("aft_full", DIM, width=6, max_length=T + 2), aft),
    "aft_local": (lambda: layers.build("aft_local", DIM, width=6, max_length=T + 2, window=3), aft),
    "aft_local_longer_than_all": (lambda: AFT(DIM, "local", 6, T + 2, T + 3), aft),
    "aft_conv": (lambda: layers.build("aft_conv", DIM, width=6, window=3, num_heads=2), aft),
    "aft_conv_of_channels": (lambda: AFT(DIM, "conv", 6, window=2, num_heads=6), aft),
}

REFUSED = [
    (lambda: layers.build("aft", 8, variant="ful"), r"aft: unknown variant 'ful'; did you mean 'full'\?"),
    (lambda: AFT(8, max_length=0), "aft: max_length is 0, expected at least 1"),
    (lambda: AFT(8, "conv", window=1), "aft: window is 1, expected at least 2 because of variant 'conv'"),
    (lambda: AFT(8, "conv", num_heads=3), "aft: num_heads is 3, expected a divisor of width=8"),
]


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("variant", ["simple", "full", "local", "conv"])
def test_no_key_of_aft_is_too_large(variant):
    """Keys far apart, large ones leaving the window too: the largest weighs alone."""
    layer = AFT(1, variant, 1, 9, 2)
    with torch.no_grad():
        for linear in (layer.to_k, layer.to_v, layer.project):
            linear.weight.fill_(1)
            linear.bias.zero_()
        layer.to_q.weight.zero_()
        layer.to_q.bias.fill_(50)
    x = torch.tensor([-2000.0, 1000, 5000, 0, -3000, 6000, -1]).view(1, 7, 1).requires_grad_()
    expected = torch.tensor([-2000.0, 1000, 5000, 5000, 5000, 6000, 6000]).view(1, 7, 1)
    y, state = layer(x)
    torch.testing.assert_close(y, expected)
    y.sum().backward()
    assert x.grad.isfinite().all()
    pieces, state = [], None
    for t in range(7):
        y, state = layer(x[:, t : t + 1], state)
        pieces.append(y)
    torch.testing.assert_close(torch.cat(pieces, 1), expected)


@pytest.mark.parametrize("spreads", [(0.1, 0.1), (40, 0.1), (0.1, 40), (40, 40)], ids=str)
@pytest.mark.parametrize("variant", ["full", "local", "conv"])
def test_aft_over_blocks_is_its_loop(variant, spreads):
    """However far keys and w lie apart: values and gradients, longer than a block of steps, beside the loop."""
    layer = AFT(3, variant, 4, 300, 5, 2)
    exact = AFT(3, variant, 4, 300, 5, 2).double()
    with torch.no_grad():
        layer.to_k.weight.normal_(0, spreads[0])
        layer.wbias.normal_(0, spreads[1])
        if variant == "conv":
            layer.gamma.fill_(spreads[1])
    exact.load_state_dict({name: value.double() for name, value in layer.state_dict().items()})
    x = torch.randn(2, 270 if variant == "full" else 140, 3)
    weights = torch.randn(x.shape).double()
    leaves = [x.double().requires_grad_(), *exact.parameters()]
    expected = exact_averages(exact, leaves[0])
    truth = torch.autograd.grad(expected, leaves, weights)
    for model, dtype in ((exact, torch.float64), (layer, torch.float32)):
        own = [x.to(dtype).requires_grad_(), *model.parameters()]
        y, _ = model(own[0])
        rounding = x.shape[1] * torch.finfo(dtype).eps * (1 + max(spreads))  # sums over T steps; the exponents' size
        own_and_true = zip(
            (y, *torch.autograd.grad(y, own, weights.to(dtype))), (expected.detach(), *truth), strict=True
        )
        for actual, right in own_and_true:
            bound = rounding * (1 + float(right.abs().max()))
            torch.testing.assert_close(actual.detach().double(), right, rtol=0, atol=bound)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("variant", ["full", "local", "conv"])
def test_rows_of_aft_at_other_positions_are_each_alone(variant):
    layer = shaken(AFT(3, variant, 4, 40, 5, 2), 0.5)
    before, x = [layer(torch.randn(1, steps, 3))[1] for steps in (9, 2)], torch.randn(2, 6, 3)
    y, after = layer(x, states.cat(before))
    for row, state in enumerate(before):
        alone, last = layer(x[row : row + 1], state)
        torch.testing.assert_close(y[row : row + 1], alone)
        torch.testing.assert_close(states.index(after, slice(row, row + 1)), last)


def test_aft_ends_where_its_positions_end():
    layer = AFT(DIM, "local", max_length=5, window=2)
    _, state = layer(torch.randn(1, 4, DIM))
    for arguments in ((torch.randn(1, 6, DIM),), (torch.randn(1, 2, DIM), state)):
        with pytest.raises(ShapeError, match="aft: x ends at step 6, expected at most max_length=5"):
            layer(*arguments)
    assert layer(torch.randn(1, 1, DIM), state)[1].steps.item() == 5


def test_init_of_aft():
    layer = AFT(32, "full", 16, 200)
    assert_uniform(layer.wbias, -math.sqrt(6 / 400), math.sqrt(6 / 400))
    for linear in (layer.to_q, layer.to_k, layer.to_v):
        assert linear.weight.shape == (16, 32)
        assert_uniform(linear.weight, -math.sqrt(1 / 32), math.sqrt(1 / 32))
    conv = AFT(32, "conv", num_heads=4)
    assert conv.to_k.weight.shape == (4, 32)
    assert conv.wbias.shape == (4, 32)
    assert not conv.gamma.any()
    assert not conv.beta.any()


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("variant", ["full", "local"])
def test_weights_of_aft_may_have_a_low_rank(variant):
    layer, x = AFT(DIM, variant, 4, 9, 3, rank=2), torch.randn(2, 7, DIM)
    whole = AFT(DIM, variant, 4, 9, 3)
    weights = layer.state_dict()
    u, v = weights.pop("w_u"), weights.pop("w_v")
    assert u.shape == v.shape == (9, 2)
    whole.load_state_dict({**weights, "wbias": u @ v.T})
    torch.testing.assert_close(layer(x)[0], whole(x)[0])
    layer(x)[0].sum().backward()
    assert layer.w_u.grad.any()
    for options, message in (
        ({"rank": 0}, "rank is 0, expected at least 1"),
        ({"rank": 2, "variant": "conv"}, "rank is 2, expected None because of variant='conv'"),
    ):
        with pytest.raises(ConfigError, match=f"aft: {message}"):
            AFT(DIM, **{"variant": "full", **options})
