"""The functions of the package causal-conv1d, computed by `short_convolution`.

    y_t = φ(b + Σ_j w_{W-1-j} ⊙ x_{t-j})

Channels are the second axis. Any window W >= 1 is possible, not only 2 to 4, and x may lie in memory in any
order. Source: Dao, https://github.com/Dao-AILab/causal-conv1d, version 1.6.1.
"""

import torch
from torch import Tensor

from scanl.compat.sequences import Sequences, joined
from scanl.errors import ConfigError, ShapeError
from scanl.ops import short_convolution


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Convolve each channel of x (B, D, T) causally with its own weights (D, W). Return y (B, D, T).

    bias: (D,).   seq_idx: the number of the sequence of each step, (B, T); each sequence is convolved alone,
    and where it is negative, y is 0.   initial_states: the inputs before x, (B, D, W-1).   return_final_states: also
    return the last inputs, (B, D, W-1).   final_states_out: a tensor that they are written to.   activation: "silu",
    "swish", which is the same, or None.

    Raises ConfigError for an unknown activation, and for seq_idx with initial or final states; ShapeError.
    """
    silu = _silu("causal_conv1d_fn", activation)
    if seq_idx is None:
        state = None if initial_states is None else initial_states.mT
        y, last = short_convolution(x.mT, weight, bias, state, silu=silu)
        y = alike(y.mT, x)
        if not return_final_states:
            return y
        final = last.mT.to(x.dtype)
        return y, final if final_states_out is None else final_states_out.copy_(final)
    if initial_states is not None or return_final_states:
        raise ConfigError(
            "causal_conv1d_fn: seq_idx is given, expected None because of initial_states or return_final_states"
        )
    packed = Sequences.of("causal_conv1d_fn", seq_idx, x.mT)
    y, _ = short_convolution(joined(x.mT), weight, bias, silu=silu, cu_seqlens=packed.cu_seqlens)
    y = y.view(x.mT.shape).masked_fill(seq_idx.unsqueeze(-1) < 0, 0)
    return alike(y.mT, x)


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
) -> Tensor:
    """Convolve the next steps x (B, D) or (B, D, T), after the inputs in conv_state, which is updated in place.

    conv_state: the last S >= W-1 inputs, (B, D, S).   cache_seqlens: how many steps came before, (B,); conv_state is
    then a ring, and step t is at t mod S.   conv_state_indices: the row of conv_state for each row of x, (B,); where it
    is negative, y is 0 and no state changes.   The others: as for `causal_conv1d_fn`. Returns y like x.

    Raises ConfigError and ShapeError.
    """
    silu = _silu("causal_conv1d_update", activation)
    if x.ndim == 2:
        steps = (x.unsqueeze(-1), conv_state, weight, bias, activation, cache_seqlens, conv_state_indices)
        return causal_conv1d_update(*steps).squeeze(-1)
    size, window = conv_state.shape[-1], weight.shape[1] - 1
    if size < window:
        raise ShapeError(f"causal_conv1d_update: conv_state has {size} inputs, expected at least {window} from weight")
    rows = torch.arange(len(x), device=x.device) if conv_state_indices is None else conv_state_indices.long()
    idle = rows < 0
    state = conv_state[rows.clamp(min=0)]
    if cache_seqlens is None:
        recent = state[..., size - window :]
        after = torch.cat([state, x.to(state.dtype)], -1)[..., -size:]
    else:
        start = cache_seqlens.long().unsqueeze(-1)
        recent = state.gather(-1, _ring(start + torch.arange(-window, 0, device=x.device), state))
        after = state.scatter(-1, _ring(start + torch.arange(x.shape[-1], device=x.device), state), x.to(state.dtype))
    y, _ = short_convolution(x.mT, weight, bias, recent.mT, silu=silu)
    if conv_state_indices is None:
        conv_state.copy_(after)
    else:
        conv_state[rows[~idle]] = after[~idle]
    return alike(y.mT.masked_fill(idle[:, None, None], 0), x)


def causal_conv1d_varlen_states(x: Tensor, cu_seqlens: Tensor, state_len: int) -> Tensor:
    """Return the last state_len inputs of each packed sequence, (N, D, state_len), zeros before its start.

    x: inputs, (T, D).   cu_seqlens: offsets of the sequences, (N+1,).
    """
    steps = cu_seqlens[1:, None] + torch.arange(-state_len, 0, device=x.device)
    if not len(x):
        return x.new_zeros(len(steps), x.shape[1], state_len)
    states = x[steps.clamp(min=0)]
    return states.masked_fill((steps < cu_seqlens[:-1, None]).unsqueeze(-1), 0).mT


def alike(y: Tensor, x: Tensor) -> Tensor:
    """Return y with its last axis innermost in memory if x has it so, as callers may view it."""
    return y.contiguous() if x.is_contiguous() else y


def _silu(who: str, activation: str | None) -> bool:
    if activation not in (None, "silu", "swish"):
        raise ConfigError(f"{who}: activation is {activation!r}, expected None, 'silu' or 'swish'")
    return activation is not None


def _ring(steps: Tensor, state: Tensor) -> Tensor:
    """Return the positions of steps (B, T) in a ring (B, D, S), for each channel."""
    return steps.remainder(state.shape[-1]).unsqueeze(1).expand(-1, state.shape[1], -1)
