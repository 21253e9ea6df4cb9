"""Token Turing Machine: a Transformer that reads tokens of a memory and of the input, and writes the memory anew."""

import math
from collections.abc import Sequence
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.layers import options, registry
from scanl.layers.base import Layer, as_widened, widen
from scanl.layers.initial_state import StateAxes
from scanl.layers.packing import each_alone
from scanl.ops._frame.opaque import opaque
from scanl.options import divides

Map = tuple[Tensor, Tensor]  # weight and bias
EPS = 1e-6  # in the norms


def _normed(x: Tensor, norm: Map) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], *norm, eps=EPS)


def _mlp(x: Tensor, first: Map, second: Map) -> Tensor:
    return F.linear(F.gelu(F.linear(x, *first), approximate="tanh"), *second)


def summary(tokens: Tensor, norm: Map, first: Map, second: Map) -> Tensor:
    """Return p weighted means (B, p, d) of tokens (B, n, d). An MLP of the normed tokens gives the weights."""
    return _mlp(_normed(tokens, norm), first, second).softmax(1).mT @ tokens


def _block(x: Tensor, heads: int, maps: Sequence[Map], norms: Sequence[Map]) -> Tensor:
    """Return the output of a pre-norm Transformer block without a mask."""
    h = _normed(x, norms[0])
    q, k, v = (F.linear(h, *maps[i]).unflatten(2, (heads, -1)).transpose(1, 2) for i in range(3))
    weights = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)
    x = x + F.linear((weights @ v).transpose(1, 2).flatten(2), *maps[3])
    return x + _mlp(_normed(x, norms[1]), *maps[4:])


@opaque(
    "token_turing(Tensor x, Tensor memory, Tensor[] maps, Tensor[] norms, Tensor positions, int heads) -> Tensor[]",
    lambda x, memory, maps, norms, positions, heads: [
        x.new_empty(*x.shape[:2], *positions.shape),
        torch.empty_like(memory),
    ],
)
def _steps(
    x: Tensor, memory: Tensor, maps: list[Tensor], norms: list[Tensor], positions: Tensor, heads: int
) -> list[Tensor]:
    """Run over all steps of x (B, T, n, d). Return the processed tokens (B, T, r, d) and the last memory."""
    linear, normal = (list(zip(values[::2], values[1::2], strict=True)) for values in (maps, norms))
    ys = []
    for tokens in x.unbind(1):
        everything = torch.cat([memory, tokens], 1)
        y = summary(everything, normal[0], *linear[:2]) + positions
        for block in range((len(linear) - 4) // 6):
            y = _block(y, heads, linear[4 + 6 * block : 10 + 6 * block], normal[2 + 2 * block : 4 + 2 * block])
        y = _normed(y, normal[-1])
        memory = summary(torch.cat([everything, y], 1), normal[1], *linear[2:4])
        ys.append(y)
    return [torch.stack(ys, 1), memory]


@registry.register("ttm")
class TTM(Layer):
    """Token Turing Machine: m tokens of memory, which every step reads, and then writes as a whole.

    A step holds n tokens of width d = D / n, without an order. Read makes r tokens of memory and input; a Transformer
    of `depth` blocks processes them; write makes the next memory of memory, input and processed tokens. Read and write
    are weighted means: an MLP of each normed token gives its weights, by a softmax over the tokens. The memory starts
    with zeros. The output of a step is the mean over r / n processed tokens for each of its n.

    Differs: this output, where the paper has a head of its task. Tokens get no positions at read and write, as in the
    authors' program by default. It adds positions to the r processed tokens, and so does this layer.

    Parameters: maps, linear with biases: 2 of read (64, d), (r, 64), 2 of write (64, d), (m, 64), then for each block
    q, k, v, o (d, d) and 2 of its MLP; norms, LayerNorms: of read, of write, 2 for each block, the last; positions
    (r, d).
    Initialisation as in the authors' program: weights Xavier uniform, biases 0 (there N(0, 1e-12)), positions
    N(0, 0.02²).
    """

    id = "S-ttm"
    aliases = ("token_turing_machine",)
    equation = "Z_t = S_r([M_{t-1}; x_t]),  O_t = Transformer(Z_t),  M_t = S_m([M_{t-1}; x_t; O_t]),  y_t = mean O_t"
    source = 'Ryoo et al., "Token Turing Machines", arXiv:2211.09119, eq. (1) to (6)'
    state: ClassVar = StateAxes("num_slots, token_dim", "M, the memory")
    reads: ClassVar = {"maps": nn.Linear, "norms": nn.LayerNorm}
    sample: ClassVar = {"num_groups": 2, "num_slots": 5, "num_anchors": 4, "num_heads": 2}

    def __init__(
        self,
        dim: options.Dim,
        num_groups: Annotated[options.Groups, divides("dim"), "n, tokens of a step; a divisor of dim"] = 1,
        num_slots: Annotated[options.Slots, "m, tokens of the memory"] = 64,
        num_anchors: Annotated[int, "r, tokens that are processed, a multiple of n"] = 8,
        num_heads: Annotated[options.FreeHeads, "H, heads of attention; a divisor of D / n"] = 4,
        depth: Annotated[options.Depth, "blocks of the Transformer"] = 1,
        expand: Annotated[options.Expand, "the MLP of a block has int(expand d) hidden features"] = 2.0,
    ) -> None:
        super().__init__()
        d = dim // num_groups
        if num_anchors < 1 or num_anchors % num_groups:
            self._refuse("num_anchors", num_anchors, f"a multiple of num_groups={num_groups}")
        if d % num_heads:
            self._refuse("num_heads", num_heads, f"a divisor of dim / num_groups={d}")
        hidden = int(expand * d)
        if hidden < 1:
            self._refuse("expand", expand, f"at least 1/{d} because of dim / num_groups={d}")
        self.dim, self.num_groups, self.num_slots, self.num_anchors = dim, num_groups, num_slots, num_anchors
        self.num_heads, self.token_dim = num_heads, d
        sizes = [(d, 64), (64, num_anchors), (d, 64), (64, num_slots)]
        sizes += depth * [*4 * [(d, d)], (d, hidden), (hidden, d)]
        self.maps = nn.ModuleList(nn.Linear(*size) for size in sizes)
        self.norms = nn.ModuleList(nn.LayerNorm(d, eps=EPS) for _ in range(3 + 2 * depth))
        self.positions = nn.Parameter(0.02 * torch.randn(num_anchors, d))
        for linear in self.maps:
            assert isinstance(linear, nn.Linear)
            nn.init.xavier_uniform_(linear.weight)
            nn.init.zeros_(linear.bias)

    def run(self, x: Tensor, state: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
        if cu_seqlens is not None:
            return each_alone(self.forward, x, state, cu_seqlens)  # pyright: ignore[reportReturnType]
        memory, tokens = self._begin(x, state, None), widen(x).unflatten(2, (self.num_groups, -1))
        maps, norms = (
            [widen(getattr(module, name)) for module in modules for name in ("weight", "bias")]
            for modules in (self.maps, self.norms)
        )
        if x.shape[1] == 0:
            return x + 0 * self.positions.sum().to(x.dtype), memory.to(tokens.dtype)
        with as_widened(x):
            y, memory = _steps(tokens, memory.to(tokens.dtype), maps, norms, widen(self.positions), self.num_heads)
            y = y.unflatten(2, (self.num_groups, -1)).mean(3).flatten(2)
        return y.to(x.dtype), memory
