"""The influence of the parameters on the state, carried forward in the blocks that a structure leaves.

Parameters that reach the same numbers of the state form a group. A group of q parameters that reach k numbers keeps
M (k, q), and M becomes J M + dM with the block J (k, k) of the Jacobian. Groups of one form are computed together. So
the influence is dense only where parameters reach all of the state.

The derivatives come from backward passes. Numbers of the state that no parameter reaches together share one pass
(Curtis, Powell and Reid, "On the Estimation of Sparse Jacobian Matrices", 1974): a layer whose unit has its own row of
weights takes one pass for each number of a unit.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from scanl.learning.algorithms._flat import products
from scanl.learning.algorithms._structure import Structure


class Group(NamedTuple):
    """Groups of one form. units: (G, k), numbers of the state.   columns: (G, q), parameters among the p of all."""

    units: Tensor
    columns: Tensor


class DerivativeSource(NamedTuple):
    """Place of the derivatives of a group. shared: they come from shared passes.

    places: with shared passes, positions among (passes, columns), and `to` those in (G, k, q) at which they are added;
    else the columns (G, q).
    """

    shared: bool
    places: Tensor
    to: Tensor


class Influence:
    """M of all groups, and how a block of steps changes it.

    steps: after how many steps a parameter still reaches more of the state, see `Structure.reach`.
    """

    def __init__(self, structure: Structure, steps: int | None, device: torch.device) -> None:
        mask = structure.reach(steps)
        self._spans, self.device, self._batched = structure.spans, device, structure.batched
        self.numbers, self.parameters = mask.shape
        single = _Passes(structure, structure.immediate, structure.jacobian, device)
        block = single if steps is not None else _Passes(structure, structure.reach(None), structure.closure(), device)
        self._passes = {True: single, False: block}
        self.groups: list[Group] = []
        self._sources: dict[bool, list[DerivativeSource]] = {True: [], False: []}
        for kind in dict.fromkeys((single.kind(i), block.kind(i)) for i in range(len(self._spans))):
            some = [i for i in range(len(self._spans)) if (single.kind(i), block.kind(i)) == kind]
            columns = torch.cat([torch.arange(self._spans[i].start, self._spans[i].stop) for i in some])
            for units, own in _groups(mask[:, columns]):
                at = columns[own]
                self.groups.append(Group(units.to(device), at.to(device)))
                for is_single, passes in self._passes.items():
                    self._sources[is_single].append(passes.source(units, at))

    def zeros(self, rows: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Return M before the first step: (rows, G, k, q) for each form of groups."""
        return tuple(
            torch.zeros(rows, *group.units.shape, group.columns.shape[1], dtype=dtype, device=self.device)
            for group in self.groups
        )

    def gradient(self, by_state: Tensor, influence: tuple[Tensor, ...]) -> list[Tensor]:
        """Return the sum over rows of by_state (B, e) times M: for each parameter the gradient of its numbers."""
        total = by_state.new_zeros(self.parameters)
        for group, carried in zip(self.groups, influence, strict=True):
            part = torch.einsum("bgk,bgkq->gq", by_state[:, group.units], carried)
            total.index_add_(0, group.columns.flatten(), part.flatten())
        return [total[span] for span in self._spans]

    def advance(
        self,
        influence: tuple[Tensor, ...],
        before: Tensor,
        after: Tensor,
        parameters: list[Tensor],
        *,
        single: bool,
    ) -> tuple[Tensor, ...]:
        """Return M after a block, from the states before and after it (B, e), in a graph with the parameters.

        single: whether the block is a single step, whose derivatives are sparser.
        """
        passes, rows = self._passes[single], len(after)
        jacobian, shared, wide = passes.run(before, after, parameters, batched=self._batched)
        advanced = []
        for group, source, carried in zip(self.groups, self._sources[single], influence, strict=True):
            to, by = group.units[:, :, None], group.units[:, None]
            block = jacobian[passes.by_state[to], :, by].movedim(-1, 0) * passes.pattern[to, by]
            carried = block.to(carried.dtype) @ carried
            if source.shared:
                carried.view(rows, -1)[:, source.to] += shared.view(rows, -1)[:, source.places].to(carried.dtype)
            else:
                carried += wide[:, to, source.places[:, None]]
            advanced.append(carried)
        return tuple(advanced)


class _Passes:
    """The backward passes that give the derivatives of a block.

    fresh: (e, p), which numbers of the state a parameter reaches in the block.   of_state: (e, e), the state after it
    by the state before.
    """

    def __init__(self, structure: Structure, fresh: Tensor, of_state: Tensor, device: torch.device) -> None:
        count, few = fresh.sum(0), max(2, len(fresh) // 4)
        wide = [bool(count[span].max() > few) for span in structure.spans]
        self._shared = [index for index, dense in enumerate(wide) if not dense]
        self._wide = [index for index, dense in enumerate(wide) if dense]
        self._fresh, self._device, self.pattern = fresh, device, of_state.to(device)
        self._place = torch.zeros(fresh.shape[1], dtype=torch.int64)  # of a column in the results of its passes
        self._is_shared = torch.zeros(fresh.shape[1], dtype=torch.bool)
        for some in (self._shared, self._wide):
            spans = [structure.spans[index] for index in some]
            columns = torch.cat([torch.arange(span.start, span.stop) for span in spans] or [count[:0]])
            self._place[columns] = torch.arange(len(columns))
            if some is self._shared:
                self._is_shared[columns] = True
                self._colors, self._columns = _colors(fresh[:, columns]), len(columns)
        self._cotangents = _one_hot(self._colors).to(device)  # (passes, e)
        every = torch.arange(len(fresh))
        self.by_state = (every if self._wide else _colors(of_state)).to(device)  # the pass of each number

    def kind(self, index: int) -> bool:
        """Return whether the derivatives by a parameter come from shared passes."""
        return index in self._shared

    def source(self, units: Tensor, columns: Tensor) -> DerivativeSource:
        """Return the places of the derivatives of groups."""
        places, to = self._place[columns], columns.new_empty(0)
        if self._is_shared[columns[0, 0]]:
            to = self._fresh[units[:, :, None], columns[:, None]].flatten().nonzero()[:, 0]
            flat = self._colors[units][:, :, None] * self._columns + places[:, None]
            return DerivativeSource(True, flat.flatten()[to].to(self._device), to.to(self._device))
        return DerivativeSource(False, places.to(self._device), to)

    def run(
        self, before: Tensor, after: Tensor, parameters: list[Tensor], *, batched: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the derivatives by the state, (passes, B, e), and by the parameters.

        Those of shared passes are (B, passes, columns), the others (B, e, columns).
        """
        rows, numbers = after.shape
        one = torch.eye(rows, dtype=after.dtype, device=after.device)
        shared, wide = ([parameters[index] for index in some] for some in (self._shared, self._wide))
        of_shared, of_wide = after.new_empty(rows, 0), after.new_empty(rows, 0)
        if shared:
            cotangents = torch.einsum("br,pe->bpre", one, self._cotangents.to(after.dtype)).flatten(0, 1)
            derivatives = products(after, shared, cotangents, batched=batched)
            of_shared = torch.cat([part.reshape(rows, len(self._cotangents), -1) for part in derivatives], 2)
        if wide:
            cotangents = torch.eye(rows * numbers, dtype=after.dtype, device=after.device).view(-1, rows, numbers)
            jacobian, *derivatives = products(after, [before, *wide], cotangents, batched=batched)
            of_wide = torch.cat([part.reshape(rows, numbers, -1) for part in derivatives], 2)
            jacobian = torch.einsum("berf,br->ebf", jacobian.view(rows, numbers, rows, numbers), one)
        else:
            cotangents = _one_hot(self.by_state).to(after.dtype)[:, None].expand(-1, rows, -1)
            (jacobian,) = products(after, [before], cotangents, batched=batched)
        return jacobian, of_shared, of_wide


def _groups(reached: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the groups of columns that reach the same numbers: those numbers (G, k), and the columns (G, q)."""
    draw = torch.Generator().manual_seed(0)
    weights = torch.randint(-(2**62), 2**62, (2, len(reached)), generator=draw)
    labels = torch.stack([torch.where(reached, w[:, None], 0).sum(0) for w in weights])  # of a set of numbers
    _, group, count = labels.unique(dim=1, return_inverse=True, return_counts=True)
    forms: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = {}
    for member in group.argsort(stable=True).split(count.tolist()):
        units = reached[:, member[0]].nonzero()[:, 0]
        if len(units):
            forms.setdefault((len(units), len(member)), []).append((units, member))
    for pairs in forms.values():
        yield torch.stack([units for units, _ in pairs]), torch.stack([member for _, member in pairs])


def _colors(pattern: Tensor) -> Tensor:
    """Return a color for each row of a pattern (e, n), so that rows that share a column differ; the first that fits."""
    near = ((pattern.float() @ pattern.float().T) > 0).tolist()
    colors: list[int] = []
    for row in near:
        taken = {color for color, beside in zip(colors, row, strict=False) if beside}
        colors.append(next(color for color in range(len(colors) + 1) if color not in taken))
    return torch.tensor(colors)


def _one_hot(colors: Tensor) -> Tensor:
    return torch.nn.functional.one_hot(colors, int(colors.max()) + 1).T
