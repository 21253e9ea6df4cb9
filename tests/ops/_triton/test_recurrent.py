"""The kernel of few steps alone: `_recurrent.forward` against the references of the ops that call it."""

import itertools

import pytest
import torch
from torch import Tensor

import laws
from scanl.ops import delta_rule, dplr_scan, linear_attention

triton = pytest.importorskip("triton")
from scanl.ops._triton import _recurrent  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KINDS = {"linear_attention": linear_attention, "bonus": linear_attention, "delta": delta_rule, "low rank": dplr_scan}
DTYPES = [torch.float32, torch.float64, torch.float16]
each_kind = pytest.mark.parametrize("kind", KINDS)
directions = pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
SIZES = {"B": 2, "T": 5, "G": 2, "H": 4, "K": 5, "V": 20}  # off the blocks: two of columns, rows of which some are none


@pytest.fixture(autouse=True)
def _device():
    with torch.device(DEVICE):
        yield


def draw(kind: str, decay: str | None, dtype: torch.dtype, bounds: list[int] | None = None, **sizes: int) -> dict:
    """Operands by name; `decay` names the axes of g."""
    sizes = {**SIZES, **sizes}
    if bounds is not None:
        sizes |= {"B": 1, "T": bounds[-1]}

    def random(axes: str) -> Tensor:
        return torch.randn([sizes[axis] for axis in axes], dtype=torch.float64)

    rows = sizes["B"] if bounds is None else len(bounds) - 1
    operands = {"q": random("BTGK"), "k": random("BTGK") / sizes["K"] ** 0.5, "v": random("BTHV")}
    if kind == "bonus":
        operands["u"] = random("HK")
    elif kind == "delta":
        operands["beta"] = random("BTH").sigmoid()
    elif kind == "low rank":
        operands |= {"a": random("BTHK") / sizes["K"], "b": random("BTHK")}
    if decay is not None:
        operands["g"] = -random(decay).abs()
    operands["state"] = torch.randn(rows, sizes["H"], sizes["K"], sizes["V"], dtype=torch.float64)
    operands = {name: value.to(dtype) for name, value in operands.items()}
    operands["state"] = operands["state"].to(torch.promote_types(dtype, torch.float32))
    return operands


def ours(operands: dict, reverse: bool = False, cu_seqlens: Tensor | None = None, scale: float | None = None):
    q, k, v, state = (operands[name] for name in ("q", "k", "v", "state"))
    more = {name: value for name, value in operands.items() if name in ("u", "beta", "a", "b")}
    return _recurrent.forward(q, k, v, operands.get("g"), state, reverse, cu_seqlens, scale, **more)


def check(kind: str, operands: dict, **options) -> None:
    """For float64 the reference's error in float32 counts, in units of eps, as in `laws.own_rounding`."""
    op = KINDS[kind]
    exact = op(**laws.wide(operands), **options, backend="reference")
    narrowed = {name: v.float() if v.dtype == torch.float64 else v for name, v in operands.items()}
    same = op(**narrowed, **options, backend="reference")
    of_same = op(**laws.wide(narrowed), **options, backend="reference")
    found = ours(operands, **options)
    for name, operand, mine, right, plain, of_plain in zip(
        ("o", "last"), ("q", "state"), found, exact, same, of_same, strict=True
    ):
        assert mine.dtype == operands[operand].dtype
        assert mine.is_contiguous()
        laws.close(mine, right, laws.worst({name: plain}, {name: of_plain}), f"{kind} {name}")


@each_kind
@directions
@pytest.mark.parametrize("decay", [None, "H", "BTH", "BTHK"])
def test_equals_the_reference(kind, reverse, decay):
    check(kind, draw(kind, decay, torch.float32), reverse=reverse)


@each_kind
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_in_every_dtype_with_a_scale(kind, dtype):
    check(kind, draw(kind, "BTHK", dtype, B=1), scale=1 / 3)


@each_kind
def test_wide_gates_beside_half_precision(kind):
    operands = draw(kind, "BTHK", torch.float16, B=1)
    for name in ("g", "u", "beta"):
        if name in operands:
            operands[name] = torch.randn(operands[name].shape).abs().neg() if name == "g" else operands[name].float()
    check(kind, operands)


@each_kind
@directions
@pytest.mark.parametrize("bounds", [[0, 0, 2, 2, 6, 7], [0, 5]], ids=str)
def test_packed(kind, reverse, bounds):
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
    check(kind, draw(kind, "BTH", torch.float32, bounds), reverse=reverse, cu_seqlens=cu_seqlens)


@each_kind
@pytest.mark.parametrize("sizes", [{"T": 1}, {"T": 16, "B": 1}, {"H": 9, "G": 1, "K": 1, "V": 1}], ids=str)
def test_sizes(kind, sizes):
    check(kind, draw(kind, "BTHK", torch.float32, **sizes))


@each_kind
@pytest.mark.parametrize("axis", ["B", "T", "K", "V"])
def test_empty(kind, axis):
    operands = draw(kind, "BTHK", torch.float32, **{axis: 0})
    o, last = ours(operands)
    assert o.shape == operands["v"].shape
    assert not o.any()
    assert torch.equal(last, operands["state"])
    assert last is not operands["state"]


def test_packed_sequences_of_no_steps():
    operands = draw("delta", "BTH", torch.float32, [0, 0, 0])
    o, last = ours(operands, cu_seqlens=torch.tensor([0, 0, 0]))
    assert o.shape == (1, 0, 4, 20)
    assert torch.equal(last, operands["state"])


@each_kind
def test_a_decay_of_minus_infinity_forgets(kind):
    operands = draw(kind, "BTHK", torch.float32, B=1)
    operands["g"][:, 2] = -torch.inf
    check(kind, operands)


@each_kind
def test_operands_lie_as_they_lie(kind):
    """Every second element of a transposed memory, and one row for all of the batch."""
    operands = draw(kind, "BTHK", torch.float32)
    strided = {}
    for name, value in operands.items():
        wide = torch.zeros(*value.shape[1:], value.shape[0], 2)
        strided[name] = wide.movedim(-2, 0)[..., 0].copy_(value)
        assert not strided[name].is_contiguous()
    torch.testing.assert_close(ours(strided), ours(operands))
    operands["v"] = operands["v"][:1].expand(2, -1, -1, -1)
    check(kind, operands)


@pytest.mark.gpu
@each_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("sizes", [(1, 1, 16, 128), (64, 1, 32, 64), (4, 16, 8, 256), (3, 7, 5, 100)], ids=str)
def test_real_sizes(kind, dtype, sizes):
    B, T, H, K = sizes
    for decay, reverse in itertools.product((None, "H", "BTH", "BTHK"), (False, True)):
        check(kind, draw(kind, decay, dtype, B=B, T=T, H=H, G=H, K=K, V=K), reverse=reverse)


@pytest.mark.gpu
def test_another_length_compiles_nothing():
    ours(draw("delta", "BTH", torch.bfloat16, T=3))
    with laws.compiling_nothing():
        for batch, length in ((1, 1), (2, 2), (16, 16)):
            ours(draw("delta", "BTH", torch.bfloat16, B=batch, T=length))


@pytest.mark.gpu
@each_kind
def test_recorded_as_a_graph(kind):
    """A graph of it reads the operands anew each time it runs."""
    operands = draw(kind, "BTHK", torch.bfloat16, T=1)
    ours(operands)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = ours(operands)
    for name, value in draw(kind, "BTHK", torch.bfloat16, T=1).items():
        operands[name].copy_(value)
    graph.replay()
    torch.testing.assert_close(found, ours(operands))
