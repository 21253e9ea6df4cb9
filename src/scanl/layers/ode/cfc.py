"""Closed-form continuous-time network."""

from collections.abc import Iterator
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.layers import options, registry
from scanl.layers.initial_state import StateAxes
from scanl.layers.ode._closed_form import (
    ACTIVATIONS,
    EQUATION,
    SOURCE,
    ClosedFormMaps,
    Memory,
    MixedMemory,
    Variant,
    closed_form,
    remember,
)
from scanl.layers.ode._timed import TimedCell
from scanl.ops._frame.draws import Draws
from scanl.ops.cell import cell
from scanl.ops.registry import OpSample
from scanl.options import at_least, one_of


@cell(
    "x: B T U | B T G E, dt: B T 1, w: U E | G E E, deep?: L U U, deep_bias?: L U, heads?: G E U, heads_bias?: G E, "
    "time?: 2 E, gates?: B T J E, r?: J E E, state: B S E -> B T E",
    derived={"S": lambda sizes: 2 if "J" in sizes else 1},
    static=("L", "S"),
    equation=EQUATION,
    source=SOURCE,
)
def cfc_cell(
    x: Tensor,
    dt: Tensor,
    w: Tensor,
    deep: Tensor | None,
    deep_bias: Tensor | None,
    heads: Tensor | None,
    heads_bias: Tensor | None,
    time: Tensor | None,
    gates: Tensor | None,
    r: Tensor | None,
    state: Tensor,
    *,
    variant: str = "default",
    activation: str = "lecun_tanh",
) -> tuple[Tensor, Tensor]:
    """Step to the closed form. x, w: of the first layer of the backbone.   deep: its further layers.   heads: above it.

    Without heads there is no backbone: x and w are those of the heads.   gates: the input's part of the LSTM of a mixed
    memory, z, i, f and o.   r: its recurrent weights.   state: h, and c of that LSTM.
    """
    h, *c = state.unbind(1)
    if gates is not None and r is not None:
        h, c[0] = remember(gates, r, h, c[0])
    if heads is None or heads_bias is None:
        raw = x + torch.einsum("be,gfe->bgf", h, w)
    else:
        z = ACTIVATIONS[activation](x + h @ w.T)
        if deep is not None and deep_bias is not None:
            for weight, bias in zip(deep.unbind(0), deep_bias.unbind(0), strict=True):
                z = ACTIVATIONS[activation](z @ weight.T + bias)
        raw = torch.einsum("bu,geu->bge", z, heads) + heads_bias
    h = closed_form(raw, dt, time, variant)
    return h, torch.stack([h, *c], 1)


@registry.register("cfc")
class CfC(TimedCell):
    """Closed-form continuous-time network: a formula, and not a solver, gives the state after a time.

    Parameters as in PyPI's ncps: rnn_cell.backbone.0 (U, D+E) and further layers; rnn_cell.ff1, ff2, time_a, time_b
    (E, U) for g, k, a and b, or rnn_cell.ff1 for f with rnn_cell.w_tau and rnn_cell.A (1, E) for "pure";
    lstm.input_map (4E, D), lstm.recurrent_map (4E, E); fc (D, E) where E differs from D.
    Initialisation as in that code: matrices Xavier-uniform, biases as in `nn.Linear`; of the LSTM's input U(-0.1, 0.1),
    its recurrent matrix orthogonal. Differs: A starts at 1, as in ncps' TensorFlow cell; in its PyTorch cell A is
    Xavier-uniform. There is no dropout. ncps multiplies the time spans of a batch along the neurons. Here each row of
    the batch has its own time spans.
    """

    id = "S-cfc"
    aliases = ("closed_form_continuous", "closed_form_continuous_time")
    cell = cfc_cell
    reads: ClassVar = {"rnn_cell": nn.Linear, "lstm.recurrent_map": nn.Linear}
    state: ClassVar = StateAxes("num_states, width", "h; with a mixed memory h and c")
    sample: ClassVar = {"width": 10, "hidden_dim": 8}

    def __init__(
        self,
        dim: options.Dim,
        width: Annotated[
            options.Width | None, "E, neurons; by default D. If E is not D, a linear map reads the neurons out"
        ] = None,
        variant: Variant = "default",
        hidden_dim: Annotated[options.HiddenDim, "U, channels of the backbone"] = 128,
        depth: Annotated[int, at_least(0), "layers of the backbone; 0 for none"] = 1,
        activation: Annotated[
            str,
            one_of(ACTIVATIONS),
            'φ of the backbone, "lecun_tanh" (1.7159 tanh(0.666 x)), "silu", "relu", "tanh" or "gelu"',
        ] = "lecun_tanh",
        mixed_memory: Memory = False,
    ) -> None:
        super().__init__()
        self.dim, self.width, self.variant, self.activation = dim, width or dim, variant, activation
        self.num_states = 2 if mixed_memory else 1
        self.rnn_cell = ClosedFormMaps(dim, self.width, variant, hidden_dim, depth)
        self.lstm = MixedMemory(dim, self.width) if mixed_memory else None
        self.fc = nn.Linear(self.width, dim) if self.width != dim else nn.Identity()

    def operands(self, x: Tensor, spans: Tensor) -> list[Tensor | None]:
        heads, bias = self.rnn_cell.stacked()
        time = self.rnn_cell.time() if self.variant == "pure" else None
        after = [time, *([None, None] if self.lstm is None else self.lstm.operands(x))]
        if not self.rnn_cell.backbone:
            into, w = heads.split([self.dim, self.width], 2)
            inputs = F.linear(x, into.flatten(0, 1), bias.flatten()).unflatten(-1, (-1, self.width))
            return [inputs, spans, w, None, None, None, None, *after]
        first, *deep = self.rnn_cell.backbone_layers()
        into, w = first.weight.split([self.dim, self.width], 1)
        inputs = F.linear(x, into, first.bias)
        if not deep:
            return [inputs, spans, w, None, None, heads, bias, *after]
        further = [torch.stack([layer.weight for layer in deep]), torch.stack([layer.bias for layer in deep])]
        return [inputs, spans, w, *further, heads, bias, *after]

    def output(self, h: Tensor) -> Tensor:
        return self.fc(h)


@cfc_cell.samples
def _samples() -> Iterator[OpSample]:
    draw = Draws()
    inputs = {"x": draw(2, 4, 5), "dt": draw(2, 4, 1).abs(), "gates": draw(2, 4, 4, 3)}
    backbone = {"w": draw(5, 3), "deep": draw(1, 5, 5), "deep_bias": draw(1, 5)}
    heads = {"heads": draw(4, 3, 5), "heads_bias": draw(4, 3), "r": draw(4, 3, 3)}
    yield OpSample({**inputs, **backbone, **heads, "state": draw(2, 2, 3)})
    inputs = {"x": draw(1, 5, 1, 3), "dt": draw(1, 5, 1).abs(), "w": draw(1, 3, 3), "time": draw(2, 3)}
    packed = {"variant": "pure", "cu_seqlens": torch.tensor([0, 2, 2, 5])}
    yield OpSample({**inputs, "state": draw(3, 1, 3)}, packed)


@cfc_cell.errors
def _errors() -> Iterator[tuple[OpSample, str]]:
    operands = {"x": torch.zeros(2, 4, 5), "dt": torch.zeros(2, 4, 1), "w": torch.zeros(5, 3)}
    yield (
        OpSample({**operands, "heads": torch.zeros(4, 2, 5)}),
        "heads has shape (4, 2, 5), expected (G, E, U) with E=3",
    )
    yield OpSample({**operands, "dt": torch.zeros(2, 4)}), "dt has shape (2, 4), expected (B, T, 1)"
    gates, r = torch.zeros(2, 4, 4, 3), torch.zeros(4, 3, 2)
    yield (
        OpSample({**operands, "gates": gates, "r": r}),
        "r has shape (4, 3, 2), expected (J, E, E) with J=4 from gates",
    )
