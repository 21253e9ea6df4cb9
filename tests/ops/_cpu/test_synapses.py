"""Kernels of synapses: more neurons than a vector has, in pairs and alone, four sequences at a time and fewer."""

import pytest
import torch

from scanl.layers.ode.ltc import ltc_cell, ncp_cell

SIZES = [(ltc_cell, {"D": 3, "N": 37}), (ncp_cell, {"D": 5, "I": 20, "C": 3, "M": 17})]
OPTIONS = {"substeps": 3}


def _operands(cell, sizes, batch, steps):
    torch.manual_seed(0)
    sizes = {**sizes, "P": sizes.get("C", 0) + sizes.get("I", 0)}
    sizes = {"N": sizes["P"] + sizes.get("M", 0), **sizes, "B": batch, "T": steps}
    shapes = [[int(a) if a.isdigit() else sizes[a] for a in operand.choices[0]] for operand in cell.operands]
    operands = dict(zip(cell.names, map(torch.randn, shapes), strict=True))
    return {name: value if name in ("x", "state") else value.abs() for name, value in operands.items()}


@pytest.mark.parametrize(("cell", "sizes"), SIZES, ids=["ltc", "ncp"])
def test_values_and_gradients_are_those_of_the_reference(cell, sizes):
    operands = _operands(cell, sizes, 5, 40)
    results = {}
    for dtype, backend in ((torch.float64, "reference"), (torch.float32, "reference"), (torch.float32, "cpu")):
        leaves = {name: value.to(dtype).requires_grad_() for name, value in operands.items()}
        y, last = cell(*leaves.values(), **OPTIONS, backend=backend)
        torch.manual_seed(1)
        dy, dlast = (torch.randn(value.shape).to(dtype) for value in (y, last))
        gradients = torch.autograd.grad((y, last), list(leaves.values()), (dy, dlast))
        results[dtype, backend] = dict(zip(("y", "last", *leaves), (y, last, *gradients), strict=True))
    exact, single, found = results.values()
    for name, value in exact.items():
        bound = 2 * ((single[name] - value).abs().max() + torch.finfo(torch.float32).eps * value.abs().max())
        assert (found[name] - value).abs().max() <= bound, name


@pytest.mark.parametrize(("cell", "sizes"), SIZES, ids=["ltc", "ncp"])
def test_bits_are_those_of_a_sequence_alone(cell, sizes):
    operands = _operands(cell, sizes, 6, 9)
    y, _ = cell(*operands.values(), **OPTIONS, backend="cpu")
    for row in range(6):
        alone = {n: v[row : row + 1] if n in ("x", "dt", "state") else v for n, v in operands.items()}
        torch.testing.assert_close(cell(*alone.values(), **OPTIONS, backend="cpu")[0][0], y[row], rtol=0, atol=0)
