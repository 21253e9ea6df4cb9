r"""Convolution kernels of linear state-space systems, and their discretisation.

.. math:: \dot s = A s + B x,\; y = C s \quad\Rightarrow\quad
    s_t = \bar A s_{t-1} + \bar B x_t,\; y_t = C s_t = \sum_j K_j x_{t-j}, \quad K_j = C \bar A^j \bar B

Sources: Gu, Goel and Ré, "Efficiently Modeling Long Sequences with Structured State Spaces" (S4), arXiv:2111.00396,
eq. (3) to (5) and algorithm 1; Gu, Gupta, Goel and Ré, "On the Parameterization and Initialization of Diagonal State
Space Models" (S4D), arXiv:2206.11893, section 3. Differs: C is the system's own; S4 trains C̃, truncated, in its place.

Conjugate pairs. A complex A stands for a real system. One eigenvalue of each pair is given, the other is implied, and
the pair contributes 2 Re(...), as in both papers' programs. If you pass every eigenvalue, or if a model is defined by
Re(...) alone, halve C. A real A is used as it is.

Tensors of size D × N and all powers are computed in double, because the error of an angle grows with the power.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from scanl.errors import ConfigError, ShapeError, unknown
from scanl.ops._frame.context import exactly, over, times
from scanl.ops._frame.dispatch import in_forward_mode, transforming
from scanl.ops._frame.fused import differentiable

DISCRETIZATIONS = ("zoh", "bilinear", "dirac")
TERMS = 19  # of a series in |z| < 1: 1/20! is below the rounding of a double
VECTOR, STEP, LOW_RANK = ("N", "D N"), ("", "D", "D N"), ("N", "D N", "R D N")


def discretize(A: Tensor, B: Tensor, dt: Tensor, method: str = "zoh") -> tuple[Tensor, Tensor]:
    r"""Discretise diagonal systems: return (Ā, B̄) of the recurrence s_t = Ā s_{t-1} + B̄ x_t.

    A: continuous-time eigenvalues, (N,) or (D, N), real or complex, Re A <= 0.   B: input weights that broadcast
    against A, real if A is.   dt: step size Δ > 0, in A's unit of time: (), (D,) for one per channel, or (D, N).
    method: "zoh" holds the input over the step: Ā = e^{ΔA}, B̄ = (e^{ΔA} - 1)/A B, also exact at A = 0;
    "bilinear": Ā = (1 + ΔA/2)/(1 - ΔA/2), B̄ = Δ/(1 - ΔA/2) B;
    "dirac" takes the input for an impulse at the end of the step: Ā = e^{ΔA}, B̄ = B.

    Returns Ā and B̄ in the dtype of the arguments, float32 or wider. With conjugate pairs, y_t = 2 Re(Σ_n C_n s_{t,n}).
    Raises ConfigError for an unknown method, ShapeError for shapes that do not fit.

    >>> a, b = discretize(torch.tensor([-2.0]), torch.tensor([1.0]), torch.tensor(0.5), "bilinear")
    >>> a.tolist(), b.tolist()  # (1 - .5)/(1 + .5); .5/1.5
    ([0.3333333432674408], [0.3333333432674408])
    """
    _check_method("discretize", "method", method)
    _check_system("discretize", {"A": (A, VECTOR), "B": (B, VECTOR), "dt": (dt, STEP)})
    a, b = _discretize(A, B, dt, method)
    dtype = _out(A, dt)
    return a.to(dtype), b.to(torch.promote_types(dtype, B.dtype))


def ssm_kernel_diagonal(
    A: Tensor, B: Tensor, C: Tensor, dt: Tensor, length: int, *, discretization: str = "zoh"
) -> Tensor:
    r"""Return K_j = Σ_n C_n Ā_n^j B̄_n for j < length, or twice its real part if A is complex: (D, length), real.

    A: eigenvalues, (N,) or (D, N), real or complex (one of each conjugate pair).   B, C: input and output weights that
    broadcast to (D, N), real if A is.   dt: step size, (), (D,) or (D, N).   discretization: "zoh", "bilinear" or
    "dirac", as in `discretize`.   Returns the real dtype of the arguments, float32 or wider.

    The kernel is built without a table of N × length powers. With j = i b + l, the powers Ā^{ib} and Ā^l are two tables
    of about √length columns. One matrix product joins them, in 4 D N length multiply-adds for complex A.
    Raises ConfigError for an unknown discretization, ShapeError for shapes that do not fit.

    >>> A, one = torch.tensor([-2.0]), torch.tensor([1.0])
    >>> K = ssm_kernel_diagonal(A, one, 3 * one, torch.tensor([0.5]), 3, discretization="bilinear")
    >>> [round(v, 4) for v in K[0].tolist()]  # Ā = B̄ = 1/3: 3/3, 3/9, 3/27
    [1.0, 0.3333, 0.1111]
    """
    _check_method("ssm_kernel_diagonal", "discretization", discretization)
    arguments = {"A": (A, VECTOR), "B": (B, VECTOR), "C": (C, VECTOR), "dt": (dt, STEP)}
    _check_system("ssm_kernel_diagonal", arguments, length)
    a, b = _discretize(A, B, dt, discretization)
    weights = b * C.to(b.dtype) * (2 if A.is_complex() else 1)
    return _sum_of_powers(weights, a, length, _real_out(A, B, C, dt))


def sum_of_powers(weights: Tensor, a: Tensor, length: int) -> Tensor:
    """Return Re Σ_n w_n a_n^j for j < length: (D, length), the kernel of a discrete-time system.

    weights: w, (N,) or (D, N), real if a is.   a: multiplier per step, (N,) or (D, N), real or complex. 0^0 is 1.
    The powers of an a of shape (N,) are computed once for all channels. The method is as in `ssm_kernel_diagonal`, in
    double.

    >>> sum_of_powers(torch.tensor([2.0, 1.0]), torch.tensor([0.5, 0.0]), 3).tolist()  # 2 + 1; 1; .5
    [[3.0, 1.0, 0.5]]
    """
    _check_system("sum_of_powers", {"a": (a, VECTOR), "weights": (weights, VECTOR)}, length)
    return _sum_of_powers(_wide(weights), _wide(a), length, _real_out(weights, a))


def ssm_kernel_dplr(
    Lambda: Tensor, P: Tensor, B: Tensor, C: Tensor, dt: Tensor, length: int, *, Q: Tensor | None = None
) -> Tensor:
    r"""Return S4's kernel K_j = C Ā^j B̄, j < length, for A = diag(Λ) - P Q* and the bilinear rule: (D, length), real.

    Lambda: Λ, (N,) or (D, N), Re Λ < 0, real, or complex with one of each conjugate pair.   B, C: (N,) or (D, N), C not
    conjugated.   P, Q: the low-rank part, (N,), (D, N), or (R, D, N) for rank R; Q is P when None.   dt: () or (D,).
    With conjugate pairs, A acts on the doubled state: diag(Λ, Λ̄) - (P, P̄)(Q, Q̄)*. B and C are doubled likewise.

    The generating function Σ_j K_j ω^j at the roots of unity is C̃ (I - ω Ā)^{-1} B̄, where C̃ = C (I - Ā^length) cuts
    the sum at length. Let ρ(x, y) = Σ_n x_n y_n Δ/((1 - ω) - (1 + ω) ΔΛ_n/2), a Cauchy product that is finite at
    ω = -1, and h = (1 + ω)/2. The Woodbury identity gives ρ(C̃, B) - h ρ(C̃, P) (1 + h ρ(Q*, P))^{-1} ρ(Q*, B), and an
    inverse FFT of that gives the kernel.
    The cost is O(D N length), plus O(D N³ log length) for C̃. The backward pass stores D N length complex numbers.
    Raises ShapeError for shapes that do not fit.

    >>> one = torch.tensor([1.0])
    >>> K = ssm_kernel_dplr(-one, one, one, 3 * one, torch.tensor([0.5]), 3)  # A = -1 - 1·1 = -2: as above
    >>> [round(v, 4) for v in K[0].tolist()]
    [1.0, 0.3333, 0.1111]
    """
    Q = P if Q is None else Q
    arguments = {"Lambda": (Lambda, VECTOR), "B": (B, VECTOR), "C": (C, VECTOR), "dt": (dt, STEP[:2])}
    _check_system("ssm_kernel_dplr", {**arguments, "P": (P, LOW_RANK), "Q": (Q, LOW_RANK)}, length)
    dtype = _real_out(Lambda, P, B, C, dt)
    lam, p, q, b, c, step = _doubled(Lambda, P, Q, B, C, dt)
    if length == 0:
        return lam.new_zeros(lam.shape[0], 0, dtype=dtype)
    tilde = c - _times_power(c, _bilinear(lam, p, q, step), length)
    lhs = torch.cat([tilde[None], q.conj()]).movedim(0, 1)
    rhs = torch.cat([b[None], p]).movedim(0, 1)
    pairs = lhs[:, :, None] * rhs[:, None]  # (D, 1+R, 1+R, N)
    pairs = pairs.flatten(1, 2).to(torch.complex128)
    angles = torch.arange(length // 2 + 1, device=lam.device, dtype=torch.float64) * (-2 * math.pi / length)
    spectrum = []
    # Process the frequencies in slices, to bound the table of Cauchy terms, of size D × N × slice.
    for some in angles.split(max(1, 2**21 // max(1, lam.numel()))):
        omega = torch.polar(torch.ones_like(some), some)
        h = (1 + omega) / 2
        terms = step[:, None, None] / ((1 - omega) - h * (step[:, None] * lam)[..., None])
        rho = (pairs @ terms).unflatten(1, lhs.shape[1:2] * 2)
        spectrum.append(rho[:, 0, 0] - _low_rank(rho, h))
    return torch.fft.irfft(torch.cat(spectrum, 1), length).to(dtype)


def discretize_dplr(
    Lambda: Tensor, P: Tensor, B: Tensor, dt: Tensor, *, Q: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Discretise the system of `ssm_kernel_dplr` by the bilinear rule: return dense Ā (D, M, M) and B̄ (D, M).

    M is N for real Λ. With conjugate pairs M = 2N, the state is (s, s̄), and y_t = Σ_n (C_n s_{t,n} + C̄_n s̄_{t,n}).

    >>> one = torch.tensor([1.0])
    >>> Abar, Bbar = discretize_dplr(-one, one, one, torch.tensor([0.5]))  # A = -2: (1 - .5)/(1 + .5); .5/1.5
    >>> round(Abar.item(), 4), round(Bbar.item(), 4)
    (0.3333, 0.3333)
    """
    Q = P if Q is None else Q
    arguments = {"Lambda": (Lambda, VECTOR), "B": (B, VECTOR), "dt": (dt, STEP[:2])}
    _check_system("discretize_dplr", {**arguments, "P": (P, LOW_RANK), "Q": (Q, LOW_RANK)})
    lam, p, q, b, _, step = _doubled(Lambda, P, Q, B, B, dt)
    both = _bilinear(lam, p, q, step, (step[:, None] * b)[..., None])
    dtype = _out(Lambda, P, B, dt)
    return both[..., :-1].to(dtype), both[..., -1].to(dtype)


def _discretize(A: Tensor, B: Tensor, dt: Tensor, method: str) -> tuple[Tensor, Tensor]:
    step = _wide(dt)
    step = step[:, None] if step.ndim == 1 else step
    z = step * _wide(A)
    if method == "zoh":
        return z.exp(), times(step * _expm1_over(z), _wide(B))
    if method == "dirac":
        return z.exp(), torch.ones_like(z) * _wide(B)
    return over(1 + z / 2, 1 - z / 2), times(over(step, 1 - z / 2), _wide(B))


def _expm1_over(z: Tensor) -> Tensor:
    """Return (e^z - 1)/z."""
    if exactly() or torch.compiler.is_compiling() or in_forward_mode() or transforming():
        return _differentiable_expm1_over(z)
    return _Expm1Ratio.apply(z)  # pyright: ignore[reportReturnType]


def _differentiable_expm1_over(z: Tensor) -> Tensor:
    """For |z| < 1 it is a series: there the quotient, and more so its derivatives, lose digits."""
    near = z.abs() < 1
    inside, outside = torch.where(near, z, 0), torch.where(near, 1, z)
    series = torch.ones_like(z)
    for k in range(TERMS, 1, -1):
        series = 1 + times(inside / k, series)
    return torch.where(near, series, over(outside.exp() - 1, outside))


class _Expm1Ratio(torch.autograd.Function):
    """The same, of whose series no term is kept for the backward pass: the derivative has one of its own."""

    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        near = z.abs() < 1
        y = _polynomial([1 / math.factorial(k + 1) for k in range(TERMS)], torch.where(near, z, 0))
        outside = torch.where(near, 1, z)
        y = torch.where(near, y, (outside.exp() - 1) / outside)
        ctx.save_for_backward(z, y)
        return y

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        (dy,), (z, y) = cotangents, ctx.saved_tensors
        if torch.is_grad_enabled():  # this pass is differentiated
            return differentiable(_differentiable_expm1_over, [z], [dy])[0]
        near = z.abs() < 1
        slope = _polynomial([(k + 1) / math.factorial(k + 2) for k in range(TERMS)], torch.where(near, z, 0))
        outside = torch.where(near, 1, z)
        return dy * torch.where(near, slope, (1 + z * y - y) / outside).conj()  # e^z = 1 + z y


def _polynomial(coefficients: Sequence[float], z: Tensor) -> Tensor:
    """Return Σ_k c_k z^k."""
    total = torch.full_like(z, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        total.mul_(z).add_(coefficient)
    return total


def _sum_of_powers(weights: Tensor, a: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """Compute `sum_of_powers` from double, in `dtype`. The block length b is the power of two next to √length."""
    weights, a = torch.atleast_2d(weights), torch.atleast_2d(a)
    block = 1 << (max(length - 1, 0).bit_length() + 1) // 2
    inner, last = powers(a, block)
    outer = weights[..., None] * powers(last, -(-length // block))[0]
    if inner.is_complex():  # Re(uv) = Re u Re v - Im u Im v
        outer = torch.cat([outer.real, -outer.imag], 1)
        inner = torch.cat([inner.real, inner.imag], 1)
    inner, outer = inner.to(dtype), outer.to(dtype).transpose(1, 2)
    product = outer @ (inner[0] if inner.shape[0] == 1 else inner)
    return product.flatten(1)[:, :length]


def powers(a: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Return (..., n): a^0 to a^{n-1} by doubling; and the next power, a^n, if n is a power of two.

    Powers are products, not e^{j log a}, so a = 0 and its gradient need no special case.
    """
    if n < 2 or torch.compiler.is_compiling() or in_forward_mode() or transforming():
        return _differentiable_powers(a, n)
    return _PowerTable.apply(a, n)  # pyright: ignore[reportReturnType]


def _differentiable_powers(a: Tensor, n: int) -> tuple[Tensor, Tensor]:
    table, last = torch.ones_like(a)[..., None], a
    while table.shape[-1] < n:
        table = torch.cat([table, table * last[..., None]], -1)
        last = last * last
    return table[..., :n], last


class _PowerTable(torch.autograd.Function):
    """The same in one piece of memory. The gradient of all powers is one sum, Σ_j j a^{j-1}."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, n: int) -> tuple[Tensor, Tensor]:
        a = a.resolve_conj()
        full = 1 << (n - 1).bit_length()
        table, last, count = a.new_empty(*a.shape, full), a.clone(), 1
        table[..., 0] = 1
        while count < n:
            torch.mul(table[..., :count], last[..., None], out=table[..., count : 2 * count])
            last, count = last * last, 2 * count
        ctx.save_for_backward(a, table)
        return table[..., :n], last

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        (by_table, by_last), (a, table) = cotangents, ctx.saved_tensors
        n, full = by_table.shape[-1], table.shape[-1]
        if torch.is_grad_enabled():  # this pass is differentiated
            return differentiable(lambda a: _differentiable_powers(a, n), [a], cotangents)[0], None
        exponents = torch.arange(1, full + 1, dtype=a.real.dtype, device=a.device)
        slopes = (table * exponents).conj()
        total = slopes[..., -1] * by_last
        return total + (slopes[..., : n - 1] * by_table[..., 1:]).sum(-1), None


def _doubled(
    Lambda: Tensor, P: Tensor, Q: Tensor, B: Tensor, C: Tensor, dt: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return all in double with axes (D, M), P and Q (R, D, M), dt (D,). If Λ is complex, append the conjugates."""
    wide = torch.complex128 if Lambda.is_complex() else torch.float64
    shape = torch.broadcast_shapes(*(v.shape[-2:] for v in (Lambda, P, Q, B, C)), (*dt.shape, 1), (1, 1))

    def full(v: Tensor) -> Tensor:
        v = v.to(wide).expand(*v.shape[:-2], *shape)
        return torch.cat([v, v.conj()], -1) if v.is_complex() else v

    low = [full(v if v.ndim == 3 else torch.atleast_2d(v)[None]) for v in (P, Q)]
    rank = torch.broadcast_shapes(*(v.shape for v in low))
    p, q = (v.expand(rank) for v in low)
    return full(Lambda), p, q, full(B), full(C), dt.to(torch.float64).expand(shape[0])


def _bilinear(lam: Tensor, p: Tensor, q: Tensor, step: Tensor, more: Tensor | None = None) -> Tensor:
    """Return (I - ΔA/2)^{-1} (I + ΔA/2), and (I - ΔA/2)^{-1} times further columns."""
    half = (torch.diag_embed(lam) - torch.einsum("rdm,rdn->dmn", p, q.conj())) * step[:, None, None] / 2
    eye = torch.eye(lam.shape[-1], device=lam.device, dtype=lam.dtype)
    right = eye + half if more is None else torch.cat([eye + half, more], -1)
    return torch.linalg.solve(eye - half, right)


def _times_power(row: Tensor, matrix: Tensor, exponent: int) -> Tensor:
    """Return row · matrix^exponent, by repeated squaring."""
    while exponent:
        if exponent & 1:
            row = (row[:, None] @ matrix)[:, 0]
        exponent >>= 1
        if exponent:
            matrix = matrix @ matrix
    return row


def _low_rank(rho: Tensor, h: Tensor) -> Tensor:
    """Return h ρ(C̃, P) (I + h ρ(Q*, P))^{-1} ρ(Q*, B), for ρ (D, 1+R, 1+R, F)."""
    if rho.shape[1] == 2:
        return h * rho[:, 0, 1] * rho[:, 1, 0] / (1 + h * rho[:, 1, 1])
    core = torch.eye(rho.shape[1] - 1, device=rho.device) + (h * rho[:, 1:, 1:]).movedim(-1, 1)
    solved = torch.linalg.solve(core, rho[:, 1:, :1].movedim(-1, 1))
    return h * (rho[:, :1, 1:].movedim(-1, 1) @ solved)[..., 0, 0]


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.complex128 if x.is_complex() else torch.float64)


def _out(*values: Tensor) -> torch.dtype:
    dtype = torch.float32
    for value in values:
        dtype = torch.promote_types(dtype, value.dtype)
    return dtype


def _real_out(*values: Tensor) -> torch.dtype:
    # dtype.to_real() does the same, but torch.compile does not support it.
    dtype = _out(*values)
    return {torch.complex64: torch.float32, torch.complex128: torch.float64}.get(dtype, dtype)


def _check_method(who: str, name: str, method: str) -> None:
    if method not in DISCRETIZATIONS:
        raise ConfigError(f"{who}: {unknown(name, method, DISCRETIZATIONS)}")


def _check_system(who: str, arguments: dict[str, tuple[Tensor, tuple[str, ...]]], length: int | None = None) -> None:
    """Check each argument's shape. An axis of size 1 always fits. If the first argument is real, all must be real."""
    sizes: dict[str, int] = {}
    origin: dict[str, str] = {}
    first_name, (first, _) = next(iter(arguments.items()))
    for name, (value, choices) in arguments.items():
        axes = " or ".join(f"({c.replace(' ', ', ')}{',' * (len(c) == 1)})" for c in choices)
        if not isinstance(value, Tensor):
            raise ShapeError(f"{who}: {name} is a {type(value).__name__}, expected a tensor {axes}")
        if not (value.is_floating_point() or value.is_complex()) or (name == "dt" and value.is_complex()):
            kind = "real" if name == "dt" else "real or complex"
            raise ShapeError(f"{who}: {name} is {_short(value)}, expected a {kind} floating dtype")
        if value.is_complex() and not first.is_complex():
            raise ShapeError(
                f"{who}: {name} is {_short(value)}, expected a real dtype because {first_name} is {_short(first)}"
            )
        if value.device != first.device:
            raise ShapeError(f"{who}: {name} is on {value.device}, expected {first.device} because of {first_name}")
        match = next(
            (dict(zip(c.split(), value.shape, strict=True)) for c in choices if len(c.split()) == value.ndim), None
        )
        if match is None or any(size != 1 and sizes.get(axis, size) not in (1, size) for axis, size in match.items()):
            known = ", ".join(f"{axis}={size} from {origin[axis]}" for axis, size in sizes.items() if size != 1)
            because = f" with {known}" if known else ""
            raise ShapeError(f"{who}: {name} has shape {tuple(value.shape)}, expected {axes}{because}")
        for axis, size in match.items():
            if sizes.get(axis, 1) == 1:
                sizes[axis], origin[axis] = size, name
    if length is not None and (not isinstance(length, int) or length < 0):
        raise ConfigError(f"{who}: length is {length!r}, expected an integer >= 0")


def _short(value: Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")
