r"""Closed-form continuous-time network.

.. math:: h_t = g \odot (1 - s) + s \odot k, \quad s = \sigma(a \Delta_t + b), \quad
          g, k = \tanh(\cdot), \; a, b \text{ linear in } \phi(W x_t + U h_{t-1})
"""

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.errors import nearest
from scanl.layers.base import register
from scanl.layers.ode._closed_form import (
    ACTIVATIONS,
    EQUATION,
    MODES,
    SOURCE,
    Heads,
    MixedMemory,
    closed_form,
    remember,
)
from scanl.layers.ode._timed import Draw, TimedCell, at_least, samples
from scanl.ops.cell import cell
from scanl.ops.registry import Sample


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
    mode: str = "default",
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
    h = closed_form(raw, dt, time, mode)
    return h, torch.stack([h, *c], 1)


@register("cfc")
class CfC(TimedCell):
    """Closed-form continuous-time network: a formula, and not a solver, gives the state after a time.

    Args:
        dim: D, inputs and outputs.
        units: E, neurons; by default D. If E is not D, a linear map reads the neurons out.
        mode: "default"; "no_gate", g + s k; or "pure", A - A exp(-Δ (|w_tau| + |f|)) f, the solution of an LTC.
        backbone_units: U, width of the backbone.
        backbone_layers: layers of the backbone; 0 for none.
        activation: φ of the backbone, "lecun_tanh" (1.7159 tanh(0.666 x)), "silu", "relu", "tanh" or "gelu".
        mixed_memory: an LSTM between the state and the network.

    `forward` also takes `timespans` (B, T), the duration Δ of each step.

    Parameters as in PyPI's ncps: rnn_cell.backbone.0 (U, D+E) and further layers; rnn_cell.ff1, ff2, time_a, time_b
    (E, U) for g, k, a and b, or rnn_cell.ff1 for f with rnn_cell.w_tau and rnn_cell.A (1, E) in mode "pure";
    lstm.input_map (4E, D), lstm.recurrent_map (4E, E); fc (D, E) where E differs from D.
    Initialisation as there: matrices Xavier-uniform, biases as in `nn.Linear`; of the LSTM's input U(-0.1, 0.1), its
    recurrent matrix orthogonal.
    State: h, (B, 1, E); with a mixed memory h and c, (B, 2, E).
    Differs: A starts at 1, as in ncps' TensorFlow cell; in its PyTorch cell A is Xavier-uniform. There is no dropout.
    ncps multiplies the time spans of a batch along the neurons. Here each row of the batch has its own time spans.
    """

    id = "S-cfc"
    aliases = ("closed_form_continuous",)
    equation = EQUATION
    source = SOURCE
    cell = cfc_cell
    reads: ClassVar = {"rnn_cell": nn.Linear, "lstm.recurrent_map": nn.Linear}
    sample: ClassVar = {"units": 10, "backbone_units": 8}

    def __init__(
        self,
        dim: int,
        units: int | None = None,
        mode: str = "default",
        backbone_units: int = 128,
        backbone_layers: int = 1,
        activation: str = "lecun_tanh",
        mixed_memory: bool = False,
    ) -> None:
        super().__init__()
        at_least(self._who(), 1, dim=dim, units=units, backbone_units=backbone_units)
        at_least(self._who(), 0, backbone_layers=backbone_layers)
        if mode not in MODES:
            raise nearest("mode of cfc", mode, MODES)
        if activation not in ACTIVATIONS:
            raise nearest("activation of cfc", activation, ACTIVATIONS)
        self.dim, self.units, self.mode, self.activation = dim, units or dim, mode, activation
        self.rnn_cell = Heads(dim, self.units, mode, backbone_units, backbone_layers)
        self.lstm = MixedMemory(dim, self.units) if mixed_memory else None
        self.fc = nn.Linear(self.units, dim) if self.units != dim else nn.Identity()

    def state_shape(self) -> tuple[int, ...]:
        return (1 if self.lstm is None else 2, self.units)

    def operands(self, x: Tensor, spans: Tensor) -> list[Tensor | None]:
        heads, bias = self.rnn_cell.stacked()
        time = self.rnn_cell.time() if self.mode == "pure" else None
        after = [time, *([None, None] if self.lstm is None else self.lstm.operands(x))]
        if not self.rnn_cell.backbone:
            into, w = heads.split([self.dim, self.units], 2)
            given = F.linear(x, into.flatten(0, 1), bias.flatten()).unflatten(-1, (-1, self.units))
            return [given, spans, w, None, None, None, None, *after]
        first, *deep = self.rnn_cell.backbone_layers()
        into, w = first.weight.split([self.dim, self.units], 1)
        given = F.linear(x, into, first.bias)
        if not deep:
            return [given, spans, w, None, None, heads, bias, *after]
        further = [torch.stack([each.weight for each in deep]), torch.stack([each.bias for each in deep])]
        return [given, spans, w, *further, heads, bias, *after]

    def options(self) -> dict[str, Any]:
        return {"mode": self.mode, "activation": self.activation}

    def output(self, h: Tensor) -> Tensor:
        return self.fc(h)


@cfc_cell.samples
def _samples() -> Iterator[Sample]:
    def make(draw: Draw, batch: int, steps: int, rows: int) -> dict[str, Tensor]:
        timed = {"x": draw(batch, steps, 5), "dt": draw(batch, steps, 1).abs(), "gates": draw(batch, steps, 4, 3)}
        backbone = {"w": draw(5, 3), "deep": draw(1, 5, 5), "deep_bias": draw(1, 5)}
        heads = {"heads": draw(4, 3, 5), "heads_bias": draw(4, 3), "r": draw(4, 3, 3)}
        return {**timed, **backbone, **heads, "state": draw(rows, 2, 3)}

    yield from samples(make)
    yield from samples(
        lambda draw, batch, steps, rows: {
            "x": draw(batch, steps, 1, 3), "dt": draw(batch, steps, 1).abs(), "w": draw(1, 3, 3), "time": draw(2, 3),
            "state": draw(rows, 1, 3),
        },
        mode="pure",
    )  # fmt: skip


@cfc_cell.errors
def _errors() -> Iterator[tuple[Sample, str]]:
    given = {"x": torch.zeros(2, 4, 5), "dt": torch.zeros(2, 4, 1), "w": torch.zeros(5, 3)}
    yield Sample({**given, "heads": torch.zeros(4, 2, 5)}), "heads has shape (4, 2, 5), expected (G, E, U) with E=3"
    yield Sample({**given, "dt": torch.zeros(2, 4)}), "dt has shape (2, 4), expected (B, T, 1)"
    gates, r = torch.zeros(2, 4, 4, 3), torch.zeros(4, 3, 2)
    yield Sample({**given, "gates": gates, "r": r}), "r has shape (4, 3, 2), expected (J, E, E) with J=4 from gates"
