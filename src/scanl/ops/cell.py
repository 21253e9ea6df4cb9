r"""A cell: a nonlinear recurrence, written once as a plain torch function of one step.

.. math:: y_t, s_t = f(x_t, \theta, s_{t-1})

From this step, scanl derives the loop over time, which is the reference, and a fused kernel for a CPU with its backward
pass.

    @cell("x: B T D, u: D D, state: B D -> B T D", equation="h_t = tanh(x_t + U h_{t-1})", source="Elman 1990")
    def elman(x, u, state):
        h = torch.tanh(x + state @ u.T)
        return h, h

    y, last = elman(x, u)  # x: (B, T, D), u: (D, D)

The declaration is that of every op: the operands with their axes, the state last, and the output's axes after the
arrow. An operand with an axis T is an input: the step gets one time step of it, here (B, D). An operand without B and T
is a parameter: the step gets it whole. Keyword-only arguments of the step are options.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from scanl.ops._frame.declaration import FLOATING, HALF, Call
from scanl.ops._frame.op import REGISTRY, Op

Step = Callable[..., tuple[Tensor, Any]]


class Cell(Op[..., Any]):
    """An op that is made from its step; the decorator `cell` makes it.

    step: the function of one step. It gets the inputs of the step, the parameters and the state, in the order of the
    declaration, and the options. It returns the output of the step and the next state. It treats every row of the batch
    independently.
    """

    def __init__(self, step: Step, declaration: str, **declared: Any):
        self.step = step
        super().__init__(
            self._loop(), declaration, **{"id": None, "neutral": {}, "dtypes": HALF + FLOATING, **declared}
        )

    def _loop(self) -> Callable[..., tuple[Tensor, Any]]:
        """Return the loop over time. Its signature is that of the step with `state=None` and the keywords of `Call`."""
        step = self.step

        @functools.wraps(step)
        def loop(*values: Any, **options: Any) -> tuple[Tensor, Any]:
            *operands, state = values
            steps = [
                value.unbind(1) if value is not None and "T" in operand.choices[0] else [value] * operands[0].shape[1]
                for operand, value in zip(self.operands, operands, strict=False)
            ]
            ys = []
            for now in zip(*steps, strict=True):
                y, state = step(*now, state, **options)
                ys.append(y)
            if ys:
                return torch.stack(ys, 1), state
            sizes = self.sizes(dict(zip(self.names, [*operands, None], strict=True)), None)
            return operands[0].new_zeros(self.output_shape(sizes)), state

        found = inspect.signature(step)
        last = [name for name, one in found.parameters.items() if one.kind is one.POSITIONAL_OR_KEYWORD][-1]
        own = [one.replace(default=None) if name == last else one for name, one in found.parameters.items()]
        call = [inspect.Parameter("call", inspect.Parameter.VAR_KEYWORD, annotation=Call)]
        loop.__signature__ = found.replace(parameters=own + call)  # pyright: ignore[reportAttributeAccessIssue]
        return loop


def cell(declaration: str, **declared: Any) -> Callable[[Step], Cell]:
    """Declare the decorated step as a cell and register it; `declared` as in `Op`, with `equation` and `source`."""

    def register(step: Step) -> Cell:
        REGISTRY[step.__name__] = made = Cell(step, declaration, **declared)
        return made

    return register
