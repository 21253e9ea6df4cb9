"""Neural Turing Machine: an LSTM that reads and writes a memory by content and by location."""

import math
from typing import Annotated, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.layers import options, registry
from scanl.layers.base import as_widened, widen
from scanl.layers.initial_state import StateAxes
from scanl.layers.parts.cell_cases import cases
from scanl.layers.parts.cell_layer import SolvedLayer
from scanl.layers.state import Device, DType
from scanl.ops.cell import cell

EPS = 1e-16  # in denominators and logarithms, as in the program
SHIFTS = 3  # by one row forwards, by none, by one row backwards
EXTRA_CHANNELS = 3 + SHIFTS  # numbers of a head beside vectors: strength, gate, shifts, sharpness


class NTMState(NamedTuple):
    """State of `NTM`; it starts from learned values, but for the weights, which are 0."""

    h: Annotated[Tensor, StateAxes("width", "output of the controller")]
    c: Annotated[Tensor, StateAxes("width", "memory of the controller")]
    memory: Annotated[Tensor, StateAxes("num_slots, head_dim", "M")]
    weights: Annotated[
        Tensor, StateAxes("2 * num_heads, num_slots", "the last weights of the heads, first those that read")
    ]
    recall: Annotated[Tensor, StateAxes("num_heads, head_dim", "r, what was read last")]


def shapes(units: int, rows: int, width: int, heads: int) -> list[tuple[int, ...]]:
    """Return the shapes of the fields of `NTMState`, of one sequence."""
    return [(units,), (units,), (rows, width), (2 * heads, rows), (heads, width)]


def packed(state: NTMState) -> Tensor:
    """Return the fields side by side (B, S)."""
    return torch.cat([value.flatten(1) for value in state], 1)


def unpacked(state: Tensor, *sizes: int) -> NTMState:
    """Invert `packed`. sizes: the arguments of `shapes`."""
    fields = shapes(*sizes)
    values = state.split([math.prod(shape) for shape in fields], 1)
    return NTMState(*(value.unflatten(1, shape) for value, shape in zip(values, fields, strict=True)))


def addressed(o: Tensor, memory: Tensor, weights: Tensor) -> Tensor:
    """Return the new weights (B, R, N) of heads over the rows of a memory (B, N, W).

    o: what the heads emit (B, R, W + 6 or more).   weights: the last ones.
    """
    width = memory.shape[2]
    k, strength, gate = o[..., :width], F.softplus(o[..., width : width + 1]), o[..., width + 1 : width + 2].sigmoid()
    shift, sharpness = o[..., width + 2 : width + 5].softmax(-1), 1 + F.softplus(o[..., width + 5 : width + 6])
    products = (memory[:, None] * k[:, :, None]).sum(-1)
    lengths = ((memory * memory).sum(-1)[:, None] * (k * k).sum(-1, keepdim=True) + EPS).sqrt()
    mixed = gate * (strength * products / lengths).softmax(-1) + (1 - gate) * weights
    moved = shift[..., :1] * mixed.roll(1, -1) + shift[..., 1:2] * mixed + shift[..., 2:] * mixed.roll(-1, -1)
    return (sharpness * (moved + EPS).log()).softmax(-1)


@cell(
    "x: B T 4 H, recurrent: 4 H H, recalled: 4 H R W, heads: A P H, head_bias: A P, edits: R Q H, edit_bias: R Q, "
    "from_h: D H, from_recall: D R W, rows: N, state: B S -> B T D",
    equation="r_t = Σ_n w_t(n) M_{t-1}(n), M_t(n) = M_{t-1}(n) ⊙ Π (1 - w_t(n) e_t) + Σ w_t(n) a_t",
    source="Graves, Wayne and Danihelka 2014, arXiv:1410.5401, eq. (2) to (9)",
    derived={"S": lambda sizes: sum(map(math.prod, shapes(*(sizes[axis] for axis in "HNWR"))))},
    static=("R",),
)
def ntm(
    x: Tensor,
    recurrent: Tensor,
    recalled: Tensor,
    heads: Tensor,
    head_bias: Tensor,
    edits: Tensor,
    edit_bias: Tensor,
    from_h: Tensor,
    from_recall: Tensor,
    rows: Tensor,
    state: Tensor,
) -> tuple[Tensor, Tensor]:
    """Run a neural Turing machine over time.

    x: the projected input of the gates i, f, g, o of the controller, with biases, (B, T, 4, H).   recurrent, recalled:
    their weights of h and of what was read.   heads, head_bias: map h to key, strength, gate, three shifts and
    sharpness of A = 2 R heads, P = W + 6; the first R read, the others write.   edits, edit_bias: map h to what the
    writing heads erase and add, Q = 2 W.   from_h, from_recall: map h and what is read to the output.   rows: (N,),
    ones, a factor of the weights.   state: the fields of `NTMState` side by side. Returns the output (B, T, D).
    """
    count, width = recalled.shape[2:]
    h, c, memory, weights, recall = unpacked(state, x.shape[2], rows.shape[0], width, count)
    gates = x + torch.einsum("ghi,bi->bgh", recurrent, h)
    gates = gates + torch.einsum("ghk,bk->bgh", recalled.flatten(2), recall.flatten(1))
    i, f, g, o = gates.unbind(1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    h = o.sigmoid() * c.tanh()
    emitted = torch.einsum("aph,bh->bap", heads, h) + head_bias
    weights = addressed(emitted, memory, weights) * rows
    recall = (weights[:, :count, :, None] * memory[:, None]).sum(2)
    emitted = torch.einsum("rqh,bh->brq", edits, h) + edit_bias
    writing, (erase, add) = weights[:, count:, :, None], emitted[:, :, None].split(width, -1)
    for r in range(count):
        memory = memory * (1 - writing[:, r] * erase[:, r].sigmoid())
    memory = memory + (writing * add).sum(1)
    y = F.linear(h, from_h) + F.linear(recall.flatten(1), from_recall.flatten(1))
    return y, packed(NTMState(h, c, memory, weights, recall))


cases(
    ntm,
    "H=3 N=4 W=2 R=2 A=4 P=8 Q=4 D=4",
    "recurrent has shape (4, 3, 2), expected (4, H, H) with H=3 from x",
    "state has shape (2, 5), expected (B, S)",
    x=lambda x: x / 2,  # the gates are not saturated: there every rounding counts
    rows=Tensor.abs,
    state=Tensor.abs,
)


@registry.register("ntm")
class NTM(SolvedLayer):
    """Neural Turing Machine: an LSTM controller whose heads read and write the rows of a memory.

    A head emits a key k, its strength β, a gate g, weights s of three shifts and a sharpness γ. Four steps give its
    weights over the rows: softmax(β cos(k, M)), by content; the mixture with the last weights by g; the shifts, in a
    circle, by s; and the power γ, which sharpens. A writing head also emits what it erases and what it adds.

    All heads of a step address the memory as the step before left it, and reading precedes writing. Erasures are
    products and additions sums, so their order is irrelevant, as in the paper. In pytorch-ntm a head sees what earlier
    heads of its step wrote; with one head of each kind this is the same. Its output has a sigmoid, which is left out.

    Parameters: input (4H, D), with a bias, of the gates i, f, g, o; recurrent (4H, H); recalled (4H, R W); read (R (W +
    6), H) and write (R (3 W + 6), H), with biases, the heads one after another, each as (k, β, g, s, γ, e, a); output
    (D, H + R W), of h and r, with a bias; h_0, c_0 (H); memory_0 (N, W); recall_0 (R, W).
    Initialisation as in pytorch-ntm: input, recurrent and recalled U(±5/sqrt(D + R W + H)), their bias 0; each head
    Xavier uniform with gain 1.4, output with gain 1, their biases N(0, 0.01²); h_0, c_0 N(0, 0.05²), memory_0
    U(±1/sqrt(N + W)), recall_0 N(0, 0.01²). There the last two are constant; the paper has "bias values" for all.
    """

    id = "S-ntm"
    kind: ClassVar = {"gated": True}
    aliases = ("Neural Turing Machine",)
    equation = (
        "h_t = LSTM([x_t; r_{t-1}]),  w_t = address(W_k h_t, M_{t-1}, w_{t-1}),  r_t = sum_n w_t(n) M_{t-1}(n),  "
        "M_t(n) = M_{t-1}(n) * prod (1 - w_t(n) e_t) + sum w_t(n) a_t,  y_t = W_o [h_t; r_t]"
    )
    source = 'Graves, Wayne and Danihelka, "Neural Turing Machines", arXiv:1410.5401, sec. 3'
    op = "ntm"
    carried_by = "turns"
    state: ClassVar = NTMState
    reads: ClassVar = {"read": nn.Linear, "write": nn.Linear, "output": nn.Linear}
    sample: ClassVar = {"width": 6, "num_slots": 5, "head_dim": 4, "num_heads": 2}
    residual_out = "output"

    def __init__(
        self,
        dim: options.Dim,
        width: Annotated[options.Width | None, "H, units of the controller; by default D / 2"] = None,
        num_slots: Annotated[options.Slots, "N, rows of the memory"] = 128,
        head_dim: Annotated[options.HeadDim, "W, numbers of a row"] = 20,
        num_heads: Annotated[options.FreeHeads, "R, heads that read, and as many that write"] = 1,
    ) -> None:
        super().__init__()
        width = width or max(1, dim // 2)
        self.dim, self.width, self.num_slots, self.head_dim, self.num_heads = dim, width, num_slots, head_dim, num_heads
        words = num_heads * head_dim
        self.input = nn.Linear(dim, 4 * width)
        self.recurrent = nn.Parameter(torch.empty(4 * width, width))
        self.recalled = nn.Parameter(torch.empty(4 * width, words))
        self.read = nn.Linear(width, num_heads * (head_dim + EXTRA_CHANNELS))
        self.write = nn.Linear(width, num_heads * (3 * head_dim + EXTRA_CHANNELS))
        self.output = nn.Linear(width + words, dim)
        self.h_0, self.c_0 = (nn.Parameter(0.05 * torch.randn(width)) for _ in range(2))
        limit = 1 / math.sqrt(num_slots + head_dim)
        self.memory_0 = nn.Parameter(torch.empty(num_slots, head_dim).uniform_(-limit, limit))
        self.recall_0 = nn.Parameter(0.01 * torch.randn(num_heads, head_dim))
        limit = 5 / math.sqrt(dim + words + width)
        for weight in (self.input.weight, self.recurrent, self.recalled):
            nn.init.uniform_(weight, -limit, limit)
        nn.init.zeros_(self.input.bias)
        for linear, gain, heads in ((self.read, 1.4, num_heads), (self.write, 1.4, num_heads), (self.output, 1.0, 1)):
            for matrix in linear.weight.detach().chunk(heads):  # each head has a map of its own
                nn.init.xavier_uniform_(matrix, gain)
            nn.init.normal_(linear.bias, std=0.01)

    def init_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> NTMState:
        state: NTMState = super().init_state(batch_size, device=device, dtype=dtype)
        starts = {"h": self.h_0, "c": self.c_0, "memory": self.memory_0, "recall": self.recall_0}
        return state._replace(**{name: getattr(state, name) + start.to(state.h) for name, start in starts.items()})

    def run(self, x: Tensor, state: NTMState | None, cu_seqlens: Tensor | None) -> tuple[Tensor, NTMState]:
        heads, width = self.num_heads, self.width
        keys = self.head_dim + EXTRA_CHANNELS
        (first, first_bias), (second, second_bias) = (
            (linear.weight.unflatten(0, (heads, -1)), linear.bias.unflatten(0, (heads, -1)))
            for linear in (self.read, self.write)
        )
        operands = (
            self.input(x).unflatten(-1, (4, width)),
            self.recurrent.unflatten(0, (4, width)),
            self.recalled.view(4, width, heads, self.head_dim),
            torch.cat([first, second[:, :keys]]),
            torch.cat([first_bias, second_bias[:, :keys]]),
            second[:, keys:],
            second_bias[:, keys:],
            self.output.weight[:, :width],
            self.output.weight[:, width:].unflatten(1, (heads, -1)),
            self.recurrent.new_ones(self.num_slots),
        )
        begun = packed(NTMState(*map(widen, self._begin(x, state, cu_seqlens))))
        with as_widened(x):
            y, last = self.run_cell(ntm, *map(widen, operands), begun, cu_seqlens=cu_seqlens)
        after = unpacked(last, width, self.num_slots, self.head_dim, heads)
        return (y + widen(self.output.bias)).to(x.dtype), NTMState(*(value.clone() for value in after))
