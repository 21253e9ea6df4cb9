"""The scans of mamba-ssm against plain loops in its layouts: outputs, states and all gradients."""

import pytest
import torch
from torch.nn import functional as F

from scanl import ops
from scanl.compat.mamba_ssm import mamba_chunk_scan_combined, selective_scan_fn, selective_state_update
from scanl.errors import ConfigError

B, E, T, N, H, P, G = 2, 4, 5, 3, 4, 2, 2


def draw(*shape, dtype=torch.float64):
    return torch.randn(shape, dtype=dtype).requires_grad_()


def agree(ours, theirs, leaves):
    results = []
    for ys in (ours, theirs):
        total = sum((y * torch.linspace(-1, 1, y.numel()).cos().view(y.shape)).sum().real for y in ys)
        results.append([*ys, *torch.autograd.grad(total, leaves)])
    for mine, other in zip(*results, strict=True):
        torch.testing.assert_close(mine, other)


def selective(u, delta, A, B, C, D, z, bias, h):
    """B and C are functions of the step that return (B, E, N)."""
    delta, ys = F.softplus(delta + bias[:, None]), []
    for t in range(u.shape[2]):
        step = delta[:, :, t, None]
        h = (step * A).exp() * h + step * B(t) * u[:, :, t, None]
        y = (h * C(t)).sum(-1)
        y = 2 * y.real if y.is_complex() else y
        ys.append((y + D * u[:, :, t]) * F.silu(z[:, :, t]))
    return torch.stack(ys, -1), h


@pytest.mark.parametrize("form", ["constant", "variable", "grouped"])
@pytest.mark.parametrize("kind", ["real", "complex"])
def test_selective_scan(form, kind):
    dtype = torch.complex128 if kind == "complex" else torch.float64
    u, delta, z = draw(B, E, T), draw(B, E, T), draw(B, E, T)
    A, D, bias = (-torch.rand(E, N, dtype=dtype)).requires_grad_(), draw(E), draw(E)
    if form == "constant":
        weights = draw(E, N, dtype=dtype), draw(E, N, dtype=dtype)
        steps = [lambda t, w=w: w for w in weights]
    else:
        lead = (B, N) if form == "variable" else (B, G, N)
        weights = [draw(*lead, T * (2 if kind == "complex" else 1)) for _ in range(2)]
        pairs = [torch.view_as_complex(w.unflatten(-1, (T, 2))) if kind == "complex" else w for w in weights]
        steps = [
            lambda t, w=w: w[..., t].unsqueeze(1) if w.ndim == 3 else w[..., t].repeat_interleave(E // G, 1)
            for w in pairs
        ]
    leaves = [u, delta, A, *weights, D, z, bias]
    with ops.backend("parallel", "reference"):  # the compiled kernel of complex numbers takes long to make
        ours = selective_scan_fn(u, delta, A, *weights, D, z, bias, True, return_last_state=True)
        alone = selective_scan_fn(u, delta, A, *weights, D, z, bias, True)
    assert torch.equal(alone, ours[0])
    agree(ours, selective(u, delta, A, *steps, D, z, bias, torch.zeros(B, E, N, dtype=dtype)), leaves)
    assert ours[0].is_contiguous()


def test_weights_wider_than_the_input():
    u, A = torch.randn(B, E, T).half(), -torch.rand(E, N)
    weights = [torch.randn(E, N), torch.randn(B, N, T)]
    y = selective_scan_fn(u, u.abs(), A, *weights)
    assert y.dtype == torch.float16
    expected = selective_scan_fn(u.float(), u.abs().float(), A, *weights)
    torch.testing.assert_close(y, expected.half())


@pytest.mark.parametrize("lead", [(E,), (H, P)])
def test_one_step(lead):
    state, x, dt, z = (torch.randn(B, *lead, *more) for more in ((N,), (), (), ()))
    A, D, bias = -torch.rand(*lead, N), torch.randn(lead), torch.randn(lead)
    weights = [torch.randn(B, *lead[:-1], N)[:, : G if len(lead) > 1 else N] for _ in range(2)]
    by_row = [w.unsqueeze(1) if len(lead) == 1 else w.repeat_interleave(H // G, 1).unsqueeze(2) for w in weights]
    step = F.softplus(dt + bias)[..., None]
    h = (step * A).exp() * state + step * by_row[0] * x[..., None]
    expected = ((h * by_row[1]).sum(-1) + D * x) * F.silu(z)
    larger, rows = torch.randn(5, *state.shape[1:]), torch.tensor([3, 1])
    larger[rows] = state
    torch.testing.assert_close(selective_state_update(state, x, dt, A, *weights, D, z, bias, True), expected)
    torch.testing.assert_close(state, h)
    y = selective_state_update(larger, x, dt, A, *weights, D, z, bias, True, state_batch_indices=rows)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(larger[rows], h)


def heads(x, dt, A, B, C, D, z, S):
    """One sequence after the other; dt is positive. S: (B, H, P, N)."""
    ys, shared = [], H // G
    B, C = B.repeat_interleave(shared, 2), C.repeat_interleave(shared, 2)
    for t in range(x.shape[1]):
        step = dt[:, t, :, None, None]
        S = (step * A[:, None, None]).exp() * S + step * x[:, t, :, :, None] * B[:, t, :, None]
        ys.append(((S * C[:, t, :, None]).sum(-1) + D * x[:, t]) * F.silu(z[:, t]))
    return torch.stack(ys, 1), S


@pytest.mark.parametrize("wide_D", [False, True])
@pytest.mark.parametrize("limit", [(0.0, float("inf")), (0.4, 0.9)])
def test_heads(wide_D, limit):
    x, z, dt, bias = draw(B, T, H, P), draw(B, T, H, P), draw(B, T, H), draw(H)
    A, D, S = (-torch.rand(H).double()).requires_grad_(), draw(H, P) if wide_D else draw(H), draw(B, H, P, N)
    weights = draw(B, T, G, N), draw(B, T, G, N)
    options = {"dt_softplus": True, "dt_limit": limit, "return_final_states": True}
    ours = mamba_chunk_scan_combined(x, dt, A, *weights, 64, D, z, bias, S, **options)
    step = F.softplus(dt + bias).clamp(*limit)
    theirs = heads(x, step, A, *weights, D if wide_D else D[:, None], z, S)
    agree(ours, theirs, [x, z, dt, bias, A, D, S, *weights])


def test_sequences_in_rows():
    x, z, dt = draw(2, 6, H, P), draw(2, 6, H, P), torch.rand(2, 6, H).double()
    A, S, weights = -torch.rand(H).double(), draw(2, H, P, N), (draw(2, 6, G, N), draw(2, 6, G, N))
    seq_idx = torch.tensor([[0, 0, 1, 1, 1, 2], [3, 3, 3, 3, 4, 4]])
    y, last = mamba_chunk_scan_combined(
        x, dt, A, *weights, 64, z=z, initial_states=S, seq_idx=seq_idx, return_final_states=True
    )
    for row, first, end in ((0, 0, 2), (0, 2, 5), (0, 5, 6), (1, 0, 4), (1, 4, 6)):
        at = slice(row, row + 1), slice(first, end)
        start = S[:1] if (row, first) == (0, 0) else torch.zeros(1, H, P, N)  # only number 0 continues from S
        expected, end_state = heads(x[at], dt[at], A, *(w[at] for w in weights), 0, z[at], start)
        torch.testing.assert_close(y[at], expected)
        if end == 6:
            torch.testing.assert_close(last[at[0]], end_state)
    one = [value[:1] for value in (x, dt)], [w[:1] for w in weights]
    ends = {"return_varlen_states": True, "cu_seqlens": torch.tensor([0, 2, 5, 6])}
    y, last, states = mamba_chunk_scan_combined(
        *one[0], A, *one[1], 64, seq_idx=seq_idx[:1], return_final_states=True, **ends
    )
    assert torch.equal(states[-1:], last)
    assert states.shape == (3, H, P, N)
    y, states = mamba_chunk_scan_combined(*one[0], A, *one[1], 64, seq_idx=seq_idx[:1], **ends)
    assert y.shape == (1, 6, H, P)
    with pytest.raises(ConfigError, match="seq_idx is None, expected a tensor with return_varlen_states"):
        mamba_chunk_scan_combined(*one[0], A, *one[1], 64, **ends)
    ends["cu_seqlens"] = torch.tensor([0, 6])
    with pytest.raises(ConfigError, match=r"cu_seqlens is \[0, 6\], expected \[0, 2, 5, 6\] because of seq_idx"):
        mamba_chunk_scan_combined(*one[0], A, *one[1], 64, seq_idx=seq_idx[:1], **ends)
