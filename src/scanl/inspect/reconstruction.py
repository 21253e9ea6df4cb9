"""The reconstruction of a signal from the memories of HiPPO."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from scanl.errors import ConfigError, ShapeError
from scanl.inspect.base import BLUE, Drawing, Inspection, inspector, prepared
from scanl.layers.base import Layer
from scanl.layers.designation import label
from scanl.layers.parts.polynomial_memory import reconstruct
from scanl.layers.ssm.hippo import HiPPO
from scanl.whole import whole_number

MEASURE_NAMES = {
    "legs": "LegS: all of the past",
    "legt": "LegT: the last {theta:g} steps",
    "fourier": "Fourier: the last {theta:g} steps",
    "lagt": "LagT: the past fades over {theta:g} steps",
}
PIECE = 512  # steps whose matrices are in memory at once


@dataclass(frozen=True)
class Reconstruction(Inspection):
    """signal: (T,).   steps: (A,), those that the memory covers, oldest first.   values: (A,), the signal there, as the
    memory has it.   what: the measure in words.   numbers: N, of the memory.
    """

    signal: Tensor
    steps: Tensor
    values: Tensor
    what: str
    numbers: int

    def error(self) -> float:
        """Return the root mean squared error over these steps, divided by the signal's root mean square."""
        exact = self.signal[-len(self.steps) :]
        return ((self.values - exact).square().mean() / exact.square().mean()).sqrt().item()

    def figures(self) -> dict[str, float]:
        return {"numbers": self.numbers, "steps covered": len(self.steps), "error": self.error()}

    def columns(self) -> dict[str, Any]:
        signal = self.signal[-len(self.steps) :]
        return {"step": self.steps.tolist(), "signal": signal.tolist(), "reconstruction": self.values.tolist()}

    def panels(self) -> dict[str, Drawing]:
        return {f"{self.what}; error {self.error():.1%}": self._draw}

    def _draw(self, axes: Any) -> None:
        axes.plot(self.signal, lw=1, color="#bdbdbd", label="signal")
        axes.plot(self.steps, self.values, lw=1.3, color=BLUE, label=f"{self.numbers} numbers")
        low, high = self.signal.min().item(), self.signal.max().item()
        axes.set_ylim(low - 0.15 * (high - low), high + 0.15 * (high - low))
        axes.set(xlabel="step", ylabel="signal")
        axes.legend(frameon=False, fontsize=8, loc="upper left")
        axes.grid(alpha=0.3)


@inspector(
    title="Reconstruction of a signal by HiPPO",
    equation="u(t - age) ~ sum_n c_n(t) p_n(age)",
    source='Gu et al., "HiPPO: Recurrent Memory with Optimal Polynomial Projections", arXiv:2008.07669, sec. 2',
    takes="hippo",
    own_signal=True,
)
def reconstruction(layer: Layer, x: Tensor | None = None) -> Reconstruction:
    """Return the reconstruction of a signal from the memory of a HiPPO layer at its end.

    x: (1, T, dim), T at least 2, of which channel 0 is the signal; None for `waves` of 2000 steps. The memory covers
    all steps, or the last θ; of "lagt" 4 θ. The age of an input counts from the middle of the step over which it is
    held. Computed in float64.

    Raises ConfigError for another layer, ShapeError for more than one sequence or less than two steps.
    """
    if not isinstance(layer, HiPPO):
        name = label(layer) if isinstance(layer, Layer) else type(layer).__name__
        raise ConfigError(
            f"reconstruction: layer is {name}, expected hippo because its memory is a projection on known functions"
        )
    if x is None:
        x = waves()[None, :, None].expand(-1, -1, layer.dim)
    hippo, x = prepared("reconstruction", layer, x, 0)
    assert isinstance(hippo, HiPPO)
    if len(x) != 1 or x.shape[1] < 2:
        raise ShapeError(f"reconstruction: x has shape {tuple(x.shape)}, expected (1, T, {layer.dim}), T at least 2")
    state = None
    with torch.no_grad():
        for piece in x.split(PIECE, 1):
            state = hippo.memory(piece, state)[1]
    assert state is not None
    signal, measure, theta = x[0, :, 0], hippo.measure, hippo.theta
    unit = float(len(signal)) if measure == "legs" else theta
    reach = min(len(signal) / unit, 4.0 if measure == "lagt" else 1.0)
    steps = torch.arange(len(signal), dtype=torch.float64)
    steps = steps[steps >= len(signal) - reach * unit]
    age = (len(signal) - 0.5 - steps) / unit
    values = reconstruct(state.c[0, 0], age, measure)
    return Reconstruction(signal, steps, values, MEASURE_NAMES[measure].format(theta=theta), hippo.state_dim)


def waves(steps: int = 2000, seed: int = 0) -> Tensor:
    """Return a sum of five waves of 2 to 18 periods with random phases, (steps), in float64."""
    generator = torch.Generator().manual_seed(whole_number("waves", "seed", seed))
    phases = 2 * math.pi * torch.rand(5, generator=generator, dtype=torch.float64)
    time = torch.arange(steps, dtype=torch.float64) / steps
    periods = torch.tensor([2.0, 5.0, 9.0, 13.0, 18.0], dtype=torch.float64)
    return torch.sin(2 * math.pi * time[:, None] * periods + phases).sum(1)
