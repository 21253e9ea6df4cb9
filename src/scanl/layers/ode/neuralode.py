"""Neural ordinary differential equation, driven by the inputs."""

from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.errors import ConfigError
from scanl.layers import options, registry
from scanl.layers.base import as_widened, widen
from scanl.layers.ode._field import METHODS, Field, FieldDepth, FieldWidth, derivative, evolve
from scanl.layers.ode._timed import TimedCell
from scanl.layers.packing import each_alone
from scanl.layers.parts.cell_cases import cases
from scanl.ops.cell import cell
from scanl.ops.offsets import sequences
from scanl.options import above, one_of

SOLVERS = ("dopri5", "dopri8", "bosh3", "fehlberg2", "adaptive_heun")  # of torchdiffeq, with adaptive steps


@cell(
    "x: B T U, dt: B T 1, first: U D, deep?: L U U, deep_bias?: L U, last: D U, last_bias: D, state: B D -> B T D",
    equation="dh/dt = f(h, x_t), with x_t held for the duration of step t",
    source='Chen, Rubanova, Bettencourt and Duvenaud, "Neural Ordinary Differential Equations", arXiv:1806.07366, eq. '
    "(2)",
    static=("L",),
)
def neuralode_cell(
    x: Tensor,
    dt: Tensor,
    first: Tensor,
    deep: Tensor | None,
    deep_bias: Tensor | None,
    last: Tensor,
    last_bias: Tensor,
    state: Tensor,
    *,
    method: str = "rk4",
    substeps: int = 1,
) -> tuple[Tensor, Tensor]:
    """Let the state evolve for dt. x: what the input gives to the first layer of f.   first, deep, last: the rest."""
    h = evolve(lambda h: derivative(h, x, first, deep, deep_bias, last, last_bias), state, dt, method, substeps)
    return h, h


cases(
    neuralode_cell,
    "D=3 U=4",
    "last has shape (4, 3), expected (D, U) with D=3 from first",
    "last_bias is missing, expected a tensor (D,)",
    options=[{"method": method, "substeps": 2} for method in METHODS],
    dt=Tensor.abs,
)


@registry.register("neuralode")
class NeuralODE(TimedCell):
    """Neural ODE: the state follows a perceptron's derivative while each input is held.

    An adaptive solver chooses one length of step for the whole batch. So the result for a row depends on the other
    rows, within the tolerance.

    Parameters: func.first (U, 2D) of h and x, func.deep.0 (U, U) and further ones, func.last (D, U).
    Initialisation: N(0, 0.01), biases 0, as the perceptrons of the authors' program for irregular series.
    Differs: f does not see the time itself.
    """

    added: ClassVar = {}  # its cell has solvers of its own, so the steps run one after another
    id = "S-neuralode"
    cell = neuralode_cell
    reads: ClassVar = {"func": nn.Linear}

    def __init__(
        self,
        dim: options.Dim,
        hidden_dim: Annotated[FieldWidth | None, "U, width of the perceptron f; by default D"] = None,
        depth: FieldDepth = 0,
        method: Annotated[
            options.Method,
            one_of((*METHODS, *SOLVERS)),
            '"euler", "midpoint" or "rk4", with steps of fixed length; or a solver of torchdiffeq (the extra `ode`) '
            'whose steps adapt: "dopri5", "dopri8", "bosh3", "fehlberg2" or "adaptive_heun"',
        ] = "rk4",
        substeps: Annotated[options.Substeps, "steps of fixed length for each input"] = 1,
        rtol: Annotated[
            options.RelativeTolerance,
            "relative tolerance of each step of an adaptive solver. The errors of its steps add up",
        ] = 1e-7,
        atol: Annotated[float, above(0), "absolute tolerance of each step of an adaptive solver"] = 1e-9,
        adjoint: Annotated[
            bool,
            "the gradients of an adaptive solver come from the adjoint equation, which is solved backwards in constant "
            "memory. If False, they come from the solver's own steps",
        ] = False,
    ) -> None:
        super().__init__()
        if adjoint and method in METHODS:
            self._refuse("adjoint", adjoint, f"False because of method={method!r}")
        self.dim, self.method, self.substeps = dim, method, substeps
        self.rtol, self.atol, self.adjoint = rtol, atol, adjoint
        self.func = Field(dim, dim, hidden_dim or dim, depth)

    def operands(self, x: Tensor, spans: Tensor) -> list[Tensor | None]:
        return [self._drive(x), spans, *self.func.operands()]

    def _drive(self, x: Tensor) -> Tensor:
        return F.linear(x, self.func.first.weight[:, self.dim :], self.func.first.bias)

    def _scan(self, x: Tensor, spans: Tensor, state: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
        if self.method in METHODS:
            return super()._scan(x, spans, state, cu_seqlens)
        rows = sequences(x, cu_seqlens)
        state = widen(self.init_state(rows, device=x.device, dtype=x.dtype) if state is None else state)
        drive = widen(self._drive(x))
        field = [tensor if tensor is None else widen(tensor) for tensor in self.func.operands()]

        def run(timed: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
            hs = []
            for now in timed.unbind(1):
                h = self._solve(h, now[:, 1:], now[:, :1], field)
                hs.append(h)
            return torch.stack(hs, 1) if hs else timed.new_zeros(*timed.shape[:2], self.dim), h

        with as_widened(x):
            timed = torch.cat([spans, drive], 2)
            return run(timed, state) if cu_seqlens is None else each_alone(run, timed, state, cu_seqlens)

    def _solve(self, h: Tensor, drive: Tensor, span: Tensor, field: list[Any]) -> Tensor:
        """Solve over one step, in time divided by its duration, which may differ between rows."""
        try:
            import torchdiffeq  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ConfigError(
                f"{self._who()}: method is {self.method!r}, expected one of {', '.join(METHODS)} because torchdiffeq "
                "is not installed; pip install 'scanl[ode]'"
            ) from error

        def flow(_: Tensor, h: Tensor) -> Tensor:
            return span * derivative(h, drive, *field)

        times = h.new_tensor([0.0, 1.0])
        # A solver's step ends at 1, and the adjoint's at 0. A step beyond is interpolated less exactly than rtol.
        chosen = {"rtol": self.rtol, "atol": self.atol, "method": self.method, "options": {"step_t": times}}
        if self.adjoint:
            needed = tuple(tensor for tensor in (drive, span, *field) if tensor is not None and tensor.requires_grad)
            path: Any = torchdiffeq.odeint_adjoint(flow, h, times, adjoint_params=needed, **chosen)
        else:
            path = torchdiffeq.odeint(flow, h, times, **chosen)
        return path[1]
