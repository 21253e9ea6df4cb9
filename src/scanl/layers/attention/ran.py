"""Recurrent Attention Network: attention within windows, with a cell that carries what it has perceived to the next."""

import math
from typing import Annotated, ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.layers import options, registry
from scanl.layers.base import Layer, as_widened, widen
from scanl.layers.initial_state import StateAxes
from scanl.layers.packing import each_alone
from scanl.layers.parts.blocks import Blocks
from scanl.layers.parts.masked_attention import attend
from scanl.layers.parts.rotary import rotate
from scanl.layers.state import Device, DType
from scanl.ops._frame.nonfinite import faulty, readable, replaced
from scanl.ops._frame.opaque import opaque

Map = tuple[Tensor, Tensor]  # weight and bias


class RANState(NamedTuple):
    """State of `RAN`. Keys and values are of the present window, zeros where it has no steps."""

    cell: Annotated[Tensor, StateAxes("dim", "g, the cell that the present window reads")]
    perceived: Annotated[Tensor, StateAxes("dim", "the last window's result, before it became the cell")]
    keys: Annotated[Tensor, StateAxes("reach, num_heads, head_dim", "rotated keys of the present window")]
    values: Annotated[Tensor, StateAxes("reach, num_heads, head_dim", "their values")]
    steps: Annotated[Tensor, StateAxes("1", "number of steps read", dtype=torch.int64, after=torch.add)]


def _glu(x: Tensor, linear: Map, gate: Map) -> Tensor:
    return F.linear(x, *linear) * F.linear(x, *gate).sigmoid()


def _norm(x: Tensor, norm: Map) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], *norm)


def _standard(x: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)) / (x.square().mean(-1, keepdim=True) + 1e-7).sqrt()


def _segment(x: Tensor, state: RANState, maps: list[Map], norms: list[Map], base: float) -> tuple[Tensor, RANState]:
    """Run over steps x (B, L, D), which end within the window of each row. Return outputs before the last norm."""
    cell, perceived, keys, values, steps = state
    length, window, heads = x.shape[1], *keys.shape[1:3]
    at = steps % window
    source = _norm(torch.cat([cell[:, None], x], 1), norms[0])
    q, k, v = (F.silu(F.linear(source, *linear)).unflatten(-1, (heads, -1)) for linear in maps[:3])
    index = torch.arange(length, device=x.device)
    places = F.pad(at + 1 + index, (1, 0))
    q, k = (rotate(value, places, q.shape[-1] // 2 * 2, base) for value in (q, k))
    slots = torch.arange(window, device=x.device)
    since = slots - at  # steps of this segment before each slot
    written = ((since >= 0) & (since < length))[..., None, None]
    since = since.clamp(0, length - 1)[..., None, None].expand(-1, -1, *k.shape[2:])
    keys, values = (torch.where(written, new[:, 1:].gather(1, since), old) for new, old in ((k, keys), (v, values)))
    ended = at + length == window
    # A window's result reads all its steps. Before the end of the window it is unused, and reads the cell alone.
    rows = torch.cat([torch.where(ended, window, 0), at + index + 1], 1)
    visible = F.pad(slots < rows[..., None], (1, 0), value=True)
    k, v = torch.cat([k[:, :1], keys], 1), torch.cat([v[:, :1], values], 1)
    scores = torch.einsum("bthk,bshk->bhts", q, replaced(k)) / math.sqrt(q.shape[-1])
    weights = scores.masked_fill(~visible[:, None], -torch.inf).softmax(-1)
    fault = (faulty(k) | faulty(v)).flatten(2).any(2)[:, None] & visible
    o = torch.einsum("bhts,bshk->bthk", weights, replaced(v)).flatten(2)
    o = o * torch.where(fault.any(-1, keepdim=True), torch.nan, 1.0).to(o.dtype)
    y = _standard(_norm(F.silu(F.linear(o, *maps[3])) + _glu(source, *maps[4:6]), norms[1]))
    result = y[:, 0]
    cell, perceived = _ended(ended, steps < window, result, cell, perceived, maps, norms)
    keys, values = (value.masked_fill(ended[..., None, None], 0) for value in (keys, values))
    return y[:, 1:], RANState(cell, perceived, keys, values, steps + length)


def _ended(
    ended: Tensor, first: Tensor, result: Tensor, cell: Tensor, perceived: Tensor, maps: list[Map], norms: list[Map]
) -> tuple[Tensor, Tensor]:
    """Return the next cell and the last result of the rows (B, 1) whose window has ended. first: it was their first."""
    following = _norm(result + _glu(perceived, *maps[6:8]), norms[2])
    cell = torch.where(ended, torch.where(first, result, following), cell)
    return cell, torch.where(ended, result, perceived)


@opaque(
    "recurrent_attention(Tensor x, Tensor[] state, Tensor[] maps, Tensor[] norms, float base) -> Tensor[]",
    lambda x, state, maps, norms, base: [torch.empty_like(x), *(torch.empty_like(value) for value in state)],
)
def _windows(x: Tensor, state: list[Tensor], maps: list[Tensor], norms: list[Tensor], base: float) -> list[Tensor]:
    """Run over all steps: window by window where all rows are at the same step of their windows, else step by step."""
    linear, normal = (list(zip(values[::2], values[1::2], strict=True)) for values in (maps, norms))
    carried, ys, start, window = RANState(*state), [], 0, state[2].shape[1]
    known = readable(carried.steps) and bool((carried.steps % window == carried.steps[:1] % window).all())
    at = int(carried.steps[0]) % window if known and len(x) else window - 1
    while start < x.shape[1]:
        end = min(x.shape[1], start + window - at)
        y, carried = _segment(x[:, start:end], carried, linear, normal, base)
        at, start = (0 if known else window - 1), end
        ys.append(y)
    return [_norm(torch.cat(ys, 1), normal[3]), *carried]


@opaque(
    "reviewed_attention(Tensor x, Tensor[] state, Tensor[] maps, Tensor[] norms, float base) -> Tensor[]",
    lambda x, state, maps, norms, base: [torch.empty_like(x), *(torch.empty_like(value) for value in state)],
)
def _reviewed(x: Tensor, state: list[Tensor], maps: list[Tensor], norms: list[Tensor], base: float) -> list[Tensor]:
    """Run over all steps, in both directions within a window. Each review reads the results of all windows."""
    linear, normal = (list(zip(values[::2], values[1::2], strict=True)) for values in (maps, norms))
    cell, perceived, keys, values, steps = state
    rows, (window, heads) = len(x), keys.shape[1:3]
    blocks = Blocks(x, steps, window, None, causal=False)

    def queries_keys_values(each: Tensor, places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (F.silu(F.linear(each, *to)).unflatten(-1, (heads, -1)) for to in linear[:3])
        q, k = (rotate(value, places, q.shape[-1] // 2 * 2, base) for value in (q, k))
        return q, k, v

    def standard(attended: Tensor, each: Tensor) -> Tensor:
        return _standard(_norm(F.silu(F.linear(attended.flatten(2), *linear[3])) + _glu(each, *linear[4:6]), normal[1]))

    source = _norm(x, normal[0])
    q, k, v = queries_keys_values(source, blocks.steps + 1)
    k, v = blocks.keys(k, keys), blocks.keys(v, values)
    held = blocks.seen(k)[:, 0]
    inside = [each.unflatten(0, (rows, 1 if blocks.one else blocks.row_blocks)) for each in (k, v, held)]
    first, results, seen = steps < window, [], []
    for k_in, v_in, held_in in zip(*(each.unbind(1) for each in inside), strict=True):
        row = _norm(cell, normal[0])[:, None]
        q_cell, *seen_cell = queries_keys_values(row, torch.zeros_like(steps))
        k_in, v_in = (torch.cat(pair, 1) for pair in zip(seen_cell, (k_in, v_in), strict=True))
        visible = F.pad(held_in, (1, 0), value=True)
        results.append(standard(attend(q_cell, k_in, v_in, visible[:, None]), row)[:, 0])
        seen.append((k_in, v_in, visible))
        cell, perceived = _ended(held_in.all(1, keepdim=True), first, results[-1], cell, perceived, linear, normal)
        first = torch.zeros_like(first)
    k_in, v_in, visible = (torch.stack(each, 1).flatten(0, 1) for each in zip(*seen, strict=True))
    attended = blocks.taken(attend(blocks.queries(q), k_in, v_in, visible[:, None]))
    y, result = standard(attended, source), torch.stack(results, 1)
    asked, reviewed_k, reviewed_v = (
        F.silu(F.linear(each, *to))[:, :, None] for each, to in zip((y, result, result), linear[8:11], strict=True)
    )
    o = attend(asked, reviewed_k, reviewed_v, inside[2].any(2)[:, None])
    y = _norm(F.silu(F.linear(o.flatten(2), *linear[11])) + _glu(asked.flatten(2), *linear[12:]), normal[3])
    return [y, cell, perceived, blocks.kept(k), blocks.kept(v), blocks.after]


@registry.register("ran")
class RAN(Layer):
    """Recurrent Attention Network: windows of W steps, and a global perception cell that stands before each of them.

    A step attends to the cell and to the steps of its window up to itself. At the end of a window the cell attends to
    all of it, and the result is the next cell; from the third window on, a norm of it plus a GLU of the result before.
    Windows take their turns one after another.

    With causal=False it is the paper's encoder. A step attends to all of its window. Then it reviews the memory: it
    attends, with one head, to the results r_1, ..., r_S of all windows, later ones too, also of a last one that is not
    full: y = LN(SiLU(W_o' Attention(q', r)) + GLU(q')), q' = SiLU(W_q' y). It reviews the windows of a call alone; a
    carried state brings the cell, and the steps of a window that the call goes on with.

    Differs: without review the output is normed instead, as in the authors' program without it. There, a causal mask
    keeps the cell from seeing its window. A short last window is not joined to the one before.

    Parameters: q_proj, k_proj, v_proj (H K, D), o_proj (D, H K), each before a SiLU; glu, glu_gate, cell_glu, cell_gate
    (D, D); all with biases; norm, of cell and input; attn_norm; cell_norm; out_norm; cell_0 (D), the first cell. With
    causal=False also review.0 to review.5 (D, D) with biases: W_q', W_k', W_v', W_o' and the two maps of the GLU.
    Initialisation as in the authors' model: weights truncated normal with deviation 0.02, biases and cell_0 0.
    """

    id = "S-ran"
    cost = ("T W", "W")
    aliases = ("recurrent_attention_network",)
    equation = (
        "[r_s; y_s] = std(LN(SiLU(W_o Attention(H)) + GLU(H))),  H = LN([g_s; x_s]) of window s,  "
        "g_{s+1} = LN(r_s + GLU(r_{s-1})), g_2 = r_1;  "
        "with causal=False y = LN(SiLU(W_o' Attention(q', r)) + GLU(q')),  q' = SiLU(W_q' y)"
    )
    source = 'Li et al., "Recurrent Attention Networks for Long-text Modeling", arXiv:2306.06843, sec. 2, and its code'
    state: ClassVar = RANState
    excused: ClassVar = {
        "gradients_are_the_derivatives_and_reach_every_parameter": "cell_glu, cell_gate and cell_norm act from "
        "the third window on, which the law's sequence does not reach"
    }
    reads: ClassVar = {
        **dict.fromkeys(
            ("q_proj", "k_proj", "v_proj", "o_proj", "glu", "glu_gate", "cell_glu", "cell_gate"), nn.Linear
        ),
        "review": nn.Linear,
        **dict.fromkeys(("norm", "attn_norm", "cell_norm", "out_norm"), nn.LayerNorm),
    }
    sample: ClassVar = {"num_heads": 3, "window": 3}

    def __init__(
        self,
        dim: options.Dim,
        num_heads: options.FreeHeads = 8,
        head_dim: Annotated[options.HeadDim | None, "K, channels of a head; by default dim / num_heads"] = None,
        window: Annotated[options.Window, "W, steps of a window"] = 128,
        rope_base: options.RopeBase = 10000.0,
        causal: Annotated[
            options.Causal, "if False, a step attends to all of its window, and then reviews the cells of all windows"
        ] = True,
    ) -> None:
        super().__init__()
        if head_dim is None and dim % num_heads:
            self._refuse("num_heads", num_heads, f"a divisor of dim={dim} without head_dim")
        self.dim, self.num_heads, self.reach, self.rope_base = dim, num_heads, window, rope_base
        self.causal, self.bidirectional = causal, not causal
        self.head_dim = head_dim or dim // num_heads
        width = num_heads * self.head_dim
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(dim, width) for _ in range(3))
        self.o_proj = nn.Linear(width, dim)
        self.glu, self.glu_gate, self.cell_glu, self.cell_gate = (nn.Linear(dim, dim) for _ in range(4))
        self.review = nn.ModuleList([] if causal else [nn.Linear(dim, dim) for _ in range(6)])
        self.norm, self.attn_norm, self.cell_norm, self.out_norm = (nn.LayerNorm(dim) for _ in range(4))
        self.cell_0 = nn.Parameter(torch.zeros(dim))
        for linear in self._maps():
            nn.init.trunc_normal_(linear.weight, std=0.02, a=-0.04, b=0.04)
            nn.init.zeros_(linear.bias)

    def _maps(self) -> list[nn.Linear]:
        return [
            self.q_proj, self.k_proj, self.v_proj, self.o_proj, self.glu, self.glu_gate, self.cell_glu, self.cell_gate,
            *cast("list[nn.Linear]", self.review),
        ]  # fmt: skip

    def init_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> RANState:
        state: RANState = super().init_state(batch_size, device=device, dtype=dtype)
        return state._replace(cell=state.cell + self.cell_0.to(state.cell))

    def run(self, x: Tensor, state: RANState | None, cu_seqlens: Tensor | None) -> tuple[Tensor, RANState]:
        if cu_seqlens is not None:
            return each_alone(self.forward, x, state, cu_seqlens, causal=self.causal)  # pyright: ignore[reportReturnType]
        begun = self._begin(x, state, None)
        if x.shape[1] == 0:
            return x + 0 * self.cell_0.sum().to(x.dtype), begun
        maps = [widen(value) for linear in self._maps() for value in (linear.weight, linear.bias)]
        norms = [
            widen(value)
            for norm in (self.norm, self.attn_norm, self.cell_norm, self.out_norm)
            for value in (norm.weight, norm.bias)
        ]
        wide = widen(x)
        values = [value if value.dtype == torch.int64 else value.to(wide.dtype) for value in begun]
        with as_widened(x):
            y, *after = (_windows if self.causal else _reviewed)(wide, values, maps, norms, self.rope_base)
        return y.to(x.dtype), RANState(*after)
