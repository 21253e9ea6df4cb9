"""Closed-form continuous-time network, wired as a neural circuit policy."""

from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.layers import options, registry
from scanl.layers.initial_state import StateAxes
from scanl.layers.module import Module
from scanl.layers.ode._closed_form import ClosedFormMaps, Memory, MixedMemory, Variant, closed_form, remember
from scanl.layers.ode._timed import TimedCell
from scanl.layers.ode._wiring import AllNeurons, Sparsity, WiringSeed, default_neurons, neural_circuit_policy
from scanl.layers.parts.cell_cases import cases
from scanl.ops.cell import cell


@cell(
    "x: B T G I, dt: B T 1, inter: G I I, command: G C P, command_bias: G C, motor: G M Q, motor_bias: G M, "
    "time?: 2 N, gates?: B T J N, r?: J N N, state: B S N -> B T M",
    derived={
        "N": lambda sizes: sizes["I"] + sizes["C"] + sizes["M"],
        "S": lambda sizes: 2 if "J" in sizes else 1,
    },
    static=("S",),
    equation=(
        "h_t = g (1 - s) + s k,  s = sigmoid(a dt + b),  g, k, a, b from W x_t + U h_{t-1},  in three layers, each fed "
        "by the one below and by itself"
    ),
    source='Hasani et al., "Closed-form continuous-time neural networks", arXiv:2106.13898; wiring: Lechner et al., '
    '"Neural '
    'circuit policies enabling auditable autonomy", Nature Machine Intelligence 2, 2020',
)
def cfc_ncp_cell(
    x: Tensor,
    dt: Tensor,
    inter: Tensor,
    command: Tensor,
    command_bias: Tensor,
    motor: Tensor,
    motor_bias: Tensor,
    time: Tensor | None,
    gates: Tensor | None,
    r: Tensor | None,
    state: Tensor,
    *,
    variant: str = "default",
) -> tuple[Tensor, Tensor]:
    """Step inter, command and motor neurons in turn. x, inter: of the inter neurons' maps, from x and from themselves.

    command: from inter and command neurons, P = I + C.   motor: from command and motor neurons, Q = C + M.   gates, r,
    state: as in `cfc_cell`, over all N neurons.
    """
    h, *c = state.unbind(1)
    if gates is not None and r is not None:
        h, c[0] = remember(gates, r, h, c[0])
    sizes = [inter.shape[1], command.shape[1], motor.shape[1]]
    befores = h.split(sizes, 1)
    times = [None] * 3 if time is None else time.split(sizes, 1)
    below = closed_form(x + torch.einsum("be,gfe->bgf", befores[0], inter), dt, times[0], variant)
    news = [below]
    for previous, w, bias, constants in zip(
        befores[1:], (command, motor), (command_bias, motor_bias), times[1:], strict=True
    ):
        raw = torch.einsum("be,gfe->bgf", torch.cat([below, previous], 1), w) + bias
        below = closed_form(raw, dt, constants, variant)
        news.append(below)
    return below, torch.stack([torch.cat(news, 1), *c], 1)


cases(
    cfc_ncp_cell,
    "C=2 G=4 I=3 M=1 P=5 Q=3",
    "motor_bias has shape (4, 2), expected (G, M) with G=4",
    "state has shape (2, 1, 5), expected (B, S, N) with",
    dt=Tensor.abs,
)


class WiredMaps(Module):
    """The maps of inter, command and motor neurons."""

    def __init__(self, dim: int, width: int, variant: str, sparsity_level: float, seed: int) -> None:
        super().__init__()
        wiring = neural_circuit_policy(dim, width, dim, sparsity_level, seed)
        self.sizes = (wiring.inter, wiring.command, wiring.motor)
        below = dim
        for at, (rows, size) in enumerate(zip(wiring.layers(), self.sizes, strict=True)):
            mask = torch.tensor(abs(rows.T), dtype=torch.get_default_dtype())
            self.add_module(
                f"layer_{at}", ClosedFormMaps(below, size, variant, mask=torch.cat([mask, torch.ones(size, size)], 1))
            )
            below = size

    def maps(self) -> list[ClosedFormMaps]:
        """Return the maps of the three layers, from the lowest up."""
        return [module for module in self.children() if isinstance(module, ClosedFormMaps)]


@registry.register("cfc_ncp")
class CfCNCP(TimedCell):
    """CfC in three sparse layers of inter, command and motor neurons; the last are the output.

    The maps that give g and k, or f, are masked by the wiring. Within a layer every neuron feeds every other.

    Parameters as in PyPI's ncps with `AutoNCP`: rnn_cell.layer_0 (inter), layer_1 (command) and layer_2 (motor), each
    with ff1, ff2, time_a and time_b, or ff1, w_tau and A, and the mask sparsity_mask; lstm as in `cfc`.
    Initialisation: as in `cfc`. The same seed gives the same wiring as in ncps.
    """

    id = "S-cfc"
    cell = cfc_ncp_cell
    reads: ClassVar = {"rnn_cell": nn.Linear, "lstm.recurrent_map": nn.Linear}
    state: ClassVar = StateAxes(
        "num_states, width", "h of inter, command and motor neurons; with a mixed memory h and c"
    )

    def __init__(
        self,
        dim: Annotated[options.Dim, "D, model width and motor neurons"],
        width: AllNeurons = None,
        sparsity_level: Sparsity = 0.5,
        seed: WiringSeed = 22222,
        variant: Variant = "default",
        mixed_memory: Memory = False,
    ) -> None:
        super().__init__()
        self.dim, self.width, self.variant = dim, default_neurons(dim) if width is None else width, variant
        self.num_states = 2 if mixed_memory else 1
        self.rnn_cell = WiredMaps(dim, self.width, variant, sparsity_level, seed)
        self.lstm = MixedMemory(dim, self.width) if mixed_memory else None

    def operands(self, x: Tensor, spans: Tensor) -> list[Tensor | None]:
        maps = self.rnn_cell.maps()
        (weight, bias), *above = (module.stacked() for module in maps)
        into, inter = weight.split([self.dim, weight.shape[1]], 2)
        inputs = F.linear(x, into.flatten(0, 1), bias.flatten()).unflatten(-1, bias.shape)
        time = torch.cat([module.time() for module in maps], 1) if self.variant == "pure" else None
        memory = [None, None] if self.lstm is None else self.lstm.operands(x)
        return [inputs, spans, inter, *above[0], *above[1], time, *memory]
