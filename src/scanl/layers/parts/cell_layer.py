"""Base classes of layers whose recurrence is one cell, checks of their options, and samples of such cells."""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from scanl.errors import ConfigError, unknown
from scanl.layers.base import Layer, as_widened, widen
from scanl.layers.state import Device, DType
from scanl.ops._frame.draws import Draws
from scanl.ops.cell import METHODS, Cell
from scanl.ops.registry import Sample


class SolvedLayer(Layer):
    """Layer whose recurrence is one cell, with an option `method` that every subclass gets.

    The constructor of a subclass does not name the option. A subclass whose constructor has another `method`, such as
    that of an ODE, does not get it, and runs sequentially.
    """

    added: ClassVar = {
        "method": 'how the steps are solved, "sequential", "newton" or "quasi_newton"; see `Cell.solve`. One step '
        "alone runs sequentially"
    }
    method: str = "sequential"

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        start = vars(cls).get("__init__")
        if start is None:
            return
        if "method" in inspect.signature(start).parameters:
            cls.added = {}
        else:
            type.__setattr__(cls, "__init__", _with_method(start))

    def run_cell(self, cell: Cell, *operands: Tensor | None, cu_seqlens: Tensor | None, **options: Any) -> Any:
        """Run the cell over time by the method that the option names; the state is the last operand."""
        if not self.added or self.method == "sequential":
            return cell(*operands, cu_seqlens=cu_seqlens, **options)
        return cell.solve(self.method, *operands, cu_seqlens=cu_seqlens, **options)


def _with_method(start: Callable[..., None]) -> Callable[..., None]:
    """Return a constructor with the option `method`."""
    signature = inspect.signature(start)
    own = list(signature.parameters.values())
    option = inspect.Parameter("method", inspect.Parameter.KEYWORD_ONLY, default="sequential", annotation=str)
    own.insert(len(own) - (own[-1].kind is inspect.Parameter.VAR_KEYWORD), option)

    @functools.wraps(start)
    def __init__(self: SolvedLayer, *args: Any, **kwargs: Any) -> None:
        given = {"method": kwargs.pop("method")} if "method" in kwargs else {}
        for method in given.values():
            if method not in METHODS:
                raise ConfigError(f"{self._who()}: {unknown('method', method, METHODS)}")
        start(self, *args, **kwargs)  # may pass a method to the constructor of its base class
        vars(self).update({"method": self.method, **given})

    vars(__init__)["__signature__"] = signature.replace(parameters=own)
    __init__.__annotations__ = {**start.__annotations__, "method": str}
    return __init__


class CellBase(SolvedLayer):
    """Layer that runs a cell over the whole sequence. A subclass sets `cell`.

    Where its state is not (B, D) it defines `state_shape`, and where the cell's output is not its own, `output`.
    """

    sample: ClassVar = {}
    cell: ClassVar[Cell]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "cell" in vars(cls):
            cls.op = cls.cell.name

    def state_shape(self) -> tuple[int, ...]:
        """Return the shape of one sequence's state."""
        return (self.dim,)

    def options(self) -> Mapping[str, Any]:
        """Return the options of the cell."""
        return {}

    def output(self, h: Tensor) -> Tensor:
        """Map the output of the cell to y (B, T, dim)."""
        return h

    def init_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> Tensor:
        return self._zeros(batch_size, *self.state_shape(), device=device, dtype=dtype, at_least=torch.float32)

    def _run(
        self, x: Tensor, operands: Sequence[Tensor | None], state: Tensor | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Run the cell in float32 or wider, also under autocast."""
        wide = [each if each is None else widen(each) for each in operands]
        with as_widened(x):
            return self.run_cell(self.cell, *wide, state, cu_seqlens=cu_seqlens, **self.options())


class CellLayer(CellBase):
    """Layer that runs a cell over the whole sequence. A subclass sets `cell` and defines `operands`."""

    def operands(self, x: Tensor) -> Sequence[Tensor | None]:
        """Return the operands of the cell, without the state."""
        raise NotImplementedError

    def forward(
        self, x: Tensor, state: Tensor | None = None, *, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        self._check(x, state, cu_seqlens)
        h, last = self._run(x, self.operands(x), state, cu_seqlens)
        return self.output(h.to(x.dtype)), last


def at_least(who: str, least: float, **sizes: float | None) -> None:
    """Raise ConfigError for a number below `least`; None is allowed."""
    for name, size in sizes.items():
        if size is not None and not size >= least:
            raise ConfigError(f"{who}: {name} is {size}, expected at least {least}")


def positive(who: str, **values: float) -> None:
    """Raise ConfigError for a number that is not above 0."""
    for name, value in values.items():
        if not value > 0:
            raise ConfigError(f"{who}: {name} is {value}, expected more than 0")


def share(who: str, **values: float) -> None:
    """Raise ConfigError for a number that is not from 0 to 1."""
    for name, value in values.items():
        if not 0 <= value <= 1:
            raise ConfigError(f"{who}: {name} is {value}, expected 0 to 1")


Draw = Callable[..., Tensor]


def samples(make: Callable[[Draw, int, int, int], Mapping[str, Any]], **options: Any) -> Iterator[Sample]:
    """Yield two samples of a cell: a batch, and packed sequences.

    make: gets a function that draws normal numbers of a shape, then B, T and the number of sequences.
    """
    draw = Draws()

    yield Sample(make(draw, 2, 4, 2), options)
    yield Sample(make(draw, 1, 5, 3), {**options, "cu_seqlens": torch.tensor([0, 2, 2, 5])})
