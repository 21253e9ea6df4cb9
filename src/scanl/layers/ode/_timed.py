"""Base class of layers that are one cell in continuous time, and the samples of such cells."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from scanl.errors import ConfigError
from scanl.layers.base import Layer, as_widened, widen
from scanl.layers.parts.timespans import durations
from scanl.layers.state import Device, DType
from scanl.ops.cell import Cell
from scanl.ops.registry import Sample

ACTIVATIONS = {"relu": torch.relu, "tanh": torch.tanh}


class TimedCell(Layer):
    """Layer that runs a cell over the whole sequence. A subclass sets `cell` and defines `operands`."""

    takes: ClassVar = frozenset({"timespans"})
    sample: ClassVar = {}
    cell: ClassVar[Cell]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "cell" in vars(cls):
            cls.op = cls.cell.name

    def state_shape(self) -> tuple[int, ...]:
        """Return the shape of one sequence's state."""
        return (self.dim,)

    def operands(self, x: Tensor, spans: Tensor) -> Sequence[Tensor | None]:
        """Return the operands of the cell, without the state. spans: how long each step lasts, (B, T, 1)."""
        raise NotImplementedError

    def options(self) -> Mapping[str, Any]:
        """Return the options of the cell."""
        return {}

    def output(self, h: Tensor) -> Tensor:
        """Map the output of the cell to y (B, T, dim)."""
        return h

    def init_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> Tensor:
        return self._zeros(batch_size, *self.state_shape(), device=device, dtype=dtype, at_least=torch.float32)

    def forward(
        self,
        x: Tensor,
        state: Tensor | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        timespans: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        self._check(x, state, cu_seqlens)
        h, last = self._scan(x, durations(self._who(), timespans, x), state, cu_seqlens)
        return self.output(h.to(x.dtype)), last

    def _scan(self, x: Tensor, spans: Tensor, state: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
        operands = [each if each is None else widen(each) for each in self.operands(x, spans)]
        with as_widened(x):
            return self.cell(*operands, state, cu_seqlens=cu_seqlens, **self.options())


def at_least(who: str, least: int, **sizes: int | None) -> None:
    """Raise ConfigError for a number below `least`; None is allowed."""
    for name, size in sizes.items():
        if size is not None and size < least:
            raise ConfigError(f"{who}: {name} is {size}, expected at least {least}")


def positive(who: str, **values: float) -> None:
    """Raise ConfigError for a number that is not above 0."""
    for name, value in values.items():
        if not value > 0:
            raise ConfigError(f"{who}: {name} is {value}, expected more than 0")


Draw = Callable[..., Tensor]


def samples(make: Callable[[Draw, int, int, int], Mapping[str, Any]], **options: Any) -> Iterator[Sample]:
    """Yield two samples of a cell: a batch, and packed sequences.

    make: gets a function that draws normal numbers of a shape, then B, T and the number of sequences.
    """
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    yield Sample(make(draw, 2, 4, 2), options)
    yield Sample(make(draw, 1, 5, 3), {**options, "cu_seqlens": torch.tensor([0, 2, 2, 5])})
