"""Algorithms that carry influence forward, against programs that no package registry has: figures that those gave.

`rtrl`, `rflo`, `uoro` and `kfrtrl` are of the program vanilla-rtrl by Marschall, Cho and Savin, for a network of 4
leaky units with 4 inputs and 2 outputs over 6 steps: the sum of the gradients, or the factors of the estimate after the
last step. `fptt` is of Kag and Saligrama's program: the parameters of a linear map after each of 4 steps of gradient
descent with its penalty, and at the end of the epoch. All numbers are sines and cosines.
"""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from scanl.data.batch import Batch
from scanl.layers import CTRNN, Elman
from scanl.learning.algorithms import FPTT, KFRTRL, RFLO, RTRL, UORO
from scanl.models import Features
from scanl.models.block import BlockState

pytestmark = pytest.mark.cells_by_loop
FIGURES = json.loads(Path(__file__).with_name("forward_learning.json").read_text())
CASES = {case["case"]: case for case in FIGURES}
N, OUTPUTS, T = 4, 2, 6
SEEDS = torch.tensor([[7, 0]])  # the program had the signs that these give


def wave(*shape, phase=0):
    count = int(torch.tensor(shape).prod())
    return 0.5 * torch.sin(1.3 * torch.arange(count, dtype=torch.float64) + phase).view(shape)


class Bare(nn.Module):
    """A layer and a readout, without norms and residual connections."""

    inputs = Features(N)

    def __init__(self, layer):
        super().__init__()
        self.layer, self.head = layer, nn.Linear(N, OUTPUTS)

    @property
    def stack(self):
        return self

    def mixers(self):
        return [self.layer]

    def init_state(self, batch_size, device=None):
        return (BlockState(self.layer.init_state(batch_size, device=device), ()),)

    def forward(self, x, state):
        y, after = self.layer(x, state[0].mixer)
        return self.head(y), (BlockState(after, ()),)


def network(alpha):
    layer = Elman(N) if alpha == 1 else CTRNN(N, substeps=1, dt=alpha)
    model = Bare(layer).double()
    names = ["weight_ih_l0", "weight_hh_l0", "bias_ih_l0"] if alpha == 1 else ["weight_ih", "weight_hh", "bias"]
    with torch.no_grad():
        for i, (name, shape) in enumerate(zip(names, ((N, N), (N, N), (N,)), strict=True)):
            layer.get_parameter(name).copy_(wave(*shape, phase=(0, 1, 3)[i]))
        if alpha == 1:
            layer.bias_hh_l0.zero_()
        model.head.weight.copy_(wave(OUTPUTS, N, phase=2))
        model.head.bias.copy_(wave(OUTPUTS, phase=4))
    return model, [layer.get_parameter(name) for name in (names[1], names[0], names[2])]


def half_square(model, batch, state):
    y, state = model(batch.inputs, state)
    return 0.5 * (y - batch.targets).square().sum(), state


def run(algorithm, model, learner):
    x = torch.cos(0.7 * torch.arange(T * N, dtype=torch.float64)).view(1, T, N)
    y = torch.sin(0.9 * torch.arange(T * OUTPUTS, dtype=torch.float64)).view(1, T, OUTPUTS)
    for t in range(T):
        loss, learner = algorithm.update(model, learner, Batch(x[:, t : t + 1], y[:, t : t + 1]))
        loss.backward()
    return learner


@pytest.mark.parametrize(
    "algorithm", [RTRL(half_square), RFLO(half_square, feedback="symmetric")], ids=["rtrl", "rflo"]
)
def test_gradients_of_vanilla_rtrl(algorithm):
    case = CASES[algorithm.name]
    model, weights = network(case["alpha"])
    run(algorithm, model, algorithm.init(model, 1))
    found = torch.cat([weight.grad.reshape(N, -1) for weight in weights], 1)
    torch.testing.assert_close(found, torch.tensor(case["gradient"], dtype=torch.float64))


def test_factors_of_uoro():
    case, algorithm = CASES["uoro"], UORO(half_square, epsilon=1e-15)
    model, _ = network(case["alpha"])
    start = wave(N, 2 * N + 1, phase=6)  # columns of h, x and 1
    learner = algorithm.init(model, 1)
    by_parameter = torch.cat([start[:, N : 2 * N].flatten(), start[:, :N].flatten(), start[:, 2 * N]])
    learner = learner._replace(by_state=wave(1, N, phase=5), by_parameter=by_parameter[None], seeds=SEEDS)
    last = run(algorithm, model, learner)
    torch.testing.assert_close(last.by_state[0], torch.tensor(case["by_state"], dtype=torch.float64))
    of_x, of_h, of_one = last.by_parameter[0].split([N * N, N * N, N])
    found = torch.cat([of_h.view(N, N), of_x.view(N, N), of_one.view(N, 1)], 1)
    torch.testing.assert_close(found, torch.tensor(case["by_parameter"], dtype=torch.float64))


def test_factors_of_kf_rtrl():
    case, algorithm = CASES["kfrtrl"], KFRTRL(half_square)
    model, _ = network(case["alpha"])
    learner = algorithm.init(model, 1)
    start = (wave(1, 2 * N + 1, phase=5),), (wave(1, N, N, phase=6),)
    last = run(algorithm, model, learner._replace(sources=start[0], factors=start[1], seeds=SEEDS))
    torch.testing.assert_close(last.sources[0][0], torch.tensor(case["source"], dtype=torch.float64))
    torch.testing.assert_close(last.factors[0][0], torch.tensor(case["factor"], dtype=torch.float64))


class Linear(nn.Linear):
    def init_state(self, batch_size, device=None):
        return ()


@pytest.mark.parametrize("case", [case for case in FIGURES if case["case"] == "fptt"], ids=lambda case: case["alpha"])
def test_parameters_of_fptt(case):
    model = Linear(3, 2).double()
    with torch.no_grad():
        model.weight.copy_(torch.cos(torch.arange(6.0, dtype=torch.float64)).view(2, 3))
        model.bias.copy_(torch.sin(torch.arange(2.0, dtype=torch.float64)))
    algorithm = FPTT(lambda net, batch, state: ((net(batch.inputs) - batch.targets).square().mean(), state),
                     alpha=case["alpha"], beta=case["beta"], weight=case["weight"])  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), 0.2)
    x = torch.sin(1.7 * torch.arange(4 * 2 * 3, dtype=torch.float64)).view(4, 2, 3)
    y = torch.cos(0.9 * torch.arange(4 * 2 * 2, dtype=torch.float64)).view(4, 2, 2)
    learner, path = algorithm.init(model, 2), []
    for t in range(4):
        optimizer.zero_grad()
        loss, learner = algorithm.update(model, learner, Batch(x[t], y[t]))
        loss.backward()
        optimizer.step()
        path.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(torch.stack(path), torch.tensor(case["path"], dtype=torch.float64))
    algorithm.settle(model, learner)
    found = torch.cat([p.detach().flatten() for p in model.parameters()])
    torch.testing.assert_close(found, torch.tensor(case["settled"], dtype=torch.float64))
