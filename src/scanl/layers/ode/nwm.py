"""Neural wave machine: oscillators on a torus or on rings, coupled with their neighbours, so that waves travel."""

import math
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn

from scanl.layers import options, registry
from scanl.layers.initial_state import StateAxes
from scanl.layers.ode._timed import TimedCell
from scanl.layers.parts.cell_cases import cases
from scanl.ops.cell import cell
from scanl.options import at_least, one_of

KERNELS = {"torus": (3, 3), "rings": (1, 3)}


@cell(
    "x: B T P Q, dt: B T 1, w: 2 K L, rates: 2, state: B 2 P Q -> B T P Q",
    equation="z_t = z_{t-1} + dt (tanh(x_t + w_y * y_{t-1} + w_z * z_{t-1}) - gamma y_{t-1} - epsilon z_{t-1}), "
    "y_t = y_{t-1} + dt z_t, where * is a circular correlation over P and Q",
    source='Keller and Welling, "Neural Wave Machines: Learning Spatiotemporally Structured Representations", ICML '
    "2023",
    static=("K", "L"),
)
def nwm_cell(x, dt, w, rates, state):
    """Move oscillators on a grid (P, Q), closed in both directions, by one step of length dt, (B, T, 1).

    x: the projected input, biases included, (B, T, P, Q).   w: kernels of y and of z, of odd sizes, (2, K, L).
    rates: gamma and epsilon, (2).   state: y and z, (B, 2, P, Q).
    """
    rows, columns = w.shape[1:]
    pull = x
    for k in range(rows):
        for j in range(columns):
            moved = torch.roll(state, (rows // 2 - k, columns // 2 - j), (2, 3))
            pull = pull + (w[:, k, j, None, None] * moved).sum(1)
    (y, z), dt = state.unbind(1), dt[..., None]
    z = z + dt * (torch.tanh(pull) - rates[0] * y - rates[1] * z)
    y = y + dt * z
    return y, torch.stack([y, z], 1)


cases(
    nwm_cell,
    "K=3 L=3 P=3 Q=4",
    "w has shape (3, 3), expected (2, K, L)",
    "rates has shape (1,), expected (2,)",
    dt=lambda dt: dt.abs() / 2,
    rates=Tensor.abs,
)


@registry.register("nwm")
class NeuralWaveMachine(TimedCell):
    """Neural wave machine: a coRNN whose oscillators lie on a grid and feel only their neighbours.

    Parameters as in the authors' program: Wx (S², D); Wy, Wz (1, 1, 3, 3) or (1, 1, 1, 3); readout (D, S²); all with
    biases; if trained dt, gamma, alpha (1).
    Initialisation: as in PyTorch. The defaults of dt, gamma and damping are coRNN's for sMNIST.
    """

    id = "S-nwm"
    aliases = ("neural_wave",)
    equation = (
        "z_t = z_{t-1} + dt (tanh(w_y * y_{t-1} + w_z * z_{t-1} + V x_t + b) - gamma y_{t-1} - epsilon z_{t-1}),  "
        "y_t = y_{t-1} + dt z_t,  * a circular convolution"
    )
    cell = nwm_cell
    reads: ClassVar = {"Wy": nn.Conv2d, "Wz": nn.Conv2d}
    state: ClassVar = StateAxes("2, side, side", "y and z")
    sample: ClassVar = {"side": 3}
    residual_out = "readout"

    def __init__(
        self,
        dim: options.Dim,
        side: Annotated[
            int | None,
            at_least(1),
            "S; the state has S rings of S oscillators, in each of y and z. By default the largest with S² <= D",
        ] = None,
        variant: Annotated[
            str,
            one_of(KERNELS),
            '"torus" (kernels of 3 × 3), or "rings" that do not touch (kernels of 1 × 3)',
        ] = "torus",
        dt: Annotated[options.TimeStep, "Δt, the length of a step"] = 0.042,
        gamma: Annotated[float, at_least(0), "γ, stiffness of an oscillator without coupling"] = 2.7,
        damping: Annotated[float, at_least(0), "ε, damping"] = 4.7,
        trained: Annotated[
            options.Trained,
            "dt, gamma and damping are learned, as σ(dt), ReLU(gamma) and ReLU(alpha). They start at the authors' "
            "σ(-1.95), 1 and 0.5. The three options then have no effect",
        ] = False,
    ) -> None:
        super().__init__()
        side = math.isqrt(dim) if side is None else side
        self.dim, self.side, self.trained = dim, side, trained
        self.Wx = nn.Linear(dim, side * side)
        self.Wy = nn.Conv2d(1, 1, KERNELS[variant])  # these hold the kernels; the cell applies them
        self.Wz = nn.Conv2d(1, 1, KERNELS[variant])
        self.readout = nn.Linear(side * side, dim)
        if trained:
            self.dt, self.gamma, self.alpha = (nn.Parameter(torch.tensor([start])) for start in (-1.95, 1.0, 0.5))
        else:
            self.dt, self.gamma, self.damping = dt, gamma, damping

    def operands(self, x: Tensor, spans: Tensor) -> list[Tensor]:
        assert self.Wy.bias is not None
        assert self.Wz.bias is not None
        drive = self.Wx(x) + (self.Wy.bias + self.Wz.bias)
        if self.trained:
            dt, gamma, alpha = (getattr(self, name) for name in ("dt", "gamma", "alpha"))  # in torch.func plain tensors
            dt, rates = dt.sigmoid(), torch.cat([gamma, alpha]).relu()
        else:
            dt, rates = self.dt, torch.stack([spans.new_tensor(rate) for rate in (self.gamma, self.damping)])
        kernels = torch.cat([self.Wy.weight[0], self.Wz.weight[0]])
        return [drive.unflatten(-1, (self.side, self.side)), dt * spans, kernels, rates]

    def output(self, h: Tensor) -> Tensor:
        return self.readout(h.flatten(2))
