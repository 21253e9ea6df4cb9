"""Kernels of state-space systems: the powers C Ā^k B̄, computed plainly in float64."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from scanl.errors import ConfigError, ShapeError
from scanl.ops.linear_scan import linear_scan
from scanl.ops.long_convolution import long_convolution
from scanl.ops.ssm_kernels import discretize, discretize_dplr, ssm_kernel_diagonal, ssm_kernel_dplr, sum_of_powers

methods = pytest.mark.parametrize("method", ["zoh", "bilinear", "dirac"])


def dense(A, B, dt, method):
    """Ā and B̄ of a dense system by their definitions: a held input, the trapezoidal rule, or an impulse."""
    eye = torch.eye(len(A), dtype=A.dtype)
    if method == "bilinear":
        half = eye - dt / 2 * A
        return torch.linalg.solve(half, eye + dt / 2 * A), torch.linalg.solve(half, dt * B)
    both = torch.zeros(len(A) + 1, len(A) + 1, dtype=A.dtype)
    both[:-1, :-1], both[:-1, -1] = dt * A, dt * B
    both = torch.linalg.matrix_exp(both)
    return both[:-1, :-1], B if method == "dirac" else both[:-1, -1]


def powers(A, B, C, length):
    """C A^k B, step by step."""
    state, kernel = B, []
    for _ in range(length):
        kernel.append(C @ state)
        state = A @ state
    return torch.stack(kernel)


def pairs(x):
    """The other one of each conjugate pair beside it."""
    return torch.cat([x, x.conj()], -1) if x.is_complex() else x


def plain(A, B, C, dt, length, method, P=None, Q=None):
    """The definition, channel by channel over the whole dense system, in double."""
    wide = torch.complex128 if A.is_complex() else torch.float64
    shape = torch.broadcast_shapes(A.shape, B.shape, C.shape, (*dt.shape, 1), (1, 1))
    A, B, C = (pairs(v.to(wide).expand(shape)) for v in (A, B, C))
    rows = []
    for d in range(shape[0]):
        whole = torch.diag(A[d])
        if P is not None:
            low = [pairs(v.to(wide).expand(-1, *shape))[:, d] for v in (P, P if Q is None else Q)]
            whole = whole - low[0].T @ low[1].conj()
        step = dt.double().expand(shape[0])[d]
        discrete = dense(whole, B[d], step, method)
        row = powers(*discrete, C[d], length)
        if row.is_complex():
            assert row.imag.abs().max() < 1e-9 * row.abs().max()
            row = row.real
        rows.append(row)
    return torch.stack(rows)


def assert_relative(actual, expected, bound):
    """Each channel's largest error against its largest value."""
    error = (actual.double() - expected).abs().amax(1) / expected.abs().amax(1)
    assert error.max() < bound, f"relative error {error.max():.3g}, at most {bound} allowed"


def system(D, N, complex_, dtype=torch.float64):
    A = -torch.rand(D, N, dtype=torch.float64) - 0.1
    if complex_:
        A = torch.complex(A, math.pi * torch.arange(N).double().expand(D, N))
    B, C = (torch.randn(D, N, dtype=A.dtype) for _ in range(2))
    dt = torch.logspace(-2, 0, D, dtype=torch.float64)
    kind = torch.promote_types(dtype, torch.complex32) if complex_ else dtype
    return A.to(kind), B.to(kind), C.to(kind), dt.to(dtype)


@methods
@pytest.mark.parametrize("complex_", [False, True], ids=["real", "pairs"])
@pytest.mark.parametrize("length", [0, 1, 2, 3, 16, 65])
def test_diagonal_is_the_powers(complex_, method, length):
    A, B, C, dt = system(3, 4, complex_)
    kernel = ssm_kernel_diagonal(A, B, C, dt, length, discretization=method)
    assert kernel.shape == (3, length)
    assert kernel.dtype == torch.float64
    if length:
        torch.testing.assert_close(kernel, plain(A, B, C, dt, length, method), rtol=1e-11, atol=1e-12)


@methods
def test_diagonal_takes_shared_arguments(method):
    A, B, C, dt = system(3, 4, True)
    for a, b, c, step in [(A[0], B, C, dt), (A[0], B[0], C, dt[1]), (A[:1], B[1], C[1], dt), (A, B, C, dt[2])]:
        expected = plain(a, b, c, step, 20, method)
        torch.testing.assert_close(ssm_kernel_diagonal(a, b, c, step, 20, discretization=method), expected)
    one = ssm_kernel_diagonal(A[0], B[0], C[0], dt[0], 20, discretization=method)
    assert one.shape == (1, 20)
    each = dt[:, None].expand(3, 4)
    torch.testing.assert_close(
        ssm_kernel_diagonal(A, B, C, each, 20), ssm_kernel_diagonal(A, B, C, dt, 20), rtol=0, atol=0
    )


@pytest.mark.parametrize("method", ["zoh", "bilinear"])
@pytest.mark.parametrize("name", ["lin", "inv", "real", "slow"])
def test_float32_over_two_to_the_fourteen_steps(name, method):
    """S4D's initialisations, and modes that hardly decay, whose angles grow to thousands of turns."""
    D, N, length = 4, 16, 2**14
    n = torch.arange(N, dtype=torch.float64)
    A = {
        "lin": torch.complex(torch.full_like(n, -0.5), math.pi * n),
        "inv": torch.complex(torch.full_like(n, -0.5), 2 * N / math.pi * (2 * N / (2 * n + 1) - 1)),
        "real": -(n + 1),
        "slow": torch.complex(torch.full_like(n, -1e-4), math.pi * (n + 0.3)),
    }[name]
    A = A.to(torch.complex64 if A.is_complex() else torch.float32)
    B, C = (torch.randn(D, N, dtype=A.dtype) for _ in range(2))
    dt = torch.tensor([1e-3, 1e-2, 0.1, 0.5])
    kernel = ssm_kernel_diagonal(A, B, C, dt, length, discretization=method)
    assert kernel.dtype == torch.float32
    wide, weights, step = A.to(torch.complex128), B.to(torch.complex128), dt.double()[:, None]
    if method == "zoh":
        a, b = (step * wide).exp(), ((step * wide).exp() - 1) / wide * weights
    else:
        a, b = (1 + step * wide / 2) / (1 - step * wide / 2), step / (1 - step * wide / 2) * weights
    states = torch.cat([b[None], a.expand(length - 1, -1, -1)]).cumprod(0)  # after an impulse, step by step
    rows = (2 if A.is_complex() else 1) * (C.to(torch.complex128) * states).sum(2).real
    assert_relative(kernel, rows.mT, 2e-6)


@pytest.mark.parametrize("method", ["zoh", "bilinear"])
def test_small_and_vanishing_eigenvalues(method):
    """B̄ = (e^z - 1)/λ loses nothing near λ = 0, nor does its derivative; at 0 it is Δ."""
    A = torch.tensor([0.0, -1e-9, -1e-4, -0.3, -1.5, -200.0])
    one, dt = torch.ones(6), torch.tensor([0.7])
    step = dt.double().item()
    Abar, Bbar = discretize(A, one, dt, method)
    for i, a in enumerate(A.double().tolist()):
        want = dense(torch.tensor([[a]]).double(), torch.ones(1).double(), step, method)
        torch.testing.assert_close(Abar[0, i].double(), want[0][0, 0], rtol=2e-7, atol=1e-30)
        torch.testing.assert_close(Bbar[0, i].double(), want[1][0], rtol=2e-7, atol=1e-30)
    A = A.requires_grad_()
    grad = torch.autograd.grad(discretize(A, one, dt, method)[1].sum(), A)[0]
    # d/da of (e^{Δa} - 1)/a is Δ²/2 at 0, and so is that of Δ/(1 - Δa/2).
    torch.testing.assert_close(grad[:2], torch.full((2,), step**2 / 2), rtol=1e-6, atol=0)


def test_a_system_that_forgets_at_once():
    """Bilinear at ΔA = -2 has Ā = 0: the kernel is one step long, and its gradient finite."""
    A = torch.tensor([[-2.0]], requires_grad=True)
    one = torch.ones(1)
    kernel = ssm_kernel_diagonal(A, one, one, one, 5, discretization="bilinear")
    assert kernel.tolist() == [[0.5, 0, 0, 0, 0]]
    assert torch.isfinite(torch.autograd.grad(kernel.sum(), A)[0]).all()


class Largest(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.numel = max(self.numel, *(v.numel() for v in tree_leaves(out) if isinstance(v, torch.Tensor)), 0)
        return out


def test_no_table_of_states_times_length():
    A, B, C, dt = system(8, 32, True, torch.float32)
    leaves = [v.requires_grad_() for v in (A, B, C, dt)]
    length = 2**12
    with Largest() as largest:
        kernel = ssm_kernel_diagonal(*leaves, length)
        torch.autograd.grad(kernel.sum(), leaves)
    assert largest.numel < 8 * 32 * length / 16


@methods
@pytest.mark.parametrize("complex_", [False, True], ids=["real", "pairs"])
def test_diagonal_gradients_of_every_order(complex_, method):
    leaves = [v.requires_grad_() for v in system(2, 2, complex_)]

    def f(A, B, C, dt):
        return ssm_kernel_diagonal(A, B, C, dt, 6, discretization=method)

    assert torch.autograd.gradcheck(f, leaves)
    assert torch.autograd.gradgradcheck(f, leaves)


@methods
def test_recurrent_form_is_the_convolution(method):
    """One system, as a scan over its discrete form and as a convolution with its kernel."""
    A, B, C, dt = system(3, 4, True)
    x = torch.randn(2, 50, 3, dtype=torch.float64)
    Abar, Bbar = discretize(A, B, dt, method)
    assert Abar.shape == Bbar.shape == (3, 4)
    states, _ = linear_scan(Bbar * x[..., None], Abar)
    expected = 2 * (C * states).sum(-1).real
    y, _ = long_convolution(x, ssm_kernel_diagonal(A, B, C, dt, 50, discretization=method))
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-12)


def test_sum_of_powers():
    a = torch.polar(torch.rand(5).double(), 7 * torch.rand(5).double())
    w = torch.randn(3, 5, dtype=torch.complex128)
    expected = (w[:, :, None] * a[None, :, None] ** torch.arange(70)).sum(1).real
    torch.testing.assert_close(sum_of_powers(w, a, 70), expected)
    torch.testing.assert_close(sum_of_powers(w, a.expand(3, 5), 70), expected)
    torch.testing.assert_close(
        sum_of_powers(w.real, a, 9), (w.real[..., None] * a[:, None] ** torch.arange(9)).sum(1).real
    )
    assert sum_of_powers(w.to(torch.complex64), a.to(torch.complex64), 7).dtype == torch.float32


def hippo_legs(N):
    """A, B of HiPPO-LegS, and P with A + P Pᵀ = -1/2 + a skew matrix (Gu et al., arXiv:2111.00396, eq. (2), C.1)."""
    n = torch.arange(N, dtype=torch.float64)
    root = (2 * n + 1).sqrt()
    return -(torch.tril(torch.outer(root, root), -1) + torch.diag(n + 1)), root, (n + 0.5).sqrt()


def normal_plus_low_rank(A, B, P):
    """Λ, P, B in the eigenbasis V of A + P Pᵀ, one of each conjugate pair, and V."""
    skew = A + torch.outer(P, P) + torch.eye(len(A)) / 2
    assert (skew + skew.T).abs().max() < 1e-12
    w, V = torch.linalg.eigh(-1j * skew.to(torch.complex128))
    V = V[:, w > 0]
    return torch.complex(torch.full_like(w[w > 0], -0.5), w[w > 0]), V.mH @ P.to(V), V.mH @ B.to(V), V


@pytest.mark.parametrize("length", [0, 1, 2, 3, 64, 101, 512])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_dplr_is_the_powers_of_hippo_legs(dtype, length):
    """S4 as it starts: the real dense matrix on one side, its conjugate pairs on the other."""
    A, B, P = hippo_legs(16)
    Lambda, P, b, V = normal_plus_low_rank(A, B, P)
    C = torch.randn(3, 16, dtype=torch.float64)
    dt = torch.tensor([1e-3, 1e-2, 0.1], dtype=torch.float64)
    kind = torch.promote_types(dtype, torch.complex32)
    kernel = ssm_kernel_dplr(*(v.to(kind) for v in (Lambda, P, b, C.to(V) @ V)), dt.to(dtype), length)
    assert kernel.shape == (3, length)
    assert kernel.dtype == dtype
    if length == 0:
        return
    expected = torch.stack([powers(*dense(A, B, dt[d], "bilinear"), C[d], length) for d in range(3)])
    assert_relative(kernel, expected, 1e-12 if dtype == torch.float64 else 2e-6)


@pytest.mark.parametrize("rank", [None, 1, 2, 3])
@pytest.mark.parametrize("complex_", [False, True], ids=["real", "pairs"])
@pytest.mark.parametrize("length", [1, 8, 33])
def test_dplr_is_the_powers(complex_, rank, length):
    Lambda, B, C, dt = system(3, 4, complex_)
    P = torch.randn(3, 4, dtype=Lambda.dtype) if rank is None else torch.randn(rank, 3, 4, dtype=Lambda.dtype)
    low = P if P.ndim == 3 else P[None]
    expected = plain(Lambda, B, C, dt, length, "bilinear", low)
    torch.testing.assert_close(ssm_kernel_dplr(Lambda, P, B, C, dt, length), expected, rtol=1e-9, atol=1e-11)
    Q = torch.randn_like(P) / 4
    expected = plain(Lambda, B, C, dt, length, "bilinear", low, Q if Q.ndim == 3 else Q[None])
    torch.testing.assert_close(ssm_kernel_dplr(Lambda, P, B, C, dt, length, Q=Q), expected, rtol=1e-9, atol=1e-11)


def test_dplr_takes_shared_arguments():
    Lambda, B, C, dt = system(3, 4, True)
    P = torch.randn(4, dtype=torch.complex128)
    expected = plain(Lambda[0], B[0], C, dt, 9, "bilinear", P[None, None])
    torch.testing.assert_close(ssm_kernel_dplr(Lambda[0], P, B[0], C, dt, 9), expected)
    expected = plain(Lambda[0], B[0], C, dt[1], 9, "bilinear", P[None, None])
    torch.testing.assert_close(ssm_kernel_dplr(Lambda[0], P, B[0], C, dt[1], 9), expected)


def test_dplr_without_low_rank_is_diagonal():
    Lambda, B, C, dt = system(3, 4, True)
    kernel = ssm_kernel_dplr(Lambda, torch.zeros_like(B), B, C, dt, 40)
    expected = ssm_kernel_diagonal(Lambda, B, C, dt, 40, discretization="bilinear")
    torch.testing.assert_close(kernel, expected, rtol=1e-10, atol=1e-12)


def test_dplr_in_slices_of_frequencies(monkeypatch):
    Lambda, B, C, dt = system(2, 3, True)
    P = torch.randn_like(B)
    expected = ssm_kernel_dplr(Lambda, P, B, C, dt, 40)
    split = torch.Tensor.split
    monkeypatch.setattr(torch.Tensor, "split", lambda self, size, dim=0: split(self, 5, dim))
    torch.testing.assert_close(ssm_kernel_dplr(Lambda, P, B, C, dt, 40), expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("complex_", [False, True], ids=["real", "pairs"])
def test_dplr_recurrent_form(complex_):
    Lambda, B, C, dt = system(2, 3, complex_)
    P = torch.randn_like(B)
    size = 6 if complex_ else 3
    for Q in (None, torch.randn_like(B) / 4):
        Abar, Bbar = discretize_dplr(Lambda, P, B, dt, Q=Q)
        assert Abar.shape == (2, size, size)
        kernel = ssm_kernel_dplr(Lambda, P, B, C, dt, 12, Q=Q)
        for d in range(2):
            row = powers(Abar[d], Bbar[d], pairs(C)[d], 12)
            torch.testing.assert_close(row.real if complex_ else row, kernel[d], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("complex_", [False, True], ids=["real", "pairs"])
def test_dplr_gradients_of_every_order(complex_):
    Lambda, B, C, dt = system(2, 2, complex_)
    P, Q = torch.randn_like(B), torch.randn_like(B) / 4
    leaves = [v.requires_grad_() for v in (Lambda, P, B, C, dt, Q)]

    def f(Lambda, P, B, C, dt, Q):
        return ssm_kernel_dplr(Lambda, P, B, C, dt, 5, Q=Q)

    assert torch.autograd.gradcheck(f, leaves)
    assert torch.autograd.gradgradcheck(f, leaves)


@pytest.mark.parametrize("complex_", [False, True], ids=["real", "pairs"])
def test_kernels_run_where_their_tensors_live(complex_):
    """On a device without numbers: whatever were made on another would be refused."""
    A, B, C, dt = (v.to("meta") for v in system(3, 4, complex_, torch.float32))
    for method in ("zoh", "bilinear"):
        assert ssm_kernel_diagonal(A, B, C, dt, 9, discretization=method).device.type == "meta"
    for P in (B, B.expand(2, 3, 4)):
        assert ssm_kernel_dplr(A, P, B, C, dt, 9).device.type == "meta"
        assert discretize_dplr(A, P, B, dt)[0].device.type == "meta"


def _errors():
    A, dt = torch.full((3, 4), -1.0), torch.ones(3)
    pairs = A.to(torch.complex64)
    diagonal, dplr = ssm_kernel_diagonal, ssm_kernel_dplr
    yield diagonal, (A, A, A, dt, 4), {"discretization": "zho"}, "unknown discretization 'zho'; did you mean 'zoh'?"
    yield diagonal, (A, A, A, dt, -1), {}, "length is -1, expected an integer >= 0"
    yield diagonal, (A, A, A, dt, 4.0), {}, "length is 4.0, expected an integer >= 0"
    yield (
        diagonal,
        (A, A[:, :2], A, dt, 4),
        {},
        "B has shape (3, 2), expected (N,) or (D, N) with D=3 from A, N=4 from A",
    )
    yield diagonal, (A, A, A[0, 0], dt, 4), {}, "C has shape (), expected (N,) or (D, N) with"
    yield diagonal, (A, A, A, dt[:2], 4), {}, "dt has shape (2,), expected () or (D,) or (D, N) with D=3 from A"
    yield diagonal, (A, A, A.to("meta"), dt, 4), {}, "C is on meta, expected cpu because of A"
    yield diagonal, (A, A, pairs, dt, 4), {}, "C is complex64, expected a real dtype because A is float32"
    yield diagonal, (A.long(), A, A, dt, 4), {}, "A is int64, expected a real or complex floating dtype"
    yield diagonal, (pairs, A, A, dt.to(torch.complex64), 4), {}, "dt is complex64, expected a real floating dtype"
    yield diagonal, (A, A, A, 0.1, 4), {}, "dt is a float, expected a tensor () or (D,) or (D, N)"
    yield dplr, (A, A[None, :, :3], A, A, dt, 4), {}, "P has shape (1, 3, 3), expected (N,) or (D, N) or (R, D, N) with"
    yield dplr, (A, A.expand(2, 3, 4), A, A, dt, 4), {"Q": A.expand(3, 3, 4)}, "Q has shape (3, 3, 4), expected (N,)"
    yield dplr, (A, A, A, A, A, 4), {}, "dt has shape (3, 4), expected () or (D,) with"
    yield dplr, (A, A, A, A, dt, -3), {}, "length is -3"
    yield discretize, (A, A, dt), {"method": "tustin"}, "unknown method 'tustin'; known: zoh, bilinear"
    yield discretize, (A, A[:2], dt), {}, "B has shape (2, 4), expected (N,) or (D, N) with D=3 from A"
    yield discretize_dplr, (A, A, A[:, :1], dt[:2]), {}, "dt has shape (2,), expected () or (D,) with D=3 from Lambda"
    yield sum_of_powers, (A[:, :3], A, 4), {}, "weights has shape (3, 3), expected (N,) or (D, N) with D=3 from a, N=4"


def test_errors_name_the_argument():
    for function, arguments, options, message in _errors():
        with pytest.raises((ShapeError, ConfigError)) as caught:
            function(*arguments, **options)
        assert str(caught.value).startswith(f"{function.__name__}: {message}")
