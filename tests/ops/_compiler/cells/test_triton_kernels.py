"""Triton kernels that are generated from the step of a cell: what only they have. The laws test some cells too."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import laws
import scanl.layers
from scanl import ops
from scanl.errors import BackendError
from scanl.ops import registry
from scanl.ops.registry import Cell, OpSample

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from scanl.ops._compiler.cells import triton_kernels  # noqa: E402
from scanl.ops._triton import _tuned  # noqa: E402
from scanl.ops._triton._cells import expm1, log1p, log_sigmoid, tanh  # noqa: E402

pytestmark = pytest.mark.cells_by_loop("name")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# What a kernel has no tiles for; `auto` takes the loop there
REFUSED = {
    "cfc_cell": "has not the channels on both axes",
    "cfc_ncp_cell": "a value with its channels in another order",
    "gated_outer_product_cell": "the axes H and V beside their channels",
    "hippo_rnn_cell": "has not the channels on both axes",
    "hippo_rnn_window_cell": "has not the channels on both axes",
    "lmu_cell": "has not the channels on both axes",
    "ltc_cell": "sum over D",
    "memory_cell": "sum over C",
    "momentum_delta_cell": "sum over K",
    "ncp_cell": "a value with its channels in another order",
    "nwm_cell": "a value with its channels in another order",
    "odefwp_cell": "the axes H and K beside their channels",
    "onlstm_cell": "cumsum",
    "rdn_cell": "has not the channels on both axes",
    "srwm_cell": "a value with its channels in another order",
    "timed_lmu_cell": "has not the channels on both axes",
    "varying_memory_cell": "a value with two axes of channels",
    "wrnn_cell": "a value with its channels in another order",
}
scanl.layers.names()  # imports all layers, which registers their cells
# A sum over channels in the step; its gradient alone; a matrix of two widths; a product after a product; two numbers
# of a step that have no channels
SHORT = ("layernorm_lstm_cell", "unicornn_cell", "jordan_cell", "lem_cell", "sru")
CELLS = [
    pytest.param(cell, id=cell.name, marks=[] if cell.name in SHORT else [pytest.mark.long])
    for cell in registry.cells()
    if cell.name not in REFUSED
]


def _draw(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64) / 2


def _truth(op: Cell, operands: dict[str, Tensor], dtype: torch.dtype = torch.float32, **options) -> None:
    with torch.device(DEVICE):
        laws.truth(op, OpSample(operands, options), {}, "triton", dtype)


def _slstm(batch: int, steps: int, width: int, sequences: int | None = None) -> dict[str, Tensor]:
    x, r = _draw(batch, steps, 4, 2, width), _draw(4, 2, width, width) / width
    return {"x": x, "r": r, "state": _draw(sequences or batch, 4, 2, width).abs()}


@pytest.mark.parametrize("cell", CELLS)
def test_cells_of_the_library(cell):
    samples = [sample for sample in cell.samples if not laws.refusal(cell, sample, "triton")]
    assert len(samples) == len(list(cell.samples))
    for sample in laws.some(samples, 1):
        for reverse in (False, True):
            laws.truth(cell, sample, {"reverse": reverse}, "triton", torch.float32)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name):
    op = registry.get(name)
    sample = next(iter(op.samples))
    operands = laws.pytree.tree_map(lambda v: v.to(DEVICE), dict(sample.operands))
    with pytest.raises(BackendError, match=f"'triton' cannot run these arguments: its step uses .*{REFUSED[name]}"):
        op(**operands, **sample.options, backend="triton")
    reasons = op.explain(**operands, **sample.options).splitlines()
    assert reasons[0].startswith("triton: " + "device cpu (runs on cuda); " * (DEVICE == "cpu") + "its step uses ")


@pytest.mark.parametrize("width", [16, 37])
def test_channels_in_blocks(width):
    """Blocks of 16 channels in the interpreter; sums over time of each block go to one row."""
    _truth(ops.indrnn, {"x": _draw(2, 3, width), "w": _draw(width), "state": _draw(2, width)})


def test_blocks_of_channels_as_they_ship(monkeypatch):
    """Blocks of 64 channels, and a sequence alone in its program; indrnn with 66 channels, slstm with heads of 20."""
    monkeypatch.setattr(_tuned, "HAS_SMALL_TILES", False)
    monkeypatch.setattr(_tuned, "MAX_CHANNELS", _tuned.MAX_WIDTH)
    _truth(ops.indrnn, {"x": _draw(2, 3, 66), "w": _draw(66), "state": _draw(2, 66)})
    _truth(ops.slstm, _slstm(2, 3, 20))


@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize("batch", [1, 18], ids=["one row", "two programs of rows"])
def test_matrices(batch, held, monkeypatch):
    """A large matrix is loaded at each step. In the interpreter a program has at most 16 sequences."""
    monkeypatch.setattr(triton_kernels, "MAX_HELD_NUMBERS", triton_kernels.MAX_HELD_NUMBERS if held else 0)
    operands = {"x": _draw(batch, 3, 3, 5), "u": _draw(3, 5, 5), "b": _draw(3, 5), "state": _draw(batch, 5)}
    _truth(ops.gru, operands)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_dtypes(dtype):
    _truth(ops.slstm, _slstm(2, 4, 5), dtype)


def test_sequences_of_different_lengths_in_one_program():
    """The longest decides how long a program runs; a shorter one keeps its state, and one of no steps too."""
    bounds = torch.tensor([0, 1, 1, 8, 10])
    _truth(ops.slstm, _slstm(1, 10, 17, sequences=4), cu_seqlens=bounds)
    # The gradient of a bias leaves out what a program computes after the end of a shorter sequence.
    operands = {"x": _draw(1, 10, 3, 5), "u": _draw(3, 5, 5), "b": _draw(3, 5) + 1, "state": _draw(4, 5)}
    _truth(ops.gru, operands, cu_seqlens=bounds)


def _rows_of_channels(x, z, state):
    """Six numbers are channels only when no axis follows them."""
    return torch.cat([z.flip(-1), z[..., :1]], -1).sum(1), torch.tanh(x + state)


def _rows_times_a_matrix(x, z, w, state):
    """Twelve rows of z are twice the six channels."""
    rows = z @ w
    return rows[:, 0] - rows[:, 7], torch.tanh(x + state)


@pytest.mark.parametrize(
    ("step", "declaration", "shapes"),
    [
        (_rows_of_channels, "x: B T D, z: B T H K", {"x": (2, 3, 6), "z": (2, 3, 2, 5)}),
        (_rows_times_a_matrix, "x: B T D, z: B T H D, w: D D", {"x": (2, 3, 6), "z": (2, 3, 12, 6), "w": (6, 6)}),
    ],
    ids=["sum", "product"],
)
def test_single_numbers_that_would_be_channels_of_a_fixed_number(step, declaration, shapes):
    axes = sorted(set("DHK") & set(declaration))
    op = Cell(step, f"{declaration}, state: B D -> B T D", static=axes, equation="", source="")
    operands = {name: _draw(*shape).to(DEVICE) for name, shape in shapes.items()}
    reason = "its step uses channels on the last axis of a value that are single numbers before another axis"
    assert reason in op.explain(**operands).splitlines()[0]
    with pytest.raises(BackendError, match=reason):
        op(**operands, backend="triton")
    torch.testing.assert_close(op(**operands), op(**operands, backend="reference"))


def test_no_steps():
    operands = {"x": torch.zeros(2, 0, 3), "w": torch.ones(3), "state": torch.randn(2, 3)}
    operands = {name: value.to(DEVICE).requires_grad_() for name, value in operands.items()}
    y, last = ops.indrnn(*operands.values(), backend="triton")
    assert y.shape == (2, 0, 3)
    assert torch.equal(last, operands["state"])
    dx, dw, dstate = torch.autograd.grad(last.sum(), list(operands.values()), allow_unused=True, materialize_grads=True)
    assert dx.shape == (2, 0, 3)
    assert not dw.any()
    assert (dstate == 1).all()


def test_wide_matrices_are_refused():
    x, u = torch.zeros(1, 1, 129, device=DEVICE), torch.zeros(129, 129, device=DEVICE)
    with pytest.raises(BackendError, match="cannot run these arguments: D=129 is over 128"):
        ops.elman(x, u, backend="triton")
    y, _ = ops.elman(x[..., :128], u[:128, :128], backend="triton")
    assert y.shape == (1, 1, 128)


def _cell(declaration: str):
    return lambda step: Cell(step, declaration, equation="", source="")


@_cell("x: B T D, w: D, state: B D -> B T D")
def elementary(x, w, state):
    low, high = torch.minimum(x, state), torch.clamp(x * state, -0.5, 0.7)
    h = torch.where(x > state, torch.exp(-(state**2)), torch.nn.functional.silu(low)) + high * torch.log1p(w * w)
    h = h + torch.sqrt(1 + x * x) * torch.cos(state) - torch.expm1(x) / (2 + torch.erf(state))
    return h + torch.softmax(x, -1) * state.amin(-1, keepdim=True), torch.tanh(h) / 3


@_cell("x: B T D, state: B D -> B T D")
def power(x, state):
    h = x.abs() ** 1.5 + state
    return h, h


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_functions_of_one_element_and_sums(dtype):
    _truth(elementary, {"x": _draw(2, 4, 6), "w": _draw(6), "state": _draw(2, 6)}, dtype)


def test_a_power_is_refused():
    assert "its step uses a power other than" in power.explain(torch.ones(1, 1, 2))


@triton.jit
def _apply(p_x, p_y, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    x = tl.load(p_x + i)
    tl.store(p_y + i, tanh(x))
    tl.store(p_y + SIZE + i, expm1(x))
    tl.store(p_y + 2 * SIZE + i, log1p(x))
    tl.store(p_y + 3 * SIZE + i, log_sigmoid(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.filterwarnings("ignore:(invalid value|overflow|divide by zero) encountered:RuntimeWarning")
def test_functions_are_exact(dtype):
    """To four roundings, for small numbers too."""
    x = torch.cat([torch.linspace(-9, 9, 500), torch.logspace(-9, 0, 500), torch.tensor([0.0, torch.inf, -torch.inf])])
    x = torch.cat([x, torch.full((21,), torch.nan)]).to(DEVICE, dtype)
    y = x.new_empty(4, 1024)
    _apply[(1,)](x, y, SIZE=1024)
    wide = x.double()
    for found, of in zip(y, (torch.tanh, torch.expm1, torch.log1p, torch.nn.functional.logsigmoid), strict=True):
        exact = of(wide)
        torch.testing.assert_close(found.double(), exact, rtol=4 * torch.finfo(dtype).eps, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "wanted", ["indrnn: float32", pytest.param("slstm: 64", marks=pytest.mark.long)], ids=["indrnn", "slstm"]
)
def test_compiles_ahead_of_time(wanted, tmp_path):
    """For sm_90: no register is spilled, and operands are loaded ahead of their step."""
    if not (Path(triton.__file__).parent / "backends/nvidia/bin/ptxas").exists():
        pytest.skip("this triton comes without ptxas")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    program = Path(__file__).parents[4] / "benchmarks" / "speed" / "ahead_of_time.py"
    run = subprocess.run(
        [sys.executable, str(program), "--first", "--results", str(tmp_path), wanted],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert run.returncode == 0, run.stderr + run.stdout
    found = list(csv.DictReader((tmp_path / "ahead_of_time.csv").read_text().splitlines()))
    assert [kernel["kernel"].rpartition(".")[2] for kernel in found] == ["forward", "backward"]
    for kernel in found:
        assert int(kernel["spilled"]) == 0, kernel
        assert int(kernel["asynchronous"]) > 0, kernel


@pytest.mark.gpu
def test_another_length_compiles_nothing():
    u = torch.rand(64, device="cuda")
    ops.indrnn(torch.randn(2, 48, 64, device="cuda"), u, backend="triton")
    with laws.compiling_nothing():
        for length in (2, 16, 47, 101):
            ops.indrnn(torch.randn(2, length, 64, device="cuda"), u, backend="triton")
