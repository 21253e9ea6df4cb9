"""Recurrent cells against the authors' programs: what those gave for the same numbers, recorded in rnn.json.

Parameters are cosines in the order of their names, and the input is a sine, so each case is a few numbers: the output
of the last step.
"""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from scanl import layers
from scanl.layers.rnn.esn import ESN
from scanl.learning.forecasting.readout import Ridge

pytestmark = pytest.mark.cells_by_loop

B, T, D = 2, 5, 6
X = torch.sin(1.7 * torch.arange(B * T * D, dtype=torch.float64)).view(B, T, D)

FIGURES = json.loads(Path(__file__).with_name("rnn.json").read_text())  # the program, and its output of the last step


def cosines(index, shape):
    steps = torch.arange(shape.numel(), dtype=torch.float64)
    return (0.6 * torch.cos(steps * (1.3 + 0.37 * index) + index)).view(shape)


def filled(layer):
    with torch.no_grad():
        for index, (_, parameter) in enumerate(sorted(layer.named_parameters())):
            parameter.copy_(cosines(index, parameter.shape))
    return layer


def close(found, expected):
    torch.testing.assert_close(found.flatten(), torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("case", FIGURES, ids=lambda case: case["case"])
def test_the_authors_program_gave_this(case):
    layer = filled(layers.build(case["layer"], D, **case["options"]).double())
    if case["case"] == "ligru":
        layer(X)  # one step of training: the statistics
        layer.eval()
    y, _ = layer(X)
    close(y[:, -1], case["y"])


def reservoir():
    layer = ESN(D, width=8, leak=0.3).double()
    for index, buffer in enumerate((layer.W, layer.Win, layer.bias)):
        buffer.copy_(cosines(index, buffer.shape))
    layer.readout = nn.Linear(8, 8, bias=False).double()  # what the layer gives are its states
    nn.init.eye_(layer.readout.weight)
    return layer


def test_reservoirpy_gave_these_states_and_this_readout():
    """PyPI's reservoirpy 0.4.2, Reservoir and Ridge."""
    states = reservoir()(X)[0].detach()
    close(states[:, -1], [
        0.0771953803497, -0.2548485772621, 0.3834158720362, -0.245917804935, -0.1441901963349, 0.2348615016003,
        -0.1816631567751, -0.0600627983267, -0.1952624841169, -0.1821923725218, 0.2912556541625, -0.1967401403971,
        0.09347116915, 0.0910058747043, -0.0692770467486, 0.0269277374763,
    ])  # fmt: skip
    fit, targets = Ridge(0.01), torch.linspace(-1, 1, B * T * 2, dtype=torch.float64).view(B, T, 2) ** 3
    for row, target in zip(states, targets, strict=True):
        fit.add(row, target)
    weight, bias = fit.solve()
    close(weight, [
        -3.7585369488221, -0.5085742975116, 2.0585373936674, 0.68845531241, -0.6320587818205, 3.1358093771613,
        0.5836449358243, -0.453804215337, -4.0523268092611, -0.3411016082304, 2.063787707731, 1.0630345563445,
        -0.5830037970344, 2.5727369782275, -0.0421008490491, -0.1061955277883,
    ])  # fmt: skip
    close(bias, [-1.1397921084635, -0.9324380423803])


def test_a_reservoir_beside_reservoirpy():
    nodes = pytest.importorskip("reservoirpy.nodes", reason="needs reservoirpy")
    layer = reservoir()
    states = layer(X)[0].detach()
    for row, expected in zip(X, states, strict=True):
        theirs = nodes.Reservoir(W=layer.W.numpy(), Win=layer.Win.numpy(), bias=layer.bias.numpy(), lr=layer.leak)
        close(expected, theirs.run(row.numpy()).ravel().tolist())


@pytest.mark.parametrize("options", [{}, {"variant": "v1"}, {"layer_norm": True, "highway_bias": -3.0}])
def test_sru_beside_pypi_s(options):
    theirs = pytest.importorskip("sru", reason="needs sru").SRUCell(D, D, **options)
    layer = layers.build("sru", D, **options)
    layer.load_state_dict(theirs.state_dict())
    with torch.no_grad():
        expected, _ = theirs(X.float().transpose(0, 1))
        torch.testing.assert_close(layer(X.float())[0], expected.transpose(0, 1))


def test_ligru_beside_speechbrain_s():
    rnn = pytest.importorskip("speechbrain.nnet.RNN", reason="needs speechbrain")
    theirs, layer = rnn.LiGRU_Layer(D, D, 1, B), layers.build("ligru", D)
    layer.load_state_dict(theirs.state_dict(), strict=False)
    torch.testing.assert_close(layer(X.float())[0], theirs(X.float()))
