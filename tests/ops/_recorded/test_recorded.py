"""Functions that run as one kernel: against the functions themselves."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.errors import ShapeError
from scanl.ops._recorded import Recorded, Unsupported

torch.manual_seed(0)
A, B, C = torch.randn(3, 4), torch.randn(4, 5), torch.randn(2, 3, 4)
BUFFER = torch.zeros(3, 4)
Z = torch.randn(3, 4, dtype=torch.complex64)


def real(a: Tensor, b: Tensor, c: Tensor, z: Tensor) -> list[Tensor]:
    positive, truth = a.abs() + 0.5, a > 0.1
    return [
        a + 2 * c, a - c[1], a / positive, -a, a * a[:, :1], positive**2.5, positive**-0.5, (a + 1) ** 3, a.exp(),
        positive.log(), torch.log1p(positive), torch.expm1(a), positive.sqrt(), positive.rsqrt(), a.sin(), a.cos(),
        torch.erf(a), a.tanh(), a.sigmoid(), F.silu(a), F.softplus(a), F.logsigmoid(a), F.gelu(a),
        F.gelu(a, approximate="tanh"), F.relu(a), a.clamp(-0.5, 0.5), a.clamp(min=0.1), torch.maximum(a, c[0]),
        torch.where(truth, a, 0.0), torch.where(truth & ~(a > 1), a, c[1]), a.masked_fill(truth, 3.0), truth.to(a),
        (a.isnan() | (a == a)).to(a), a.sum(), a.sum(0), c.sum((0, 2)), c.mean(-1, keepdim=True), c.amax(1), c.amin(),
        a.sum(1, keepdim=True) * torch.ones(3, 7), a @ b, b.T @ a.T, a[:, :1] @ b[:1], F.linear(c, a, c[0, :, 0]),
        c @ b, torch.bmm(c, c.mT), torch.cat([a, c[0]], 1), torch.stack([a, c[1]], 1), a[1], a[:, 1:3],
        a.T.reshape(2, 6), F.pad(a, (1, 2)), a.cumsum(1), a.softmax(-1), a.log_softmax(0), F.layer_norm(a, (4,)),
        (2 * a[:, :3]).T + 1, torch.zeros_like(a), torch.full((2, 2), 3.0), torch.arange(3.0) * a[:, 0],
        c.flip(0, 2), torch.eye(4) + a[:1], 2.5**a, positive**a, F.elu(a), torch.exp2(a),
    ]  # fmt: skip


def complex_(a: Tensor, b: Tensor, c: Tensor, z: Tensor) -> list[Tensor]:
    return [
        z + a, z - z[0], z * z[:, :1], z * a, z / (z + 3), 1 / (z + 3), -z, z.exp(), z.abs(), z.conj() * z, z.sgn(),
        torch.polar(a.abs(), a), torch.complex(a, c[0]), z.real * z.imag, torch.view_as_real(z).sum(-1), z.sum(0),
        z.T, torch.where(a > 0, z, 0.0), 2j * z, z.angle(), z**2, torch.stack([z, z]),
        torch.view_as_complex(c.unflatten(-1, (2, 2))),
    ]  # fmt: skip


def gradients(a: Tensor, b: Tensor, c: Tensor, z: Tensor) -> tuple[Tensor, ...]:
    a, b, c, z = (each.detach().requires_grad_() for each in (a, b, c, z))
    y = F.silu(F.linear(c, a)) @ F.layer_norm(b[:3], (5,)).tanh()
    more = (z.exp() * a).abs().sum() + torch.polar(a.abs(), a).real.sum() + F.gelu(a[:, 1:]).square().mean()
    classes = F.cross_entropy(a, torch.tensor([1, 0, 3])) + F.softplus(c[0, 1]).sum() + a.log_softmax(0)[1, 2]
    return torch.autograd.grad(y.square().sum() + more + classes, (a, b, c, z))


def double(x: Tensor) -> Tensor:
    return x.to(torch.complex128 if x.is_complex() else torch.float64)


@pytest.mark.parametrize("function", [real, complex_, gradients])
def test_a_kernel_equals_its_function(function: Callable[..., Any]) -> None:
    operands = A, B, C, Z
    expected, exact = function(*operands), function(*map(double, operands))
    for at, (y, like, true) in enumerate(zip(Recorded(function, *operands)(*operands), expected, exact, strict=True)):
        assert (y.shape, y.dtype) == (like.shape, like.dtype), at
        allowed = 2 * ((like - true).abs().max() + torch.finfo(torch.float32).eps * true.abs().max())
        assert (y - true).abs().max() <= allowed, at


def test_a_buffer_that_is_read_before_it_is_written_has_its_old_numbers() -> None:
    buffer = torch.ones(3, 4)

    def function(x: Tensor) -> Tensor:
        y = x + 1
        old = 2 * buffer
        buffer.copy_(y)
        return old

    kernel = Recorded(function, A)
    torch.testing.assert_close(kernel(A), torch.full((3, 4), 2.0))
    torch.testing.assert_close(kernel(A), 2 * (A + 1))


def test_doubles_whole_numbers_and_truths() -> None:
    """Operands and results of other dtypes than float32, also beside it."""
    wide, index = B.double(), torch.tensor([[2, 0], [1, 2]])

    def function(a: Tensor, b: Tensor, i: Tensor, t: Tensor) -> list[Tensor]:
        return [
            b.exp() @ b.mT, (a.sum() + b.sum(0)).to(torch.float32), F.embedding(i, a), a.gather(1, i), i + 1,
            torch.where(t, a, -a), t.any(1), t.all(), (a > 0) & t, t.sum(0), a.amin(1).double(), b.log_softmax(-1),
            torch.arange(1, 7, 2, dtype=b.dtype) * b[0, :3],
        ]  # fmt: skip

    operands = A, wide, index, A > 0.3
    for at, (y, expected) in enumerate(zip(Recorded(function, *operands)(*operands), function(*operands), strict=True)):
        assert (y.shape, y.dtype) == (expected.shape, expected.dtype), at
        torch.testing.assert_close(y, expected)


def test_products_by_weights_for_tiles_and_what_is_left() -> None:
    weight, bias, x = torch.randn(35, 40), torch.randn(35), torch.randn(7, 40)

    def function(x: Tensor) -> list[Tensor]:
        return [F.linear(x[:rows], weight, bias) for rows in (1, 4, 7)]

    for y, expected in zip(Recorded(function, x)(x), function(x), strict=True):
        torch.testing.assert_close(y, expected)


def test_rows_run_in_parts() -> None:
    """Also where the last part has rows in common with the one before it."""
    kernel = Recorded(lambda x, s: (x.sum(1), s + x[:, :1]), torch.zeros(2, 4), torch.zeros(2, 3), by_rows=True)
    for rows in (2, 4, 5):
        x, s = torch.randn(rows, 4), torch.randn(rows, 3)
        for y, expected in zip(kernel(x, s), (x.sum(1), s + x[:, :1]), strict=True):
            torch.testing.assert_close(y, expected)
    with pytest.raises(Unsupported, match=r"a tensor \(4,\) without a row for each of 2"):
        Recorded(lambda x: x.sum(0), torch.zeros(2, 4), by_rows=True)


def test_numbers_that_are_not_finite_pass_as_in_torch() -> None:
    x = torch.tensor([[torch.nan, torch.inf, -torch.inf, 1.0]])

    def function(x: Tensor) -> list[Tensor]:
        return [x * 2, x.amax(1), x.amin(1), x.clamp(min=0.0), x.isnan(), x.isfinite(), F.relu(x), x.sum(), x.sigmoid()]

    for y, expected in zip(Recorded(function, x)(x), function(x), strict=True):
        torch.testing.assert_close(y, expected, equal_nan=True)


class Pair(NamedTuple):
    first: Tensor
    others: dict[str, Any]


def test_parameters_are_read_anew_and_buffers_are_written() -> None:
    linear, seen = nn.Linear(4, 2), torch.zeros(3, 2)

    def function(x: Tensor) -> Pair:
        with torch.no_grad():
            y = linear(x)
            seen.copy_(y)
            return Pair(y + 1, {"sum": y.sum(), "none": None})

    kernel = Recorded(function, A)
    assert seen.count_nonzero() == 0
    before = kernel(A)
    with torch.no_grad():
        linear.weight.mul_(2)
    after = kernel(A)
    expected = linear(A)
    torch.testing.assert_close(after.first, expected + 1)
    torch.testing.assert_close(seen, expected)
    torch.testing.assert_close(after.others["sum"], expected.sum())
    assert after.others["none"] is None
    assert not torch.equal(before.first, after.first)  # the results of a call stay as they are


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: x[x > 0], "index"),
        (lambda x: x * x.sum().item(), "depend on the numbers"),
        (lambda x: torch.rand_like(x), "rand_like"),
        (lambda x: torch.linalg.inv(x[:, :3]), "inv"),
        (lambda x: x.half(), "float16"),
        (lambda x: BUFFER.add_(x), "add_.Tensor of a tensor that is no operand"),
        (lambda x: "text", "a result of str"),
    ],
)
def test_a_function_that_no_kernel_runs_is_refused(function: Callable[[Tensor], Any], message: str) -> None:
    with pytest.raises(Unsupported, match=message):
        Recorded(function, A)


def test_other_operands_are_refused() -> None:
    kernel = Recorded(lambda x: x + 1, A)
    with pytest.raises(ShapeError, match=r"an operand is torch.float32 \(4, 5\), expected torch.float32 \(3, 4\)"):
        kernel(B)
