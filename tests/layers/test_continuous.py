"""Layers in continuous time: each against its equation, step by step, how it starts, and what only it knows."""

from itertools import pairwise

import pytest
import torch
from by_hand import DIM, T, assert_uniform, shaken

from scanl.errors import ConfigError
from scanl.layers import Elman
from scanl.layers.ode.ctrnn import CTRNN


def ones(xs):
    return [1.0] * len(xs)


def ctrnn(layer, xs, spans=None):
    h, ys = torch.zeros(DIM), []
    for x, span in zip(xs, spans if spans is not None else ones(xs), strict=True):
        for _ in range(layer.unfolds):
            feedback = 0 if layer.weight_hh is None else layer.weight_hh @ h
            h = h + layer.delta_t * span * (torch.tanh(layer.weight_ih @ x + feedback + layer.bias) - h / layer.tau)
        ys.append(h)
    return ys


EQUATIONS = {
    "ctrnn": (lambda: CTRNN(DIM), ctrnn),
    "ctrnn_linear": (lambda: CTRNN(DIM, 3, tau=2.0, global_feedback=False), ctrnn),
    "ctrnn_trained_tau": (lambda: CTRNN(DIM, 2, 0.3, fix_tau=False), ctrnn),
}


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", EQUATIONS)
def test_a_layer_follows_the_time_between_its_steps(name):
    make, equation = EQUATIONS[name]
    layer, x, spans = shaken(make()), torch.randn(2, T, DIM), 2 * torch.rand(2, T) + 0.1
    y, last = layer(x, timespans=spans)
    for row in range(2):
        torch.testing.assert_close(y[row], torch.stack(equation(layer, list(x[row]), spans[row])))
    torch.testing.assert_close(layer(x, timespans=torch.ones(2, T))[0], layer(x)[0])
    left, state = layer(x[:, :3], timespans=spans[:, :3])
    right, state = layer(x[:, 3:], state, timespans=spans[:, 3:])
    torch.testing.assert_close(torch.cat([left, right], 1), y)
    torch.testing.assert_close(state, last)
    cuts = [0, 4, 4, 10, 14]
    packed, packed_spans = x.reshape(1, -1, DIM), spans.reshape(1, -1)
    y, _ = layer(packed, cu_seqlens=torch.tensor(cuts), timespans=packed_spans)
    for start, end in pairwise(cuts):
        alone, _ = layer(packed[:, start:end], timespans=packed_spans[:, start:end])
        torch.testing.assert_close(y[:, start:end], alone)
    slope = torch.autograd.grad(layer(x, timespans=spans.requires_grad_())[0].square().sum(), spans)[0]
    assert slope.isfinite().all()
    assert slope.ne(0).any(1).all()


@pytest.mark.usefixtures("double")
def test_one_euler_step_of_length_one_is_an_elman_network():
    layer, elman, x = shaken(CTRNN(DIM, 1, 1.0)), Elman(DIM, bias=False), torch.randn(2, T, DIM)
    with torch.no_grad():
        layer.bias.zero_()
    elman.load_state_dict({"weight_ih_l0": layer.weight_ih, "weight_hh_l0": layer.weight_hh})
    torch.testing.assert_close(layer(x)[0], elman(x)[0])


@pytest.mark.usefixtures("double")
def test_euler_steps_converge_with_their_length():
    """Twice the steps of half the length: half the distance from the solution."""
    torch.manual_seed(0)
    x, ys = torch.randn(1, 3, DIM), []
    for unfolds in (10, 20, 40, 2000):
        torch.manual_seed(1)
        ys.append(CTRNN(DIM, unfolds, 1 / unfolds)(x)[0])
    coarse, middle, fine = ((y - ys[3]).abs().max() for y in ys[:3])
    assert 1.8 < coarse / middle < 2.2
    assert 1.8 < middle / fine < 2.2


# --- initialisation


def test_init_of_ctrnn():
    layer = CTRNN(64)
    for weight in (layer.weight_ih, layer.weight_hh):
        assert_uniform(weight, -((6 / 192) ** 0.5), (6 / 192) ** 0.5)
    assert not layer.bias.any()
    assert layer.tau == 1
    assert_uniform(CTRNN(64, global_feedback=False).weight_ih, -((6 / 128) ** 0.5), (6 / 128) ** 0.5)


# --- options

WRONG = [
    (lambda: CTRNN(8, 0), "ctrnn: unfolds is 0, expected at least 1"),
    (lambda: CTRNN(8, delta_t=0.0), r"ctrnn: delta_t is 0.0, expected more than 0"),
    (lambda: CTRNN(8, tau=-1.0), r"ctrnn: tau is -1.0, expected more than 0"),
]


@pytest.mark.parametrize(("build", "message"), WRONG)
def test_wrong_options_are_refused(build, message):
    with pytest.raises(ConfigError, match=message):
        build()
