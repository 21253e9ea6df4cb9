"""The options of estimators, each kept under its name, as scikit-learn and aeon want it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch
from sklearn.utils import check_random_state

from scanl.errors import ConfigError
from scanl.models import Stack
from scanl.whole import is_whole, whole_number

METHODS = ("filters", "stack")
OF_FILTERS, OF_STACK = ({"method": method} for method in METHODS)


@dataclass(eq=False, repr=False, kw_only=True)
class StackOptions:
    """The options of a stack and of its training.

    layer, dim, depth: of the `Stack`; layer None: hawk.   stack_options: its further arguments, by name.
    steps, batch_size, lr: of training; steps None: 300.   random_state: seed of weights and order.
    """

    layer: str | None = field(default=None, metadata=OF_STACK)
    dim: int = field(default=32, metadata=OF_STACK)
    depth: int = field(default=1, metadata=OF_STACK)
    stack_options: Mapping[str, Any] | None = field(default=None, metadata=OF_STACK)
    steps: int | None = field(default=None, metadata=OF_STACK)
    batch_size: int = field(default=32, metadata=OF_STACK)
    lr: float = field(default=3e-3, metadata=OF_STACK)
    random_state: Any = 0

    def __post_init__(self) -> None:
        super().__init__()

    def _stack(self) -> Stack:
        return Stack(self.dim, self.depth, self.layer or "hawk", **(self.stack_options or {}))

    @property
    def _steps(self) -> int:
        return 300 if self.steps is None else self.steps


@dataclass(eq=False, repr=False, kw_only=True)
class EstimatorOptions(StackOptions):
    """The options of an estimator of series.

    method: "filters", the model is `RandomFilters` with a readout in closed form; or "stack", a stack is trained. An
    option of the other method raises ConfigError.

    Of a stack, beside `StackOptions`:
    early_stopping: whether to hold out series, measure their loss after each pass over the others, end when it has not
    fallen for `n_iter_no_change` passes, and return to the weights with the smallest one.
    validation_fraction: share of the series that are held out, of each class alike.

    Of filters:
    filter_options: arguments of `RandomFilters`, by name.   penalty: of its readout. What is left open is chosen.

    Of both:
    random_state: a whole number; or a RandomState, a Generator, or None for the global generator of NumPy, which give
    another seed at each fit.
    device: of torch, on which a stack is trained and stays; None: the processor, where filters always are.
    verbose: 1 prints the loss ten times in a fit; 0 prints nothing.
    """

    method: str = "filters"
    filter_options: Mapping[str, Any] | None = field(default=None, metadata=OF_FILTERS)
    penalty: float | None = field(default=None, metadata=OF_FILTERS)
    device: Any = None
    verbose: int = 0
    early_stopping: bool = field(default=False, metadata=OF_STACK)
    validation_fraction: float = 0.1  # scikit-learn's checks set these two of any estimator
    n_iter_no_change: int = 10

    @property
    def _trains(self) -> bool:
        """Whether the method is a stack. Raises ConfigError for another method, and for an option of the other one."""
        who = type(self).__name__
        if self.method not in METHODS:
            raise ConfigError(f"{who}: method is {self.method!r}, expected one of {', '.join(METHODS)}")
        for option in fields(self):
            value, owner = getattr(self, option.name, option.default), option.metadata.get("method", self.method)
            if owner != self.method and value is not option.default and value != option.default:
                raise ConfigError(
                    f"{who}: {option.name} is {value!r}, expected {option.default!r} because method is "
                    f"{self.method!r}; give method={owner!r}, or leave the option out"
                )
        return self.method == "stack"


def seed_of(who: str, random_state: Any) -> int:
    """Return the seed of a fit. A whole number is the seed; a generator of NumPy draws one, at each fit anew.

    random_state: a whole number, a RandomState, a Generator, or None for the global generator of NumPy.
    """
    if isinstance(random_state, np.random.Generator):
        return int(random_state.integers(2**31))
    if random_state is None or isinstance(random_state, np.random.RandomState):
        return int(check_random_state(random_state).randint(2**31 - 1))
    if not is_whole(random_state):
        raise ConfigError(
            f"{who}: random_state is {random_state!r}, expected a whole number of at least 0, a RandomState, a "
            "Generator, or None"
        )
    return whole_number(who, "random_state", random_state)


def device_of(who: str, device: Any) -> torch.device:
    """Return a device of torch on which tensors can be made; None is the processor."""
    try:
        chosen = torch.device("cpu" if device is None else device)
        torch.empty(0, device=chosen)
    except (RuntimeError, TypeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"{who}: device is {device!r}, expected a device of torch that runs here, such as 'cpu' or 'cuda'; {reason}"
        ) from None
    return chosen
