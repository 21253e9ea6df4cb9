"""LiquidS4: its equation step by step, and what only it knows."""

import math
from itertools import combinations

import pytest
import torch

from by_hand import DIM, gelu, shaken, sigmoid
from scanl.layers import S4D, LiquidS4
from tests.layers.ssm.equations import without_decay


def liquid_s4(layer, xs, spans=None):
    """The expansion term by term: each product of inputs with the coefficient of its earliest one.

    Where the steps differ in duration, the recurrence of each degree.
    """
    A, C = torch.complex(-torch.exp(layer.kernel.log_A_real), layer.kernel.A_imag), layer.kernel.C
    C, step, conv = torch.complex(*C.unbind(-1)), torch.exp(layer.kernel.log_dt)[:, None], layer.output_linear[0]
    if layer.discretization == "bilinear":
        a, b = (1 + step / 2 * A) / (1 - step / 2 * A), step / (1 - step / 2 * A)
    else:
        a, b = torch.exp(step * A), (torch.exp(step * A) - 1) / A
    ys, unit, degrees = [], step, [torch.zeros_like(A) for _ in range(layer.degree or len(xs))]
    for t in range(len(xs)):
        s = torch.zeros_like(A)
        if spans is not None:
            step = unit * spans[t]
            if layer.discretization == "bilinear":
                a, b = (1 + step / 2 * A) / (1 - step / 2 * A), step / (1 - step / 2 * A)
            else:
                a, b = torch.exp(step * A), (torch.exp(step * A) - 1) / A
            below = [torch.ones_like(A), *degrees[:-1]]
            degrees = [a * each + b * xs[t][:, None] * low for each, low in zip(degrees, below, strict=True)]
            s = sum(degrees)
        for p in () if spans is not None else range(1, min(layer.degree or t + 1, t + 1) + 1):
            for chosen in combinations(range(t + 1), p):
                product = torch.stack([xs[i] for i in chosen]).prod(0)
                s = s + a ** (t - chosen[0] - (p - 1)) * b**p * product[:, None]
        y = conv.weight[..., 0] @ gelu(2 * (C * s).sum(1).real + layer.D * xs[t]) + conv.bias
        ys.append(y[: layer.dim] * sigmoid(y[layer.dim :]))
    return ys


EQUATIONS = {
    "liquid_s4": (lambda: LiquidS4(DIM, 4, dt_min=0.3, dt_max=0.9), liquid_s4),
    "liquid_s4_of_degree_four": (lambda: LiquidS4(DIM, 2, 4, dt_min=0.3, dt_max=0.9, discretization="zoh"), liquid_s4),
    "liquid_s4_of_all_degrees": (lambda: LiquidS4(DIM, 4, None, dt_min=0.3, dt_max=0.9), liquid_s4),
}


@pytest.mark.parametrize("degree", [1, 2])
def test_liquid_s4_in_blocks_is_liquid_s4_token_by_token(degree):
    """Blocks, a rest, a state that enters, and packed sequences of which one is shorter than a block."""
    layer, x = shaken(LiquidS4(DIM, 4, degree)).double(), torch.randn(2, 75, DIM, dtype=torch.float64)
    with torch.no_grad():
        _, state = layer(torch.randn(2, 3, DIM, dtype=torch.float64))
        y, last = layer(x, state)
        packed, _ = layer(torch.cat([x[:1], x[1:, :9]], 1), state, cu_seqlens=torch.tensor([0, 75, 84]))
        ys = []
        for t in range(75):
            token, state = layer.step(x[:, t], state)
            ys.append(token)
    torch.testing.assert_close(y, torch.stack(ys, 1))
    torch.testing.assert_close(last, state)
    torch.testing.assert_close(packed[0], torch.cat([y[0], y[1, :9]]))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_liquid_s4_in_blocks_keeps_what_is_not_finite_from_the_past(value):
    layer, x = LiquidS4(DIM, 4), torch.randn(2, 96, DIM)
    spoilt = x.clone()
    spoilt[0, 40, 1] = value
    with torch.no_grad():
        (exact, _), (y, last) = layer(x), layer(spoilt)
    assert torch.equal(y[0, :40], exact[0, :40])
    assert torch.equal(y[1], exact[1])
    assert not y[0, 40:].isfinite().any()  # the linear map mixes channels
    assert not last[0, :, 1].isfinite().any()
    assert last[0, :, 0].isfinite().all()


@pytest.mark.usefixtures("double")
def test_liquid_s4_of_degree_one_is_s4d():
    torch.manual_seed(0)
    liquid = LiquidS4(DIM, 6, 1, discretization="zoh")
    torch.manual_seed(0)
    plain, x = S4D(DIM, 6, init="legs"), torch.randn(2, 30, DIM)
    torch.testing.assert_close(liquid.state_dict(), plain.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(liquid(x)[0], plain(x)[0])
    assert without_decay(liquid) == without_decay(plain)


def test_blocks_of_several_wide_rows():
    """The library lays the product of many blocks out otherwise. Shorter pieces are read step by step."""
    layer, x = LiquidS4(128), torch.randn(2, 130, 128)
    whole, _ = layer(x)
    pieces, state = [], None
    for piece in x.split(60, 1):
        y, state = layer(piece, state)
        pieces.append(y)
    torch.testing.assert_close(whole, torch.cat(pieces, 1), rtol=1e-4, atol=1e-4)
