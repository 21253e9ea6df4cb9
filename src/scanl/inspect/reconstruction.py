"""A picture of what HiPPO's memories hold of a signal: the signal, and its reconstruction from each memory.

python -m scanl.inspect.reconstruction hippo.png
"""

import math
import os
from pathlib import Path

import torch
from torch import Tensor

from scanl.errors import ShapeError
from scanl.files import written_whole
from scanl.layers.parts.polynomial_memory import MEASURES, reconstruct
from scanl.layers.ssm.hippo import HiPPO
from scanl.whole import whole_number

WHAT = {
    "legs": "LegS: all of the past",
    "legt": "LegT: the last {theta:g} steps",
    "fourier": "Fourier: the last {theta:g} steps",
    "lagt": "LagT: the past fades over {theta:g} steps",
}
PIECE = 512  # steps whose matrices are in memory at once


def reconstructed(signal: Tensor, size: int, measure: str, theta: float) -> tuple[Tensor, Tensor, float]:
    """Return the steps that a HiPPO memory of `size` numbers covers, the reconstructed values there, and the error.

    signal: (T).   measure, theta: as for `hippo`.   Steps and values: (A), oldest first. For "lagt" they reach back 4
    θ. The error is the root mean squared error over these steps, divided by the signal's root mean square. The age of
    an input counts from the middle of the step over which it is held. Computed in float64.
    """
    if signal.ndim != 1 or len(signal) < 2:
        raise ShapeError(f"reconstructed: signal has shape {tuple(signal.shape)}, expected (T) with T at least 2")
    x, state = signal.detach().double().cpu()[None, :, None], None
    layer = HiPPO(1, size, measure, theta).double()
    with torch.no_grad():
        for piece in x.split(PIECE, 1):
            state = layer.memory(piece, state)[1]
    assert state is not None
    unit = {"legs": float(len(signal)), "lagt": theta}.get(measure, theta)
    reach = min(len(signal) / unit, 4.0 if measure == "lagt" else 1.0)
    steps = torch.arange(len(signal), dtype=torch.float64)
    steps = steps[steps >= len(signal) - reach * unit]
    age = (len(signal) - 0.5 - steps) / unit
    values = reconstruct(state.c[0, 0], age, measure)
    exact = x[0, -len(steps) :, 0]
    return steps, values, ((values - exact).square().mean() / exact.square().mean()).sqrt().item()


def save_reconstruction(
    path: str | os.PathLike[str], signal: Tensor, size: int = 64, theta: float | None = None
) -> dict[str, float]:
    """Write a picture of the signal (T) and of what each measure gives back, as PNG. Return the errors by measure.

    theta: θ; by default a quarter of the signal.
    """
    from matplotlib.figure import Figure

    theta = len(signal) / 4 if theta is None else theta
    figure = Figure(figsize=(8, 7), layout="constrained")
    errors = {}
    panels = figure.subplots(len(MEASURES), 1, sharex=True)
    for axes, measure in zip(panels, MEASURES, strict=True):
        steps, values, errors[measure] = reconstructed(signal, size, measure, theta)
        axes.plot(signal.detach().cpu(), lw=1, color="#bdbdbd", label="signal")
        axes.plot(steps, values, lw=1.3, color="#08519c", label=f"given back by {size} numbers")
        axes.set_title(f"{WHAT[measure].format(theta=theta)}; error {errors[measure]:.1%}", fontsize=10, loc="left")
        low, high = signal.min().item(), signal.max().item()
        axes.set_ylim(low - 0.15 * (high - low), high + 0.15 * (high - low))
        axes.grid(alpha=0.3)
    panels[-1].set_xlabel("step")
    figure.legend(*panels[-1].get_legend_handles_labels(), loc="outside upper right", ncols=2, frameon=False)
    with written_whole(Path(path)) as temporary:
        figure.savefig(temporary, format="png", dpi=120)
    return errors


def waves(steps: int = 2000, seed: int = 0) -> Tensor:
    """Return a sum of five waves of 2 to 18 periods with random phases, (steps), in float64."""
    generator = torch.Generator().manual_seed(whole_number("waves", "seed", seed))
    phases = 2 * math.pi * torch.rand(5, generator=generator, dtype=torch.float64)
    time = torch.arange(steps, dtype=torch.float64) / steps
    periods = torch.tensor([2.0, 5.0, 9.0, 13.0, 18.0], dtype=torch.float64)
    return torch.sin(2 * math.pi * time[:, None] * periods + phases).sum(1)
