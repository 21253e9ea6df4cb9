"""Newton's method for s_t = f(s_{t-1}) at all steps at once: the iteration, the linear recurrences, the gradient.

`nonlinear_scan` has the equations and the sources.
"""

import functools
import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scanl.errors import ConfigError, unknown
from scanl.ops._frame.dispatch import transforming
from scanl.ops.associative_scan import associative_scan
from scanl.ops.fixed_point import Convergence, ConvergenceError
from scanl.ops.linear_scan import linear_scan

REACH = 1000.0  # a Newton step to a state above this times the largest |f| of the guess is rejected
METHODS = ("sequential", "newton", "quasi_newton")


class Trajectory(tuple[Tensor, Tensor]):
    """The pair `(y, state)`; `convergence` says how the iteration ended."""

    convergence: Convergence

    def __new__(cls, y: Tensor, state: Tensor, convergence: Convergence):
        self = super().__new__(cls, (y, state))
        self.convergence = convergence
        return self

    def __getnewargs__(self):
        return *self, self.convergence


class Starts(NamedTuple):
    """Packed sequences that are not empty: the first step of each, and its row of the initial state."""

    steps: Tensor
    rows: Tensor


# From the states before every step, (B·T, *F), to their J: (B·T, E, E) and None, or blocks of it and their places.
Linearise = Callable[[Tensor], tuple[Tensor, Tensor | None]]


@dataclass(frozen=True)
class Newton:
    """A method with its limits. who: the function that was called, for messages.   tolerance: None for `limit`'s.

    Raises ConfigError for an option out of range.
    """

    who: str
    method: str
    tolerance: float | None
    max_iterations: int

    def __post_init__(self):
        if self.method not in METHODS:
            raise ConfigError(f"{self.who}: {unknown('method', self.method, METHODS)}")
        if not isinstance(self.max_iterations, int) or self.max_iterations < 1:
            raise ConfigError(
                f"{self.who}: max_iterations is {self.max_iterations!r}, expected an integer of at least 1"
            )
        if self.tolerance is not None and not self.tolerance > 0:
            raise ConfigError(f"{self.who}: tolerance is {self.tolerance!r}, expected a number above 0, or None")
        if self.method != "sequential" and transforming():
            raise NotImplementedError(
                f"{self.who}: method is {self.method!r}, which cannot run under a transformation of torch.func; "
                "expected 'sequential'"
            )

    def limit(self, dtype: torch.dtype) -> float:
        """Return the tolerance: the caller's, or eps^(5/6) of the state's dtype."""
        return float(torch.finfo(dtype).eps ** (5 / 6) if self.tolerance is None else self.tolerance)

    def solve(
        self,
        f: Callable[[Tensor], Tensor],
        state: Tensor,
        steps: int,
        linearise: Linearise,
        starts: Starts | None = None,
    ) -> tuple[Tensor, Convergence]:
        """Return s of every step (B, T, *F), with its gradient.

        f: from the states before every step, (B·T, *F), to the states after it.   state: (B, *F).   starts: of packed
        sequences, for B == 1; then the state has a row for each of them.
        """
        tolerance = self.limit(state.dtype)
        batch = state.shape[0] if starts is None else 1
        states = state.new_zeros(batch, steps, *state.shape[1:])
        iteration, reached = 0, None
        while True:
            previous_states = previous(states, state.detach(), starts)
            with torch.no_grad():
                value = f(previous_states).view_as(states)
            residual = _residual(states, value)
            if reached is not None and not residual < reached[1]:
                states, residual = reached
                break
            if residual <= tolerance:
                at_rounding = residual <= torch.finfo(state.dtype).eps
                if reached is not None or at_rounding or iteration == self.max_iterations:
                    break
                reached = states, residual  # one more: residuals add up over many steps
            self._give_up(states, value, residual, tolerance, iteration)
            new = states + _Linear(*linearise(previous_states), states.shape, starts).solve(value - states)
            bound = REACH * value.abs().nan_to_num(0, 0, 0).max()
            states = torch.where(new.abs() <= bound, new, torch.where(torch.isfinite(value), value, 0))
            iteration += 1
        convergence = Convergence(iteration, residual, tolerance)
        if not torch.is_grad_enabled():
            return states, convergence
        # Evaluate f once more, at the solution: autograd takes δ from here to all that f depends on.
        entering = previous(states, state, starts)
        last = f(entering)
        if not last.requires_grad:
            return states, convergence
        if not entering.requires_grad:  # the adjoint needs the derivative by it
            last = f(entering.requires_grad_())
        last = last.view_as(states)
        adjoint = functools.partial(self._adjoint, linearise, entering, last, starts, tolerance)
        return _ImplicitSolution.apply(last, states, adjoint, self.who), convergence

    def _give_up(self, states: Tensor, value: Tensor, residual: float, tolerance: float, iteration: int) -> None:
        """Raise ConvergenceError if no further iteration is allowed, or none can help."""
        overflow = _overflow(states, value, tolerance)
        if overflow is not None:
            raise ConvergenceError(
                f"{self.who}: the cell diverges, its state is not finite from step {overflow} on; seen after "
                f"{iteration} iterations of method {self.method!r}, relative residual {residual:.3g}"
            )
        if iteration == self.max_iterations:
            raise ConvergenceError(
                f"{self.who}: did not converge in {iteration} iterations (max_iterations) of method {self.method!r}: "
                f"relative residual {residual:.3g}, tolerance {tolerance:.3g}. A chaotic or growing cell needs "
                "method='sequential'; otherwise raise max_iterations or tolerance"
            )

    def _adjoint(
        self,
        linearise: Linearise,
        entering: Tensor,
        last: Tensor,
        starts: Starts | None,
        tolerance: float,
        g: Tensor,
    ) -> Tensor:
        """Solve δ_t = g_t + J_{t+1}ᵀ δ_{t+1} with the J of `linearise`; correct it by the residual of the full J."""
        linear = _Linear(*linearise(entering.detach()), last.shape, starts)
        delta, residual, reached = linear.solve(g, adjoint=True), math.inf, False
        for _ in range(self.max_iterations + 1):
            (pulled,) = torch.autograd.grad(last, entering, delta, retain_graph=True, materialize_grads=True)
            total = g + _after(pulled.view_as(g), starts)
            residual = _residual(delta, total)
            if reached or residual <= torch.finfo(g.dtype).eps:
                return total
            reached = residual <= tolerance
            delta = delta + linear.solve(total - delta, adjoint=True)
        raise ConvergenceError(
            f"{self.who}: the gradient did not converge in {self.max_iterations} iterations (max_iterations) of "
            f"method {self.method!r}: relative residual {residual:.3g}, tolerance {tolerance:.3g}; method='newton' "
            "needs no iterations"
        )


class _ImplicitSolution(torch.autograd.Function):
    """The solution as a function of f at the solution. Its derivative is the inverse of the map s_t - J_t s_{t-1}."""

    @staticmethod
    def forward(ctx: Any, last: Tensor, states: Tensor, adjoint: Callable[[Tensor], Tensor], who: str) -> Tensor:
        ctx.adjoint, ctx.who = adjoint, who
        ctx.save_for_backward(last)
        return states.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        delta = ctx.adjoint(g.detach())
        if torch.is_grad_enabled():  # create_graph: δ depends on g and on all that f depends on
            delta = _FirstOrderGradient.apply(delta, g, ctx.who, *ctx.saved_tensors)
        return delta, None, None, None


class _FirstOrderGradient(torch.autograd.Function):
    """The gradient in a graph; differentiating it raises."""

    @staticmethod
    def forward(ctx: Any, delta: Tensor, g: Tensor, who: str, last: Tensor) -> Tensor:
        ctx.who = who
        return delta.clone()

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        raise RuntimeError(f"{ctx.who}: Newton's methods give first derivatives only; method='sequential' gives all")


class _Linear:
    """The recurrence d_t = b_t + J_t d_{t-1} with J, or with its blocks alone, cut at the starts of sequences.

    shape: (B, T, *F).   places: of the K variables of C channels in the flat state, (K, C); None for full J.
    """

    def __init__(self, jacobians: Tensor, places: Tensor | None, shape: torch.Size, starts: Starts | None):
        self.jacobians, self.places = jacobians.unflatten(0, shape[:2]), places
        if starts is not None:
            self.jacobians = self.jacobians.index_fill(1, starts.steps, 0)

    def solve(self, b: Tensor, *, adjoint: bool = False) -> Tensor:
        """Solve d_t = b_t + J_t d_{t-1}, or for the adjoint d_t = b_t + J_{t+1}ᵀ d_{t+1}."""
        flat, places = b.flatten(2), self.places
        if places is None:
            return _affine(self.jacobians, flat, adjoint).view_as(b)
        out = torch.empty_like(flat)
        if len(places) == 1:
            a, channels = self.jacobians[..., 0, 0], flat[..., places[0]]
            result, _ = linear_scan(channels, _after(a), reverse=True) if adjoint else linear_scan(channels, a)
            out[..., places[0]] = result
            return out.view_as(b)
        batch, steps, channels, count = self.jacobians.shape[:4]
        blocks = self.jacobians.transpose(1, 2).flatten(0, 1)
        result = _affine(blocks, flat[..., places].permute(0, 3, 1, 2).flatten(0, 1), adjoint)
        out[..., places] = result.view(batch, channels, steps, count).permute(0, 2, 3, 1)
        return out.view_as(b)


def products(f: Callable[[Tensor], Tensor], states: Tensor, places: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Linearise any f by vector-Jacobian products: a product for each number of the state.

    If J consists of the blocks of `places`, the product of its Kᵀ with signs v over the channels, times v, is the same
    for all v; then a product for each variable and each of a few v is enough.
    """
    states = states.detach().requires_grad_()
    with torch.enable_grad():
        out = f(states)
    size = states[0].numel()
    index = torch.arange(size, device=states.device)

    def pull(weights: Tensor) -> Tensor:
        """Return Jᵀ times the same weights (E,) in every row, (B·T, E)."""
        if not out.requires_grad:  # f does not use its state
            return torch.zeros_like(states).flatten(1)
        cotangent = weights.to(out.dtype).view(out.shape[1:]).expand(out.shape)
        (gradient,) = torch.autograd.grad(out, states, cotangent, retain_graph=True, materialize_grads=True)
        return gradient.flatten(1)

    if places is None:
        return torch.stack([pull(index == k) for k in index.tolist()], 1), None
    channels, rows = places.shape[1], []
    for variables in places:
        chosen = torch.zeros_like(index).index_fill(0, variables, 1)
        gradient = pull(chosen)
        for bit in range(max(channels - 1, 0).bit_length()):
            signs = torch.ones_like(index)
            signs[places] = 1 - 2 * (torch.arange(channels, device=index.device) >> bit & 1)
            if not torch.equal(signs * pull(signs * chosen), gradient):
                gradient = gradient.clone()
                for c in range(channels):
                    gradient[:, places[:, c]] = pull(index == variables[c])[:, places[:, c]]
                break
        rows.append(gradient[:, places])  # (B·T, K, C)
    return torch.stack(rows, 1).permute(0, 3, 1, 2), places


def _affine(jacobians: Tensor, b: Tensor, adjoint: bool) -> Tensor:
    """Solve the dense recurrence. The CPU kernel loops over time at E² per step; elsewhere a scan multiplies at E³."""
    wide = torch.promote_types(b.dtype, torch.float32)
    if b.device.type == "cpu" and importlib.util.find_spec("numba") is not None:
        from scanl.ops._cpu.nonlinear_scan import affine

        jacobians, b, dtype = jacobians.to(wide).contiguous(), b.to(wide).resolve_neg().contiguous(), b.dtype
        return affine(jacobians, b, adjoint=adjoint).to(dtype)

    def join(first: tuple[Tensor, Tensor], then: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return then[0] @ first[0], then[1] + (then[0] @ first[1][..., None])[..., 0]

    jacobians, b, dtype = jacobians.to(wide), b.to(wide), b.dtype
    if adjoint:
        jacobians = _after(jacobians).mT
    return associative_scan(join, (jacobians, b), reverse=adjoint)[1].to(dtype)


def previous(s: Tensor, state: Tensor, starts: Starts | None) -> Tensor:
    """Return the state before every step, with all steps flattened into the batch."""
    if starts is None:
        return torch.cat([state[:, None], s[:, :-1]], 1).flatten(0, 1)
    return s[0].roll(1, 0).index_put((starts.steps,), state[starts.rows])


def _after(value: Tensor, starts: Starts | None = None) -> Tensor:
    """Shift to the value of the next step; zero at the last step of a sequence."""
    if starts is not None:
        value = value.index_fill(1, starts.steps, 0)
    return torch.cat([value[:, 1:], torch.zeros_like(value[:, :1])], 1)


def _residual(s: Tensor, value: Tensor) -> float:
    error, size = (s - value).abs().max().item(), value.abs().max().item()
    return error / size if size > 0 else error


def _overflow(s: Tensor, value: Tensor, tolerance: float) -> int | None:
    """Return the first step at which f is not finite, if all steps before it are solved; else None."""
    broken = (~torch.isfinite(value)).flatten(2).any(-1).any(0).nonzero()
    if len(broken) == 0:
        return None
    step = int(broken[0])
    return step if step == 0 or _residual(s[:, :step], value[:, :step]) <= tolerance else None
