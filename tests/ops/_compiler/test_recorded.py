"""Functions that run as one kernel: against the functions themselves."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.errors import ShapeError
from scanl.ops._compiler.recorded import RecordedFunction
from scanl.ops._compiler.rules import UnsupportedOperation

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


def positions(a: Tensor, b: Tensor, c: Tensor, z: Tensor) -> list[Tensor]:
    """Axes that count from the last, and arguments that are no defaults."""
    return [
        F.pad(a, (1, 2), value=3.0), F.pad(a, (-1, 1)),
        F.pad(c, (0, 1, 2, 0, 1, 1), value=-0.5), F.pad(a > 0, (1, 0), value=True).to(a),
        F.pad(z, (2, 0), value=1.0), a.sum(-1), c.amax((-1, 0)), c.amin(-2, keepdim=True), c.mean((0, -1)),
        a.softmax(-2), a.cumsum(-2), c.flip(-1, 0), torch.cat([a, a[:, :1]], -1), torch.stack([a, -a], -1),
        torch.arange(7, 1, -2) * a[0, :3], a[-1], a[:, -2:], a.var(1), a.var(0, correction=0), c.std((0, 2)),
        a.var(1, correction=2), torch.var(a), torch.ops.aten.var.correction(a, [1]),
        a.gather(-1, torch.ones(3, 2, dtype=torch.int64)), a.scatter(-1, torch.ones(3, 1, dtype=torch.int64), 2.0),
        torch.sub(a, c, alpha=0.5), 2 - a, torch.full((2, 2), 1.0 + 2.0j) * z[:2, :2], torch.complex(a.relu(), a).sgn(),
        torch.complex(a, (a - 0.5).relu()).sgn(), torch.complex(a.relu(), a.relu()).sgn(), F.softshrink(a, 0.3),
        F.hardshrink(a.clamp(-0.5, 0.5), 0.5),
    ]  # fmt: skip


def whole(a: Tensor, b: Tensor, c: Tensor, z: Tensor) -> list[Tensor]:
    """Whole numbers and parts of numbers, and what is read at indices."""
    ties, count = (3 * c).round(), (10 * a).long()
    return [
        a.floor(), a.ceil(), (3 * a).trunc(), ties, 3 * a % 0.7, a.remainder(c), a.fmod(0.3), -a % -0.7, count % 3,
        count // 3, torch.div(a, 0.3, rounding_mode="floor"), torch.div(a, 0.3, rounding_mode="trunc"),
        ties.argmax(1), ties.argmin(-1, keepdim=True), a.roll(1, 1), a.roll((1, -2), (0, 1)), a.roll(2),
        a.repeat(2, 1, 3),
        c[:, torch.tensor([2, -1, 0, 0])], c[torch.tensor([[1], [0]]), torch.tensor([0, -2])], b[count[:, 0] % 4],
        c.index_select(2, torch.tensor([3, 1])), torch.triu_indices(3, 3)[0] * a[0, 0],
        (2 * a).bool().to(a) + a,
    ]  # fmt: skip


def of_slices(a: Tensor, b: Tensor, c: Tensor, z: Tensor) -> tuple[Tensor, ...]:
    """Gradients of slices whose ends count from the last, or are beyond the axis."""
    a, c, z = (each.detach().requires_grad_() for each in (a, c, z))
    of_a = a[:, -2:], a[:, -9:], a[-9:2], a[:, -9:-1], a[-2:, 1::2], a[:, :-1], a[:, 9:], a[-1], a[:, -3], a[0:9:2]
    sliced = [*of_a, c[..., -3::2], c[:, -2], c.select(-1, -4), z[-1:], z[:, -2].conj()]
    weighted = [(y * torch.arange(1.0, 1 + y.numel()).view(y.shape)).sum() for y in sliced]
    return torch.autograd.grad(torch.stack([total.real for total in weighted]).sum(), (a, c, z))


def gradients(a: Tensor, b: Tensor, c: Tensor, z: Tensor) -> tuple[Tensor, ...]:
    a, b, c, z = (each.detach().requires_grad_() for each in (a, b, c, z))
    y = F.silu(F.linear(c, a)) @ F.layer_norm(b[:3], (5,)).tanh()
    more = (z.exp() * a).abs().sum() + torch.polar(a.abs(), a).real.sum() + F.gelu(a[:, 1:]).square().mean()
    classes = F.cross_entropy(a, torch.tensor([1, 0, 3])) + F.softplus(c[0, 1]).sum() + a.log_softmax(0)[1, 2]
    return torch.autograd.grad(y.square().sum() + more + classes, (a, b, c, z))


def double(x: Tensor) -> Tensor:
    return x.to(torch.complex128 if x.is_complex() else torch.float64)


@pytest.mark.parametrize("function", [real, complex_, gradients, positions, whole, of_slices])
def test_a_kernel_equals_its_function(function: Callable[..., Any]) -> None:
    operands = A, B, C, Z
    expected, exact = function(*operands), function(*map(double, operands))
    for at, (y, like, true) in enumerate(
        zip(RecordedFunction(function, *operands)(*operands), expected, exact, strict=True)
    ):
        assert (y.shape, y.dtype) == (like.shape, like.dtype), at
        allowed = 2 * ((like - true).abs().max() + torch.finfo(torch.float32).eps * true.abs().max())
        assert (y - true).abs().max() <= allowed, at


@pytest.mark.parametrize("view", [lambda buffer: buffer, lambda buffer: buffer.view(3, 4)])
def test_a_buffer_that_is_read_before_it_is_written_has_its_old_numbers(view: Callable[[Tensor], Tensor]) -> None:
    buffer = torch.ones(3, 4)
    written = view(buffer)

    def function(x: Tensor) -> Tensor:
        y = x + 1
        old = 2 * buffer
        written.copy_(y)
        return old

    kernel = RecordedFunction(function, A)
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
    for at, (y, expected) in enumerate(
        zip(RecordedFunction(function, *operands)(*operands), function(*operands), strict=True)
    ):
        assert (y.shape, y.dtype) == (expected.shape, expected.dtype), at
        torch.testing.assert_close(y, expected)


def test_a_scale_of_half_precision_is_read_anew() -> None:
    scale = torch.tensor(1.5, dtype=torch.bfloat16)
    kernel = RecordedFunction(lambda x: x * scale.float(), A)
    scale.fill_(3)
    assert torch.equal(kernel(A), 3 * A)


def test_rows_of_whole_numbers() -> None:
    table, scale = torch.tensor([[-128, 3], [127, -1]], dtype=torch.int8), torch.tensor([[0.5], [2.0]])

    def rows(index: Tensor) -> Tensor:
        return F.embedding(index, table) * F.embedding(index, scale)

    index = torch.tensor([1, 0, 1])
    assert torch.equal(RecordedFunction(rows, index)(index), rows(index))
    with pytest.raises(UnsupportedOperation, match="a result of torch"):
        RecordedFunction(lambda index: F.embedding(index, table), index)


def test_a_number_that_becomes_float32_is_rounded() -> None:
    """Also where a later loop alone reads it."""
    x = torch.randn(5, dtype=torch.float64)

    def function(x: Tensor) -> Tensor:
        return (x / 3).float().double() - x / 3

    assert torch.equal(RecordedFunction(function, x)(x), function(x))
    assert function(x).any()


def test_products_by_weights_for_tiles_and_what_is_left() -> None:
    weight, bias, x = torch.randn(35, 40), torch.randn(35), torch.randn(7, 40)

    def function(x: Tensor) -> list[Tensor]:
        return [F.linear(x[:rows], weight, bias) for rows in (1, 4, 7)]

    for y, expected in zip(RecordedFunction(function, x)(x), function(x), strict=True):
        torch.testing.assert_close(y, expected)


def test_rows_run_in_parts() -> None:
    """Also where the last part has rows in common with the one before it."""
    kernel = RecordedFunction(lambda x, s: (x.sum(1), s + x[:, :1]), torch.zeros(2, 4), torch.zeros(2, 3), by_rows=True)
    for rows in (2, 4, 5):
        x, s = torch.randn(rows, 4), torch.randn(rows, 3)
        for y, expected in zip(kernel(x, s), (x.sum(1), s + x[:, :1]), strict=True):
            torch.testing.assert_close(y, expected)
    with pytest.raises(UnsupportedOperation, match=r"a tensor \(4,\) without a row for each of 2"):
        RecordedFunction(lambda x: x.sum(0), torch.zeros(2, 4), by_rows=True)


def test_numbers_that_are_not_finite_pass_as_in_torch() -> None:
    """Each of them is the first of a row, and the last."""
    one = torch.tensor([torch.nan, torch.inf, -torch.inf, 1.0])
    x = torch.stack([*(one.roll(n) for n in range(4)), one.nan_to_num(2.0), one.nan_to_num(2.0).flip(0)])

    def function(x: Tensor) -> list[Tensor]:
        return [
            x * 2, x.amax(1), x.amin(1), x.clamp(min=0.0), x.isnan(), x.isfinite(), F.relu(x), x.sum(), x.sigmoid(),
            x.isinf(), x[:4].amax((0, 1)), x[:, 1:].amin(0), torch.maximum(x, x.flip(1)), torch.minimum(x, x.flip(1)),
        ]  # fmt: skip

    for y, expected in zip(RecordedFunction(function, x)(x), function(x), strict=True):
        torch.testing.assert_close(y, expected, equal_nan=True)


def test_parts_of_larger_memory_are_read_where_they_lie() -> None:
    """Of tensors that are no operands, and of operands."""
    memory, wide = torch.randn(9, 7), torch.randn(8, dtype=torch.float64)[3::2]
    part, turned, z = memory[4:, 2:6], memory[1:4, :3].T, torch.randn(7, dtype=torch.complex64)[2:5]

    def function(x: Tensor) -> list[Tensor]:
        return [x @ part.T, x[:, :3] @ turned, wide * 2, z * 2, part.sum(0)]

    kernel = RecordedFunction(function, A)
    for x in (A, A.T.contiguous().T, torch.randn(3, 9)[:, 1::2]):
        for y, expected in zip(kernel(x), function(x), strict=True):
            torch.testing.assert_close(y, expected)


@pytest.mark.parametrize("decoupled", [False, True])
def test_a_fused_step_of_adam_is_its_equations(decoupled: bool) -> None:
    values = [A.clone(), C[0].clone(), C[1].square()]
    parameter, mean, square, count = (*(value.clone() for value in values), torch.tensor(3.0))
    options = {"lr": 0.1, "beta1": 0.8, "beta2": 0.9, "weight_decay": 0.2, "eps": 0.3}
    fused = torch._fused_adamw_ if decoupled else torch._fused_adam_

    def step(gradient: Tensor) -> Tensor:
        torch._foreach_add_([count], 1)
        fused([parameter], [gradient], [mean], [square], [], [count], amsgrad=False, maximize=False, **options)
        return parameter + 0

    kernel = RecordedFunction(step, A)
    p, m, v = (value.double() for value in values)
    for t in (4, 5):
        gradient = (A + t).double()
        result = kernel(A + t)
        p, gradient = ((1 - 0.1 * 0.2) * p, gradient) if decoupled else (p, gradient + 0.2 * p)
        m, v = 0.8 * m + 0.2 * gradient, 0.9 * v + 0.1 * gradient**2
        p = p - 0.1 * (m / (1 - 0.8**t)) / ((v / (1 - 0.9**t)).sqrt() + 0.3)
        for mine, true in zip((result, parameter, mean, square), (p, p, m, v), strict=True):
            torch.testing.assert_close(mine, true.float())
    assert count == 5


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

    kernel = RecordedFunction(function, A)
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
        (lambda x: torch.linalg.inv(x[:, :3]), "depend on the numbers: aten._linalg"),
        (lambda x: x.half(), "float16"),
        (lambda x: BUFFER.add_(x), "add_.Tensor of a tensor that is no operand"),
        (lambda x: "text", "a result of str"),
        (lambda x: F.elu(x, 0.5), "elu"),
        (F.selu, "elu"),
        (lambda x: torch.addmm(x, x, x.T @ x, beta=2.0), "addmm with factors"),
        (lambda x: torch.addmm(x, x, x.T @ x, alpha=2.0), "addmm with factors"),
        (lambda x: torch.add(Z, x, alpha=2.0), "add of complex numbers with a factor"),
        (lambda x: x.scatter(1, (x > 9).long(), 2.0, reduce="add"), "scatter with a reduction"),
    ],
)
def test_a_function_that_no_kernel_runs_is_refused(function: Callable[[Tensor], Any], message: str) -> None:
    with pytest.raises(UnsupportedOperation, match=message):
        RecordedFunction(function, A)


def test_other_operands_are_refused() -> None:
    kernel = RecordedFunction(lambda x: x + 1, A)
    with pytest.raises(ShapeError, match=r"an operand is torch.float32 \(4, 5\), expected torch.float32 \(3, 4\)"):
        kernel(B)
