"""Base class of linear recurrent models: projections, short convolution, recurrence, norm and gate."""

import math
from functools import partial
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.errors import ShapeError
from scanl.layers import options, registry
from scanl.layers.base import Layer
from scanl.layers.packing import restarted
from scanl.layers.parts.short_convolution import convolve
from scanl.layers.state import Device, DType, State, cat, index, leaves, loadable, map_leaves
from scanl.ops import linear_scan
from scanl.ops.offsets import sequences
from scanl.options import at_least


@loadable
class LinearRNNState(NamedTuple):
    """State of `LinearRNN`.

    recurrent: state of `recurrent_forward`.   conv: the last inputs (B, W-1, width), or None.
    """

    recurrent: Any
    conv: Tensor | None

    @property
    def shape(self) -> torch.Size:
        """Shape of the recurrent part."""
        return self.recurrent.shape


@registry.register("linear_rnn")
class LinearRNN(Layer):
    """Base class of linear recurrent layers; by itself it is a leaky sum with one learned decay per channel.

    To write a new layer, override `recurrent_forward(x, state) -> (y, state)`. x and y are (B, T, hidden_dim), and
    state is None at the start. Training, streaming, packing and padding then work.

    Parameters, with E = hidden_dim: in_proj (2E, D), its first E rows for the main branch; conv.weight (E, 1, W) and
    conv.bias (E); norm (E); out_proj (D, E); by itself also decay (E).
    State: LinearRNNState; `state.shape` is the recurrent part's. The recurrent part alone is a state too: then the
    convolution begins anew.
    Initialisation: in_proj Xavier uniform, out_proj Kaiming uniform, biases 0, sigmoid(decay) = 0.9.
    """

    id = "S-linrnn-block"
    aliases = ("LinRNN",)
    equation = "s_t = sigmoid(decay) * s_{t-1} + SiLU(conv(W_x u))_t;  y_t = W_o (LN(s_t) * SiLU(W_z u_t))"
    source = "Linear RNN base block: gate after norm, short convolution, diagonal recurrence"
    op = "linear_scan"
    reads: ClassVar = {"conv": nn.Conv1d}
    sample: ClassVar = {"expand": 2}
    residual_out = "out_proj"

    def __init__(
        self,
        dim: options.Dim,
        expand: Annotated[int, at_least(1), "hidden_dim = expand * dim channels in the recurrence"] = 2,
        bias: Annotated[options.Bias, "biases in the projections and the convolution"] = True,
        use_short_conv: Annotated[bool, "a short causal convolution before the recurrence"] = True,
        conv_size: options.ConvSize = 4,
        norm_before_gate: Annotated[bool, "y = LN(rec) * SiLU(z); if False, y = LN(rec * SiLU(z))"] = True,
    ) -> None:
        super().__init__()
        self.dim, self.expand, self.norm_before_gate = dim, expand, norm_before_gate
        self.use_short_conv, self.conv_size = use_short_conv, conv_size
        self.hidden_dim = width = dim * expand
        self.in_proj = nn.Linear(dim, 2 * self.hidden_dim, bias=bias)
        if use_short_conv:
            self.conv = nn.Conv1d(width, width, conv_size, padding=conv_size - 1, groups=width, bias=bias)
        self.norm = nn.LayerNorm(self.hidden_dim)
        self.out_proj = nn.Linear(self.hidden_dim, dim, bias=bias)
        nn.init.xavier_uniform_(self.in_proj.weight)
        nn.init.kaiming_uniform_(self.out_proj.weight)
        for module in (self.in_proj, self.out_proj, *([self.conv] if use_short_conv else [])):
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        if not self._custom:
            self.decay = nn.Parameter(torch.full((self.hidden_dim,), math.log(0.9 / 0.1)))

    @property
    def _custom(self) -> bool:
        return type(self).recurrent_forward is not LinearRNN.recurrent_forward

    def recurrent_shape(self) -> tuple[int, ...]:
        """Return the shape of the recurrent state of one sequence, for a subclass that overrides `recur`."""
        return (self.hidden_dim,)

    def recur(self, x: Tensor, state: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
        """Map x (B, T, hidden_dim) to y of the same shape and the last state, for packed sequences too."""
        return linear_scan(x, self.decay.sigmoid(), state, cu_seqlens=cu_seqlens)

    def init_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> LinearRNNState:
        conv, kind = None, {"device": device, "dtype": dtype, "at_least": torch.float32}
        if self.use_short_conv:
            conv = self._zeros(batch_size, self.conv_size - 1, self.hidden_dim, **kind)
        if self._custom:  # only the subclass knows the form of its state; it begins with None
            return LinearRNNState(None, conv)
        return LinearRNNState(self._zeros(batch_size, *self.recurrent_shape(), **kind), conv)

    def _restarted(
        self, x: Tensor, state: State, cu_seqlens: Tensor | None, starts: Tensor, others: dict[str, Any]
    ) -> tuple[Tensor, State]:
        def initial(rows: int) -> LinearRNNState:  # which a custom recurrence tells in a call of no steps
            return self.run(x.new_zeros(rows, 0, self.dim), None, None)[1] if self._custom else self.init_state(rows)

        state = self._with_cache(x, state, cu_seqlens)
        return restarted(self._who(), self.run, initial, x, state, cu_seqlens, starts, **others)

    def _state_form(self) -> State:
        return None if self._custom else super()._state_form()

    def _check(self, x: Tensor, state: State, cu_seqlens: Tensor | None) -> None:
        state = self._with_cache(x, state, cu_seqlens)
        super()._check(x, state, cu_seqlens)
        if self._custom and state is not None and not torch.compiler.is_compiling():
            batch = sequences(x, cu_seqlens)
            for path, leaf in leaves(state):
                if leaf.shape[:1] != (batch,):
                    shape = tuple(leaf.shape)
                    raise ShapeError(f"{self._who()}: {path} has shape {shape}, expected ({batch}, ...) because of x")

    def _with_cache(self, x: Tensor, state: State, cu_seqlens: Tensor | None) -> LinearRNNState | None:
        """Return a state that is the recurrent part alone with the convolution's state before any input."""
        if state is None or isinstance(state, LinearRNNState):
            return state
        return LinearRNNState(state, self.init_state(sequences(x, cu_seqlens)).conv)

    def recurrent_forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """Map x (B, T, hidden_dim) to y of the same shape and the state after the last step."""
        return self.recur(x, state, None)

    def run(self, x: Tensor, state: State, cu_seqlens: Tensor | None) -> tuple[Tensor, LinearRNNState]:
        recurrent, cache = self._with_cache(x, state, cu_seqlens) or (None, None)
        h, z = self.in_proj(x).chunk(2, -1)
        if self.use_short_conv:
            h, cache = convolve(self.conv, h, cache, cu_seqlens=cu_seqlens, silu=True)
        else:
            h = F.silu(h)
        if not self._custom:
            y, recurrent = self.recur(h, recurrent, cu_seqlens)
        else:
            one = self.recurrent_forward if cu_seqlens is None else partial(self._each_alone, cu_seqlens=cu_seqlens)
            y, recurrent = one(h, recurrent)
            # The subclass's backward pass may need its state, and a caller may change what is returned in place.
            recurrent = map_leaves(Tensor.clone, recurrent)
        y, gate = y.to(z.dtype), F.silu(z)  # a custom recurrence may return float32
        y = self.norm(y) * gate if self.norm_before_gate else self.norm(y * gate)
        return self.out_proj(y), LinearRNNState(recurrent, cache)

    def _each_alone(self, h: Tensor, recurrent: State, cu_seqlens: Tensor) -> tuple[Tensor, State]:
        """Run a custom recurrence on each packed sequence separately, because it cannot read them packed."""
        ys, states = [], []
        for i, sequence in enumerate(h.split(cu_seqlens.diff().tolist(), 1)):
            y, state = self.recurrent_forward(sequence, index(recurrent, slice(i, i + 1)))
            ys.append(y)
            states.append(state)
        return (torch.cat(ys, 1), cat(states)) if ys else (h, recurrent)
