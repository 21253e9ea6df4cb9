r"""Any recurrence s_t = f(s_{t-1}, x_t): step by step, or for all steps at once by Newton's method.

.. math:: s^{k+1}_t = f(s^k_{t-1}, x_t) + J_t\,(s^{k+1}_{t-1} - s^k_{t-1}), \qquad
   J_t = \frac{\partial f}{\partial s}(s^k_{t-1}, x_t)

Each iteration is a linear recurrence. The gradient needs no iterations. With g_t the gradient of the loss by the output
s_t, δ_t = g_t + J_{t+1}ᵀ δ_{t+1} at the solution, and dθ = Σ (∂f_t/∂θ)ᵀ δ_t. This is backpropagation through time.

Source: Lim, Zhu, Selfridge and Kasim, "Parallelizing non-linear sequential models over the sequence length",
arXiv:2309.12252, eqs. (3) to (6) for the iteration and section 3.1.1 for the gradient; for the method that uses only
the diagonals of J, Gonzalez, Warrington, Smith and Linderman, "Towards Scalable and Stable Parallelization of Nonlinear
RNNs", arXiv:2407.19115. Differs: where a Newton step overflows or becomes very large, the state is set to f of the
previous guess instead. A result that did not converge is never returned.
"""

import functools
import importlib.util
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch import Tensor

from scanl.errors import ConfigError, ShapeError, unknown
from scanl.ops._frame.declaration import FLOATING, Call, Sample
from scanl.ops._frame.dispatch import transforming
from scanl.ops._frame.higher import higher_order
from scanl.ops.associative_scan import associative_scan
from scanl.ops.fixed_point import Convergence, ConvergenceError
from scanl.ops.linear_scan import linear_scan

Cell = Callable[[Tensor, Tensor], Tensor]
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


@higher_order(
    id="P-denserec",
    equation="s_t = f(s_{t-1}, x_t)",
    source="Lim et al. 2024, arXiv:2309.12252, eqs. (3) to (6); Gonzalez et al. 2024, arXiv:2407.19115",
    dtypes=FLOATING,
)
def nonlinear_scan(
    cell: Cell,
    x: Tensor,
    state: Tensor | None = None,
    *,
    method: str = "sequential",
    tolerance: float | None = None,
    max_iterations: int = 100,
    reverse: bool = False,
) -> Trajectory:
    """Scan s_t = cell(s_{t-1}, x_t) over time.

    cell: the function f: (B, *F), (B, *D) -> (B, *F). It must treat each row of the batch independently. It may close
    over modules and tensors. The Newton methods call it on all steps at once, as a batch of B·T rows, in every
    iteration, so it must not use dropout.
    x: (B, T, *D).   state: s_0, (B, *F). None is zeros of x's width, so it needs *F equal to *D.
    method: "sequential"; "newton", with full Jacobians of T·E² numbers for a state of E, so for small states;
    "quasi_newton", with their diagonals, of T·E numbers, exact for a cell that acts on each channel separately.
    tolerance: the limit for max |s_t - f(s_{t-1}, x_t)| / max |s|, over all steps. None is eps^(5/6) of the state's
    dtype (1.7e-6 in float32, 9e-14 in float64).
    max_iterations: the most linear scans; the gradient of "quasi_newton" may take as many again.
    reverse: scan from the last step to the first.

    Returns s of every step, (B, T, *F), and the last one. `result.convergence` has the iterations, the residual and the
    tolerance; for "sequential", T iterations and residual 0. Raises ConvergenceError, with iterations and residual,
    when the tolerance was not reached or the cell's own states overflow; ShapeError when a shape, dtype or device does
    not fit; ConfigError for an option out of range.

    Gradients flow to x, the state and everything the cell closes over. They equal backpropagation through time.
    Second derivatives are exact with "sequential"; the Newton methods raise RuntimeError when asked for them.

    >>> x = torch.tensor([[[1.0], [3.0], [2.0]]], dtype=torch.float64)
    >>> result = nonlinear_scan(lambda s, x: torch.relu(x - s), x, method="newton")
    >>> y, last = result  # 1 - 0; 3 - 1 = 2; 2 - 2
    >>> y.flatten().tolist(), last.tolist()
    ([1.0, 2.0, 0.0], [[0.0]])
    >>> result.convergence.residual <= result.convergence.tolerance
    True
    """
    if method not in METHODS:
        raise ConfigError(f"nonlinear_scan: {unknown('method', method, METHODS)}")
    if not isinstance(max_iterations, int) or max_iterations < 1:
        raise ConfigError(f"nonlinear_scan: max_iterations is {max_iterations!r}, expected an integer of at least 1")
    if tolerance is not None and not tolerance > 0:
        raise ConfigError(f"nonlinear_scan: tolerance is {tolerance!r}, expected a number above 0, or None")
    if method != "sequential" and transforming():
        raise NotImplementedError(
            f"nonlinear_scan: method is {method!r}, which cannot run under a transformation of torch.func; "
            "expected 'sequential'"
        )
    state = _checked(cell, x, state)
    tolerance = float(torch.finfo(state.dtype).eps ** (5 / 6) if tolerance is None else tolerance)
    steps = x.shape[1]
    if steps == 0 or state.numel() == 0:
        y = state[:, None].expand(-1, steps, *state.shape[1:]).clone()
        return Trajectory(y, state, Convergence(0, 0.0, tolerance))
    if reverse:
        x = x.flip(1)
    if method == "sequential":
        s, ys = state, []
        for x_t in x.unbind(1):
            s = cell(s, x_t)
            ys.append(s)
        y, convergence = torch.stack(ys, 1), Convergence(steps, 0.0, tolerance)
    else:
        form = _Dense if method == "newton" else _Diagonal
        y, convergence = _newton(cell, x, state, form, method, tolerance, max_iterations)
    return Trajectory(y.flip(1) if reverse else y, y[:, -1], convergence)


def _checked(cell: Cell, x: Tensor, state: Tensor | None) -> Tensor:
    """Return the state, after checking with one call of the cell that the cell accepts it."""
    if not isinstance(x, Tensor) or x.ndim < 2:
        kind = f"has shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"is a {type(x).__name__}"
        raise ShapeError(f"nonlinear_scan: x {kind}, expected a tensor (B, T, *D)")
    given = state is not None
    if state is None:
        state = x.new_zeros(x.shape[0], *x.shape[2:])
    if not isinstance(state, Tensor) or not state.is_floating_point():
        kind = str(state.dtype).removeprefix("torch.") if isinstance(state, Tensor) else f"a {type(state).__name__}"
        raise ShapeError(f"nonlinear_scan: state is {kind}, expected a real tensor (B, *F)")
    if state.ndim < 1 or state.shape[0] != x.shape[0]:
        shape = tuple(state.shape)
        raise ShapeError(f"nonlinear_scan: state has shape {shape}, expected (B, *F) with B={x.shape[0]} from x")
    if state.device != x.device:
        raise ShapeError(f"nonlinear_scan: state is on {state.device}, expected {x.device} because of x")
    if x.shape[1] == 0 or state.numel() == 0:
        return state
    hint = (
        "" if given else f"; state is None, which means zeros of x's width, {tuple(state.shape)}: pass the cell's own"
    )
    try:
        with torch.no_grad():
            first = cell(state, x[:, 0])
    except (RuntimeError, ValueError) as error:
        if given:
            raise
        raise ShapeError(f"nonlinear_scan: cell failed with {error}{hint}") from error
    if first.shape != state.shape or first.dtype != state.dtype:
        got = f"{str(first.dtype).removeprefix('torch.')} of shape {tuple(first.shape)}"
        expected = f"{str(state.dtype).removeprefix('torch.')} of shape {tuple(state.shape)}"
        raise ShapeError(f"nonlinear_scan: cell gives {got}, expected {expected} like its state{hint}")
    return state


def _newton(
    cell: Cell, x: Tensor, state: Tensor, form: "type[_Linear]", method: str, tolerance: float, max_iterations: int
) -> tuple[Tensor, Convergence]:
    rows, found = x.detach().flatten(0, 1), state.new_zeros(*x.shape[:2], *state.shape[1:])
    iteration = 0
    while True:
        before = _before(found, state.detach()).requires_grad_()
        with torch.enable_grad():
            out = cell(before, rows)
        value = out.detach().view_as(found)
        residual = _residual(found, value)
        if residual <= tolerance:
            break
        overflow = _overflow(found, value, tolerance)
        if overflow is not None:
            raise ConvergenceError(
                f"nonlinear_scan: the cell diverges, its state is not finite from step {overflow} on; seen after "
                f"{iteration} iterations of method {method!r}, relative residual {residual:.3g}"
            )
        if iteration == max_iterations:
            raise ConvergenceError(
                f"nonlinear_scan: did not converge in {iteration} iterations (max_iterations) of method {method!r}: "
                f"relative residual {residual:.3g}, tolerance {tolerance:.3g}. A chaotic or growing cell needs "
                "method='sequential'; otherwise raise max_iterations or tolerance"
            )
        new = found + form(before, out, found.shape).solve(value - found)
        bound = REACH * value.abs().nan_to_num(0, 0, 0).max()
        found = torch.where(new.abs() <= bound, new, torch.where(torch.isfinite(value), value, 0))
        iteration += 1
    convergence = Convergence(iteration, residual, tolerance)
    if not torch.is_grad_enabled():
        return found, convergence
    # Evaluate f once more, at the solution: autograd takes δ from here to x, the state and the cell's parameters.
    last = cell(_before(found, state), x.flatten(0, 1)).view_as(found)
    if not last.requires_grad:
        return found, convergence
    adjoint = functools.partial(_adjoint, form(before, out, found.shape), tolerance, max_iterations, method)
    return _Implicit.apply(last, found, adjoint), convergence


class _Implicit(torch.autograd.Function):
    """The solution as a function of f at the solution. Its derivative is the inverse of the map s_t - J_t s_{t-1}."""

    @staticmethod
    def forward(ctx: Any, last: Tensor, found: Tensor, adjoint: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.adjoint = adjoint
        ctx.save_for_backward(last)
        return found.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        delta = ctx.adjoint(g.detach())
        if torch.is_grad_enabled():  # create_graph: δ depends on g and on all that f depends on
            delta = _Once.apply(delta, g, *ctx.saved_tensors)
        return delta, None, None


class _Once(torch.autograd.Function):
    """The gradient in a graph; differentiating it raises."""

    @staticmethod
    def forward(ctx: Any, delta: Tensor, g: Tensor, last: Tensor) -> Tensor:
        return delta.clone()

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        raise RuntimeError(
            "nonlinear_scan: Newton's methods give first derivatives only; method='sequential' gives all"
        )


def _adjoint(linear: "_Linear", tolerance: float, max_iterations: int, method: str, g: Tensor) -> Tensor:
    """Solve δ_t = g_t + J_{t+1}ᵀ δ_{t+1} with the J that `linear` has; correct it by the residual of the full J."""
    delta, residual = linear.solve(g, adjoint=True), math.inf
    for _ in range(max_iterations):
        total = g + _after(linear.pull(delta))
        residual = _residual(delta, total)
        if residual <= tolerance:
            return total
        delta = delta + linear.solve(total - delta, adjoint=True)
    raise ConvergenceError(
        f"nonlinear_scan: the gradient did not converge in {max_iterations} iterations (max_iterations) of method "
        f"{method!r}: relative residual {residual:.3g}, tolerance {tolerance:.3g}; method='newton' needs no iterations"
    )


@dataclass
class _Linear:
    """f at every step to first order: the states before each step, f of them with its graph, and their (B, T, *F)."""

    before: Tensor
    out: Tensor
    shape: torch.Size

    def pull(self, cotangent: Tensor) -> Tensor:
        """Return J_tᵀ times the cotangent, for every step."""
        if not self.out.requires_grad:  # the cell does not use its state
            return cotangent.new_zeros(self.shape)
        (found,) = torch.autograd.grad(
            self.out, self.before, cotangent.reshape(self.out.shape), retain_graph=True, allow_unused=True
        )
        return cotangent.new_zeros(self.shape) if found is None else found.view(self.shape)

    def rows(self, weights: Tensor) -> Tensor:
        """Pull the same weights (E,) of the outputs back at every step, (B, T, E)."""
        return self.pull(weights.view(self.shape[2:]).expand(self.shape)).flatten(2).detach()

    def solve(self, b: Tensor, *, adjoint: bool = False) -> Tensor:
        """Solve d_t = b_t + J_t d_{t-1}, or for the adjoint d_t = b_t + J_{t+1}ᵀ d_{t+1}."""
        raise NotImplementedError


class _Dense(_Linear):
    @functools.cached_property
    def jacobians(self) -> Tensor:
        size = self.before[0].numel()
        units = torch.eye(size, dtype=self.out.dtype, device=self.out.device)
        found = self.out.new_empty(*self.shape[:2], size, size)
        for k in range(size):
            found[:, :, k] = self.rows(units[k])
        return found

    def solve(self, b: Tensor, *, adjoint: bool = False) -> Tensor:
        return _affine(self.jacobians, b.flatten(2), adjoint).view_as(b)


class _Diagonal(_Linear):
    @functools.cached_property
    def diagonals(self) -> Tensor:
        """Return the diagonals of J. If J is diagonal, v ⊙ Jᵀv is its diagonal for any signs v, one product for all.

        If two choices of v disagree, J is not diagonal; then the diagonal is taken row by row.
        """
        index = torch.arange(self.before[0].numel(), device=self.out.device)
        ones = torch.ones_like(index, dtype=self.out.dtype)
        found = self.rows(ones)
        for bit in range(max(len(index) - 1, 0).bit_length()):
            signs = ones - 2 * (index >> bit & 1)
            if not torch.equal(signs * self.rows(signs), found):
                return torch.stack([self.rows((index == k).to(ones.dtype))[..., k] for k in index.tolist()], -1)
        return found

    def solve(self, b: Tensor, *, adjoint: bool = False) -> Tensor:
        a, flat = self.diagonals, b.flatten(2)
        found, _ = linear_scan(flat, _after(a), reverse=True) if adjoint else linear_scan(flat, a)
        return found.view_as(b)


def _affine(jacobians: Tensor, b: Tensor, adjoint: bool) -> Tensor:
    """Solve the dense recurrence. The CPU kernel loops over time at E² per step; elsewhere a scan multiplies at E³."""
    wide = torch.promote_types(b.dtype, torch.float32)
    if b.device.type == "cpu" and importlib.util.find_spec("numba") is not None:
        from scanl.ops._cpu.nonlinear_scan import affine

        return affine(jacobians.to(wide), b.to(wide).resolve_neg().contiguous(), adjoint=adjoint).to(b.dtype)

    def join(first: tuple[Tensor, Tensor], then: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return then[0] @ first[0], then[1] + (then[0] @ first[1][..., None])[..., 0]

    jacobians, b = jacobians.to(wide), b.to(wide)
    if adjoint:
        jacobians = _after(jacobians).mT
    return associative_scan(join, (jacobians, b), reverse=adjoint)[1].to(b.dtype)


def _before(s: Tensor, state: Tensor) -> Tensor:
    """Return the state before every step, with all steps flattened into the batch."""
    return torch.cat([state[:, None], s[:, :-1]], 1).flatten(0, 1)


def _after(value: Tensor) -> Tensor:
    """Shift to the value of the next step; zero at the last step."""
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


@nonlinear_scan.instance("x: B T D, w: D D, state: B D -> B T D")
def _tanh(x: Tensor, w: Tensor, state: Tensor | None = None, **call: Unpack[Call]) -> tuple[Tensor, Tensor]:
    """A plain recurrent cell, s_t = tanh(s_{t-1} w + x_t)."""
    assert state is not None  # zeros where the caller gave None
    s, ys = state, []
    for t in range(x.shape[1]):
        s = torch.tanh(s @ w + x[:, t])
        ys.append(s)
    return torch.stack(ys, 1) if ys else x.clone(), s


@_tanh.backend(
    "parallel",
    forward_mode=False,
    excused={
        "causality to the bit": "Newton's method stops when all steps are solved to the tolerance",
        "second derivatives": "Newton's method gives first derivatives only",
        "compilation": "how many iterations there are depends on the numbers",
    },
)
def _by_newton(x: Tensor, w: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Solve all steps at once, to rounding."""
    tolerance = 4 * torch.finfo(x.dtype).eps
    y, last = nonlinear_scan(lambda s, x: torch.tanh(s @ w + x), x, state, method="newton", tolerance=tolerance)
    return y, last


@_tanh.samples
def _samples() -> Iterator[Sample]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    yield Sample({"x": draw(2, 7, 3), "w": draw(3, 3) / 2, "state": draw(2, 3)})
    packed = {"x": draw(1, 9, 2), "w": draw(2, 2) / 2, "state": draw(3, 2)}
    yield Sample(packed, {"cu_seqlens": torch.tensor([0, 2, 2, 9])})


@_tanh.errors
def _errors() -> Iterator[tuple[Sample, str]]:
    x = torch.zeros(2, 4, 3)
    yield Sample({"x": x, "w": torch.zeros(3, 2)}), "w has shape (3, 2), expected (D, D) with D=3 from x"
