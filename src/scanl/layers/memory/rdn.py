"""Recurrent delta network: a fast weight programmer whose slow network also reads the last output."""

from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn

from scanl.layers import options, registry
from scanl.layers.initial_state import StateAxes
from scanl.layers.parts.cell_cases import cases
from scanl.layers.parts.cell_layer import CellLayer
from scanl.ops.cell import cell


@cell(
    "q: B T H K, k: B T H K, vb: B T H J, r_q: H K K, r_k: H K K, r_vb: H K J, state: B H J K -> B T H K",
    equation="S_t = S_{t-1} + sigmoid(b_t) k_t (v_t - S_{t-1}^T k_t)^T,  o_t = S_t^T q_t,  "
    "q, k = softmax(W x_t + R tanh(o_{t-1})),  v, b = W x_t + R tanh(o_{t-1})",
    source='Irie, Schlag, Csordas and Schmidhuber, "Going Beyond Linear Transformers with Recurrent Fast Weight '
    'Programmers", '
    "arXiv:2106.06295, eq. (17) to (20), as in the authors' program",
)
def rdn_cell(
    q: Tensor, k: Tensor, vb: Tensor, r_q: Tensor, r_k: Tensor, r_vb: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Write by the delta rule and read. vb: v and the logit b, J = K + 1.   state: S, with o as one more row."""
    width = q.shape[-1]
    memory, output = state.split([width, 1], 2)
    back = torch.tanh(output[:, :, 0])
    q = torch.softmax(q + torch.einsum("bhi,hij->bhj", back, r_q), -1)
    k = torch.softmax(k + torch.einsum("bhi,hij->bhj", back, r_k), -1)
    v, b = (vb + torch.einsum("bhi,hij->bhj", back, r_vb)).split([width, 1], -1)
    missing = torch.sigmoid(b) * (v - (k[..., None] * memory).sum(2))
    memory = memory + k[..., None] * missing[:, :, None]
    o = (q[..., None] * memory).sum(2)
    return o, torch.cat([memory, o[:, :, None]], 2)


cases(rdn_cell, "H=2 J=4 K=3", "r_vb has shape (2, 3, 3), expected (H, K, J) with H=2 from q, K=3 from q, J=4 from vb")


@registry.register("rdn")
class RDN(CellLayer):
    """Recurrent delta network: a DeltaNet whose queries, keys, values and write strengths depend on its last output.

    The feedback is not linear, so the steps cannot be computed in parallel.

    Parameters as in the authors' program: slow_net (H (3K + 1), D), of each head q, k, v and b; R_q, R_k, R_v
    (1, H, K, K), each (inputs, outputs), the transpose of the equation's R; r_b (1, H, 1, K); out_linear (D, D).
    Their block also has a norm before the layer, and a sum with its input after it.
    Initialisation: R_q, R_k, R_v and r_b N(0, 1/K), the others as in PyTorch.
    """

    id = "S-rdn"
    aliases = ("recurrent_delta_network", "recurrent_deltanet", "delta_rnn")
    cell = rdn_cell
    state: ClassVar = StateAxes("num_heads, head_dim + 1, head_dim", "S, with the last output as one more row")
    residual_out = "out_linear"
    sample: ClassVar = {"num_heads": 3}

    def __init__(
        self,
        dim: options.Dim,
        num_heads: Annotated[options.Heads, "H queries, keys and values of K = D / H channels; a divisor of dim"] = 8,
    ) -> None:
        super().__init__()
        self.dim, self.num_heads, self.head_dim = dim, num_heads, dim // num_heads
        width = self.head_dim
        self.slow_net = nn.Linear(dim, num_heads * (3 * width + 1), bias=False)
        self.R_q, self.R_k, self.R_v = (nn.Parameter(torch.empty(1, num_heads, width, width)) for _ in range(3))
        self.r_b = nn.Parameter(torch.empty(1, num_heads, 1, width))
        self.out_linear = nn.Linear(dim, dim, bias=False)
        for weight in (self.R_q, self.R_k, self.R_v, self.r_b):
            nn.init.normal_(weight, std=width**-0.5)

    def operands(self, x: Tensor) -> list[Tensor]:
        width = self.head_dim
        q, k, vb = self.slow_net(x).unflatten(-1, (self.num_heads, -1)).split([width, width, width + 1], -1)
        return [q, k, vb, self.R_q[0], self.R_k[0], torch.cat([self.R_v[0], self.r_b[0].mT], -1)]

    def output(self, h: Tensor) -> Tensor:
        return self.out_linear(h.flatten(-2))
