"""Base class of layers with a matrix memory: projections, short convolutions, SiLU, and the state."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, NamedTuple, TypeAlias

from torch import Tensor, nn
from torch.nn import functional as F

from scanl.layers.base import Layer
from scanl.layers.initial_state import StateAxes, TensorTuple
from scanl.layers.parts.short_convolution import convolve

Windows: TypeAlias = tuple[Tensor, ...]  # the last inputs of each convolution, (B, W-1, width)
WINDOWS = TensorTuple("windows", "the last inputs of the convolutions")
LastInputs: TypeAlias = Annotated[Windows, WINDOWS]


class MemoryState(NamedTuple):
    """State of a matrix memory."""

    recurrent: Annotated[Tensor, StateAxes("*memory", "S")]
    conv: LastInputs


class QueryKeyValue(Layer):
    """Base class: projections to queries, keys and values, each with a short convolution or without.

    Parameters as in flash-linear-attention: q_proj, k_proj, v_proj; q_conv1d, k_conv1d, v_conv1d. Its layers draw the
    convolutions as PyTorch does, and so do these; its models draw them from N(0, 0.02²).
    """

    memory: tuple[int, ...]  # H, K, V of the state; a layer may have another shape
    windows: list[tuple[int, int]]  # W-1 and the channels of each convolution
    state: ClassVar = MemoryState
    reads: ClassVar = dict.fromkeys(("q_conv1d", "k_conv1d", "v_conv1d"), nn.Conv1d)

    def _make_projections(self, widths: Sequence[int], conv_size: int | None, conv_bias: bool) -> None:
        """Make the projections to queries, keys and values, whose channels are `widths`, and their convolutions.

        conv_size: window of the convolutions; None for no convolutions.
        """
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(self.dim, width, bias=False) for width in widths)
        self.q_conv1d, self.k_conv1d, self.v_conv1d = (
            None if conv_size is None else nn.Conv1d(width, width, conv_size, groups=width, bias=conv_bias)
            for width in widths
        )
        self.windows = [] if conv_size is None else [(conv_size - 1, width) for width in widths]

    def _read(
        self,
        x: Tensor,
        state: tuple[Any, Windows] | None,
        cu_seqlens: Tensor | None,
        silu: Sequence[bool] = (True, True, True),
    ) -> tuple[list[Tensor], Any, Windows]:
        """Return [q, k, v] (B, T, width), the memory of `state`, and the new windows of the convolutions.

        silu: for each of q, k and v, whether to apply SiLU.
        """
        recurrent, windows = (None, None) if state is None else state
        earlier, parts, after = iter(windows or [None] * 3), [], []
        projections = ((self.q_proj, self.q_conv1d), (self.k_proj, self.k_conv1d), (self.v_proj, self.v_conv1d))
        for (project, conv), active in zip(projections, silu, strict=True):
            projected = project(x)
            if conv is not None:
                projected, window = convolve(conv, projected, next(earlier), cu_seqlens=cu_seqlens, silu=active)
                after.append(window)
            elif active:
                projected = F.silu(projected)
            parts.append(projected)
        return parts, recurrent, tuple(after)
