"""Light gated recurrent unit with a norm over its input."""

from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.layers import options, registry
from scanl.layers.base import widen
from scanl.layers.initial_state import StateAxes
from scanl.layers.parts.cell_layer import SolvedLayer
from scanl.ops import ligru


class _BatchNorm(nn.BatchNorm1d):
    """Batch norm of rows. A single row has no variance: the running statistics normalise it, and stay as they are."""

    def forward(self, input: Tensor) -> Tensor:
        if len(input) > 1 or not self.training:
            return super().forward(input)
        return F.batch_norm(input, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)


@registry.register("ligru")
class LiGRU(SolvedLayer):
    """Light GRU: one gate, no reset gate, a rectified candidate, and a norm that keeps it from growing.

    With batch norm in training mode, the mean and variance are those of all steps of all rows. So an output depends on
    every step of the batch. In evaluation mode they are the running statistics from training. A single step of a
    single row is always normalised by the running statistics, because it has no variance, and does not change them.
    Differs: the dropout mask of the candidate is omitted. `gate_penalty` is a term of a loss that draws the gates to 0
    or 1.

    Parameters as in speechbrain's LiGRU_Layer, the candidate's rows first: w (2D, D), u (2D, D), norm.weight and
    norm.bias (2D), and the statistics of batch norm, which take 5 % of each batch.
    Initialisation as in that code: u orthogonal as one matrix, w as in PyTorch, the norm 1 and 0.
    """

    id = "S-ligru"
    aliases = ("light_gru", "light_gated_recurrent_unit")
    equation = (
        "h_t = z_t * h_{t-1} + (1 - z_t) * ReLU(BN(W_a x_t) + U_a h_{t-1}),  z_t = sigmoid(BN(W_z x_t) + U_z h_{t-1})"
    )
    source = (
        'Ravanelli, Brakel, Omologo and Bengio, "Light Gated Recurrent Units for Speech Recognition", '
        "arXiv:1803.10225, eq. (5)"
    )
    op = "ligru"
    state: ClassVar = StateAxes("dim")
    reads: ClassVar = {"u": nn.Linear}
    sample: ClassVar = {"variant": "layernorm"}  # in training, batch norm looks at the steps to come

    def __init__(
        self,
        dim: options.Dim,
        variant: Annotated[
            Literal["batchnorm", "layernorm"], 'norm of the input; "layernorm" is over the 2D numbers of a step'
        ] = "batchnorm",
    ) -> None:
        super().__init__()
        self.dim, self.variant = dim, variant
        self.w, self.u = nn.Linear(dim, 2 * dim, bias=False), nn.Linear(dim, 2 * dim, bias=False)
        nn.init.orthogonal_(self.u.weight)
        batch = variant == "batchnorm"
        self.norm = _BatchNorm(2 * dim, momentum=0.05) if batch else nn.LayerNorm(2 * dim)

    def run(self, x: Tensor, state: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
        gates = widen(self._normed(self.w(x))).unflatten(-1, (2, -1))
        y, last = self.run_cell(ligru, gates, self.u.weight.unflatten(0, (2, -1)), state, cu_seqlens=cu_seqlens)
        return y.to(x.dtype), last

    def gate_penalty(self, x: Tensor, state: Tensor | None = None) -> Tensor:
        """Return the mean of 4 z_t (1 - z_t) over all gates of `forward(x, state)`: 0 if all are 0 or 1, at most 1.

        x: (B, T, D). Add a multiple of it to the loss, so that the gates become nearly binary. In training with batch
        norm, each call updates the running statistics.
        """
        h, _ = self(x, state)
        first = self.init_state(len(x), device=x.device, dtype=x.dtype) if state is None else state
        previous = torch.cat([first[:, None].to(h), h[:, :-1]], 1)
        z = torch.sigmoid((self._normed(self.w(x)) + self.u(previous)).chunk(2, -1)[1])
        return (4 * z * (1 - z)).mean()

    def _normed(self, gates: Tensor) -> Tensor:
        return self.norm(gates.flatten(0, 1)).view_as(gates)
