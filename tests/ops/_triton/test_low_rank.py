"""The delta rule and the scan with low-rank transitions on triton beyond the laws of all ops; their solve alone."""

import itertools

import pytest
import torch
from torch import Tensor

import laws
from scanl.ops import delta_rule, dplr_scan
from scanl.ops.registry import Op, OpSample

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from scanl.ops._triton import _chunks, _low_rank, _matrix_memory  # noqa: E402
from scanl.ops._triton import delta_rule as delta_kernels  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CUDA = torch.cuda.is_available()
each_op = pytest.mark.parametrize("op", [delta_rule, dplr_scan], ids=lambda op: op.name)


@pytest.fixture(autouse=True)
def _device():
    with torch.device(DEVICE):
        yield


@triton.jit
def _inverses(p_l, p_t, C: tl.constexpr, UNITS: tl.constexpr):
    i_row, i_col = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    at = _chunks.units(UNITS) * (C * C) + i_row * C + i_col
    tl.store(p_t + at, _low_rank.inverse(tl.load(p_l + at), UNITS))


@pytest.mark.parametrize("size", [16, 32, 64] if not CUDA else [_chunks.CHUNK])
@pytest.mark.parametrize("units", [1, 2] if not CUDA else [1])
def test_inverse(size, units, monkeypatch):
    """Of systems near the identity, and of the worst that unit keys give: all of them the same, T = I - subdiagonal."""
    for module in (_chunks, _low_rank) if not CUDA else ():
        monkeypatch.setattr(module, "C", tl.constexpr(size))
    below = torch.randn(3, size, size).tril(-1) / 4
    below = torch.cat([below, -torch.ones(1, size, size).tril(-1)])
    found = torch.empty_like(below)
    _inverses[(len(below) // units,)](below, found, C=size, UNITS=units)
    eye = torch.eye(size, dtype=torch.float64)
    exact = torch.linalg.solve_triangular(eye - below.double(), eye, upper=False, unitriangular=True)
    solved = torch.linalg.solve_triangular(eye.float() - below, eye.float(), upper=False, unitriangular=True)
    for n in range(len(below)):
        own = (solved[n] - exact[n]).abs().max().item() / exact[n].abs().max().item()
        laws.close(found[n], exact[n], own / torch.finfo(torch.float32).eps, "inverse")
    assert torch.equal(found[3], eye.float() - torch.ones(size - 1).diag(-1))


def draw(
    op: Op, steps: int, decay: str | None, *, G=1, H=2, K=5, V=3, bounds: list[int] | None = None, **more
) -> OpSample:
    """Operands of an op; `decay` names the axes of g."""
    sizes = {"B": 1, "T": steps, "G": G, "H": H, "K": K, "V": V}

    def random(axes: str) -> Tensor:
        return torch.randn([sizes[axis] for axis in axes], dtype=torch.float64)

    operands = {"q": random("BTGK"), "k": torch.nn.functional.normalize(random("BTGK"), dim=-1), "v": random("BTHV")}
    if op is delta_rule:
        operands["beta"] = random("BTH").sigmoid()
    else:
        b = torch.nn.functional.normalize(random("BTHK"), dim=-1)
        operands |= {"a": -b * random("BTHK").sigmoid(), "b": b}
    if decay is not None:
        operands["g"] = -random(decay).abs() / 4
    options = dict(more)
    if bounds is not None:
        options["cu_seqlens"] = torch.tensor(bounds, dtype=torch.int32)
    rows = 1 if bounds is None else len(bounds) - 1
    operands["state"] = torch.randn(rows, H, K, V, dtype=torch.float64)
    return OpSample(operands, options)


CASES = {
    "one step over a chunk": ((17, "BTHK"), {"H": 1}),
    "several chunks": ((35, "BTH"), {"G": 2, "H": 4}),
    "no decay": ((18, None), {}),
    "a decay a head": ((18, "H"), {}),
    "wide keys": ((18, "BTHK"), {"K": 19}),
    "wide keys and values, one decay": ((18, "BTH"), {"K": 33, "V": 18}),
    "packed": ((37, "BTHK"), {"G": 2, "bounds": [0, 16, 16, 17, 34, 37]}),
    "packed, one decay": ((21, "BTH"), {"bounds": [0, 0, 20, 21, 21]}),
}


BACKWARDS = ("several chunks", "packed")  # these run in reverse, the others forwards; with --all each runs both ways


@each_op
@pytest.mark.parametrize(
    ("case", "reverse"),
    [
        pytest.param(case, reverse, marks=[pytest.mark.long] * (reverse != (case in BACKWARDS)))
        for case, reverse in itertools.product(CASES, (False, True))
    ],
)
def test_off_the_blocks(op, case, reverse):
    """Chunks of 16 steps, blocks of 16 channels of keys and values, shared keys, sequences that end anywhere."""
    given, more = CASES[case]
    laws.truth(op, draw(op, *given, **more), {"reverse": reverse}, "triton", torch.float32)


@pytest.mark.parametrize(
    ("op", "decay"),
    [
        pytest.param(delta_rule, "BTH", id="delta_rule-BTH"),
        pytest.param(delta_rule, "BTHK", id="delta_rule-BTHK", marks=pytest.mark.long),
        pytest.param(dplr_scan, "BTH", id="dplr_scan-BTH", marks=pytest.mark.long),
        pytest.param(dplr_scan, "BTHK", id="dplr_scan-BTHK"),
    ],
)
def test_half_precision(op, decay):
    laws.truth(op, draw(op, 18, decay, G=1, K=18, V=17), {}, "triton", torch.float16)


@each_op
def test_one_unit_a_program(op, monkeypatch):
    """As on a device; the interpreter takes many units at once."""
    monkeypatch.setattr(_chunks, "MAX_UNITS", 1)
    laws.truth(op, draw(op, 18, "BTHK", H=1), {}, "triton", torch.float64)


@each_op
def test_gradients_of_a_single_step(op):
    laws.truth(op, draw(op, 1, "BTHK"), {}, "triton", torch.float64)


@pytest.mark.skipif(CUDA, reason="a device's chunks have 64 steps anyway")
@each_op
def test_longer_chunks(op, monkeypatch):
    """Between the interpreter's 16 steps and a device's 64, which test_shipped.py has."""
    size = 32
    for module in (_chunks, _low_rank, _matrix_memory):
        monkeypatch.setattr(module, "C", tl.constexpr(size))
    for module in (_chunks, _low_rank):
        monkeypatch.setattr(module, "CHUNK", size)
    monkeypatch.setattr(_chunks, "LEVELS", tl.constexpr(size.bit_length() - 1))
    laws.truth(op, draw(op, size + 9, "BTHK"), {}, "triton", torch.float32)


@each_op
def test_strong_decays_beside_weak_ones(op):
    """Sums of logs that are differences would lose the weak ones, or be NaN after -inf."""
    sample = draw(op, 20, "BTHK", H=1)
    g = sample.operands["g"]
    g[:, 3] = g[:, 17, :, 0] = -3e4
    g[:, 9, :, 1:] = -torch.inf
    g[:, 10] = -1e-3
    leaves = [value.requires_grad_() for value in sample.operands.values()]
    found = {}
    for backend in ("triton", "reference"):
        y, last = op(**dict(zip(sample.operands, leaves, strict=True)), backend=backend)
        grads = torch.autograd.grad((y.square().sum() + last.sum()), leaves)
        found[backend] = {"y": y, "last": last, **dict(zip(sample.operands, grads, strict=True))}
    for name, value in found["triton"].items():
        expected = found["reference"][name]
        torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")


def test_unit_keys_of_many_rows(monkeypatch):
    """5 rows in tiles of 2, keys of no length, and their gradients."""
    monkeypatch.setattr(delta_kernels, "TILE", 16)
    k = torch.randn(1, 5, 1, 7, dtype=torch.float64)
    k[:, 2] = 0
    dy = torch.randn_like(k)
    leaf = k.clone().requires_grad_()
    plain = leaf * (leaf.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
    torch.testing.assert_close(delta_kernels._unit_keys(k, 1e-6), plain, rtol=1e-7, atol=1e-7)
    (grad,) = torch.autograd.grad(plain, leaf, dy)
    torch.testing.assert_close(delta_kernels._unit_keys(k, 1e-6, dy), grad, rtol=1e-6, atol=1e-6)


@each_op
def test_keys_and_values_too_wide_are_refused(op):
    sample = draw(op, 1, None, K=257, V=300)
    assert laws.refusal(op, sample, "triton") == ["K=257 is over 256", "V=300 is over 256"]


@pytest.mark.gpu
@each_op
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("decay", [None, "BTH", "BTHK"])
@pytest.mark.parametrize(
    "K", [64, pytest.param(128, marks=pytest.mark.long), pytest.param(256, marks=pytest.mark.long)]
)
def test_real_sizes(op, dtype, decay, K):
    sample = draw(op, 1000, decay, G=2, H=4, K=K, V=128)
    operands = laws.at(op, sample, dtype, "triton")
    exact = laws.evaluate(op, laws.wide(operands), {}, "parallel")
    same = laws.evaluate(op, operands, {}, "parallel")
    ours = laws.evaluate(op, operands, {}, "triton")
    rounding = laws.worst(same, exact)
    for name in exact:
        laws.close(ours[name], exact[name], rounding, f"{op.name} {name}", laws.coarsest(op, "triton", dtype))


@pytest.mark.gpu
@each_op
def test_another_length_compiles_nothing(op):
    def run(steps: int) -> None:
        laws.evaluate(op, draw(op, steps, "BTH", K=64, V=64).operands, {}, "triton")

    run(130)
    with laws.compiling_nothing():
        for steps in (17, 64, 65, 200):
            run(steps)
