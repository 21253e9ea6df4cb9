"""Liquid time-constant network: neurons that leak and are driven through synapses, solved by semi-implicit steps."""

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.errors import ShapeError
from scanl.layers import options, registry
from scanl.layers.base import widen
from scanl.layers.initial_state import StateAxes
from scanl.layers.module import Module
from scanl.layers.ode._timed import TimedCell
from scanl.layers.ode._wiring import AllNeurons, Sparsity, WiringSeed, default_neurons, neural_circuit_policy
from scanl.layers.parts.cell_cases import cases
from scanl.ops.cell import cell
from scanl.options import at_least_option

EQUATION = (
    "c dv/dt = g (v_leak - v) + sum_j a_j (E_j - v),  a_j = w_j sigmoid(sigma_j (v_j - mu_j)) over neurons and inputs"
)
EPSILON = 1e-8
Substeps = Annotated[options.Substeps, "semi-implicit steps for each input"]
ImplicitConstraints = Annotated[bool, "softplus makes w, sensory_w, cm and gleak positive; if False, max(., 0)"]


@cell(
    "x: B T D, dt: B T 1, sensory: 4 D N, synapse: 4 N N, leak: 3 N, state: B N -> B T N",
    by_hand="synapses",
    equation="v <- (c v + dt (g v_leak + sum_j a_j E_j)) / (c + dt (g + sum_j a_j)), several times a step",
    source='Hasani et al., "Liquid Time-constant Networks", arXiv:2006.04439, algorithm 1; neurons as in PyPI\'s ncps',
)
def ltc_cell(
    x: Tensor, dt: Tensor, sensory: Tensor, synapse: Tensor, leak: Tensor, state: Tensor, *, substeps: int = 6
) -> tuple[Tensor, Tensor]:
    """Take `substeps` semi-implicit steps of length dt, during which the input x is held.

    sensory, synapse: σ, μ, w and w E, from rows to columns.   leak: c, g with its ε, and g v_leak.
    """
    c, g, resting = leak.unbind(0)
    driven, opened = received(x, sensory.unbind(0))
    synapses = synapse.unbind(0)
    for _ in range(substeps):
        drive, conductance = received(state, synapses)
        above, below = drive + driven + resting, conductance + opened + g
        state = (c * state + dt * above) / (c + dt * below)
    return state, state


def check_layers(operands: Mapping[str, Tensor | None]) -> None:
    """Raise ShapeError unless the sizes of the layers of `ncp_cell` agree; the op checks the axes of each."""
    sensory, command, motor, leak = (operands[name] for name in ("sensory", "command", "motor", "leak"))
    if sensory is None or command is None or motor is None or leak is None or motor.ndim != 3 or command.ndim != 3:
        return
    inter, (commands, motors) = sensory.shape[-1], motor.shape[1:]
    if (command.shape[1], leak.shape[-1]) != (commands + inter, motors + commands + inter):
        raise ShapeError(
            f"ncp_cell: command has shape {tuple(command.shape)}, expected (4, C + I, C) and leak (3, M + C + I) with "
            f"C={commands} and M={motors} from motor, I={inter} from sensory"
        )


@cell(
    "x: B T D, dt: B T 1, sensory: 4 D I, command: 4 P C, motor: 4 C M, leak: 3 N, state: B N -> B T N",
    check=lambda operands, options, cu_seqlens: check_layers(operands),
    by_hand="synapses",
    equation="v <- (c v + dt (g v_leak + sum_j a_j E_j)) / (c + dt (g + sum_j a_j)), several times a step",
    source='Hasani et al., "Liquid Time-constant Networks", arXiv:2006.04439, algorithm 1; wiring: Lechner et al., '
    '"Neural circuit policies enabling auditable autonomy", Nature Machine Intelligence 2, 2020',
)
def ncp_cell(
    x: Tensor,
    dt: Tensor,
    sensory: Tensor,
    command: Tensor,
    motor: Tensor,
    leak: Tensor,
    state: Tensor,
    *,
    substeps: int = 6,
) -> tuple[Tensor, Tensor]:
    """Take the steps of `ltc_cell` with M motor, C command and I inter neurons, in this order.

    Inputs reach inter neurons, these and command neurons command neurons, which reach motor neurons.
    """
    c, g, resting = leak.unbind(0)
    to_command, to_motor = command.unbind(0), motor.unbind(0)
    count, commands = motor.shape[2], motor.shape[1]
    driven, opened = received(x, sensory.unbind(0))
    for _ in range(substeps):
        drives = zip(
            received(state[:, count : count + commands], to_motor), received(state[:, count:], to_command),
            (driven, opened), strict=True,
        )  # fmt: skip
        drive, conductance = (torch.cat(parts, 1) for parts in drives)
        state = (c * state + dt * (drive + resting)) / (c + dt * (conductance + g))
    return state, state


def received(v: Tensor, synapse: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return Σ a_j E_j and Σ a_j of the neurons v_j (B, N), for each that they reach. synapse: σ, μ, w and w E."""
    sharpness, middle, w, driven = synapse
    open_ = torch.sigmoid(sharpness * (v[:, :, None] - middle))
    return (open_ * driven).sum(1), (open_ * w).sum(1)


CHANGES = dict.fromkeys(("dt", "sensory", "leak"), Tensor.abs)
cases(
    ltc_cell,
    "D=2 N=3",
    "leak has shape (2, 3), expected (3, N) with N=3 from sensory",
    "leak is missing, expected a tensor (3, N)",
    options=[{"substeps": 2}],
    synapse=Tensor.abs,
    **CHANGES,
)
cases(
    ncp_cell,
    "C=2 D=3 I=2 M=3 N=7 P=4",
    "command has shape (4, 3, 2), expected (4, C + I, C) and leak (3, M + C + I) with C=2 and M=3 from motor, I=2 from "
    "sensory",
    "leak is missing, expected a tensor (3, N)",
    options=[{"substeps": 2}],
    command=Tensor.abs,
    motor=Tensor.abs,
    **CHANGES,
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

    def sensed(self, x: Tensor) -> Tensor:
        """Return the inputs of the synapses from x."""
        return widen(x * self.input_w + self.input_b)

    def positive(self, implicit: bool) -> list[Tensor]:
        """Return `sensory`, `synapse` and `leak` of `ltc_cell`, w, c and g made positive by softplus or max(., 0)."""
        positive = F.softplus if implicit else torch.relu
        sensory_w, w = positive(self.sensory_w) * self.sensory_sparsity_mask, positive(self.w) * self.sparsity_mask
        g = positive(self.gleak)
        return [
            torch.stack([self.sensory_sigma, self.sensory_mu, sensory_w, sensory_w * self.sensory_erev]),
            torch.stack([self.sigma, self.mu, w, w * self.erev]),
            torch.stack([positive(self.cm), g + EPSILON, g * self.vleak]),
        ]


@registry.register("ltc")
class LTC(TimedCell):
    """Liquid time-constant network: a neuron's time constant depends on what it receives.

    A step of one sequence takes `substeps` N² + D N logistic functions forwards, and as many backwards. With N = D =
    256 these are 918,000 exponentials, where an LSTM of this width takes 1,280 forwards. No kernel can avoid them.

    Parameters as in PyPI's ncps, in rnn_cell: gleak, vleak, cm (N); sigma, mu, w, erev (N, N), from rows to columns;
    sensory_sigma, sensory_mu, sensory_w, sensory_erev (D, N); input_w, input_b, output_w, output_b (D); the masks
    sparsity_mask and sensory_sparsity_mask.
    Initialisation as in that code: gleak and w U(0.001, 1), vleak U(-0.2, 0.2), cm U(0.4, 0.6), sigma U(3, 8), mu
    U(0.3, 0.8); erev ±1, +1 with probability 2/3; the affine maps are 1 and 0.
    Differs: ncps sets negative parameters to 0 after each step of the optimiser, and they can rise again. Here they
    count as 0 and stay negative, without a gradient. ncps draws the signs from one fixed seed. Its class LTC has
    implicit_param_constraints=True by default, and multiplies the time spans of a batch along the neurons.
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
            options.Width | None, at_least_option("dim"), "N, neurons, of which the first D are read out; by default D"
        ] = None,
        substeps: Substeps = 6,
        implicit_param_constraints: ImplicitConstraints = False,
    ) -> None:
        super().__init__()
        self.dim, self.width, self.substeps = dim, dim if width is None else width, substeps
        self.implicit_param_constraints = implicit_param_constraints
        signs = (torch.where(torch.rand(rows, self.width) < 2 / 3, 1.0, -1.0) for rows in (dim, self.width))
        self.rnn_cell = Neurons(next(signs), next(signs), dim)

    def operands(self, x: Tensor, spans: Tensor) -> list[Tensor | None]:
        sensory, synapses, leak = self.rnn_cell.positive(self.implicit_param_constraints)
        return [self.rnn_cell.sensed(x), spans / self.substeps, sensory, synapses, leak]

    def output(self, h: Tensor) -> Tensor:
        return h[..., : self.dim] * self.rnn_cell.output_w + self.rnn_cell.output_b


@registry.register("ncp")
class NCP(LTC):
    """Neural circuit policy: a liquid time-constant network of sparse layers of inter, command and motor neurons.

    Inputs reach inter neurons, these command neurons, which also reach each other, and these the D motor neurons.
    Computed are those between these layers, absent ones among them: with N = 3/2 D = 384, 19,700 for an input and as
    many in each of the `substeps`, where the full network of as many neurons has 98,000 and 147,000.

    Parameters: as in `ltc`. The numbers of synapses that the wiring has not are there too, and are not read.
    Initialisation: as in `ltc`, with ±1 and 0 in erev and the masks as the wiring has them. The same seed gives the
    same wiring as in ncps.
    """

    id = "S-ltc"
    aliases = ("neural_circuit_policy",)
    equation = f"{EQUATION}, where the wiring has a synapse"
    source = (
        'Lechner et al., "Neural circuit policies enabling auditable autonomy", Nature Machine Intelligence 2, 2020, '
        "with the numbers of neurons of AutoNCP in PyPI's ncps"
    )
    cell = ncp_cell
    excused: ClassVar = {
        "default_sizes_are_in_proportion": "as in ncps, absent synapses have numbers too, of 3/2 D neurons"
    }
    sample: ClassVar = {"substeps": 3}  # of which an input needs three to reach a motor neuron

    def __init__(
        self,
        dim: Annotated[options.Dim, "D, model width and motor neurons"],
        width: AllNeurons = None,
        substeps: Substeps = 6,
        implicit_param_constraints: ImplicitConstraints = False,
        sparsity_level: Sparsity = 0.5,
        seed: WiringSeed = 22222,
    ) -> None:
        super().__init__(dim, default_neurons(dim) if width is None else width, substeps, implicit_param_constraints)
        self.wiring = neural_circuit_policy(dim, self.width, dim, sparsity_level, seed)
        signs = (torch.tensor(each, dtype=torch.get_default_dtype()) for each in self.wiring[:2])
        self.rnn_cell = Neurons(next(signs), next(signs), dim)

    def operands(self, x: Tensor, spans: Tensor) -> list[Tensor | None]:
        sensory, synapses, leak = self.rnn_cell.positive(self.implicit_param_constraints)
        motor, command = self.wiring.motor, self.wiring.motor + self.wiring.command
        to_command, to_motor = synapses[:, motor:, motor:command], synapses[:, motor:command, :motor]
        return [self.rnn_cell.sensed(x), spans / self.substeps, sensory[:, :, command:], to_command, to_motor, leak]
