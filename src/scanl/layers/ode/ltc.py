"""Liquid time-constant network: neurons that leak and are driven through synapses, solved by semi-implicit steps."""

from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.layers import options, registry
from scanl.layers.base import widen
from scanl.layers.initial_state import StateAxes
from scanl.layers.module import Module
from scanl.layers.ode._timed import TimedCell
from scanl.layers.ode._wiring import Sparsity, WiredWidth, WiringSeed, default_neurons, neural_circuit_policy
from scanl.layers.parts.cell_cases import cases
from scanl.ops.cell import cell
from scanl.options import at_least_option

EQUATION = (
    "c dv/dt = g (v_leak - v) + sum_j a_j (E_j - v),  a_j = w_j sigmoid(sigma_j (v_j - mu_j)) over neurons and inputs"
)
EPSILON = 1e-8


@cell(
    "x: B T 2 N, dt: B T 1, synapse: 4 N N, leak: 3 N, state: B N -> B T N",
    equation="v <- (c v + dt (g v_leak + sum_j a_j E_j)) / (c + dt (g + sum_j a_j)), several times a step",
    source='Hasani et al., "Liquid Time-constant Networks", arXiv:2006.04439, algorithm 1; neurons as in PyPI\'s ncps',
)
def ltc_cell(
    x: Tensor, dt: Tensor, synapse: Tensor, leak: Tensor, state: Tensor, *, substeps: int = 6
) -> tuple[Tensor, Tensor]:
    """Take `substeps` semi-implicit steps of length dt. x: Σ a_j E_j and Σ a_j over the inputs, held meanwhile.

    synapse: σ, μ, w and w E, from rows to columns.   leak: c, g and g v_leak.
    """
    sharpness, middle, w, driven = synapse.unbind(0)
    c, g, resting = leak.unbind(0)
    drive, conductance = x[:, 0] + resting, x[:, 1] + g + EPSILON
    for _ in range(substeps):
        open_ = torch.sigmoid(sharpness * (state[:, :, None] - middle))
        above, below = drive + (open_ * driven).sum(1), conductance + (open_ * w).sum(1)
        state = (c * state + dt * above) / (c + dt * below)
    return state, state


cases(
    ltc_cell,
    "N=3",
    "leak has shape (2, 3), expected (3, N) with N=3 from x",
    "leak is missing, expected a tensor (3, N)",
    options=[{"substeps": 2}],
    x=Tensor.abs,
    dt=Tensor.abs,
    synapse=Tensor.abs,
    leak=Tensor.abs,
)


class Neurons(Module):
    """Parameters of neurons and synapses. sensory, synapses: +1, -1 or 0 from inputs and from neurons to neurons."""

    sigma: Tensor
    mu: Tensor
    w: Tensor
    erev: Tensor
    sparsity_mask: Tensor
    sensory_sigma: Tensor
    sensory_mu: Tensor
    sensory_w: Tensor
    sensory_erev: Tensor
    sensory_sparsity_mask: Tensor

    def __init__(self, sensory: Tensor, synapses: Tensor, outputs: int) -> None:
        super().__init__()

        def uniform(low: float, high: float, *shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape).uniform_(low, high))

        inputs, neurons = sensory.shape
        self.gleak, self.vleak = uniform(0.001, 1, neurons), uniform(-0.2, 0.2, neurons)
        self.cm = uniform(0.4, 0.6, neurons)
        for prefix, signs in (("", synapses), ("sensory_", sensory)):
            self.register_parameter(f"{prefix}sigma", uniform(3, 8, *signs.shape))
            self.register_parameter(f"{prefix}mu", uniform(0.3, 0.8, *signs.shape))
            self.register_parameter(f"{prefix}w", uniform(0.001, 1, *signs.shape))
            self.register_parameter(f"{prefix}erev", nn.Parameter(signs))
            self.register_buffer(f"{prefix}sparsity_mask", signs.abs())
        self.input_w, self.input_b = nn.Parameter(torch.ones(inputs)), nn.Parameter(torch.zeros(inputs))
        self.output_w, self.output_b = nn.Parameter(torch.ones(outputs)), nn.Parameter(torch.zeros(outputs))


@registry.register("ltc")
class LTC(TimedCell):
    """Liquid time-constant network: a neuron's time constant depends on what it receives.

    A step of one sequence takes `substeps` N² + D N logistic functions forwards, and as many backwards. With N = D =
    256 these are 918,000 exponentials, where an LSTM of this width takes 1,280 forwards. No kernel can avoid them. The
    absent synapses of "ncp" are computed too, so with 3/2 D neurons it takes 2.1 times as many as "full".

    Parameters as in PyPI's ncps, in rnn_cell: gleak, vleak, cm (N); sigma, mu, w, erev (N, N), from rows to columns;
    sensory_sigma, sensory_mu, sensory_w, sensory_erev (D, N); input_w, input_b, output_w, output_b (D); the masks
    sparsity_mask and sensory_sparsity_mask.
    Initialisation as in that code: gleak and w U(0.001, 1), vleak U(-0.2, 0.2), cm U(0.4, 0.6), sigma U(3, 8), mu
    U(0.3, 0.8); erev ±1, in "full" +1 with probability 2/3, in "ncp" as the wiring has it; the affine maps are 1 and 0.
    Differs: ncps sets negative parameters to 0 after each step of the optimiser, and they can rise again. Here they
    count as 0 and stay negative, without a gradient. ncps draws the signs of "full" from one fixed seed. Its class LTC
    has implicit_param_constraints=True by default, and multiplies the time spans of a batch along the neurons.
    """

    id = "S-ltc"
    aliases = ("liquid_time_constant", "liquid_neural_network", "LNN")
    equation = EQUATION
    cell = ltc_cell
    state: ClassVar = StateAxes("width", "v")
    sample: ClassVar = {"substeps": 2}

    def __init__(
        self,
        dim: options.Dim,
        width: Annotated[
            WiredWidth | None,
            at_least_option("dim"),
            'N, neurons, of which the first D are read out; by default D, or 3/2 D for the wiring "ncp"',
        ] = None,
        substeps: Annotated[options.Substeps, "semi-implicit steps for each input"] = 6,
        implicit_param_constraints: Annotated[
            bool, "softplus makes w, sensory_w, cm and gleak positive; if False, max(., 0)"
        ] = False,
        wiring: Annotated[
            Literal["full", "ncp"],
            '"full", or "ncp", a neural circuit policy: sparse, from inputs over inter and command neurons to D motor '
            "neurons",
        ] = "full",
        sparsity_level: Annotated[Sparsity, 'share of the synapses of "ncp" that are absent'] = 0.5,
        seed: Annotated[WiringSeed, 'seed of the wiring "ncp"'] = 22222,
    ) -> None:
        super().__init__()
        if width is None:
            width = dim if wiring == "full" else default_neurons(dim)
        self.dim, self.width, self.substeps = dim, width, substeps
        self.implicit_param_constraints = implicit_param_constraints
        if wiring == "full":
            sensory, synapses = (torch.where(torch.rand(rows, width) < 2 / 3, 1.0, -1.0) for rows in (dim, width))
        else:
            drawn = neural_circuit_policy(dim, width, dim, sparsity_level, seed)
            sensory, synapses = (torch.tensor(signs, dtype=torch.get_default_dtype()) for signs in drawn[:2])
        self.rnn_cell = Neurons(sensory, synapses, dim)

    def operands(self, x: Tensor, spans: Tensor) -> list[Tensor | None]:
        neurons = self.rnn_cell
        positive = F.softplus if self.implicit_param_constraints else torch.relu
        x = widen(x * neurons.input_w + neurons.input_b)[..., None]
        w = positive(neurons.sensory_w) * neurons.sensory_sparsity_mask
        open_ = torch.sigmoid(neurons.sensory_sigma * (x - neurons.sensory_mu))
        sensed = torch.stack([(open_ * (w * neurons.sensory_erev)).sum(2), (open_ * w).sum(2)], 2)
        w, g = positive(neurons.w) * neurons.sparsity_mask, positive(neurons.gleak)
        synapse = torch.stack([neurons.sigma, neurons.mu, w, w * neurons.erev])
        return [sensed, spans / self.substeps, synapse, torch.stack([positive(neurons.cm), g, g * neurons.vleak])]

    def output(self, h: Tensor) -> Tensor:
        return h[..., : self.dim] * self.rnn_cell.output_w + self.rnn_cell.output_b


@registry.preset("ncp", wiring="ncp")
class NCP(LTC):
    """Neural circuit policy: a liquid time-constant network of sparse layers of inter, command and motor neurons."""

    id = "S-ltc"
    aliases = ("neural_circuit_policy",)
    equation = f"{EQUATION}, where the wiring has a synapse"
    source = (
        'Lechner et al., "Neural circuit policies enabling auditable autonomy", Nature Machine Intelligence 2, 2020, '
        "with the numbers of neurons of AutoNCP in PyPI's ncps"
    )
