r"""Fixed point of a map, with the gradient of the fixed point itself.

.. math:: s^* = f(s^*, x), \qquad
   \frac{\partial L}{\partial \theta} = \Big(\frac{\partial f}{\partial \theta}\Big)^{\!\top} z, \qquad
   z = J^\top z + \frac{\partial L}{\partial s^*}, \qquad J = \frac{\partial f}{\partial s}(s^*, x)

The gradient goes back to the recurrent backpropagation of Almeida and of Pineda (1987). Anderson's method has the form
with differences. Broyden's updates the inverse by the Sherman-Morrison formula.

Differs: each row of the batch has its own mixing weights and stops when it has converged, so its result does not depend
on the other rows.

No existing solver fits: scipy's take one numpy vector, jaxopt's and optimistix's are for JAX, and the only release of
torchdeq dates from 2023.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor

from scanl.errors import ConfigError, ShapeError, unknown
from scanl.ops._frame.context import context
from scanl.ops._frame.declaration import COMPLEX, FLOATING, HALF_DTYPES, Call, OpSample
from scanl.ops._frame.dispatch import transforming
from scanl.ops._frame.draws import Draws
from scanl.ops._frame.higher import higher_order


@dataclass(frozen=True)
class Convergence:
    """The end of an iteration: the evaluations of the map, the last residual, and the tolerance."""

    iterations: int
    residual: float
    tolerance: float


class ConvergenceError(ArithmeticError):
    """An iteration diverged, or did not reach its tolerance within the allowed evaluations."""


class FixedPoint(NamedTuple):
    state: Tensor
    convergence: Convergence


@higher_order(
    id="P-fixpoint",
    equation="s = f(s, x)",
    source=(
        'Bai, Kolter and Koltun, "Deep Equilibrium Models", arXiv:1909.01377, theorem 1; Anderson\'s method: Walker '
        'and Ni, "Anderson Acceleration for Fixed-Point Iterations", SIAM J. Numer. Anal. 49, 2011; Broyden\'s: '
        'Broyden, "A Class of Methods for Solving Nonlinear Simultaneous Equations", Math. Comp. 19, 1965'
    ),
    dtypes=HALF_DTYPES + FLOATING + COMPLEX,
)
def fixed_point(
    f: Callable[[Tensor, Any], Tensor],
    x: Any,
    state: Tensor | None = None,
    *,
    method: str = "anderson",
    tolerance: float | None = None,
    max_iterations: int = 100,
    history: int = 20,
    damping: float = 1.0,
) -> FixedPoint:
    """Find s with s = f(s, x), and differentiate s without differentiating the iterations.

    f: a map of states, (B, *F) -> (B, *F); it may close over modules and tensors. It must be deterministic: no dropout.
    x: passed to f unchanged; a tensor, unless `state` is given.
    state: the initial guess, (B, *F), batch first; zeros like x when None. It gets no gradient: s does not depend on
    it.   method: "anderson"; "broyden"; "iteration" (s <- f(s, x), which needs f to contract).
    tolerance: the limit for ‖f(s, x) - s‖ / ‖f(s, x)‖ of every row. None is eps^(5/6) of the state's dtype (9e-14 in
    float64, 1.7e-6 in float32).   max_iterations: the most evaluations of f; the backward pass may evaluate its
    transposed Jacobian as often.   history: how many past steps Anderson's method keeps; Broyden's restarts after as
    many. Each takes the memory of two states while solving.   damping: the fraction of f(s, x) - s that a step takes,
    in (0, 1]. Below 1 it stabilises a map that overshoots.

    Returns FixedPoint(state, convergence). Raises ConvergenceError when the tolerance was not reached. The backward
    pass solves its linear system with the same method and tolerance, so it may raise ConvergenceError too. Raises
    ShapeError when f changes the state's shape, dtype or device, ConfigError for an option out of range.

    The gradient flows to x and everything f closes over. It takes the memory of two evaluations of f, whatever the
    number of iterations. Second derivatives are exact too; third derivatives raise NotImplementedError.

    >>> x = torch.tensor([[3.0]], dtype=torch.float64, requires_grad=True)
    >>> s, convergence = fixed_point(lambda s, x: s / 2 + x, x)  # s = s/2 + 3 = 6
    >>> round(s.item(), 9), convergence.residual <= convergence.tolerance
    (6.0, True)
    >>> s.sum().backward()
    >>> round(x.grad.item(), 9)  # s = 2x
    2.0
    """
    if transforming():
        raise NotImplementedError(
            "fixed_point: it cannot run under a transformation of torch.func; take its gradient by "
            "torch.autograd.grad or backward()"
        )
    if method not in _METHODS:
        raise ConfigError(f"fixed_point: {unknown('method', method, _METHODS)}")
    for name, value in (("max_iterations", max_iterations), ("history", history)):
        if not isinstance(value, int) or value < 1:
            raise ConfigError(f"fixed_point: {name} is {value!r}, expected an integer of at least 1")
    if not 0 < damping <= 1:
        raise ConfigError(f"fixed_point: damping is {damping!r}, expected a number above 0, at most 1")
    if tolerance is not None and not tolerance > 0:
        raise ConfigError(f"fixed_point: tolerance is {tolerance!r}, expected a number above 0, or None")
    if state is None:
        if not isinstance(x, Tensor):
            raise ShapeError(f"fixed_point: x is a {type(x).__name__}, expected a tensor because state is None")
        state = torch.zeros_like(x)
    if not isinstance(state, Tensor):
        raise ShapeError(f"fixed_point: state is a {type(state).__name__}, expected a tensor (B, *F)")
    if state.ndim < 1 or not (state.is_floating_point() or state.is_complex()):
        raise ShapeError(f"fixed_point: state is {_kind(state)}, expected real or complex numbers of shape (B, *F)")
    reach = torch.finfo(state.dtype).eps ** (5 / 6) if tolerance is None else tolerance
    solver = _Solver(method, reach, max_iterations, history, damping)
    return _equilibrium(lambda s: f(s, x), state.detach(), solver, orders=2)


@dataclass(frozen=True)
class _Solver:
    method: str
    tolerance: float
    max_iterations: int
    history: int
    damping: float

    def __call__(self, f: Callable[[Tensor], Tensor], s: Tensor, what: str) -> FixedPoint:
        if s.numel() == 0:
            return FixedPoint(s, Convergence(0, 0.0, self.tolerance))
        step = _METHODS[self.method](self.history, self.damping)
        iteration, worst = 0, math.inf
        for iteration in range(1, self.max_iterations + 1):
            value = _rows(f(s))
            rows = _rows(s)
            r = value - rows
            size = _norms(value)
            # The relative residual of a zero state is undefined. Below this size, 1e-14 in float32, use the floor.
            floor = torch.finfo(value.dtype).eps ** 2 * math.sqrt(value.shape[1])
            residual = _norms(r) / size.clamp_min(floor)
            # Where the square of a state is infinite, the residual says nothing: the state has diverged.
            worst = torch.where(size.isfinite(), residual, math.inf).max().item()
            if worst <= self.tolerance:
                return FixedPoint(s, Convergence(iteration, worst, self.tolerance))
            if not math.isfinite(worst):
                break
            going = residual > self.tolerance
            rows = step(rows, r if going.all() else torch.where(going[:, None], r, 0))
            s = (torch.view_as_complex(rows.view(*s.shape, 2)) if s.is_complex() else rows.view(s.shape)).to(s.dtype)
        if math.isfinite(worst):
            ended = f"did not converge in {iteration} iterations (max_iterations)"
        else:
            ended = f"diverged after {iteration} iterations"
        raise ConvergenceError(
            f"fixed_point: {what} {ended} of method {self.method!r}: relative residual {worst:.3g}, tolerance "
            f"{self.tolerance:.3g}. Make f contract (smaller weights, a norm inside), start from a nearer state, lower "
            "damping, or raise max_iterations or tolerance"
        )


def _rows(s: Tensor) -> Tensor:
    """Return s as (B, N) real numbers, in float32 or wider."""
    s = torch.view_as_real(s.resolve_conj()) if s.is_complex() else s
    return s.reshape(s.shape[0], -1).to(torch.promote_types(s.dtype, torch.float32))


def _norms(x: Tensor) -> Tensor:
    """Return the norm of each row, in float64. Only squares that are infinite in float32 take a copy in float64."""
    norms = torch.linalg.vector_norm(x, dim=1)
    return norms.double() if norms.isfinite().all() else torch.linalg.vector_norm(x, dim=1, dtype=torch.float64)


def _iteration(history: int, damping: float) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda s, r: torch.add(s, r, alpha=damping)


def _anderson(history: int, damping: float) -> Callable[[Tensor, Tensor], Tensor]:
    """Step from the combination of the last points that would have the least residual if f were linear.

    A row takes plain steps as long as each of them halves its residual: then mixing saves less time than it takes.
    """
    points: list[tuple[Tensor, Tensor]] = []  # the last states and residuals; their differences are taken where mixed
    count = 0  # of all points so far
    last_size: Tensor | None = None
    slow: Tensor | None = None
    misled: Tensor | None = None  # of each row the number of points of which it uses no difference

    def mixed(r: Tensor, ds: Tensor, dr: Tensor) -> Tensor:
        """Return the difference between the combination and plain steps. r: (B, N).   ds, dr: (B, steps kept, N)."""
        # Normalise the columns, in double: small angles between them then survive rounding in the normal equations.
        size = torch.linalg.vector_norm(dr, dim=2, keepdim=True, dtype=torch.float64)
        size = torch.where(size > 0, size, 1)
        unit = dr / size
        gram = unit @ unit.mT + 1e-12 * torch.eye(unit.shape[1], dtype=unit.dtype, device=unit.device)
        weights = torch.linalg.solve(gram, unit @ r.to(unit.dtype)[:, :, None]) / size
        return -(weights.to(r.dtype) * (ds + damping * dr)).sum(1)

    def step(s: Tensor, r: Tensor) -> Tensor:
        nonlocal count, last_size, slow, misled
        size = r.norm(dim=1)
        points.append((s, r))
        del points[: -history - 1]
        count += 1
        if last_size is not None:
            # If a row's residual grew tenfold, its history is misleading: set it to zero, so it gets no weight.
            # Smaller growth is normal where f does not contract: f multiplies the combination's residual.
            grown = size > 10 * last_size
            if grown.any():
                misled = torch.where(
                    grown, count, torch.zeros_like(size, dtype=torch.int64) if misled is None else misled
                )
            now = size > last_size / 2
            slow = now if slow is None else slow | now
        last_size = size
        plain = torch.add(s, r, alpha=damping)
        if slow is None or not slow.any():
            return plain
        rows = (slow & (size > 0)).nonzero()[:, 0]  # a row without a residual is solved
        ds, dr = (
            torch.stack([tensor[rows] for tensor in tensors], 1).diff(dim=1) for tensors in zip(*points, strict=True)
        )
        if misled is not None:
            numbers = torch.arange(count - ds.shape[1] + 1, count + 1, device=s.device)  # of the later point of each
            ds, dr = (torch.where((numbers > misled[rows, None])[..., None], d, 0) for d in (ds, dr))
        return plain.index_add(0, rows, mixed(r[rows], ds, dr))

    return step


def _broyden(history: int, damping: float) -> Callable[[Tensor, Tensor], Tensor]:
    """Step to s - H r. H approximates the inverse Jacobian of f(s) - s: -damping I plus an outer product per step."""
    us: list[Tensor] = []
    vs: list[Tensor] = []
    last_step: tuple[Tensor, Tensor] | None = None

    def times(lhs: list[Tensor], rhs: list[Tensor], y: Tensor) -> Tensor:
        return sum(((v * y).sum(1, keepdim=True) * u for u, v in zip(lhs, rhs, strict=True)), -damping * y)

    def step(s: Tensor, r: Tensor) -> Tensor:
        nonlocal last_step
        if last_step is not None:
            ds, dr = s - last_step[0], r - last_step[1]
            if len(us) == history:
                us.clear()
                vs.clear()
            moved, v = times(us, vs, dr), times(vs, us, ds)
            slope = (ds * moved).sum(1, keepdim=True)
            us.append(torch.where(slope != 0, (ds - moved) / slope, 0))
            vs.append(v)
        last_step = s, r
        return s - times(us, vs, r)

    return step


_METHODS = {"anderson": _anderson, "broyden": _broyden, "iteration": _iteration}


def _equilibrium(f: Callable[[Tensor], Tensor], guess: Tensor, solver: _Solver, orders: int) -> FixedPoint:
    """Solve without a graph, then attach derivatives up to order `orders` to the solution."""
    value = f(guess)
    if not isinstance(value, Tensor):
        raise ShapeError(f"fixed_point: f returns a {type(value).__name__}, expected a tensor like the state")
    if _kind(value) != _kind(guess):
        raise ShapeError(f"fixed_point: f returns {_kind(value)}, expected {_kind(guess)} because of the state")
    differentiable = value.requires_grad
    del value
    with torch.no_grad():
        s, convergence = solver(f, guess, "the state" if orders == 2 else "the gradient")
    if differentiable:
        s = s.detach().requires_grad_()
        # Each pass makes one more order of derivative correct: it differentiates at a point that has a graph itself.
        for _ in range(orders):
            s = _ImplicitPoint.apply(f(s.clone()), s, solver, orders)
    return FixedPoint(s, convergence)


class _ImplicitPoint(torch.autograd.Function):
    """Return `point`, with the derivatives of the solution of point = f(point), where y = f(point).

    This is a Newton step, point + (I - J)^-1 (y - point), whose value is the point. The gradient g goes to y as
    z = (I - J)^-T g, and to the point as g - z = -Jᵀ z. The latter cancels the gradient that reaches the point through
    y, exactly if the Jacobian is evaluated in the same way both times. So for a first derivative only the last of
    several passes solves a system. A gradient that does arrive at a point belongs to the second derivative.
    """

    @staticmethod
    def forward(ctx, y: Tensor, point: Tensor, solver: _Solver, orders: int) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(y, point)
        ctx.set_materialize_grads(False)
        ctx.solver, ctx.orders = solver, orders
        return point.clone()

    @staticmethod
    def backward(ctx, g: Tensor | None):  # type: ignore[override]
        if g is None:
            return None, None, None, None
        if not g.any():
            return g, None, None, None
        again = torch.is_grad_enabled()
        if again and ctx.orders == 1:
            raise NotImplementedError("fixed_point: derivatives above the second are not implemented")
        y, point = ctx.saved_tensors

        def transposed(z: Tensor) -> Tensor:
            create = torch.is_grad_enabled()
            options = {"retain_graph": True, "create_graph": create, "materialize_grads": True}
            context.of_states += 1
            try:
                return torch.autograd.grad(y, point, z, **options)[0]
            finally:
                context.of_states -= 1

        size = sizes(g)
        unit = g / size
        z = size * _equilibrium(lambda z: transposed(z) + unit, unit.detach(), ctx.solver, orders=1).state
        return z, None if point.is_leaf else -transposed(z), None, None


def sizes(g: Tensor) -> Tensor:
    """Return (B, 1, ...) the largest magnitude of each row of g; 1 for a row of zeros.

    A gradient is solved for in this unit: the residual of a state near zero is relative to a floor.
    """
    size = g.detach().abs().reshape(len(g), -1).amax(1).view(-1, *(1,) * (g.ndim - 1))
    return torch.where(size > 0, size, 1)


def _kind(s: Tensor) -> str:
    return f"{str(s.dtype).removeprefix('torch.')} of shape {tuple(s.shape)} on {s.device}"


@fixed_point.instance("x: B T D, w: D D, state: B D -> B T D", dtypes=FLOATING)
def _implicit(x: Tensor, w: Tensor, state: Tensor | None = None, **call: Unpack[Call]) -> tuple[Tensor, Tensor]:
    """An implicit recurrence, s_t = (s_{t-1} + tanh(s_t w)) / 2 + x_t: every step is a fixed point.

    A fixed point has no time axis. This recurrence has one, so the tests of time can run on it.
    """
    assert state is not None  # zeros where the caller gave None
    s, ys = state, []
    for t in range(x.shape[1]):
        previous = s
        for _ in range(100):
            s = (previous + torch.tanh(s @ w)) / 2 + x[:, t]
        ys.append(s)
    return torch.stack(ys, 1) if ys else x.clone(), s


@_implicit.backend(
    "parallel",
    forward_mode=False,
    excused={
        "compilation": "how many iterations there are depends on the numbers",
        "causality to the bit": "all rows of a batch are iterated until the last has converged",
    },
)
def _by_equilibria(x: Tensor, w: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Solve each step to rounding, with the implicit gradient."""
    tolerance, s, ys = torch.finfo(x.dtype).eps, state, []
    for x_t in x.unbind(1):

        def step(s: Tensor, x_t: Tensor, previous: Tensor = s) -> Tensor:
            return (previous + torch.tanh(s @ w)) / 2 + x_t

        s = fixed_point(step, x_t, tolerance=tolerance, method="iteration").state
        ys.append(s)
    return torch.stack(ys, 1) if ys else x.clone(), s


@_implicit.samples
def _samples() -> Iterator[OpSample]:
    draw = Draws()

    yield OpSample({"x": draw(2, 5, 3), "w": draw(3, 3) / 3, "state": draw(2, 3)})
    packed = {"x": draw(1, 6, 2), "w": draw(2, 2) / 3, "state": draw(3, 2)}
    yield OpSample(packed, {"cu_seqlens": torch.tensor([0, 2, 2, 6])})


@_implicit.errors
def _errors() -> Iterator[tuple[OpSample, str]]:
    x = torch.zeros(2, 4, 3)
    yield OpSample({"x": x, "w": torch.zeros(3, 2)}), "w has shape (3, 2), expected (D, D) with D=3 from x"
