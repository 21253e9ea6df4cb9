"""Matrix memories against their authors' programs, which need packages that the extra has not: figures that those gave.

Each program was run once in float64, with the weights and the inputs of `waves`. The figures are its output y, and of
the sum of y times cos(0.3 n), n counting the numbers of y, the gradient by the input, and of the gradient by each
parameter its inner product with sin(n + 1). Where a case says so, a small number that the program adds to denominators
was 0. The program of GaLiTe is one of JAX; of TransNormer, names of fairseq that these files do not use were left out.
The kernels of the recurrent delta network and of SRWM, which are for GPUs, ran as C++, one thread for each of theirs;
their norm before the layer, and the sum with its input after it, were left out.
"""

import json
from pathlib import Path

import pytest
import torch

from scanl import layers
from tests.outside.test_cells import waves

pytestmark = pytest.mark.cells_by_loop

DIM = 8
FIGURES = json.loads(Path(__file__).with_name("memories.json").read_text())


def assert_agrees(case):
    """Make the layer of a case, with the weights of `waves`, and compare it with the figures."""
    layer = layers.build(case["layer"], DIM, **case["options"]).double()
    figures = [torch.tensor(case[name], dtype=torch.float64).view(2, -1, DIM) for name in ("y", "gradient")]
    x = waves(layer, figures[0].shape[1], DIM).requires_grad_()
    for name, values in case.get("buffers", {}).items():
        layer.get_buffer(name).copy_(torch.tensor(values, dtype=torch.float64))
    for name in case.get("zero", []):
        torch.nn.init.zeros_(layer.get_parameter(name))
    names, parameters = zip(*layer.named_parameters(), strict=True)
    y, _ = layer(x)
    weights = torch.cos(0.3 * torch.arange(y.numel()).double()).view(y.shape)
    gradient, *others = torch.autograd.grad((y * weights).sum(), [x, *parameters], allow_unused=True)
    expected = {name: torch.tensor(value, dtype=torch.float64) for name, value in case["gradients"].items()}
    assert expected.keys() == set(names) or "zero" in case
    found = {
        name: (each.flatten() * torch.sin(torch.arange(each.numel()).double() + 1)).sum()
        for name, each in zip(names, others, strict=True)
        if name in expected
    }
    for ours, theirs in zip((y, gradient), figures, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("case", FIGURES, ids=lambda case: case["case"])
def test_authors_program(case):
    assert_agrees(case)
