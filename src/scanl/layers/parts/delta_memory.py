"""Base class of the gated delta rules: a matrix memory that decays, and is corrected at each key."""

from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.layers import options
from scanl.layers.base import UNDECAYED_HINT, widen
from scanl.layers.parts.norm import GatedRMSNorm
from scanl.layers.parts.query_key_value import MemoryState, QueryKeyValue
from scanl.layers.parts.time_step import time_step_bias
from scanl.ops import delta_rule
from scanl.ops.delta_rule import unit

KeyHeads = Annotated[options.FreeHeads, "heads of queries and keys"]
ExpandHead = Annotated[options.Expand, "V, channels of a value, as a multiple of head_dim"]


class DeltaMemory(QueryKeyValue):
    """Base class: projections, convolutions, write strengths, decays, and the norm and gate of the output.

    Parameters and initialisation: see `GatedDeltaNet`.
    """

    op = "delta_rule"
    sample: ClassVar = {"head_dim": 3, "num_heads": 2, "num_v_heads": 4}
    residual_out = "o_proj"
    hints: ClassVar = dict.fromkeys(("A_log", "dt_bias"), UNDECAYED_HINT)
    keys_by_dim: ClassVar[float] = 0.75  # channels of all heads of keys over D, by default

    # A subclass with options of these names sets them before it calls the constructor.
    num_householder: int = 1
    forget_gate: bool = True
    allow_neg_eigval: bool = False

    g_proj: nn.Module | None

    def __init__(
        self,
        dim: options.Dim,
        expand_v: ExpandHead = 2.0,
        head_dim: Annotated[
            options.HeadDim | None,
            "K, channels of a query and of a key; by default all heads together are 3/4 dim, rounded, as the "
            "authors have it: 256 in each of 6 heads for their dim of 2,048",
        ] = None,
        num_heads: KeyHeads = 6,
        num_v_heads: Annotated[
            options.FreeHeads | None,
            "H, heads of values, a multiple of num_heads: H / num_heads of them use the same head of keys; by default "
            "num_heads",
        ] = None,
        output_gate: Annotated[options.OutputGate, "a gate after the norm"] = True,
        conv_size: options.ConvSizeOrNone = 4,
        conv_bias: options.ConvBias = False,
        norm_eps: options.NormEps = 1e-5,
    ) -> None:
        super().__init__()
        heads = num_heads if num_v_heads is None else num_v_heads
        if head_dim is None:
            head_dim = max(1, round(self.keys_by_dim * dim / num_heads))
        if heads % num_heads:
            self._refuse("num_v_heads", heads, f"a multiple of num_heads={num_heads}")
        value = round(expand_v * head_dim)
        if value < 1 or abs(value - expand_v * head_dim) > 1e-5 * value:
            self._refuse("expand_v", expand_v, f"a whole number of channels of head_dim={head_dim}")
        self.dim = dim
        self.num_heads, self.num_v_heads, self.head_dim, self.head_v_dim = num_heads, heads, head_dim, value
        writes = self.num_householder
        self.memory = (heads, head_dim, value)
        widths = (num_heads * head_dim, writes * num_heads * head_dim, writes * heads * value)
        self._make_projections(widths, conv_size, conv_bias)
        self.b_proj = nn.Linear(dim, writes * heads, bias=False)
        if self.forget_gate:
            self.a_proj = nn.Linear(dim, heads, bias=False)
            self.A_log = nn.Parameter((16 * (1 - torch.rand(heads))).log())  # 1 - U is never 0
            self.dt_bias = nn.Parameter(time_step_bias(heads))
        else:
            self.register_parameter("A_log", None)
            self.register_parameter("dt_bias", None)
        self.g_proj = nn.Linear(dim, heads * value, bias=False) if output_gate else None
        self.o_norm = GatedRMSNorm(value, norm_eps)
        self.o_proj = nn.Linear(heads * value, dim, bias=False)
        for module in self.children():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)

    def run(self, x: Tensor, state: MemoryState | None, cu_seqlens: Tensor | None) -> tuple[Tensor, MemoryState]:
        (q, k, v), recurrent, conv = self._read(x, state, cu_seqlens)
        q = q.unflatten(-1, (self.num_heads, self.head_dim))
        k = self._writes(k, (self.num_heads, self.head_dim))
        v = self._writes(v, (self.num_v_heads, self.head_v_dim))
        beta = self._writes(widen(self.b_proj(x)).sigmoid(), (self.num_v_heads,))
        beta = beta * 2 if self.allow_neg_eigval else beta
        o, recurrent = self._remember(q, k, v, beta, self._log_decay(x), recurrent, cu_seqlens)
        gate = None if self.g_proj is None else self.g_proj(x).view_as(o)
        return self.o_proj(self.o_norm(o, gate).to(x.dtype).flatten(-2)), MemoryState(recurrent, conv)

    def _writes(self, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Return the n writes of each step, one after another: (B, T, n S) to (B, T n, *shape), S the size of shape."""
        return x.unflatten(-1, (self.num_householder, *shape)).flatten(1, 2)

    def _log_decay(self, x: Tensor) -> Tensor | None:
        """Return the log decay of each step, (B, T, H); None without one."""
        if not self.forget_gate:
            return None
        return -widen(self.A_log).exp() * F.softplus(widen(self.a_proj(x)) + widen(self.dt_bias))

    def _remember(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        beta: Tensor,
        g: Tensor | None,
        state: Tensor | None,
        cu_seqlens: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Write into the memory and read it: q and g have T steps, the others T n."""
        n = self.num_householder
        if n > 1:  # a step's decay is before its first write, and its read after its last
            q = F.pad(q.unsqueeze(2), (0, 0, 0, 0, n - 1, 0)).flatten(1, 2)
            g = None if g is None else F.pad(g.unsqueeze(2), (0, 0, 0, n - 1)).flatten(1, 2)
            cu_seqlens = None if cu_seqlens is None else cu_seqlens * n
        o, last = delta_rule(unit(widen(q), 1e-6), k, v, beta, g, state, normalize_keys=True, cu_seqlens=cu_seqlens)
        return o[:, n - 1 :: n], last
