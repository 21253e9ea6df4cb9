"""Compiled loops in the place of plain forms: the same values and gradients of every order, and where they run."""

import math

import pytest
import torch
from torch.autograd import forward_ad
from torch.nn import functional as F

import laws
from scanl.ops import backend
from scanl.ops._cpu import gated as gated_kernels
from scanl.ops._cpu import rms_norm as rms_norm_kernels
from scanl.ops.fused.gated import POLYNOMIALS, gated, plain
from scanl.ops.fused.rglru_gates import plain as plain_gates
from scanl.ops.fused.rglru_gates import rglru_gates
from scanl.ops.fused.rms_norm import rms_norm

COVERS = ["ops/fused/gated", "ops/fused/rglru_gates", "ops/fused/rms_norm"]


def torch_norm(x, weight, eps):
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def from_first(x):
    """1 at the first step, 0 at the others."""
    return (torch.arange(x.shape[1]) == 0).to(x.dtype)[:, None].expand(*x.shape[:2], 1)


def rglru(x, i_gate, r_gate, rate):
    return rglru_gates(x, i_gate, r_gate, -rate.square(), from_first(x))


def rglru_plain(x, i_gate, r_gate, rate):
    return plain_gates(x, i_gate, r_gate, -rate.square(), from_first(x))


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# Past a unit of work and not a whole number of them; more axes; a size below which torch's own function runs
NORMS = [((3, 97, 65), True), ((2, 700, 3, 4), False), ((4, 40, 128), True), ((2, 3, 4), True)]
GATES = [((5, 3, 1100), "silu"), ((40_000,), "gelu_tanh"), ((2, 3), "gelu_tanh")]
SCANS = [(3, 131, 65), (2, 3, 4)]
CASES = [
    *((rms_norm, torch_norm, (2 * draw(*shape), draw(shape[-1], seed=1) if weighted else None, 1e-3))
      for shape, weighted in NORMS),
    (rms_norm, torch_norm, (1e-3 * draw(2, 90, 100), None, None)),
    *((rglru, rglru_plain, (draw(*shape), draw(*shape, seed=1), 2 * draw(*shape, seed=3), draw(shape[-1], seed=4)))
      for shape in SCANS),
    *((gated, plain, (3 * draw(*shape), draw(*shape, seed=1), activation)) for shape, activation in GATES),
]  # fmt: skip


def results(run, given, dtype, cotangent=lambda value: value):
    """The value, and the gradients by every tensor."""
    given = [each.to(dtype).requires_grad_() if isinstance(each, torch.Tensor) else each for each in given]
    found = run(*given)
    found = found if isinstance(found, tuple) else (found,)
    wanted = [each for each in given if isinstance(each, torch.Tensor)]
    by = [cotangent(draw(*y.shape, seed=5 + n).to(dtype)) for n, y in enumerate(found)]
    return [*(y.detach() for y in found), *torch.autograd.grad(found, wanted, by)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", range(len(CASES)))
def test_it_is_the_plain_form(case, dtype):
    run, reference, given = CASES[case]
    exact, own = (results(reference, given, kind) for kind in (torch.float64, torch.float32))
    for found, rounded, true in zip(results(run, given, dtype), own, exact, strict=True):
        assert found.dtype == dtype
        rounding = (rounded - true).abs().max() / (torch.finfo(torch.float32).eps * true.abs().max())
        laws.close(found, true, rounding.item(), "a result")


@pytest.mark.parametrize("case", [0, 1, 5, 7, 8])
def test_strided_operands(case):
    run, reference, given = CASES[case]
    apart = [
        torch.stack([each, each], -1)[..., 0] if isinstance(each, torch.Tensor) and each.ndim > 1 else each
        for each in given
    ]
    for found, expected in zip(
        results(run, apart, torch.float64), results(reference, given, torch.float64), strict=True
    ):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("case", [0, 5, 7, 8])
def test_a_negation_that_torch_has_put_off(case):
    """Of operands, and of the gradients by the results."""
    run, reference, given = CASES[case]

    def lazy(value):
        return torch._neg_view(-value) if isinstance(value, torch.Tensor) else value

    for found, expected in zip(
        results(run, [lazy(each) for each in given], torch.float64, lazy),
        results(reference, given, torch.float64),
        strict=True,
    ):
        torch.testing.assert_close(found, expected)


def test_numbers_without_bound():
    """As torch's functions have them."""
    for value in (math.inf, -math.inf, math.nan, 1e30, -1e30, 1e200, -1e200):
        a, b = torch.full((1 << 14,), value, dtype=torch.float64), torch.ones(1 << 14, dtype=torch.float64)
        for activation in POLYNOMIALS:
            torch.testing.assert_close(gated(a, b, activation), plain(a, b, activation), equal_nan=True)
        x = torch.ones(1 << 7, 1 << 7, dtype=torch.float64)
        x[3, 5] = value
        torch.testing.assert_close(rms_norm(x, None, 1e-6), torch_norm(x, None, 1e-6), equal_nan=True)


def test_operands_of_different_dtypes():
    """They are promoted, as in torch; the loops would read one as the other."""
    a, b = torch.randn(1 << 7, 1 << 7), torch.randn(1 << 7, 1 << 7, dtype=torch.float64)
    torch.testing.assert_close(gated(a, b), plain(a, b, "silu"))
    x, i, r = torch.randn(3, 1, 1 << 7, 1 << 7)
    decay, least = -torch.rand(1 << 7, dtype=torch.float64), x.new_zeros(1, 1 << 7, 1)
    for found, expected in zip(rglru_gates(x, i, r, decay, least), plain_gates(x, i, r, decay, least), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr("scanl.ops._frame.fused.MIN_NUMBERS", 1)


@pytest.mark.parametrize(("run", "given"), [
    (rms_norm, (draw(2, 3), draw(3), 1e-3)), (rms_norm, (draw(2, 3), None, 1e-3)),
    (gated, (draw(2, 3), draw(2, 3, seed=1), "silu")), (gated, (draw(4), draw(4, seed=1), "gelu_tanh")),
    (rglru, (draw(1, 2, 2), draw(1, 2, 2, seed=1), draw(1, 2, 2, seed=2), 1 + draw(2, seed=3).abs())),
])  # fmt: skip
def test_derivatives_of_second_order(small, run, given):
    leaves = [each.requires_grad_() for each in given if isinstance(each, torch.Tensor)]

    def call(*tensors):
        rest = iter(tensors)
        return run(*(next(rest) if isinstance(each, torch.Tensor) else each for each in given))

    results = call(*leaves)
    total = torch.stack([(y * y).sum() for y in (results if isinstance(results, tuple) else (results,))]).sum()
    once, again = (torch.autograd.grad(total, leaves, retain_graph=True, create_graph=more) for more in (False, True))
    torch.testing.assert_close(once, again)
    assert torch.autograd.gradcheck(call, leaves)
    assert torch.autograd.gradgradcheck(call, leaves)


def test_where_the_loops_run(monkeypatch):
    """They run on large tensors of a CPU; not where plain torch is asked for, compiled, transformed or traced."""
    seen = []
    for kernels in (rms_norm_kernels, gated_kernels):
        forward = kernels.forward
        monkeypatch.setattr(kernels, "forward", lambda *args, forward=forward: seen.append(1) or forward(*args))
    x = torch.randn(3, 50, 128)

    def run(x):
        return gated(rms_norm(x, x.new_ones(128), 1e-6), x)

    expected = run(x)
    assert len(seen) == 2
    with backend("parallel", "reference"):
        torch.testing.assert_close(run(x), expected)
    torch.testing.assert_close(torch.func.vmap(run)(x[:, None])[:, 0], expected)
    with forward_ad.dual_level():
        torch.testing.assert_close(run(x), expected)
    run(x.bfloat16())
    run(x.to("meta"))
    run(x[:1, :2])
    assert len(seen) == 2


def test_what_is_no_activation():
    with pytest.raises(ValueError, match="gated: unknown activation 'selu'"):
        gated(torch.ones(2), torch.ones(2), "selu")
