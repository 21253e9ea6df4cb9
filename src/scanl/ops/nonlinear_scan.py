r"""Any recurrence s_t = f(s_{t-1}, x_t): step by step, or for all steps at once by Newton's method.

.. math:: s^{k+1}_t = f(s^k_{t-1}, x_t) + J_t\,(s^{k+1}_{t-1} - s^k_{t-1}), \qquad
   J_t = \frac{\partial f}{\partial s}(s^k_{t-1}, x_t)

Each iteration is a linear recurrence. The gradient needs no iterations. With g_t the gradient of the loss by the output
s_t, δ_t = g_t + J_{t+1}ᵀ δ_{t+1} at the solution, and dθ = Σ (∂f_t/∂θ)ᵀ δ_t. This is backpropagation through time.

Differs: where a Newton step overflows or becomes very large, the state is set to f of the
previous guess instead. A result that did not converge is never returned.
"""

from collections.abc import Callable, Iterator
from typing import Unpack

import torch
from torch import Tensor

from scanl.errors import ShapeError
from scanl.ops._frame.declaration import FLOATING, Call, OpSample
from scanl.ops._frame.draws import Draws
from scanl.ops._frame.higher import higher_order
from scanl.ops._newton import Newton, Trajectory, products
from scanl.ops.fixed_point import Convergence

Cell = Callable[[Tensor, Tensor], Tensor]


@higher_order(
    id="P-denserec",
    equation="s_t = f(s_{t-1}, x_t)",
    source=(
        'Lim, Zhu, Selfridge and Kasim, "Parallelizing non-linear sequential models over the sequence length", '
        "arXiv:2309.12252, eq. (3) to (6) and section 3.1.1; by the diagonals of J: Gonzalez, Warrington, Smith "
        'and Linderman, "Towards Scalable and Stable Parallelization of Nonlinear RNNs", arXiv:2407.19115'
    ),
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
    dtype (1.7e-6 in float32, 9e-14 in float64). Once it is reached, one more iteration is made.
    max_iterations: the most linear scans; the gradient of "quasi_newton" may take as many again.
    reverse: scan from the last step to the first.

    Returns s of every step, (B, T, *F), and the last one. `result.convergence` has the iterations, the residual and the
    tolerance; for "sequential", T iterations and residual 0. Raises ConvergenceError, with iterations and residual,
    when the tolerance was not reached or the cell's own states overflow; ShapeError when a shape, dtype or device does
    not fit; ConfigError for an option out of range.

    Gradients flow to x, the state and everything the cell closes over. They equal backpropagation through time.
    Second derivatives are exact with "sequential"; the Newton methods raise RuntimeError for them.

    >>> x = torch.tensor([[[1.0], [3.0], [2.0]]], dtype=torch.float64)
    >>> result = nonlinear_scan(lambda s, x: torch.relu(x - s), x, method="newton")
    >>> y, last = result  # 1 - 0; 3 - 1 = 2; 2 - 2
    >>> y.flatten().tolist(), last.tolist()
    ([1.0, 2.0, 0.0], [[0.0]])
    >>> result.convergence.residual <= result.convergence.tolerance
    True
    """
    newton = Newton("nonlinear_scan", method, tolerance, max_iterations)
    state = _checked(cell, x, state)
    steps = x.shape[1]
    if steps == 0 or state.numel() == 0:
        y = state[:, None].expand(-1, steps, *state.shape[1:]).clone()
        return Trajectory(y, state, Convergence(0, 0.0, newton.limit(state.dtype)))
    if reverse:
        x = x.flip(1)
    if method == "sequential":
        s, ys = state, []
        for x_t in x.unbind(1):
            s = cell(s, x_t)
            ys.append(s)
        y, convergence = torch.stack(ys, 1), Convergence(steps, 0.0, newton.limit(state.dtype))
    else:
        rows, every = x.flatten(0, 1), torch.arange(state[0].numel(), device=x.device)
        places = None if method == "newton" else every[None]
        fixed = rows.detach()
        y, convergence = newton.solve(
            lambda states: cell(states, rows),
            state,
            steps,
            lambda states: products(lambda s: cell(s, fixed), states, places),
        )
    return Trajectory(y.flip(1) if reverse else y, y[:, -1], convergence)


def _checked(cell: Cell, x: Tensor, state: Tensor | None) -> Tensor:
    """Return the state, after checking with one call of the cell that the cell accepts it."""
    if not isinstance(x, Tensor) or x.ndim < 2:
        kind = f"has shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"is a {type(x).__name__}"
        raise ShapeError(f"nonlinear_scan: x {kind}, expected a tensor (B, T, *D)")
    has_state = state is not None
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
        ""
        if has_state
        else f"; state is None, which means zeros of x's width, {tuple(state.shape)}: pass the cell's own"
    )
    try:
        with torch.no_grad():
            first = cell(state, x[:, 0])
    except (RuntimeError, ValueError) as error:
        if has_state:
            raise
        raise ShapeError(f"nonlinear_scan: cell failed with {error}{hint}") from error
    if first.shape != state.shape or first.dtype != state.dtype:
        got = f"{str(first.dtype).removeprefix('torch.')} of shape {tuple(first.shape)}"
        expected = f"{str(state.dtype).removeprefix('torch.')} of shape {tuple(state.shape)}"
        raise ShapeError(f"nonlinear_scan: cell gives {got}, expected {expected} like its state{hint}")
    return state


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
def _samples() -> Iterator[OpSample]:
    draw = Draws()

    yield OpSample({"x": draw(2, 7, 3), "w": draw(3, 3) / 2, "state": draw(2, 3)})
    packed = {"x": draw(1, 9, 2), "w": draw(2, 2) / 2, "state": draw(3, 2)}
    yield OpSample(packed, {"cu_seqlens": torch.tensor([0, 2, 2, 9])})


@_tanh.errors
def _errors() -> Iterator[tuple[OpSample, str]]:
    x = torch.zeros(2, 4, 3)
    yield OpSample({"x": x, "w": torch.zeros(3, 2)}), "w has shape (3, 2), expected (D, D) with D=3 from x"
