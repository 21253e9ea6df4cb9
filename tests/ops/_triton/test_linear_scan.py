"""The triton kernels beyond the laws of all ops: off the blocks, cut in time, on a GPU; without one, interpreted."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import laws
from scanl.ops import linear_scan
from scanl.ops.registry import OpSample

triton = pytest.importorskip("triton")
from interpreter import each_way  # noqa: E402
from scanl.ops._triton import linear_scan as kernels  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def _device():
    with torch.device(DEVICE):
        yield


def truth(sample: OpSample, reverse: bool = False, dtype: torch.dtype = torch.float32) -> None:
    operands = {name: value.to(DEVICE) for name, value in sample.operands.items()}
    options = {name: value.to(DEVICE) for name, value in sample.options.items()}
    laws.truth(linear_scan, OpSample(operands, options), {"reverse": reverse}, "triton", dtype)


def draw(x_shape: tuple[int, ...], a_shape: tuple[int, ...], bounds: list[int] | None = None) -> OpSample:
    options = {} if bounds is None else {"cu_seqlens": torch.tensor(bounds)}
    rows = x_shape[0] if bounds is None else len(bounds) - 1
    operands = {"x": torch.randn(x_shape), "a": torch.rand(a_shape), "state": torch.randn(rows, *x_shape[2:])}
    operands = {name: value.double() for name, value in operands.items()}
    return OpSample(operands, options)


@pytest.mark.parametrize("a_features", [(5,), (1,), (3, 1), (3, 5), (2, 1, 5)], ids=str)
@pytest.mark.parametrize("steps", [1, 5], ids=["constant", "timed"])
def test_off_the_blocks(a_features, steps, monkeypatch):
    """5 channels in blocks of 2, 5 steps in tiles of 4; a of each channel, of a group, expanded."""
    monkeypatch.setattr(kernels, "NARROW", 2)
    monkeypatch.setattr(kernels, "TILE", 32)
    truth(draw((1, 5, *(2, 3, 5)[-len(a_features) :]), (steps, *a_features)))


CUTS = {
    "one sequence": ((1, 35, 2), (35, 2)),
    "two": ((2, 32, 2), (2, 32, 2)),
    "a shared by the batch": ((2, 33, 2), (33, 2)),
    "a constant": ((2, 33, 2), (2,)),
    "a constant for each": ((2, 33, 2), (2, 1, 2)),
    "a shared by channels": ((1, 34, 1, 2), (34, 1, 1)),
    "packed": ((1, 38, 2), (1, 38, 2), [0, 3, 3, 22, 30, 38]),
    "packed, a constant": ((1, 33, 2), (1,), [0, 0, 16, 33, 33]),
}


@each_way("case", CUTS)
def test_cut_in_time(case, reverse, monkeypatch):
    """Long sequences of few channels are cut into pieces, here of 8 steps or two tiles, their carries found first.

    Memory that nothing has written to has numbers of which numpy warns where they are computed with.
    """
    empty_like = torch.empty_like

    def unwritten(x, **more):
        made = empty_like(x, **more)
        if made.dtype == torch.float32:
            made.view(torch.int32).fill_(0x7FA00001)  # a signalling NaN
        return made

    monkeypatch.setattr(torch, "empty_like", unwritten)
    monkeypatch.setattr(kernels, "TILE", 32)
    monkeypatch.setattr(kernels, "MIN_PIECE_TILES", 2)
    entered = []
    enter = kernels._Plan.enter
    monkeypatch.setattr(kernels._Plan, "enter", lambda *args, **more: entered.append(more) or enter(*args, **more))
    truth(draw(*CUTS[case]), reverse, torch.complex64 if case in ("one sequence", "packed") else torch.float32)
    assert len(entered) == 2, "it was not cut both forwards and backwards"


@pytest.mark.parametrize("shape", [(2, 0, 3), (0, 5, 3), (2, 5, 0), (2, 1, 3)], ids=str)
@pytest.mark.parametrize("timed", [True, False])
def test_empty_and_single(shape, timed):
    sample = draw(shape, shape if timed else shape[2:])
    leaves = [value.requires_grad_() for value in sample.operands.values()]
    results = linear_scan(*leaves, backend="triton")
    gradients = torch.autograd.grad(results, leaves, [torch.ones_like(value) for value in results])
    assert [g.shape for g in gradients] == [leaf.shape for leaf in leaves]
    if shape[1] == 0:
        assert torch.equal(results[1], leaves[2])
        assert not gradients[1].any()
        assert (gradients[2] == 1).all()
    if shape[1] == 1:
        torch.testing.assert_close(results[1], leaves[1].view(-1, 3) * leaves[2] + leaves[0][:, 0])


def test_packed_sequences_of_no_steps():
    state = torch.randn(2, 3)
    y, last = linear_scan(
        torch.zeros(1, 0, 3), torch.zeros(3), state, cu_seqlens=torch.zeros(3).int(), backend="triton"
    )
    assert y.shape == (1, 0, 3)
    assert torch.equal(last, state)


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("a_shape", [(1, 5, 3), (3,)], ids=["timed", "constant"])
def test_sequences_of_no_steps_among_others(a_shape, reverse):
    """What comes to the last state of such a one is the gradient of its first, in both parts."""
    truth(draw((1, 5, 3), a_shape, [0, 0, 3, 3, 5]), reverse, torch.complex64)


def test_strided_operands():
    x = torch.randn(4, 6, 2, dtype=torch.complex64).permute(2, 1, 0)
    a = torch.rand(6, 8, dtype=torch.complex64).conj()[:, ::2]
    state = torch.randn(4, dtype=torch.complex64).expand(2, 4)
    ours, plain = (linear_scan(x, a, state, backend=backend) for backend in ("triton", "reference"))
    torch.testing.assert_close(ours, plain)


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
def test_derivative_of_a_gradient(reverse):
    shapes = ((1, 4, 2), (4, 2), (1, 2))
    leaves = [torch.randn(shape, dtype=torch.complex128).requires_grad_() for shape in shapes]
    second = []
    for backend in ("triton", "reference"):
        y, last = linear_scan(*leaves, reverse=reverse, backend=backend)
        first = torch.autograd.grad((y.abs() ** 2).sum() + (last.abs() ** 2).sum(), leaves, create_graph=True)
        second.append(torch.autograd.grad(sum((g.abs() ** 2).sum() for g in first), leaves))
    torch.testing.assert_close(*second)


@pytest.mark.parametrize(
    "wanted", [["float32"], pytest.param(["bfloat16, cut, constant", "complex64"], marks=pytest.mark.long)], ids=str
)
def test_compiles_ahead_of_time(wanted, tmp_path):
    """For sm_90: no register is spilled, three programs fit into the shared memory, and loads run ahead of the scan."""
    if not (Path(triton.__file__).parent / "backends/nvidia/bin/ptxas").exists():
        pytest.skip("this triton comes without ptxas")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    cases = [f"linear_scan: {case}" for case in wanted]
    program = Path(__file__).parents[3] / "benchmarks" / "speed" / "ahead_of_time.py"
    run = subprocess.run(
        [sys.executable, str(program), "--first", "--results", str(tmp_path), *cases],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert run.returncode == 0, run.stderr + run.stdout
    found = list(csv.DictReader((tmp_path / "ahead_of_time.csv").read_text().splitlines()))
    kernels = {f"linear_scan.{way}" for way in ("forward", "backward")}
    assert {(k["case"], k["kernel"]) for k in found} >= {(c, k) for c in cases for k in kernels}
    for kernel in found:
        assert int(kernel["spilled"]) == 0, kernel
        assert int(kernel["shared"]) <= 227 * 1024 // 3, kernel
        assert int(kernel["asynchronous"]) > 0, kernel


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
@pytest.mark.parametrize("shape", [(8, 1024, 1024), (1, 16384, 128), (1, 2**18, 16), (3, 1000, 200)], ids=str)
def test_real_sizes(shape, dtype):
    operands = laws.at(linear_scan, draw(shape, shape), dtype, "triton")
    exact = laws.evaluate(linear_scan, laws.wide(operands), {}, "parallel")
    same = laws.evaluate(linear_scan, operands, {}, "parallel")
    ours = laws.evaluate(linear_scan, operands, {}, "triton")
    rounding = laws.worst(same, exact)
    for name in exact:
        laws.close(ours[name], exact[name], rounding, name)


@pytest.mark.gpu
def test_more_elements_than_32_bits_count():
    x = torch.ones(3, 2**20, 1024, dtype=torch.bfloat16)
    y, last = linear_scan(x, torch.tensor(0.5, dtype=torch.bfloat16), backend="triton")
    assert (y[:, 20:] == 2).all()
    assert (last == 2).all()


@pytest.mark.gpu
def test_another_length_compiles_nothing():
    a = torch.rand(32)
    linear_scan(torch.randn(2, 48, 32), a, backend="triton")
    with laws.compiling_nothing():
        for length in (2, 16, 47, 101, 160):
            linear_scan(torch.randn(2, length, 32), a, backend="triton")
