"""Columnar-constructive network: columns that are added in stages, each stage on top of those before it."""

from collections.abc import Iterable, Sequence
from typing import Annotated, ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.layers import options, registry
from scanl.layers.adapters import has_hooks, is_plain
from scanl.layers.base import Layer, widen
from scanl.layers.initial_state import InnerState, StateAxes
from scanl.layers.rnn.columnar import ColumnarState, InitScale, ScalarLSTMs
from scanl.ops import linear_scan
from scanl.options import above, between, divides

BLOCK = 16  # columns whose stages read what is before all of them by one product


class ConstructiveState(NamedTuple):
    columns: Annotated[tuple[ColumnarState, ...], InnerState("stages")]
    inputs: Annotated[Tensor, StateAxes("2, dim", "running mean and variance of the inputs", fill=(0.0, 1.0))]
    features: Annotated[Tensor, StateAxes("2, dim", "those of the outputs of the columns", fill=(0.0, 1.0))]


@registry.register("columnar_constructive")
class ColumnarConstructive(Layer):
    """Columnar-constructive network: stages of scalar LSTMs. A stage reads the input and all earlier stages.

    Columns of one stage do not act on each other, and earlier stages are constant while a stage learns, so real-time
    recurrent learning of the stage is cheap and exact. The algorithm `ccn` trains the stages one after another, and
    until `grow` reaches a stage, its outputs are 0. Any other algorithm trains all stages at once; for `diagonal_rtrl`
    they are a stack, so it is exact for the last one only. Inputs and outputs are normalised by running means and
    variances, through which no gradient flows.

    Differs: a stage of the authors' program reads the outputs that earlier stages had a step before. Here it reads
    those of the same step. In the authors' program each column has running figures of its own, without the present
    input, and they stop where its stage ends. Here all columns share those of an input or output, and they include the
    present one. The floor of a variance applies where it is used.

    Parameters: stages, each with gates (4 columns, inputs) and recurrent (4, columns) as in `columnar`; the buffer
    grown (D), 1 for outputs that are reached.
    Initialisation as in the authors' program: U(±init_scale).
    """

    aliases = ("ccn",)
    equation = (
        "h^k_t = columns_k([norm(x_t); norm(h^1_t); ...; norm(h^{k-1}_t)]),  y_t = [norm(h^1_t); ...; norm(h^K_t)],  "
        "norm(x_t) = (x_t - m_t) / sqrt(max(v_t, floor)),  m_t = decay m_{t-1} + (1 - decay) x_t,  "
        "v_t = decay v_{t-1} + (1 - decay) (x_t - m_t)^2"
    )
    source = (
        'Javed, Shah, Sutton and White, "Scalable Real-Time Recurrent Learning Using Columnar-Constructive Networks", '
        "JMLR 24, 2023, arXiv:2302.05326"
    )
    op = "columnar_cell"
    carried_by = "turns"
    state: ClassVar = ConstructiveState
    sample: ClassVar = {"columns": 2, "init_scale": 0.5}
    left_out = ()

    grown: Tensor

    def __init__(
        self,
        dim: options.Dim,
        columns: Annotated[int, divides("dim"), "columns of a stage; a divisor of dim"] = 4,
        decay: Annotated[float, between(0, 1), "share of a running mean or variance that stays at each step"] = 0.99999,
        floor: Annotated[float, above(0), "least variance that divides"] = 0.01,
        init_scale: InitScale = 0.01,
    ) -> None:
        super().__init__()
        self.dim, self.columns, self.decay, self.floor = dim, columns, decay, floor
        self.stages = nn.ModuleList(ScalarLSTMs(dim + done, columns, init_scale) for done in range(0, dim, columns))
        self.register_buffer("grown", torch.ones(dim))

    def grow(self, stage: int) -> None:
        """Let the outputs of this stage, and of those before it, through; those of later stages are 0."""
        reached = (stage + 1) * self.columns
        self.grown[:reached] = 1
        self.grown[reached:] = 0

    def run(
        self, x: Tensor, state: ConstructiveState | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, ConstructiveState]:
        before, inputs, features = self._begin(x, state, cu_seqlens)
        read, inputs = self._normed(x, inputs, cu_seqlens)
        known, columns, figures = [read], [], []
        stages = cast(Iterable[ScalarLSTMs], self.stages)
        parts = list(zip(stages, before, features.split(self.columns, -1), strict=True))
        size = max(1, BLOCK // self.columns)
        for begin in range(0, len(parts), size):
            block = parts[begin : begin + size]
            earlier = torch.cat(known, -1)
            shared, new = self._shared(earlier, [stage for stage, *_ in block]), []
            for index, (stage, column, figure) in enumerate(block):
                if shared is None:
                    h, last = stage(torch.cat([earlier, *new], -1), column, cu_seqlens=cu_seqlens)
                else:
                    drive = shared[index]
                    if new:
                        drive = drive + F.linear(torch.cat(new, -1), stage.gates.weight[:, earlier.shape[-1] :])
                    h, last = stage.driven_by(drive.unflatten(-1, (4, -1)), x, column, cu_seqlens)
                feature, after = self._normed(h, figure, cu_seqlens)
                new.append(feature)
                columns.append(last)
                figures.append(after)
            known += new
        y = torch.cat(known[1:], -1) * self.grown.to(x.dtype)
        return y, ConstructiveState(tuple(columns), inputs, torch.cat(figures, -1))

    def _shared(self, earlier: Tensor, stages: list[ScalarLSTMs]) -> Sequence[Tensor] | None:
        """Return what the maps of these stages make of the numbers (B, T, n) before all of them, by one product.

        None where a stage or its map has to be called: it is watched, or has an adapter or hooks.
        """
        for stage in stages:
            if stage.watcher is not None or has_hooks(stage) or not is_plain(stage.gates, nn.Linear):
                return None
        count = earlier.shape[-1]
        weight = torch.cat([stage.gates.weight[:, :count] for stage in stages])
        return F.linear(earlier, weight, torch.cat([stage.gates.bias for stage in stages])).chunk(len(stages), -1)

    def _normed(self, x: Tensor, figures: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return x normalised, and its mean and variance (B, 2, dim) after the last step."""
        wide = widen(x)
        figures, decay = figures.to(wide.dtype), torch.full((), self.decay, dtype=wide.dtype, device=x.device)
        with torch.no_grad():
            mean, last = linear_scan((1 - self.decay) * wide, decay, figures[:, 0], cu_seqlens=cu_seqlens)
            square = (1 - self.decay) * (wide - mean).square()
            variance, spread = linear_scan(square, decay, figures[:, 1], cu_seqlens=cu_seqlens)
            scale = variance.clamp(min=self.floor).rsqrt()
        return ((wide - mean) * scale).to(x.dtype), torch.stack([last, spread], 1)


@registry.preset("constructive", columns=1)
class Constructive(ColumnarConstructive):
    """Constructive network: one column a stage, so each new column reads all earlier ones."""

    equation = ColumnarConstructive.equation
    source = (
        'Javed, White and Sutton, "Scalable Online Recurrent Learning Using Columnar Neural Networks", arXiv:2103.05787'
    )
    sample: ClassVar = {}
