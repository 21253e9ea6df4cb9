"""Cells against their authors' programs, which no package registry has: figures that those gave.

Each program was run once in float64, with the weights and the inputs of `waves`. The figures are its states at the
last step of the second sequence. The program of uRNN ran with numpy in place of theano, that of UnICORNN, a kernel for
GPUs, as C++. The other figures are of PyTorch.
"""

import json
from pathlib import Path

import pytest
import torch

from scanl import layers

pytestmark = pytest.mark.cells_by_loop

DIM, T = 4, 9
FIGURES = json.loads(Path(__file__).with_name("cells.json").read_text())


def waves(layer, steps=T, dim=DIM):
    """Give each parameter, in the order of names, a sine as its values, and return an input (2, steps, dim)."""
    with torch.no_grad():
        for index, (_, parameter) in enumerate(sorted(layer.named_parameters())):
            parameter.copy_(torch.sin(1.3 * torch.arange(parameter.numel()).double() + index).view(parameter.shape) / 2)
    return torch.cos(0.7 * torch.arange(2 * steps * dim).double()).view(2, steps, dim)


@pytest.mark.parametrize("case", FIGURES, ids=lambda case: case["case"])
def test_authors_program(case):
    layer = layers.build(case["layer"], DIM, **case["options"]).double()
    x = waves(layer)
    for name, values in case.get("buffers", {}).items():
        layer.get_buffer(name).copy_(torch.tensor(values))
    _, state = layer(x)
    torch.testing.assert_close(
        state[1].flatten(), torch.tensor(case["state"], dtype=torch.float64), rtol=1e-9, atol=1e-12
    )
