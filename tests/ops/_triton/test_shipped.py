"""Every Triton kernel at the tiles that a device gets; the other tests interpret it at smaller ones."""

import importlib

import pytest
import torch

import laws
from scanl.ops import registry
from scanl.ops.registry import Op, OpSample

pytest.importorskip("triton")
from scanl.ops._triton import _tuned
from tests.ops._triton.test_low_rank import draw

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a device has no others")

# Modules whose sizes differ in the interpreter, each after what it imports
MODULES = (
    "linear_scan", "_rows", "_chunks", "_low_rank", "_matrix_memory", "_recurrent", "linear_attention", "delta_rule",
    "dplr_scan", "selective_scan", "short_convolution", "weighted_average",
)  # fmt: skip


def _reload() -> None:
    """In place: a function that was imported before looks its kernels up in the same module."""
    _tuned.cut.cache_clear()
    for name in MODULES:
        importlib.reload(importlib.import_module(f"scanl.ops._triton.{name}"))


@pytest.fixture(scope="module", autouse=True)
def _shipped():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_tuned, "HAS_SMALL_TILES", False)
        patch.setattr(_tuned, "MAX_CHANNELS", _tuned.MAX_WIDTH)
        _reload()
        yield
    _reload()


def _vectors(**shapes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    return {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}


def _linear_scan() -> OpSample:
    """Tiles of 128 steps and 16 channels."""
    shape = (1, 130, 17)
    return OpSample({**_vectors(x=shape, state=(1, 17)), "a": torch.rand(shape, dtype=torch.float64)}, {})


def _selective_scan() -> OpSample:
    """Chunks of 32 steps, blocks of 64 channels, tiles of 8 steps at 16 states."""
    operands = _vectors(u=(1, 35, 66), B=(1, 35, 16), C=(1, 35, 16), D=(66,), z=(1, 35, 66), state=(1, 66, 16))
    operands |= {"delta": torch.rand(1, 35, 66, dtype=torch.float64), "A": -torch.rand(66, 16, dtype=torch.float64)}
    return OpSample(operands, {})


def _short_convolution() -> OpSample:
    """Programs of 64 steps, 8 for each thread, and 128 channels."""
    return OpSample(_vectors(x=(1, 67, 130), w=(130, 4), bias=(130,), state=(1, 3, 130)), {"silu": True})


def _weighted_average() -> OpSample:
    """Programs of 32 channels, tiles of 8 and 16 steps."""
    operands = _vectors(k=(1, 18, 34), v=(1, 18, 34), bonus=(34,))
    state = torch.stack([torch.randn(1, 34), torch.rand(1, 34) + 0.5, torch.randn(1, 34)], 1).double()
    return OpSample({**operands, "decay": -torch.rand(34, dtype=torch.float64), "state": state}, {})


VECTORS = {
    "linear_scan": _linear_scan,
    "selective_scan": _selective_scan,
    "short_convolution": _short_convolution,
    "weighted_average": _weighted_average,
}
MEMORIES = ("linear_attention", "delta_rule", "dplr_scan")


def _memory(name: str, steps: int, decay: str, **sizes: int) -> tuple[Op, OpSample]:
    op = registry.get(name)
    sample = draw(op, steps, decay, **sizes)
    return op, OpSample({key: value for key, value in sample.operands.items() if key in op.names}, sample.options)


def test_none_is_left_out():
    assert {op.name for op in registry.declared() if "triton" in op.backends} == {*VECTORS, *MEMORIES}
    assert importlib.import_module("scanl.ops._triton._chunks").CHUNK == 64


@pytest.mark.parametrize("name", VECTORS)
def test_vectors(name):
    laws.truth(registry.get(name), VECTORS[name](), {}, "triton", torch.float32)


@pytest.mark.parametrize(
    ("name", "decay", "dtype", "K", "V"),
    [
        ("linear_attention", "BTH", torch.float16, 66, 130),
        ("delta_rule", "BTHK", torch.float16, 34, 130),
        ("delta_rule", "BTH", torch.float32, 34, 66),
        ("dplr_scan", "BTHK", torch.float32, 18, 66),
    ],
)
def test_matrix_memories(name, decay, dtype, K, V):
    """Chunks of 64 steps; keys and values cross the widest tiles of those that are tried first."""
    laws.truth(*_memory(name, 66, decay, H=1, K=K, V=V), {}, "triton", dtype)


@pytest.mark.parametrize("name", MEMORIES)
def test_few_steps(name):
    """One head a program, 16 columns. This kernel goes forwards only."""
    op, sample = _memory(name, 3, "BTHK", H=2, K=5, V=18)
    operands = {key: value.float() for key, value in sample.operands.items()}
    exact = op(**laws.wide(operands), backend="reference")
    own, found = op(**operands, backend="reference"), op(**operands, backend="triton")
    for mine, reference, truth, what in zip(found, own, exact, ("y", "state"), strict=True):
        rounding = laws.worst({what: reference}, {what: truth})
        laws.close(mine, truth, rounding, what)
