"""Ordered-neuron long short-term memory."""

from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn

from scanl.layers import options, registry
from scanl.layers.base import widen
from scanl.layers.initial_state import StateAxes
from scanl.layers.parts.cell_cases import cases
from scanl.layers.parts.cell_layer import CellLayer
from scanl.layers.parts.chrono import ForgetBias, LongestMemory, init_memory
from scanl.ops import cell
from scanl.options import divides


@cell(
    "x: B T 4 D, m: B T 2 N, u: 4 D D, v: 2 N D, state: B 2 D -> B T D",
    divides={"N": "D"},
    equation="c_t = (f_t * w_t + F_t - w_t) * c_{t-1} + (i_t * w_t + I_t - w_t) * tanh(z_t),  w_t = F_t * I_t,  "
    "F_t = cumsum(softmax(.)),  I_t = 1 - cumsum(softmax(.)),  h_t = o_t * tanh(c_t)",
    source='Shen, Tan, Sordoni and Courville, "Ordered Neurons: Integrating Tree Structures into Recurrent Neural '
    'Networks", '
    "arXiv:1810.09536, eq. (6) to (14)",
)
def onlstm_cell(x: Tensor, m: Tensor, u: Tensor, v: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Step an LSTM whose D neurons are ordered: N master gates cut the order in a part to keep and one to write.

    x: what the input gives to o, z, i and f.   m: what it gives to the master gates I and F.   u, v: recurrent weights
    of the gates and of the master gates.   state: h and c.
    """
    h, c = state.unbind(1)
    gates = (x + torch.einsum("bd,ged->bge", h, u)).unflatten(2, (m.shape[2], -1))  # each master gate has D/N neurons
    o, z, i, f = gates.unbind(1)
    write, keep = (m + torch.einsum("bd,gnd->bgn", h, v)).softmax(2).cumsum(2)[..., None].unbind(1)
    write = 1 - write
    both = keep * write
    memory = (f.sigmoid() * both + keep - both) * c.unflatten(1, (m.shape[2], -1))
    c = (memory + (i.sigmoid() * both + write - both) * z.tanh()).flatten(1)
    h = o.flatten(1).sigmoid() * c.tanh()
    return h, torch.stack([h, c], 1)


cases(
    onlstm_cell,
    "D=6 N=3",
    "v has shape (4, 6, 6), expected (2, N, D) with N=3 from m",
    "m has N=4, expected a divisor of D=6 from x",
    "v is missing, expected a tensor (2, N, D)",
)


@registry.register("onlstm")
class ONLSTM(CellLayer):
    """Ordered-neuron LSTM: neurons late in the order keep their content for longer, so a hierarchy can emerge.

    Differs: drop-connect of the recurrent weights is omitted, as dropout is in every layer.

    Parameters as in the authors' program: ih.0 (2D/C + 4D, D) and hh (2D/C + 4D, D), each with a bias; the rows are
    those of the master gates I and F, then of o, z, i and f.
    Initialisation as in that code: U(±1/sqrt(D)).
    """

    id = "S-onlstm"
    aliases = ("ordered_neurons", "ordered_neurons_lstm")
    cell = onlstm_cell
    state: ClassVar = StateAxes("2, dim", "h and c")
    reads: ClassVar = {"hh": nn.Linear}
    excused: ClassVar = {"default_sizes_are_in_proportion": "its two master gates add to eight matrices"}

    def __init__(
        self,
        dim: options.Dim,
        chunk_size: Annotated[
            int | None,
            divides("dim"),
            "C, neighboring neurons that share their master gates; None for 10, as in the authors' program, or the "
            "next smaller divisor of D",
        ] = None,
        forget_bias: ForgetBias | None = None,
        t_max: LongestMemory | None = None,
    ) -> None:
        super().__init__()
        if chunk_size is None:
            chunk_size = max(size for size in range(1, 11) if dim % size == 0)
        self.dim, self.chunk_size = dim, chunk_size
        self.masters = 2 * (dim // chunk_size)
        into, self.hh = nn.Linear(dim, self.masters + 4 * dim), nn.Linear(dim, self.masters + 4 * dim)
        self.ih = nn.Sequential(into)
        write, keep = (slice(self.masters + gate * dim, self.masters + (gate + 1) * dim) for gate in (2, 3))
        init_memory((self.hh.bias, into.bias), keep, write, forget_bias, t_max)

    def operands(self, x: Tensor) -> list[Tensor]:
        sizes = [self.masters, 4 * self.dim]
        m, gates = (widen(self.ih(x)) + self.hh.bias).split(sizes, -1)
        v, u = self.hh.weight.split(sizes)
        inputs = [gates.unflatten(-1, (4, -1)), m.unflatten(-1, (2, -1))]
        return [*inputs, u.unflatten(0, (4, -1)), v.unflatten(0, (2, -1))]
