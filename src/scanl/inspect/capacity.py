"""Memory capacity: the share of its past inputs that a linear map can read from a state."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from scanl.errors import ConfigError, ShapeError
from scanl.inspect.base import BLUE, Drawing, Inspection, inspector, noise, prepared, state_size
from scanl.layers.base import Layer
from scanl.layers.state import flatten

STEPS = 600  # of white noise, or SAMPLES for each number of the state if that is more
SAMPLES = 5
MAX_NUMBERS = 256  # numbers of a state
LAGS = 100


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


@dataclass(frozen=True)
class MemoryCapacity(Inspection):
    """shares: (lags,), the part of the variance of the input k steps ago that a linear map reads from the state.

    numbers: N, how many numbers the state has.
    """

    shares: Tensor
    numbers: int

    def capacity(self) -> float:
        """Return the sum over the lags; at most N, up to the noise of finitely many steps."""
        return self.shares.clamp(min=0).sum().item()

    def figures(self) -> dict[str, float]:
        half = (self.shares < 0.5).int().argmax().item() if (self.shares < 0.5).any() else len(self.shares)
        return {"capacity": self.capacity(), "numbers": self.numbers, "half is held for, steps": half}

    def columns(self) -> dict[str, Any]:
        return {"lag": list(range(len(self.shares))), "share": self.shares.tolist()}

    def panels(self) -> dict[str, Drawing]:
        return {"": self._draw}

    def _draw(self, axes: Any) -> None:
        axes.fill_between(range(len(self.shares)), self.shares.clamp(min=0), step="mid", color=BLUE, alpha=0.3, lw=0)
        axes.step(range(len(self.shares)), self.shares.clamp(min=0), where="mid", lw=1.2, color=BLUE)
        axes.set(xlabel="lag, steps", ylabel="part of the variance that is read", ylim=(0, 1.05))
        axes.grid(alpha=0.3)


@inspector(
    title="Linear memory capacity",
    equation="m_k = 1 - min_w E(u_{t-k} - w^T s_t)^2 / Var(u),  capacity = sum_k m_k",
    source='Jaeger, "Short term memory in echo state networks", GMD report 152, 2001',
    takes="layers with a state of constant size, at most 256 numbers",
    own_signal=True,
)
def memory_capacity(layer: Layer, x: Tensor | None = None) -> MemoryCapacity:
    """Return the share of each past input that a linear map reads from a layer's state: `decoded`.

    x: (1, T, dim) with one number a step for all channels, up to a factor of each; None for white noise u_t times a
    random direction, over 600 steps, or 5 for each number of the state. Channel 0 is read. At most 100 lags.

    Raises ConfigError for a layer without a state of constant size, for a larger one, and for a sequence of fewer than
    4 steps for each number of the state.
    """
    copy, signal = prepared("memory_capacity", layer, x, 1, rows=1)
    numbers = state_size("memory_capacity", copy, MAX_NUMBERS)
    if x is None:
        signal = noise(1, max(STEPS, SAMPLES * numbers), 1) * noise(1, 1, layer.dim).sign()
    steps = signal.shape[1]
    if steps < 4 * numbers or steps < 8:
        least = max(8, 4 * numbers)
        raise ConfigError(
            f"memory_capacity: x has {steps} steps, expected at least {least} because the state has {numbers} numbers"
        )
    state, states = copy.init_state(len(signal)), []
    with torch.no_grad():
        for t in range(steps):
            state = copy.step(signal[:, t], state)[1]
            states.append(flatten(state)[0])
    return MemoryCapacity(decoded(signal[0, :, 0], torch.stack(states), min(LAGS, steps // 4)), numbers)
