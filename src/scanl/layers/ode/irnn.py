"""Incrementally evolving RNN: each input moves the state towards an equilibrium, by a few fixed-point rounds."""

from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor, nn

from scanl.layers import options, registry
from scanl.layers.base import widen
from scanl.layers.ode._timed import ACTIVATIONS, TimedCell
from scanl.layers.parts.cell_cases import cases
from scanl.ops.cell import cell
from scanl.options import one_of


@cell(
    "x: B T D, dt: B T 1, u: D D, eta: K, state: B D -> B T D",
    equation="h <- h + eta_k (phi(U (h + h_{t-1}) + x_t) - alpha (h + h_{t-1})), K times a step",
    source='Kag, Zhang and Saligrama, "RNNs Evolving on an Equilibrium Manifold: A Panacea for Vanishing and Exploding '
    'Gradients?", arXiv:1908.08574, eq. (5) and (6)',
    static=("K",),
)
def irnn_cell(
    x: Tensor,
    dt: Tensor,
    u: Tensor,
    eta: Tensor,
    state: Tensor,
    *,
    alpha: float = 1.0,
    activation: str = "relu",
    init: str = "state",
    twice: bool = False,
) -> tuple[Tensor, Tensor]:
    """Move towards the equilibrium by K rounds. x: W x + b.   dt: how long they last.   eta: their step sizes.

    twice: φ(U (U (h + h_{t-1}) + x)) instead of φ(U (h + h_{t-1}) + x).
    """
    h = state if init == "state" else torch.zeros_like(state)
    for size in eta.unbind(0):
        both = h + state
        inner = x + both @ u.T
        h = h + dt * size * (ACTIVATIONS[activation](inner @ u.T if twice else inner) - alpha * both)
    return h, h


cases(
    irnn_cell,
    "D=3 K=2",
    "eta has shape (2, 3), expected (K,)",
    "u has shape (2, 3), expected (D, D)",
    dt=Tensor.abs,
    eta=lambda eta: eta / 4,
)


@registry.register("irnn")
class IRNN(TimedCell):
    """Incremental RNN (iRNN, ERNN): at equilibrium the derivative of h_t by h_{t-1} is minus the identity.

    `forward` also takes `timespans` (B, T), the duration of each step. The rounds are Euler steps of
    dh/ds = φ(U (h + h_{t-1}) + W x + b) - α (h + h_{t-1}); a duration multiplies their lengths η.

    Parameters: W (D, D) with its bias b, U (D, D), eta (K); with a rank R, V2 (D, R) and V (R, D) instead of U.
    Initialisation: W, U, V2, V and b U(±1/sqrt(D)), η 0.01.
    The authors have published no program. This is not the identity-initialised RNN of the same name, which is `elman`
    with init="identity".
    """

    id = "S-irnn"
    aliases = ("ERNN", "incremental", "equilibriated_rnn", "equilibrium_rnn", "incrementally_evolving_rnn")
    equation = "phi(U (h_t + h_{t-1}) + W x_t + b) = alpha (h_t + h_{t-1}),  by K fixed-point rounds"
    cell = irnn_cell
    reads: ClassVar = {"U": nn.Linear}
    sample: ClassVar = {"substeps": 2}

    def __init__(
        self,
        dim: options.Dim,
        substeps: Annotated[options.Substeps, "K, fixed-point rounds for each input"] = 3,
        alpha: Annotated[float, "α"] = 1.0,
        activation: Annotated[str, one_of(ACTIVATIONS), "φ"] = "relu",
        init: Annotated[
            Literal["state", "zero"],
            'where the rounds start: "state", at h_{t-1}, as in public programs; or "zero", as the equation has it',
        ] = "state",
        rank: Annotated[
            options.Rank | None,
            "rank of Uᵀ - I = V2 V; U is then applied twice, φ(U (U (h + h_{t-1}) + W x + b)), as in a public port of "
            "the authors' cell with rank 20. None for a full U, applied once",
        ] = None,
    ) -> None:
        super().__init__()
        self.dim, self.alpha, self.activation, self.init, self.rank = dim, alpha, activation, init, rank
        self.twice = rank is not None
        self.W = nn.Linear(dim, dim)
        if rank is None:
            self.U = nn.Linear(dim, dim, bias=False)
        else:
            limit = dim**-0.5
            self.V2 = nn.Parameter(torch.empty(dim, rank).uniform_(-limit, limit))
            self.V = nn.Parameter(torch.empty(rank, dim).uniform_(-limit, limit))
        self.eta = nn.Parameter(torch.full((substeps,), 0.01))

    def operands(self, x: Tensor, spans: Tensor) -> list[Tensor | None]:
        return [self.W(x), spans, self._recurrent(), self.eta]

    def _recurrent(self) -> Tensor:
        if self.rank is None:
            return self.U.weight
        v2, v = widen(self.V2), widen(self.V)
        return (torch.eye(self.dim, dtype=v.dtype, device=v.device) + v2 @ v).T
