"""Antisymmetric recurrent network: small steps of a system whose Jacobian has nearly imaginary eigenvalues."""

from typing import Annotated

import torch
from torch import Tensor, nn

from scanl.layers import options, registry
from scanl.layers.ode._timed import TimedCell, part_skew, square_normal
from scanl.layers.parts.cell_cases import cases
from scanl.ops.cell import cell
from scanl.options import at_least


@cell(
    "x: B T D, dt: B T 1, w: D D, gate?: B T D, state: B D -> B T D",
    equation="h_t = h_{t-1} + dt z_t * tanh(W h_{t-1} + x_t), z_t = sigmoid(W h_{t-1} + gate_t), or 1 without a gate",
    source='Chang, Chen, Haber and Chi, "AntisymmetricRNN: A Dynamical System View on Recurrent Neural Networks", '
    "arXiv:1902.09689",
)
def antisym_cell(x, dt, w, gate, state):
    """Move h by one Euler step of length dt, (B, T, 1).

    x: the projected input, bias included, (B, T, D).   w: (D, D), skew-symmetric but for its diagonal.
    gate: the projected input of the gate, (B, T, D); None for no gate.   state: h, (B, D).
    """
    pull = state @ w.T
    change = dt * torch.tanh(pull + x)
    h = state + (change if gate is None else change * torch.sigmoid(pull + gate))
    return h, h


cases(
    antisym_cell,
    "D=3",
    "w has shape (2, 3), expected (D, D) with D=3 from x",
    "gate has shape (5, 3), expected (B, T, D)",
    dt=Tensor.abs,
)


@registry.register("antisym")
class AntisymmetricRNN(TimedCell):
    """AntisymmetricRNN: its transition nearly keeps the length of gradients, without a constraint that is hard to meet.

    Parameters: W (D, D), of which only the skew part counts; V (D, D) with bias; V_z likewise if gated. The authors
    have published no program.
    Initialisation: W N(0, (init_std / D)²); V and V_z N(0, (init_std / D)²); biases 0, of the gate 1, so that it begins
    open. The paper draws W from N(0, init_std² / D); the public programs divide by D, as here.
    """

    id = "S-antisym"
    aliases = ("antisymmetric",)
    equation = "h_t = h_{t-1} + dt tanh((W - W^T - gamma I) h_{t-1} + V x_t + b)"
    cell = antisym_cell

    def __init__(
        self,
        dim: options.Dim,
        dt: Annotated[options.TimeStep, "ε, the length of a step"] = 0.01,
        gamma: Annotated[float, at_least(0), "γ, diffusion, subtracted from the diagonal"] = 0.01,
        gated: Annotated[
            bool, "the step is multiplied by σ((W - Wᵀ - γ I) h + V_z x + b_z), which shares its W with the state"
        ] = False,
        init_std: Annotated[options.InitStd, "scale of the initial W and of the input weights"] = 1.0,
    ) -> None:
        super().__init__()
        self.dim, self.dt, self.gamma = dim, dt, gamma
        self.W = square_normal(dim, init_std)
        self.V = nn.Linear(dim, dim)
        self.V_z = nn.Linear(dim, dim) if gated else None
        for linear, bias in ((self.V, 0.0), (self.V_z, 1.0)):
            if linear is not None:
                nn.init.normal_(linear.weight, std=init_std / dim)
                nn.init.constant_(linear.bias, bias)

    def operands(self, x: Tensor, spans: Tensor) -> list[Tensor | None]:
        w = part_skew(self.W, 1.0, self.gamma)
        return [self.V(x), self.dt * spans, w, None if self.V_z is None else self.V_z(x)]
