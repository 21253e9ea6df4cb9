"""How much of its past inputs a state still holds, measured by a linear map that reads them from it."""

import torch
from torch import Tensor

from scanl.errors import ConfigError, ShapeError


def decoded(inputs: Tensor, states: Tensor, lags: int, ridge: float = 1e-6) -> Tensor:
    """Return (lags,): for each lag below `lags`, the part of the input's variance that a linear map reads from the
    state.

    inputs: u (T).   states: s (T, N), real; for a complex state, give real and imaginary parts side by side.
    ridge: penalty on the map, in parts of the states' mean square.

    The map of lag k is fitted by ridge regression of u_{t-k} on s_t over the first half of the steps, and measured on
    the second: 1 - (mean squared error) / (variance). 1 is all, 0 is nothing; less than 0 is worse than the mean. Over
    white noise their sum is at most N, the memory capacity of a linear system (Jaeger, "Short term memory in echo state
    networks", 2001). Raises ShapeError and ConfigError for wrong input.

    >>> u = torch.randn(400, generator=torch.Generator().manual_seed(0)).double()
    >>> states = torch.stack([u, u.roll(1)], 1)  # a state that holds the last two inputs
    >>> [round(part, 2) for part in decoded(u, states, 2).tolist()]
    [1.0, 1.0]
    """
    if inputs.ndim != 1 or states.ndim != 2 or len(states) != len(inputs) or states.is_complex():
        raise ShapeError(
            f"decoded: inputs has shape {tuple(inputs.shape)} and states is {states.dtype} {tuple(states.shape)}, "
            "expected (T) and real (T, N)"
        )
    if not 1 <= lags <= len(inputs) // 4:
        raise ConfigError(f"decoded: lags is {lags}, expected 1 to a quarter of the {len(inputs)} steps")
    u, s = inputs.double(), states.double()
    targets = torch.stack([u[lags - k : len(u) - k] for k in range(lags)], 1)
    s = torch.cat([s[lags:], torch.ones_like(s[lags:, :1])], 1)
    half = len(s) // 2
    penalty = ridge * half * s[:half].square().mean() * torch.eye(s.shape[1], dtype=s.dtype, device=s.device)
    weights = torch.linalg.solve(s[:half].T @ s[:half] + penalty, s[:half].T @ targets[:half])
    missed = (targets[half:] - s[half:] @ weights).square().mean(0)
    return 1 - missed / targets[half:].var(0, correction=0)
