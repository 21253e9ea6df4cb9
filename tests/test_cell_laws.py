"""Laws of every registered cell: those of the library's ops, and those in the files of layers."""

import math

import pytest
import torch

import laws
import scanl.layers  # registers the cells of layers
from scanl.ops import registry
from scanl.ops._cells import kernels

CELLS = [pytest.param(cell, id=cell.name) for cell in registry.cells()]
each_cell = pytest.mark.parametrize("cell", CELLS)


def _kinds(cell):
    """Return one sample for every set of options and operands: each set has kernels of its own."""
    found = {}
    for sample in cell.samples:
        options = {name: value for name, value in sample.options.items() if name in cell.options}
        packed = "cu_seqlens" in sample.options
        found.setdefault((*sorted(options.items()), *sorted(sample.operands)), {})[packed] = sample
    return list(found.values())


def _fit(cell, sample):
    """Whether the sample runs on kernels that are compiled."""
    sizes = cell.sizes({**dict.fromkeys(cell.names), **sample.operands}, None)
    return any(each.axes.fits(sizes) for known in cell._compiled.values() for each in known)


@each_cell
def test_kernels_equal_the_loop(cell):
    """Packed sequences run in reverse; without such a sample, the same sample runs both ways.

    The other sample does not run if it has kernels of its own, as two kinds of convolutions have.
    """
    for samples in laws.some(_kinds(cell), 1):
        plain, packed = samples.get(False), samples.get(True)
        first = packed or plain
        laws.truth(cell, first, {"reverse": True}, "cpu", torch.float64)
        laws.truth(cell, plain if plain and (laws.ALL or _fit(cell, plain)) else first, {}, "cpu", torch.float64)


@each_cell
def test_a_sequence_may_be_cut(cell):
    sample = next(sample for sample in cell.samples if "cu_seqlens" not in sample.options)
    steps = sample.operands[cell.names[0]].shape[1]
    laws.pieces(cell, sample, False, "cpu", (1, steps - 1), torch.float64)


@each_cell
def test_the_loop_has_the_gradients_of_its_output(cell):
    """Finite differences of the reference."""
    sample = next(sample for sample in cell.samples if "cu_seqlens" not in sample.options)
    operands = {name: value.requires_grad_() for name, value in sample.operands.items()}

    def run(*values):
        return cell(**dict(zip(operands, values, strict=True)), **sample.options, backend="reference")

    assert torch.autograd.gradcheck(run, tuple(operands.values()), fast_mode=True)


@each_cell
def test_errors_and_what_every_cell_states(cell):
    assert list(cell.samples), "a cell has samples"
    assert cell.equation
    assert cell.source
    assert cell.__doc__
    found = list(cell.errors)
    assert found, "a cell has wrong arguments with the message that they get"
    for sample, message in found:
        with pytest.raises((ValueError, TypeError)) as raised:
            cell(**sample.operands, **sample.options)
        assert message in str(raised.value)


HEAVY = {  # cells whose memory is larger, with the reason
    "cfc_cell": "a step's products with its three layers are stored, and together they are wider than the state",
    "cfc_ncp_cell": "the same, for three groups of neurons",
    "neuralode_cell": "the products of a network of two layers are stored each time a step applies it",
    "odernn_cell": "the same, and those of its gates",
}


@each_cell
def test_memory_is_at_most_thrice_the_inputs_outputs_and_states(cell):
    """The numbers of a step of 4,096, forward and backward: all inputs, gradients and what the kernels store."""
    sample = next(sample for sample in cell.samples if "cu_seqlens" not in sample.options)
    operands = [sample.operands.get(name) for name in cell.names]
    options = [sample.options.get(name, option.default) for name, option in cell.options.items()]
    found, given, sizes = cell._of_call("cpu", operands, None, options)
    real = found.sizes(sizes)
    inputs = sum(given[name][0, 0].numel() for name in found.timed)
    output, state = math.prod(cell.output_shape(sizes)[2:]), given["state"][0].numel()
    gradients = output + sum(real[numbers] for numbers in found._rows.values())
    factors = sum(real[numbers] for numbers in found._factors.values()) * kernels.WINDOW / 4096
    numbers = inputs + output + found.kept_numbers(real) + gradients + factors
    assert (numbers > 3 * (inputs + output + state)) == (cell.name in HEAVY), numbers / (inputs + output + state)


def test_layers_name_their_cells():
    named = {scanl.layers.get(name).op for name in scanl.layers.names()}
    shared = {"ornn_cell"}  # nnRNN and the orthogonal networks
    assert {cell.name for cell in registry.cells()} - named <= shared | {"lstm"}  # PyTorch's is as fast
