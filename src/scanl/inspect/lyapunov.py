"""Lyapunov exponents: the rates at which neighboring states approach or part."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from scanl.errors import ConfigError
from scanl.inspect.base import BLUE, GRAY, Drawing, Inspection, inspector, prepared, state_size
from scanl.layers.base import Layer
from scanl.layers.state import flatten, repeat, unflatten

STEPS = 300
MAX_EXPONENTS = 32  # exponents where the caller asks for no number
MAX_NUMBERS = 2**14  # numbers of a state


@dataclass(frozen=True)
class LyapunovExponents(Inspection):
    """exponents: (B, m), the m largest, in nats a step, the largest first; above 0 the orbit is chaotic."""

    exponents: Tensor

    def figures(self) -> dict[str, float]:
        mean = self.exponents.mean(0)
        return {
            "largest, nats a step": mean[0].item(),
            "last": mean[-1].item(),
            "count": len(mean),
            "above 0": int((mean > 0).sum()),
        }

    def columns(self) -> dict[str, Any]:
        rows, count = self.exponents.shape
        return {
            "row": torch.arange(rows).repeat_interleave(count).tolist(),
            "number": torch.arange(1, count + 1).repeat(rows).tolist(),
            "exponent": self.exponents.flatten().tolist(),
        }

    def panels(self) -> dict[str, Drawing]:
        return {"": self._draw}

    def _draw(self, axes: Any) -> None:
        for row in self.exponents:
            finite = row.isfinite()
            axes.plot(torch.arange(1, len(row) + 1)[finite], row[finite], "o-", ms=3, lw=1, color=BLUE)
        axes.axhline(0, lw=1, ls="--", color=GRAY)
        axes.set(xlabel="exponent, largest first", ylabel="Lyapunov exponent, nats a step")
        axes.grid(alpha=0.3)


@inspector(
    title="Lyapunov exponents",
    equation="J_t^T Q_t = Q_{t-1} R_{t-1},  λ_i = (1/T) sum_t ln |R_{t,ii}|",
    source='Engelken, Wolf and Abbott, "Lyapunov spectra of chaotic recurrent neural networks", arXiv:2006.02427, '
    'sec. II; Vogt et al., "On Lyapunov Exponents for RNNs", arXiv:2006.14123',
    takes="layers with a state of constant size",
)
def lyapunov_exponents(layer: Layer, x: Tensor | None = None, *, count: int | None = None) -> LyapunovExponents:
    """Return the largest Lyapunov exponents of the state along the orbit that x drives.

    x: (B, T, dim), what the layer reads; None for 1 sequence of 300 steps of white noise. Zeros give the exponents
    of the autonomous system.   count: m; None for all, at most 32.

    Differs: the vectors run backwards in time, by the transposed Jacobians, which backward passes give without the
    Jacobians themselves. The product of all steps, and so its singular values, are the same. The vectors are random at
    the end of the sequence, and the last tenth of the steps, in which they turn, does not count. A complex number of
    the state has two exponents.

    Raises ConfigError for a layer without a state of constant size, for too many exponents, and for fewer than 10
    steps.
    """
    layer, x = prepared("lyapunov_exponents", layer, x, STEPS, rows=1)
    size = state_size("lyapunov_exponents", layer, MAX_NUMBERS)
    count = min(size, MAX_EXPONENTS) if count is None else count
    if not 1 <= count <= size:
        raise ConfigError(f"lyapunov_exponents: count is {count}, expected 1 to {size}, the numbers of the state")
    rows, steps = x.shape[:2]
    if steps < 10:
        raise ConfigError(f"lyapunov_exponents: x has {steps} steps, expected at least 10")
    states = [layer.init_state(rows)]
    with torch.no_grad():
        for t in range(steps - 1):
            states.append(layer.step(x[:, t], states[-1])[1])
    random = torch.randn(rows, size, count, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    Q, stretch = torch.linalg.qr(random)[0], torch.zeros(rows, count, dtype=torch.float64)
    counted = steps - steps // 10
    for t in reversed(range(steps)):
        copies = repeat(states[t], count)
        start = flatten(copies).requires_grad_()
        with torch.enable_grad():
            after = flatten(layer.step(x[:, t].repeat_interleave(count, 0), unflatten(start, copies))[1])
            (pulled,) = torch.autograd.grad(after, start, Q.mT.flatten(0, 1))
        Q, R = torch.linalg.qr(pulled.unflatten(0, (rows, count)).mT)
        if t < counted:
            stretch += R.diagonal(dim1=1, dim2=2).abs().log()
    return LyapunovExponents((stretch / counted).sort(dim=1, descending=True).values)
