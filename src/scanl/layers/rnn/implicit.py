"""Implicit layer: the output of a step is the fixed point of a recurrence whose input is held at that step."""

from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.layers import options, registry
from scanl.layers.base import Layer, as_widened, widen
from scanl.layers.initial_state import StateAxes
from scanl.layers.packing import sequence_index
from scanl.layers.parts.short_convolution import token_shift
from scanl.ops import fixed_point
from scanl.ops.offsets import sequences
from scanl.options import above, below


@registry.register("implicit")
class Implicit(Layer):
    """Equilibrium of a recurrent network at each input, which is held. The gradient is that of the equilibrium.

    The output of a step does not depend on the steps before it. Their equilibrium is only where the solver starts. All
    steps of a call are solved together. At the start a solution to rounding takes about 18 evaluations of the map, D²
    multiplications each, and the gradient as many. An LSTM takes 8 D² forwards. Raises ConvergenceError where no
    equilibrium is found. This may happen when W has grown too large.

    Parameters: W (D, D); U (D, D) with a bias.
    Initialisation: W orthogonal times `gain`, U as in PyTorch.
    """

    id = "S-implicit"
    aliases = ("DEQ", "deep_equilibrium")
    equation = "s_t = tanh(W s_t + U x_t + b)"
    source = (
        'Bai, Kolter and Koltun, "Deep Equilibrium Models", arXiv:1909.01377, eq. (5) and theorem 1; the '
        "network: Almeida, 1987, and Pineda, 1987"
    )
    op = "fixed_point"
    state: ClassVar = StateAxes("dim", "the equilibrium of the last step")
    excused: ClassVar = {
        "bits_are_the_same_in_any_company": "the solver iterates until all rows of a call have converged",
        **dict.fromkeys(
            ("compiles_to_one_graph", "an_exported_layer_takes_any_length"),
            "how many iterations there are depends on the numbers",
        ),
        **dict.fromkeys(
            ("earlier_outputs_are_the_same_to_the_bit", "it_stays_where_it_belongs_in_layers"),
            "for a gradient that is not finite the solver raises ConvergenceError",
        ),
    }

    def __init__(
        self,
        dim: options.Dim,
        gain: Annotated[
            float,
            above(0),
            below(1),
            "spectral norm of W at the start; below 1 the map contracts, so it has exactly one fixed point",
        ] = 0.5,
        method: Annotated[
            Literal["anderson", "broyden", "iteration"], "method of `scanl.ops.fixed_point`"
        ] = "anderson",
        rtol: Annotated[
            options.RelativeTolerance | None, "relative residual of a solution; None for four roundings"
        ] = None,
        max_iterations: Annotated[options.MaxIterations, "evaluations of the map at most"] = 100,
    ) -> None:
        super().__init__()
        self.dim, self.method, self.rtol, self.max_iterations = dim, method, rtol, max_iterations
        self.W = nn.Parameter(gain * nn.init.orthogonal_(torch.empty(dim, dim)))
        self.U = nn.Linear(dim, dim)

    def run(self, x: Tensor, state: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
        inputs, W = widen(self.U(x)), widen(self.W)
        rows = sequences(x, cu_seqlens)
        start = (self.init_state(rows, device=x.device) if state is None else state).to(inputs.dtype)
        if cu_seqlens is None:
            first = start[:, None].expand_as(inputs)
        else:
            first = start[sequence_index(cu_seqlens, x.shape[1])]
        with as_widened(x):
            s = self._solve(inputs.flatten(0, 1), W, first.reshape(-1, self.dim)).view_as(inputs)
        _, last = token_shift(s, start[:, None], cu_seqlens=cu_seqlens)
        return s.to(x.dtype, copy=True), last[:, 0]  # token_shift has saved s, and the caller may change y in place

    def _solve(self, inputs: Tensor, W: Tensor, first: Tensor) -> Tensor:
        """Return the fixed point for each row of `given`."""

        def step(s: Tensor, u: Tensor) -> Tensor:
            return torch.tanh(F.linear(s, W) + u)

        if inputs.is_meta:
            return step(first, inputs)
        tolerance = 4 * torch.finfo(inputs.dtype).eps if self.rtol is None else self.rtol
        options = {"method": self.method, "tolerance": tolerance, "max_iterations": self.max_iterations}
        unknown = (inputs + first).isnan().any(1, keepdim=True)  # without a solution; the other rows have theirs
        inputs, first = (torch.where(unknown, 0, tensor) for tensor in (inputs, first))
        return torch.where(unknown, torch.nan, fixed_point(step, inputs, first, **options).state)
