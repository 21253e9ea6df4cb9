"""HiPPO-RNN: a gated recurrent network with a memory that approximates all numbers that the network wrote."""

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
from scanl.layers.parts.polynomial_memory import SOURCE, discretize_dense, transition
from scanl.layers.parts.timespans import durations
from scanl.layers.ssm.hippo import ElapsedTime, time_before
from scanl.ops.cell import Cell, cell
from scanl.options import one_of

MEASURES = ("legs", "legt", "lagt")
STEP = 0.01  # of legt and lagt, in units of their time, as in the released code
EQUATION = (
    "f_t = W_f [x_t; s_{t-1}] + b_f,  c_t = A_t c_{t-1} + B_t f_t,  g_t = sigmoid(W_g [x_t; c_t] + b_g),  "
    "s_t = (1 - g_t) * s_{t-1} + g_t * tanh(W_s [x_t; c_t] + b_s)"
)


class HiPPORNNState(NamedTuple):
    s_c: Annotated[Tensor, StateAxes("dim + state_dim", "s, then c")]
    elapsed: Annotated[ElapsedTime, ElapsedTime]


def _units(x, g, c, s, w_s, w_g):
    """Return the units after a step, which read the new memory c."""
    g = torch.sigmoid(g + c @ w_g.T)
    return (1 - g) * s + g * torch.tanh(x + c @ w_s.T)


def _later(values, steps):
    """Return the values moved up by `places` along their last axis, with zeros in the first places."""
    return torch.cat([torch.zeros_like(values[:, :steps]), values[:, :-steps]], 1)


@cell(
    "x: B T D, g: B T D, f: B T 1, time: B T 1, span: B T 1, degrees: N, w_f: 1 S, w_s: D N, w_g: D N, "
    "state: B S -> B T D",
    static=("N",),
    equation=EQUATION,
    source=SOURCE + ", sec. 2.5",
)
def hippo_rnn_cell(x, g, f, time, span, degrees, w_f, w_s, w_g, state):
    r"""Step gated units with a memory of LegS of what they wrote.

    x, g, f: the input's parts of the units, the gates and the number that is written, biases included.
    time: that before the step, (B, T, 1); 0 where the memory is to hold the number alone.   span: the time that
    the step lasts, (B, T, 1).   degrees: 0, 1, ..., N - 1, (N,).   w_f: how s, then c enter that number.
    state: s, then c, (B, D + N).

    The step of the memory is the bilinear one, c' = (I - sA/2)^{-1} ((I + sA/2) c + s B f) with s = span / time. Its
    matrix is never made, because (I - sA/2)(c' + c) = 2c + s B f, and A is triangular with entries of rank one below
    the diagonal. Forward substitution is therefore a recurrence of a single number along n, p_n = a_n p_{n-1} + b_n,
    where |a_n| < 1. It takes log2 N rounds, each of which adds what the places 1, 2, 4, ... before have gathered.
    """
    s, c = state.split([w_s.shape[0], w_s.shape[1]], 1)
    f = f + state @ w_f.T
    half = span / torch.where(time == 0, 1, time) / 2
    root = torch.sqrt(2 * degrees + 1)
    scale = 1 / (1 + half * (degrees + 1))
    known = 2 * c + 2 * half * root * f
    p, a = root * scale * known, (1 - half * degrees) * scale
    reach = 1
    while reach < degrees.shape[0]:
        p, a, reach = p + a * _later(p, reach), a * _later(a, reach), 2 * reach
    p = _later(p, 1) if degrees.shape[0] > 1 else torch.zeros_like(p)
    alone = torch.where(degrees == 0, f, 0)
    c = torch.where(time == 0, alone, scale * (known - half * root * p) - c)
    s = _units(x, g, c, s, w_s, w_g)
    return s, torch.cat([s, c], 1)


cases(
    hippo_rnn_cell,
    "D=3 N=4 S=7",
    "g has shape (2, 2, 3), expected (B, T, D) with B=2 from x, T=5 from x",
    "w_s has shape (4, 3), expected (D, N) with D=3 from x, N=4 from degrees",
    time=lambda time: time.abs() + 0.1,
    span=Tensor.abs,
    degrees=lambda n: torch.arange(len(n), dtype=n.dtype),
)


@cell(
    "x: B T D, g: B T D, f: B T 1, a: B T N N, b: B T N, w_f: 1 S, w_s: D N, w_g: D N, state: B S -> B T D",
    equation=EQUATION,
    source=SOURCE + ", sec. 2.5",
)
def hippo_rnn_window_cell(x, g, f, a, b, w_f, w_s, w_g, state):
    """Step gated units with a memory of what they wrote, whose matrix is an operand.

    x, g, f: the input's parts of the units, the gates and the number that is written, biases included.
    a, b: the memory's system of the step, (B, T, N, N) and (B, T, N).   w_f: how s, then c enter that number.
    state: s, then c, (B, D + N).
    """
    s, c = state.split([w_s.shape[0], w_s.shape[1]], 1)
    f = f + state @ w_f.T
    c = (a * c[:, None]).sum(-1) + f * b
    s = _units(x, g, c, s, w_s, w_g)
    return s, torch.cat([s, c], 1)


cases(
    hippo_rnn_window_cell,
    "D=3 N=4 S=7",
    "g has shape (2, 2, 3), expected (B, T, D) with B=2 from x, T=5 from x",
    "w_s has shape (4, 4), expected (D, N) with D=3 from x, N=4 from a",
    a=lambda a: a / 2,
)


@registry.register("hippo_rnn")
class HiPPORNN(SolvedLayer):
    """HiPPO-RNN: each step writes one number to a HiPPO memory; gated units read all of the memory.

    As in the released code the memory changes first: the written number depends on the units before the step, and the
    units read the new memory. After the first step the memory of "legs" is the first number alone. Then the bilinear
    rule is one step late: Δ = 1/(t - 1) at step t, and Δ is constant from max_length on. "legt" and "lagt" hold the
    input over steps of 0.01.

    `forward` also takes `timespans` (B, T), the duration of each step in units of the usual one. It multiplies the step
    of the memory: Δ = span / time before, or 0.01 span.

    The matrices of all steps are in memory, B T N² numbers. Pass a long sequence in pieces.

    Parameters as in the released code: W_uxh (1, 2D), columns of x and s; W_hxm and W_g (D, D + N), columns of x and c;
    all with biases. There W_g is W_gxm.W_g.
    Initialisation: W_uxh uniform in ±sqrt(3/(2D)); W_hxm Xavier normal, for x and for c on its own; W_g
    N(0, 1/(D + N)); biases as in PyTorch.
    """

    id = "S-hippo-rnn"
    equation = EQUATION
    source = SOURCE + ", sec. 2.5, and its code"
    op = "hippo_rnn_cell"
    carried_by = "turns"
    state: ClassVar = HiPPORNNState
    reads: ClassVar = {"W_uxh": nn.Linear, "W_hxm": nn.Linear, "W_g": nn.Linear}
    sample: ClassVar = {"state_dim": 4, "max_length": 3}

    def __init__(
        self,
        dim: options.Dim,
        state_dim: Annotated[options.StateDim | None, "N, numbers in the memory; by default D"] = None,
        measure: Annotated[str, one_of(MEASURES), '"legs", "legt" or "lagt"'] = "legs",
        max_length: Annotated[options.MaxLength, 'the step from which the memory of "legs" counts no further'] = 1024,
    ) -> None:
        super().__init__()
        size = dim if state_dim is None else state_dim
        self.dim, self.state_dim, self.measure, self.max_length = dim, size, measure, max_length
        self.W_uxh = nn.Linear(2 * dim, 1)
        self.W_hxm, self.W_g = nn.Linear(dim + size, dim), nn.Linear(dim + size, dim)
        limit = math.sqrt(3 / (2 * dim))
        with torch.no_grad():
            self.W_uxh.weight.uniform_(-limit, limit)
            self.W_g.weight.normal_(0, 1 / math.sqrt(dim + size))
            for weight in self.W_hxm.weight.split([dim, size], 1):
                nn.init.xavier_normal_(weight)

    def _system(self, time: Tensor, spans: Tensor | None) -> tuple[Cell, list[Tensor]]:
        """Return the cell, and its operands of the memory. time: that before each step (B, T), in float64."""
        if self.measure == "legs":
            capped = time.clamp(max=self.max_length)[..., None]
            lasting = torch.ones_like(capped) if spans is None else spans[..., None].to(capped.dtype)
            return hippo_rnn_cell, [capped, lasting, torch.arange(self.state_dim, device=time.device)]
        A, B = (tensor.to(time.device) for tensor in transition(self.measure, self.state_dim))
        if spans is not None:
            return hippo_rnn_window_cell, [*discretize_dense(A, B, STEP * spans.double())]
        a, b = discretize_dense(A, B, STEP)
        return hippo_rnn_window_cell, [a.expand(*time.shape, -1, -1), b.expand(*time.shape, -1)]

    def run(
        self, x: Tensor, state: HiPPORNNState | None, cu_seqlens: Tensor | None, timespans: Tensor | None = None
    ) -> tuple[Tensor, HiPPORNNState]:
        s_c, start = self._begin(x, state, cu_seqlens)
        spans = durations(timespans, x)
        time, elapsed = time_before(start, spans, cu_seqlens)
        cell, memory = self._system(time, None if timespans is None else spans[..., 0])
        w_fx, w_fs = self.W_uxh.weight.split(self.dim, 1)
        w_sx, w_s = self.W_hxm.weight.split([self.dim, self.state_dim], 1)
        w_gx, w_g = self.W_g.weight.split([self.dim, self.state_dim], 1)
        operands = [F.linear(x, w_sx, self.W_hxm.bias), F.linear(x, w_gx, self.W_g.bias)]
        operands += [F.linear(x, w_fx, self.W_uxh.bias), *memory]
        w_f = F.pad(w_fs, (0, self.state_dim))  # c does not enter
        with as_widened(x):
            kind = widen(x).dtype
            operands = [tensor.to(kind) for tensor in (*operands, w_f, w_s, w_g)]
            y, last = self.run_cell(cell, *operands, s_c, cu_seqlens=cu_seqlens)
        return y.to(x.dtype), HiPPORNNState(last, elapsed)
