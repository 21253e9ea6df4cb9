r"""Optimal projections of the past on polynomials or waves: matrices, their discretization, and reconstruction.

.. math:: \theta\, \dot c = A c + B u \quad \text{or, of LegS,} \quad \dot c = \tfrac{1}{t} (A c + B u)

Source: Gu et al., "HiPPO: Recurrent Memory with Optimal Polynomial Projections", arXiv:2008.07669, theorems 1 and 2 and
appendix D; "fourier": Gu et al., arXiv:2206.12037, sec. 4, for a window of length 1.
"""

import math

import torch
from torch import Tensor

from scanl.errors import ConfigError, unknown
from scanl.layers.parts.cell_cases import cases
from scanl.ops.cell import cell

MEASURES = ("legs", "legt", "lagt", "fourier")
SOURCE = 'Gu, Dao, Ermon, Rudra and Ré, "HiPPO: Recurrent Memory with Optimal Polynomial Projections", arXiv:2008.07669'


@cell(
    "u: B T C, a: N N, b: N, state: B C N -> B T C N",
    equation="c_t = A c_{t-1} + b u_t",
    source=SOURCE + ", sec. 2.3",
)
def memory_cell(u, a, b, state):
    """Step C memories that share one matrix.

    u: inputs, (B, T, C).   a: A, (N, N).   b: (N,).   state: c, (B, C, N).
    """
    state = state @ a.T + u[..., None] * b
    return state, state


cases(
    memory_cell,
    "C=2 N=3",
    "b has shape (2,), expected (N,) with N=3 from a",
    "state has shape (2, 3), expected (B, C, N)",
    a=lambda a: a / 2,
)


def transition(measure: str, size: int) -> tuple[Tensor, Tensor]:
    r"""Return A (N, N) and B (N,) in float64.

    "legs", all of the past, equally: A_nk = -\sqrt{(2n+1)(2k+1)} below the diagonal, -(n+1) on it; B_n = \sqrt{2n+1}.
    "legt", a window of length 1, equally: A_nk = -\sqrt{(2n+1)(2k+1)}, times (-1)^{n-k} above the diagonal; B as legs.
    "lagt", by Laguerre functions, which decay with age: A = I/2 minus a lower triangle of ones; B = 1.
    "fourier", a window of length 1: with b = (1, 0, √2, 0, √2, ...), A = S - 2 b bᵀ and B = 2 b, where S has
    -2πf and 2πf at (2f, 2f+1) and (2f+1, 2f).

    Raises ConfigError for an unknown measure, for a size below 1, and for an odd size of "fourier".

    >>> transition("legs", 2)[0].tolist()  # -1; -sqrt(3) -2
    [[-1.0, -0.0], [-1.7320508075688772, -2.0]]
    """
    if measure not in MEASURES:
        raise ConfigError(f"transition: {unknown('measure', measure, MEASURES)}")
    if size < 1 or (measure == "fourier" and size % 2):
        expected = "an even number of at least 2" if measure == "fourier" else "at least 1"
        raise ConfigError(f"transition: size is {size}, expected {expected} because measure is {measure!r}")
    n = torch.arange(size, dtype=torch.float64)
    if measure == "lagt":
        return torch.eye(size, dtype=n.dtype) / 2 - torch.ones(size, size, dtype=n.dtype).tril(), torch.ones_like(n)
    if measure == "fourier":
        b = torch.zeros_like(n)
        b[::2] = math.sqrt(2)
        b[0] = 1
        S = torch.zeros(size, size, dtype=n.dtype)
        even = torch.arange(0, size, 2)
        S[even + 1, even] = math.pi * even.to(S.dtype)
        return S - S.T - 2 * b[:, None] * b, 2 * b
    root = (2 * n + 1).sqrt()
    product = root[:, None] * root
    if measure == "legs":
        return -product.tril(-1) - torch.diag(n + 1), root
    sign = 1 - 2 * ((n[:, None] - n) % 2)
    return -product.tril() - product.triu(1) * sign, root


def discretize_dense(A: Tensor, B: Tensor, dt: float | Tensor, method: str = "zoh") -> tuple[Tensor, Tensor]:
    """Return Ā (*, N, N) and B̄ (*, N) of c_t = Ā c_{t-1} + B̄ u_t, for steps dt (*) in units of A's time.

    method: "zoh", the input is held over the step; or "bilinear".

    >>> a, b = discretize_dense(torch.tensor([[-2.0]]), torch.tensor([1.0]), 0.5, "bilinear")
    >>> round(a.item(), 4), round(b.item(), 4)  # (1 - .5)/(1 + .5); .5/1.5
    (0.3333, 0.3333)
    """
    dt = torch.as_tensor(dt, dtype=A.dtype, device=A.device)[..., None, None]
    if method == "bilinear":
        eye = torch.eye(len(A), dtype=A.dtype, device=A.device)
        both = torch.linalg.solve(eye - dt / 2 * A, torch.cat([eye + dt / 2 * A, dt * B[:, None]], -1))
        return both[..., :-1], both[..., -1]
    system = torch.cat([A, B[:, None]], 1)
    both = torch.linalg.matrix_exp(dt * torch.cat([system, torch.zeros_like(system[:1])]))
    return both[..., :-1, :-1], both[..., :-1, -1]


def shifted_legendre(x: Tensor, size: int) -> Tensor:
    """Return P_n(2x - 1) for n < size, in a last axis: polynomials that are orthogonal on [0, 1]."""
    y = 2 * x - 1
    values = [torch.ones_like(y), y]
    for n in range(1, size - 1):
        values.append(((2 * n + 1) * y * values[n] - n * values[n - 1]) / (n + 1))
    return torch.stack(values[:size], -1)


def reconstruct(c: Tensor, age: Tensor, measure: str) -> Tensor:
    """Reconstruct the input `age` ago from a memory c (..., N): (..., A).

    age: (A,). For "legs" it is a fraction of all time since the start, for "legt" and "fourier" a fraction of the
    window: 0 is now, 1 the start. For "lagt" it is in units of θ, and at least 0.

    "legs" and "legt": Σ_n c_n √(2n+1) P_n(1 - 2 age). "lagt": Σ_n c_n L_n(age) e^{-age/2}, with Laguerre polynomials.
    "fourier": Σ_f c_{2f} √2 cos(2πf age) + c_{2f+1} √2 sin(2πf age), with 1 for √2 at f = 0.

    >>> reconstruct(torch.tensor([3.0, 0.0]), torch.tensor([0.0, 0.7]), "legt").tolist()  # a constant
    [3.0, 3.0]
    """
    if measure not in MEASURES:
        raise ConfigError(f"reconstruct: {unknown('measure', measure, MEASURES)}")
    size, age = c.shape[-1], age.to(c.dtype)
    if measure == "lagt":
        values = [torch.ones_like(age), 1 - age]
        for n in range(1, size - 1):
            values.append(((2 * n + 1 - age) * values[n] - n * values[n - 1]) / (n + 1))
        basis = torch.stack(values[:size], -1) * (-age / 2).exp()[:, None]
    elif measure == "fourier":
        angle = 2 * math.pi * age[:, None] * torch.arange(size // 2, device=c.device, dtype=c.dtype)
        basis = math.sqrt(2) * torch.stack([angle.cos(), angle.sin()], -1).flatten(1)
        basis = torch.cat([torch.ones_like(basis[:, :1]), basis[:, 1:]], 1)
    else:
        n = torch.arange(size, device=c.device, dtype=c.dtype)
        basis = shifted_legendre(1 - age, size) * (2 * n + 1).sqrt()
    return c @ basis.mT


def legs_steps(share: Tensor, size: int, method: str = "zoh") -> tuple[Tensor, Tensor]:
    """Return Ā (*, N, N) and B̄ (*, N) of LegS for steps that are a `share` (*) of all time after them, in float64.

    The i-th of steps of equal duration is a share of 1/i.

    method: "zoh", the input is held over the step; c is then the exact projection of what was held. Its matrix maps the
    polynomials on [0, r] to those on [0, 1]: Ā_nk = √((2n+1)(2k+1)) ∫_0^r P_n(2x-1) P_k(2x/r-1) dx with
    r = 1 - share, computed by Gauss' quadrature, which is exact here. B̄ = (I - Ā) e_0.
    "bilinear": Ā = (I - sA/2)^{-1} (I + sA/2) and B̄ = (I - sA/2)^{-1} sB with s = share.

    >>> a, b = legs_steps(torch.tensor([1.0, 0.25]), 1)
    >>> a.flatten().tolist(), b.flatten().tolist()  # the mean of four numbers: 3/4 of the old mean, 1/4 of the last
    ([0.0, 0.75], [1.0, 0.25])
    """
    share = share.to(torch.float64)[..., None, None]
    if method == "bilinear":
        A, B = (matrix.to(share.device) for matrix in transition("legs", size))
        eye, half = torch.eye(size, dtype=A.dtype, device=A.device), A * share / 2
        right = torch.cat([eye + half, (B * share[..., 0])[..., None]], -1)
        both = torch.linalg.solve_triangular(eye - half, right, upper=False)
        return both[..., :-1], both[..., -1]
    n = torch.arange(size, dtype=share.dtype, device=share.device)
    side = n[1:] / (4 * n[1:] ** 2 - 1).sqrt()
    nodes, vectors = torch.linalg.eigh(torch.diag(side, 1) + torch.diag(side, -1))
    nodes, weights = (nodes + 1) / 2, vectors[0] ** 2
    root = (2 * n + 1).sqrt()
    r = 1 - share
    known = shifted_legendre(nodes, size) * root * weights[:, None]  # (Q, N)
    a = r * ((shifted_legendre(r[..., 0] * nodes, size) * root).mT @ known)
    first = torch.zeros_like(n)
    first[0] = 1
    return a, first - a[..., 0]


def legs_held(fraction: Tensor, size: int) -> Tensor:
    """Return c of LegS (*, N) for an input that was 1 up to a `fraction` (*) of all time, and then 0.

    c_n = √(2n+1) ∫_0^r P_n(2x-1) dx = (P_{n+1}(2r-1) - P_{n-1}(2r-1)) / (2 √(2n+1)), with P_{-1} = -1.

    >>> legs_held(torch.tensor([0.25]), 1).tolist()  # the mean
    [[0.25]]
    """
    values = shifted_legendre(fraction, size + 1)
    n = torch.arange(size, dtype=values.dtype, device=values.device)
    lower = torch.cat([-torch.ones_like(values[..., :1]), values[..., : size - 1]], -1)
    return (values[..., 1:] - lower) / (2 * (2 * n + 1).sqrt())
