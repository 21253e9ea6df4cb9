"""Base classes of layers whose recurrence is one cell."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from torch import Tensor

from scanl.layers.base import Layer, as_widened, widen
from scanl.layers.initial_state import StateAxes
from scanl.ops.cell import Cell

Solver = Annotated[
    Literal["sequential", "newton", "quasi_newton"],
    "how the steps are solved, see `Cell.solve`. One step alone runs sequentially",
]


class SolvedLayer(Layer):
    """Layer whose recurrence is one cell, with the option `solver` beside its own."""

    added: ClassVar = {"solver": Solver}
    solver: str = "sequential"

    def run_cell(self, cell: Cell, *operands: Tensor | None, cu_seqlens: Tensor | None, **options: Any) -> Any:
        """Run the cell over time by the method that `solver` names; the state is the last operand."""
        if self.solver == "sequential":
            return cell(*operands, cu_seqlens=cu_seqlens, **options)
        return cell.solve(self.solver, *operands, cu_seqlens=cu_seqlens, **options)


class CellBase(SolvedLayer):
    """Layer that runs a cell over the whole sequence. A subclass sets `cell`, whose equation and source it has as well.

    Where its state is not (B, D) it declares `state`, and where the cell's output is not its own, `output`.
    """

    state: ClassVar = StateAxes("dim")
    cell: ClassVar[Cell]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "cell" in vars(cls):
            cls.op = cls.cell.name
            cls.equation = vars(cls).get("equation", cls.cell.equation)
            cls.source = vars(cls).get("source", cls.cell.source)

    def options(self) -> Mapping[str, Any]:
        """Return the options of the cell: the layer's attributes of these names."""
        return {name: getattr(self, name) for name in self.cell.options}

    def output(self, h: Tensor) -> Tensor:
        """Map the output of the cell to y (B, T, dim)."""
        return h

    def _run(
        self, x: Tensor, operands: Sequence[Tensor | None], state: Tensor | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Run the cell in float32 or wider, also under autocast."""
        wide = [tensor if tensor is None else widen(tensor) for tensor in operands]
        with as_widened(x):
            return self.run_cell(self.cell, *wide, state, cu_seqlens=cu_seqlens, **self.options())


class CellLayer(CellBase):
    """Layer that runs a cell over the whole sequence. A subclass sets `cell` and defines `operands`."""

    def operands(self, x: Tensor) -> Sequence[Tensor | None]:
        """Return the operands of the cell, without the state."""
        raise NotImplementedError

    def run(self, x: Tensor, state: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
        h, last = self._run(x, self.operands(x), state, cu_seqlens)
        return self.output(h.to(x.dtype)), last
