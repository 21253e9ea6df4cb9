"""The kernels of matrix memories where the samples of their ops do not reach: several blocks of columns and of rows."""

import itertools

import pytest
import torch
from torch.nn import functional as F

import laws
from scanl.errors import BackendError
from scanl.ops import delta_rule, dplr_scan, linear_attention
from scanl.ops.registry import OpSample

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


@pytest.mark.parametrize(
    ("case", "dtype", "reverse"),
    [  # each direction in one dtype, by turns; with --all in both
        pytest.param(case, dtype, reverse, marks=[pytest.mark.long] * ((i + single + reverse) % 2))
        for (i, case), (single, dtype), reverse in itertools.product(
            enumerate(CASES), enumerate((torch.float64, torch.float32)), (False, True)
        )
    ],
)
def test_several_blocks(case, dtype, reverse):
    op, given = CASES[case]()
    laws.truth(op, OpSample(given), {"reverse": reverse}, "cpu", dtype)


@pytest.mark.parametrize("op", [linear_attention, delta_rule, dplr_scan])
def test_more_keys_than_the_kernels_hold_room_for(op):
    q, v = torch.randn(1, 3, 1, 513), torch.randn(1, 3, 1, 2)
    more = {"delta_rule": [torch.rand(1, 3, 1)], "dplr_scan": [q / 513, q]}.get(op.name, [])
    with pytest.raises(BackendError, match=r"K=513 is over 512"):
        op(q, q, v, *more, backend="cpu")
    assert torch.equal(op(q, q, v, *more)[0], op(q, q, v, *more, backend="parallel")[0])
    assert op.explain(q[..., :512], q[..., :512], v, *(m[..., :512] for m in more)).splitlines()[1] == "cpu: can run"


# Products over chunks of steps, which both passes take from WIDE keys on: 64 steps a chunk, or 32; 256 columns a block,
# and forwards 576 with at most 256 keys.
def wide(steps: int, values: int, keys: int = 193, **more) -> dict[str, torch.Tensor]:
    q, k = (torch.randn(1, steps, 1, keys, dtype=torch.float64) for _ in range(2))
    v, state = torch.randn(1, steps, HEADS, values).double(), torch.randn(1, HEADS, keys, values).double()
    return {"q": q, "k": F.normalize(k, dim=-1), "v": v, **more, "state": state}


def wide_rate(steps: int) -> torch.Tensor:
    return torch.rand(1, steps, HEADS, dtype=torch.float64).clamp(0.01)


CHUNKED = {
    "none": lambda steps=35: (linear_attention, wide(steps, 260)),
    "constant": lambda steps=35: (linear_attention, wide(steps, 260, g=wide_rate(1)[0, 0].log())),
    "step": lambda steps=70: (linear_attention, wide(steps, 5, g=40 * wide_rate(steps).log())),
    "delta_rule": lambda steps=35: (delta_rule, wide(steps, 17, beta=wide_rate(steps))),
    "narrow": lambda steps=35: (delta_rule, wide(steps, 17, 70, beta=wide_rate(steps))),
    "blocks": lambda steps=32: (
        delta_rule,
        wide(steps, 260, 260, beta=wide_rate(steps), g=wide_rate(steps).log() / 30),
    ),
    "gated": lambda steps=70: (delta_rule, wide(steps, 5, beta=wide_rate(steps), g=40 * wide_rate(steps).log())),
}


@pytest.mark.parametrize(("case", "dtype"), [*((case, torch.float64) for case in CHUNKED), ("gated", torch.float32)])
def test_products_over_chunks(case, dtype):
    op, given = CHUNKED[case]()
    laws.truth(op, OpSample(given), {"reverse": case != "none"}, "cpu", dtype)


def test_products_over_chunks_of_packed_sequences():
    op, given = CHUNKED["gated"]()
    given["state"] = torch.randn(4, HEADS, 193, 5, dtype=torch.float64)
    given["g"][:, ::9] = -torch.inf
    packed = OpSample(given, {"cu_seqlens": torch.tensor([0, 0, 3, 69, 70])})
    laws.truth(op, packed, packed.options, "cpu", torch.float64)


@pytest.mark.parametrize("case", ["step", "gated"])
@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta", "state", "dy"])
def test_what_is_not_finite_stays_in_products_over_chunks(case, name):
    """Earlier steps and the other row are the same to the bit, and it is not lost."""
    op, given = CHUNKED[case](40)
    if name not in (*given, "dy"):
        pytest.skip("linear attention has no beta")
    given = {key: torch.cat([value, value]).float() for key, value in given.items()}
    given["dy"] = torch.ones(2, 40, HEADS, 5)
    spoilt = {key: value.clone() for key, value in given.items()}
    spoilt[name][1, 20 if name != "state" else 0].view(-1)[0] = torch.nan  # in the middle of a tile
    found = []
    for values in (given, spoilt):
        leaves = {key: value.clone().requires_grad_() for key, value in values.items() if key != "dy"}
        y, last = op(**leaves, backend="cpu")
        grads = torch.autograd.grad((y, last), list(leaves.values()), (values["dy"], torch.ones_like(last)))
        found.append([y.detach(), last.detach(), *grads])
    for clean, mine in zip(*found, strict=True):
        assert torch.equal(clean[0], mine[0])
    if name not in ("state", "dy"):
        assert torch.equal(found[0][0][1, :20], found[1][0][1, :20])
        assert not found[1][0][1, 20, 0].isfinite().all()
        assert name == "q" or not found[1][1][1].isfinite().all()
    assert not all(grad[1].isfinite().all() for grad in found[1][2:])


def test_both_forms_of_a_wide_memory_meet():
    """One step more takes the other form: the same outputs but for rounding."""
    op, given = CHUNKED["gated"](17)
    fewer = {key: value if key == "state" else value[:, :16] for key, value in given.items()}
    torch.testing.assert_close(op(**given, backend="cpu")[0][:, :16], op(**fewer, backend="cpu")[0])
