"""The kernels of matrix memories where the samples of their ops do not reach: several blocks of columns and of rows."""

import pytest
import torch
from torch.nn import functional as F

import laws
from scanl.errors import BackendError
from scanl.ops import delta_rule, dplr_scan, linear_attention
from scanl.ops.registry import Sample

KEYS, VALUES, STEPS, HEADS = 70, 130, 35, 2  # more than a block of each, neither a multiple; more steps than are held


def operands(*, shared: int = 1, **more) -> dict[str, torch.Tensor]:
    q, k = (torch.randn(1, STEPS, shared, KEYS, dtype=torch.float64) for _ in range(2))
    v = torch.randn(1, STEPS, HEADS, VALUES, dtype=torch.float64)
    state = torch.randn(1, HEADS, KEYS, VALUES, dtype=torch.float64)
    return {"q": q, "k": F.normalize(k, dim=-1), "v": v, **more, "state": state}


def rate(*shape: int) -> torch.Tensor:
    return torch.rand(1, STEPS, HEADS, *shape, dtype=torch.float64).clamp(0.01)


def low_rank() -> dict[str, torch.Tensor]:
    a, b = (torch.randn(1, STEPS, HEADS, KEYS, dtype=torch.float64) / KEYS**0.5 for _ in range(2))
    return {"a": a / 2, "b": b}


CASES = {
    "linear_attention": lambda: (linear_attention, operands()),
    "head": lambda: (linear_attention, operands(shared=2, g=rate().log())),
    "key": lambda: (linear_attention, operands(g=rate(KEYS).log())),
    "bonus": lambda: (linear_attention, operands(g=rate(KEYS).log(), u=torch.randn(HEADS, KEYS).double())),
    "columns": lambda: (linear_attention, operands(g=rate(KEYS).log(), gv=rate(VALUES).log())),
    "columns and bonus": lambda: (linear_attention, operands(gv=rate(VALUES).log(), u=torch.randn(2, KEYS).double())),
    "delta_rule": lambda: (delta_rule, operands(beta=rate(), g=rate(KEYS).log())),
    "dplr_scan": lambda: (dplr_scan, operands(**low_rank(), g=rate().log())),
}


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("case", CASES)
def test_several_blocks(case, dtype, reverse):
    op, given = CASES[case]()
    laws.truth(op, Sample(given), {"reverse": reverse}, "cpu", dtype)


@pytest.mark.parametrize("op", [linear_attention, delta_rule, dplr_scan])
def test_more_keys_than_the_kernels_hold_room_for(op):
    q, v = torch.randn(1, 3, 1, 513), torch.randn(1, 3, 1, 2)
    more = {"delta_rule": [torch.rand(1, 3, 1)], "dplr_scan": [q / 513, q]}.get(op.name, [])
    with pytest.raises(BackendError, match=r"K=513 is over 512"):
        op(q, q, v, *more, backend="cpu")
    assert torch.equal(op(q, q, v, *more)[0], op(q, q, v, *more, backend="parallel")[0])
    assert op.explain(q[..., :512], q[..., :512], v, *(m[..., :512] for m in more)).splitlines()[1] == "cpu: can run"
