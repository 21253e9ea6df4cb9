"""Laws of every registered cell: those of the library's ops, and those in the files of layers."""

import math
from pathlib import Path

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import laws
import scanl.layers
from making.filling import filled
from scanl.ops import registry

COVERS = [
    "ops/cell", "ops/elman", "ops/gru", "ops/indrnn", "ops/ligru", "ops/lstm", "ops/slstm", "ops/sru",
    "layers/parts/cell_cases",
]  # fmt: skip

pytestmark = [pytest.mark.early(1), pytest.mark.cells_by_loop("name")]

PAGE = Path(__file__).parents[1] / "docs" / "cell_kernels.md"
scanl.layers.names()  # imports all layers, which registers their cells
CELLS = [pytest.param(cell, id=cell.name) for cell in registry.cells()]
each_cell = pytest.mark.parametrize("cell", CELLS)
# Cells of layers whose operations others have too: one compiler makes the kernels of all cells, which takes a second or
# more for each. These run the laws of kernels with --all.
ALIKE = [
    "alif", "antisym", "cfc_ncp", "columnar", "cornn", "ctrnn", "dense_lti", "elstm", "esn", "hippo_rnn_window", "irnn",
    "jordan", "layernorm_elman", "lem", "ligru", "linoss", "lipschitz", "lmu", "ltc", "ltc_fused", "neuralode",
    "noisy", "odernn", "shallow_plrnn", "timed_lmu", "urlstm", "varying_memory", "wrnn",
]  # fmt: skip
each_kernel = pytest.mark.parametrize(
    "cell",
    [
        pytest.param(cell, id=cell.name, marks=[pytest.mark.long] * (cell.name.removesuffix("_cell") in ALIKE))
        for cell in registry.cells()
    ],
)


class Operations(TorchDispatchMode):
    """Collects the operations that torch runs, each with the number of axes of every tensor that it takes."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        leaves = pytree.tree_leaves((args, kwargs))
        self.found.add((func._opname, *(leaf.ndim for leaf in leaves if isinstance(leaf, torch.Tensor))))
        return func(*args, **(kwargs or {}))


def test_each_operation_is_in_a_kernel_that_every_run_tests():
    """If it fails for a new cell, take a cell with that operation out of ALIKE."""
    tested, alike = Operations(), Operations()
    for cell in registry.cells():
        with alike if cell.name.removesuffix("_cell") in ALIKE else tested:
            for sample in laws.some(laws.kinds(cell), 1)[0].values():
                laws.evaluate(cell, sample.operands, sample.options, "reference")
    assert alike.found
    assert not alike.found - tested.found
    assert len(ALIKE) < len(CELLS) * 0.6


def _fit(cell, sample):
    """Whether the sample runs on kernels that are compiled."""
    sizes = cell.sizes({**dict.fromkeys(cell.names), **sample.operands}, None)
    return any(each.axes.fits(sizes) for known in cell._compiled.values() for each in known)


@each_kernel
def test_kernels_equal_the_loop(cell):
    """Packed sequences run in reverse; without such a sample, the same sample runs both ways.

    The other sample does not run if it has kernels of its own, as two kinds of convolutions have.
    """
    for samples in laws.some(laws.kinds(cell), 1):
        plain, packed = samples.get(False), samples.get(True)
        first = packed or plain
        laws.truth(cell, first, {"reverse": True}, "cpu", torch.float64)
        laws.truth(cell, plain if plain and (laws.ALL or _fit(cell, plain)) else first, {}, "cpu", torch.float64)


@each_kernel
def test_a_sequence_may_be_cut(cell):
    sample = next(sample for sample in cell.samples if "cu_seqlens" not in sample.options)
    steps = sample.operands[cell.names[0]].shape[1]
    laws.pieces(cell, sample, False, "cpu", (1, steps - 1), torch.float64)


@each_cell
def test_the_loop_has_the_gradients_of_its_output(cell):
    """Finite differences of the reference."""
    if "the gradients of the output" in cell.excused:
        pytest.skip(f"{cell.name}: {cell.excused['the gradients of the output']}")
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


def _memory(cell, operands, options):
    """Return the numbers of a step of 4,096, forward and backward, over those of its inputs, outputs and states.

    Counted are all inputs, gradients and what the kernels store.
    """
    values = [operands.get(name) for name in cell.names]
    given = [options.get(name, option.default) for name, option in cell.options.items()]
    found, present, sizes = cell._of_call("cpu", values, None, given)
    real = found.sizes(sizes)
    inputs = sum(present[name][0, 0].numel() for name in found.timed)
    output, state = math.prod(cell.output_shape(sizes)[2:]), present["state"][0].numel()
    gradients = output + sum(real[numbers] for numbers in found._rows.values())
    factors = sum(real[numbers] for numbers in found._factors.values()) * found.window(real) / 4096
    return (inputs + output + found.kept_numbers(real) + gradients + factors) / (inputs + output + state)


@each_cell
def test_memory_is_at_most_thrice_the_inputs_outputs_and_states(cell):
    for samples in laws.kinds(cell):
        if False in samples:
            assert _memory(cell, samples[False].operands, samples[False].options) <= 3


@pytest.mark.parametrize(
    ("name", "dim", "options"),
    [
        ("cfc", 128, {}),
        ("neuralode", 128, {}),
        ("ctrnn", 128, {}),
        ("odernn", 8, {}),
        ("cfc", 8, {"hidden_dim": 3, "depth": 2}),
    ],
)
def test_memory_of_cells_with_many_products(name, dim, options):
    """At D = 128 what the page says; at D = 8 layers that are wider and narrower than the state."""
    layer = scanl.layers.build(name, dim, **options)
    operands = layer.operands(torch.zeros(1, 2, dim), torch.ones(1, 2, 1))
    given = dict(zip(layer.cell.names, [*operands, layer.init_state(1)], strict=True))
    found = _memory(layer.cell, {key: v for key, v in given.items() if v is not None}, layer.options())
    assert found <= 3
    if dim == 128:
        lines = filled(PAGE.read_text()).splitlines()
        (row,) = (line for line in lines if line.startswith(f"| `{name}`") and "steps:" in line)
        assert row.split("|")[-2].strip() == f"{found:.2f}"


def test_layers_name_their_cells():
    named = {scanl.layers.get(name).op for name in scanl.layers.names()}
    # nnRNN and the orthogonal networks; `lmu` with durations; `hippo_rnn` with a window
    shared = {"ornn_cell", "timed_lmu_cell", "hippo_rnn_window_cell"}
    assert {cell.name for cell in registry.cells()} - named <= shared | {"lstm"}  # PyTorch's is as fast
