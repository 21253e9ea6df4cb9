"""The scans of mamba-ssm: Mamba's, of a whole sequence and of one step, and Mamba-2's."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from scanl.compat.causal_conv1d import alike
from scanl.compat.sequences import Sequences, joined
from scanl.errors import ConfigError
from scanl.layers.base import widen
from scanl.ops import backend, linear_attention, selective_scan


def selective_scan_fn(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Scan Mamba's state space model over u (B, E, T), by `selective_scan`. Return y (B, E, T).

    delta, z: step sizes and gate, (B, E, T).   A: (E, N).   B, C: (E, N), (B, N, T), or (B, G, N, T) for G groups of
    channels. If A is complex, B and C of two or three such axes have their real and imaginary parts alternate in the
    last, (B, N, 2T) and (B, G, N, 2T).   D, delta_bias: (E,).   return_last_state: also return h_T, (B, E, N), with
    gradients, which the original's has not. Raises ShapeError.
    """
    B, C = _weights(B, A.is_complex()), _weights(C, A.is_complex())
    x, B, C, gate = _widened(u.mT, B, C, None if z is None else z.mT)
    y, last = selective_scan(x, delta.mT, A, B, C, D, gate, delta_bias, delta_softplus=delta_softplus)
    y = alike(y.to(u.dtype).mT, u)
    return (y, last) if return_last_state else y


def selective_scan_ref(*args: Any, **kwargs: Any) -> Tensor | tuple[Tensor, Tensor]:
    """Compute `selective_scan_fn` by the reference, a plain loop over the steps."""
    with backend("reference"):
        return selective_scan_fn(*args, **kwargs)


def _weights(B: Tensor, is_complex: bool) -> Tensor:
    """Return input or output weights with time as their second axis, and as complex numbers if they are pairs."""
    if B.ndim == 2:
        return B
    if is_complex and not B.is_complex():
        B = torch.view_as_complex(widen(B).unflatten(-1, (-1, 2)).contiguous())
    return B.movedim(-1, 1)


def _widened(u: Tensor, B: Tensor, C: Tensor, z: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return all in the widest of their dtypes: B and C may be float32 where u is not."""
    wide = torch.promote_types(torch.promote_types(u.dtype, B.real.dtype), C.real.dtype)
    B, C = (weights if weights.is_complex() else weights.to(wide) for weights in (B, C))
    return u.to(wide), B, C, None if z is None else z.to(wide)


def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: Tensor | None = None,
) -> Tensor:
    """Take one step of `selective_scan_fn`, of E channels or of H heads of P channels. The state changes in place.

    state: (B, E, N) or (B, H, P, N).   x, dt, z: (B, E) or (B, H, P).   A: (E, N) or (H, P, N).   B, C: (B, N), or
    (B, G, N) for G groups of heads.   D, dt_bias: (E,) or (H, P).   state_batch_indices: the row of the state for each
    row of x, (B,). Returns y like x. Raises ShapeError.
    """
    rows = state if state_batch_indices is None else state[state_batch_indices.long()]
    channels = x.ndim - 1
    u, delta = x.flatten(1).unsqueeze(1), dt.flatten(1).unsqueeze(1)
    gate = None if z is None else z.flatten(1).unsqueeze(1)
    D, bias = (None if vector is None else vector.flatten() for vector in (D, dt_bias))
    u, B, C, gate = _widened(u, B.unsqueeze(1), C.unsqueeze(1), gate)
    A, first = A.flatten(0, channels - 1), rows.flatten(1, channels)
    y, last = selective_scan(u, delta, A, B, C, D, gate, bias, first, delta_softplus=dt_softplus)
    last = last.view_as(rows).to(state.dtype)
    if state_batch_indices is None:
        state.copy_(last)
    else:
        state[state_batch_indices.long()] = last
    return y.to(x.dtype).view(x.shape)


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    return_varlen_states: bool = False,
    state_dtype: torch.dtype | None = None,
) -> Any:
    r"""Scan Mamba-2's state space model over x (B, T, H, P), by `linear_attention`. Return y (B, T, H, P).

    .. math:: S_t = e^{\Delta_t A} S_{t-1} + \Delta_t x_t B_t^\top, \quad
        y_t = (S_t C_t + D \odot x_t) \odot \mathrm{silu}(z_t)

    dt: (B, T, H); Δ is dt + dt_bias, its softplus if dt_softplus, clipped to dt_limit.   A, dt_bias: (H,).   B, C:
    (B, T, G, N), where G divides H.   D: (H,) or (H, P).   z: (B, T, H, P).   initial_states: (B, H, P, N).   seq_idx:
    the number of the sequence of each step, (B, T). Each sequence has a state of its own; the first of a row
    continues from initial_states if its number is 0.
    return_final_states: also return the state of the last sequence of each row, (B, H, P, N).   return_varlen_states:
    also return, after that, the last state of each sequence of the one row, (N, H, P, N). cu_seqlens (N+1,) then has
    their offsets, and seq_idx is needed; the original does not reset its state by cu_seqlens.
    chunk_size, state_dtype: for the original's kernels. They are ignored.

    Raises ConfigError where seq_idx and cu_seqlens differ; ShapeError.
    """
    dt = widen(dt) if dt_bias is None else widen(dt) + widen(dt_bias)
    dt = (F.softplus(dt) if dt_softplus else dt).clamp(*dt_limit)
    state = None if initial_states is None else initial_states.mT
    operands, packed = (C, B, dt.unsqueeze(-1) * x, dt * A), None
    if seq_idx is not None:
        packed = Sequences.of("mamba_chunk_scan_combined", seq_idx, x)
        operands = tuple(map(joined, operands))
        state = None if state is None else _first_states(state, seq_idx, packed)
    if return_varlen_states:
        _check_offsets(cu_seqlens, packed)
    offsets = None if packed is None else packed.cu_seqlens
    y, last = linear_attention(*operands, state=state, scale=1.0, cu_seqlens=offsets)
    y, states = y.view(x.shape), last.mT
    if D is not None:
        y = torch.addcmul(y, x, D if D.ndim == 2 else D.unsqueeze(-1))
    y = y.to(x.dtype) if z is None else (y * F.silu(widen(z))).to(x.dtype)
    final = states if packed is None else states[packed.last]
    if not return_final_states and not return_varlen_states:
        return y
    return (y, *((final,) if return_final_states else ()), *((states,) if return_varlen_states else ()))


def _first_states(state: Tensor, seq_idx: Tensor, packed: Sequences) -> Tensor:
    """Return the initial state of every sequence: that of the row, (B, H, N, P), for its first, otherwise zeros."""
    state = state * (seq_idx[:, 0] == 0).view(-1, 1, 1, 1)
    return state.new_zeros(len(packed.cu_seqlens) - 1, *state.shape[1:]).index_copy(0, packed.first, state)


def _check_offsets(cu_seqlens: Tensor | None, packed: Sequences | None) -> None:
    if packed is None:
        raise ConfigError("mamba_chunk_scan_combined: seq_idx is None, expected a tensor with return_varlen_states")
    actual, expected = None if cu_seqlens is None else cu_seqlens.tolist(), packed.cu_seqlens.tolist()
    if actual != expected:
        raise ConfigError(f"mamba_chunk_scan_combined: cu_seqlens is {actual}, expected {expected} because of seq_idx")
