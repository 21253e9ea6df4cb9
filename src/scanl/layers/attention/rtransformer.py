"""R-Transformer: recurrent networks over windows, then attention to all of the past."""

from typing import Annotated, ClassVar, Literal, NamedTuple

from torch import Tensor, nn

from scanl.errors import ShapeError
from scanl.layers import options, registry
from scanl.layers.attention.attention import Attention
from scanl.layers.base import Layer
from scanl.layers.initial_state import InnerState
from scanl.layers.rnn.local_rnn import LocalRNN
from scanl.ops import SegmentMemory


class RTransformerState(NamedTuple):
    local: Annotated[tuple[Tensor, ...], InnerState("local")]
    attention: Annotated[SegmentMemory, InnerState("attention")]


@registry.register("rtransformer")
class RTransformer(Layer):
    """R-Transformer: N local recurrent networks, then multi-head attention without positions, each added to its input.

    `forward` also takes `residual` (B, T, D), the input of a block before its norm. A stack passes it. Then residual
    + y is the released block with the norm first. So a stack with norm="layernorm", channel_mixer="mlp" and ReLU is
    the authors' model. Without `residual` the sums start from x.

    Differs: a LayerNorm divides by the root of the variance plus ε; theirs by the unbiased deviation plus ε. At most
    `max_length` steps are read.

    Parameters: local.i.rnn, as in `local_rnn`; norms.i, the LayerNorms before local networks 1 to N - 1 and before the
    attention; attention, as in the layer `attention` with biases.
    Initialisation: as in PyTorch.
    """

    id = "S-rtransformer"
    cost = ("T^2", "T")
    aliases = ("R-Transformer",)
    equation = (
        "h = x,  h = h + LocalRNN_i(LN(h)) for i = 1..N,  "
        "y_t = h_t + W_o sum_{j <= t} softmax_j(q_t . k_j / sqrt(K)) v_j,  q, k, v = W LN(h)"
    )
    source = (
        'Wang, Ma, Liu and Tang, "R-Transformer: Recurrent Neural Network Enhanced Transformer", arXiv:1907.05572, '
        "sec. 2"
    )
    op = "segment_attention"
    carried_by = "turns"
    excused: ClassVar = {
        "default_sizes_are_in_proportion": "a GRU and multi-head attention of the model's width, as the authors have "
        "them, are 10 D² parameters"
    }
    state: ClassVar = RTransformerState
    sample: ClassVar = {"window": 3, "depth": 2, "num_heads": 3, "max_length": 80}

    def __init__(
        self,
        dim: options.Dim,
        num_heads: options.Heads = 8,
        window: Annotated[options.Window, "M, steps that a local network reads"] = 7,
        depth: Annotated[options.Depth, "N, local networks"] = 1,
        variant: Annotated[Literal["gru", "lstm", "elman"], "the recurrent network"] = "gru",
        max_length: options.MaxLength = 2048,
    ) -> None:
        super().__init__()
        self.dim = dim
        self.local = nn.ModuleList(LocalRNN(dim, window, variant) for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(depth))
        self.attention = Attention(dim, num_heads, max_length=max_length, rope_fraction=0.0, bias=True)
        for linear in self.attention.children():
            assert isinstance(linear, nn.Linear)
            linear.reset_parameters()

    def run(
        self,
        x: Tensor,
        state: RTransformerState | None,
        cu_seqlens: Tensor | None,
        residual: Tensor | None = None,
    ) -> tuple[Tensor, RTransformerState]:
        residual = x if residual is None else residual
        if residual.shape != x.shape:
            raise ShapeError(
                f"{self._who()}: residual has shape {tuple(residual.shape)}, expected {tuple(x.shape)} from x"
            )
        local, memory = state or ([None] * len(self.local), None)
        added, after = x.new_zeros(()), []
        for network, norm, inputs in zip(self.local, self.norms, local, strict=True):
            h, inputs = network(x, inputs, cu_seqlens=cu_seqlens)
            added = added + h
            x = norm((residual + added).to(x.dtype))
            after.append(inputs)
        attended, memory = self.attention(x, memory, cu_seqlens=cu_seqlens)
        return added + attended, RTransformerState(tuple(after), memory)
