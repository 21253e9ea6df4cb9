"""Sequences of different lengths: packed into one row (`cu_seqlens`), padded with a mask, or cut out of rows."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from scanl.errors import ShapeError
from scanl.layers.auxiliary import collecting
from scanl.layers.state import cat, index, leaves, map_leaves
from scanl.ops.offsets import CutRows, cut, offsets, row_ends, sequences

if TYPE_CHECKING:
    from scanl.layers.state import State


def sequence_index(cu_seqlens: Tensor, length: int) -> Tensor:
    """Return the index (T,) of the sequence that each step of a packed row belongs to."""
    steps = torch.arange(length, device=cu_seqlens.device)
    return torch.searchsorted(cu_seqlens[1:].to(torch.int64).contiguous(), steps, right=True)


def reversed_steps(cu_seqlens: Tensor, length: int) -> Tensor:
    """Return the permutation (T,) of steps that reverses each sequence within a packed row."""
    owner = sequence_index(cu_seqlens, length)
    return cu_seqlens[owner] + cu_seqlens[owner + 1] - 1 - torch.arange(length, device=cu_seqlens.device)


def turned(x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Reverse the time of x (B, T, ...), of each packed sequence by itself."""
    return x.flip(1) if cu_seqlens is None else x[:, reversed_steps(cu_seqlens, x.shape[1])]


def pack(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Pack the valid steps of x (B, T, ...). Return (1, total, ...) and the offsets (B+1,)."""
    if mask.dtype != torch.bool or mask.shape != x.shape[:2]:
        raise ShapeError(
            f"padded: mask is {mask.dtype} {tuple(mask.shape)}, expected torch.bool {tuple(x.shape[:2])} because of x"
        )
    return x[mask][None], F.pad(mask.sum(1).cumsum(0), (1, 0))


def unpack(y: Tensor, mask: Tensor) -> Tensor:
    """Invert `pack`: return (B, T, ...) with zeros at padding."""
    padded_y = y.new_zeros(*mask.shape, *y.shape[2:])
    padded_y[mask] = y[0]
    return padded_y


def each_alone(
    run: Callable[..., "tuple[Tensor, State]"],
    x: Tensor,
    state: "State",
    cu_seqlens: Tensor,
    *,
    after_zeros: float | None = None,
    causal: bool = True,
) -> "tuple[Tensor, State]":
    """Call `run` on the packed sequences separately, those of one length at once, for code that depends on the length.

    New ones whose last state is not read are padded on the right to similar lengths, if no step depends on later ones.
    state: has a row for each sequence; None where all are new.   after_zeros: given where inputs of zero before a new
    sequence change nothing; then new ones, all of them, have zeros on the left, and lengths differ by this factor.
    """
    if after_zeros is not None and state is None and not torch.compiler.is_compiling():
        return _after_zeros(run, x, cu_seqlens, after_zeros)
    bounds = offsets(cu_seqlens, x.shape[1], "each_alone")
    ends = row_ends(cu_seqlens) if causal and collecting() is None else None  # padding would have losses
    exact = None if ends is None else ends.last if state is None else torch.cat(ends).unique()
    numbers: dict[int, list[int]] = {}
    for n in range(len(bounds) - 1) if exact is None else exact.tolist():
        numbers.setdefault(bounds[n + 1] - bounds[n], []).append(n)
    if not numbers:
        return x, run(x[:0], state)[1]
    steps, ys, lasts = [], [], []
    for length, alike in numbers.items():
        begins = torch.tensor([bounds[n] for n in alike], device=x.device)
        places = begins[:, None] + torch.arange(length, device=x.device)
        rows = x[0, places] if len(alike) > 1 else x[:, bounds[alike[0]] : bounds[alike[0]] + length]
        y, last = run(rows, None if state is None else index(state, alike))
        steps.append(places.flatten())
        ys.append(y.flatten(0, 1))
        lasts.append(last)
    if len(ys) == len(bounds) - 1:  # no two are of one length
        return torch.cat(ys)[None], cat(lasts)
    for group in () if exact is None else similar_sequences(cu_seqlens, x.shape[1], exact):
        y, _ = run(group.rows(x), None if state is None else index(state, group.numbers))
        steps.append(torch.where(group.valid, group.steps, x.shape[1]).flatten())
        ys.append(y.flatten(0, 1))
    order = torch.tensor([n for alike in numbers.values() for n in alike])
    places = order.argsort()
    if ends is not None and exact is not None:
        places = places[torch.searchsorted(exact, ends.last)]
    last = index(cat(lasts), places)
    return in_order(ys, steps, x.shape[1])[None], last


def _after_zeros(
    run: Callable[..., "tuple[Tensor, State]"], x: Tensor, cu_seqlens: Tensor, within: float
) -> "tuple[Tensor, State]":
    empty = (cu_seqlens.diff() == 0).nonzero()[:, 0]
    y, last = run(x.new_zeros(len(empty), 0, *x.shape[2:]), None)
    numbers, ys, steps, lasts = [empty], [y.flatten(0, 1)], [empty[:0]], [last]
    for group in similar_sequences(cu_seqlens, x.shape[1], within=within):
        y, last = run(group.rows_to_end(x), None)
        shift = group.steps.shape[1] - group.lengths[:, None]
        places = torch.arange(group.steps.shape[1], device=x.device) - shift
        steps.append(torch.where(places < 0, x.shape[1], group.steps[:, :1] + places).flatten())
        ys.append(y.flatten(0, 1))
        numbers.append(group.numbers)
        lasts.append(last)
    return in_order(ys, steps, x.shape[1])[None], index(cat(lasts), torch.cat(numbers).argsort())


def in_order(rows: Sequence[Tensor], steps: Sequence[Tensor], length: int) -> Tensor:
    """Return (T, ...), the rows (P, ...) of each of several tensors by their steps (P,), which are T for padding."""
    places = torch.cat(list(steps)) if steps else torch.zeros(0, dtype=torch.int64)
    order = places.new_empty(length + 1)
    order[places] = torch.arange(len(places), device=places.device)
    return torch.cat(list(rows)).index_select(0, order[:length])


def restarted(
    who: str,
    run: Callable[..., "tuple[Tensor, State]"],
    initial: "Callable[[int], State]",
    x: Tensor,
    state: "State",
    cu_seqlens: Tensor | None,
    starts: Tensor,
    **others: Any,
) -> "tuple[Tensor, State]":
    """Call `run`, which reads packed sequences, so that its state begins anew where `starts` (B, T) is True.

    who: the layer or model, for messages.   initial: called with a number of rows, returns their state before any
    input.   others: further arguments of `run`: tensors of all steps, or a dict of them to which `run` adds some.
    """
    rows = cut(who, starts, x, cu_seqlens)
    packed = {name: pytree.tree_map_only(Tensor, rows.packed, value) for name, value in others.items()}
    state = _entering(who, rows, state, initial, sequences(x, rows.cu_seqlens))
    y, last = run(rows.packed(x), state, cu_seqlens=rows.cu_seqlens, **packed)
    for name, value in others.items():
        if isinstance(value, dict):
            value.update({key: rows.unpacked(tensor) for key, tensor in packed[name].items()})
    return rows.unpacked(y), map_leaves(rows.leave, last)


class SimilarSequences(NamedTuple):
    """Packed sequences of similar lengths, as rows of a batch.

    numbers: (P,) which sequences these are.   lengths: (P,), at least 1.   steps: (P, L) the step of the packed row at
    each place of a row that is padded on the right.   valid: (P, L), whether there is one.
    """

    numbers: Tensor
    lengths: Tensor
    steps: Tensor
    valid: Tensor

    def some(self, which: Tensor) -> "SimilarSequences":
        """Return those of the sequences for which `which` (P,) is True."""
        return SimilarSequences(*(tensor[which] for tensor in self))

    def rows(self, x: Tensor) -> Tensor:
        """Return the sequences of x (1, T, ...) as rows (P, L, ...) with zeros on the right."""
        return self._with_zeros(self._at(x, self.steps), self.valid)

    def rows_to_end(self, x: Tensor) -> Tensor:
        """Return the sequences of x (1, T, ...) as rows (P, L, ...) with zeros on the left."""
        shift = self.steps.shape[1] - self.lengths[:, None]
        places = torch.arange(self.steps.shape[1], device=x.device) - shift
        return self._with_zeros(self._at(x, self.steps[:, :1] + places.clamp(min=0)), places >= 0)

    def _at(self, x: Tensor, steps: Tensor) -> Tensor:
        return x[0].index_select(0, steps.flatten()).unflatten(0, steps.shape)

    def _with_zeros(self, rows: Tensor, valid: Tensor) -> Tensor:
        return torch.where(valid.view(*valid.shape, *[1] * (rows.ndim - 2)), rows, 0)


def similar_sequences(
    cu_seqlens: Tensor, length: int, without: Tensor | None = None, within: float = 2
) -> Iterator[SimilarSequences]:
    """Yield the packed sequences that have steps, those of similar lengths together, for what computes rows at once.

    A batch of them has less than `within` times as many steps as they have. without: numbers of sequences that are left
    out.
    """
    lengths = cu_seqlens.diff().long()
    left_out = set() if without is None else set(without.tolist())
    counts = {n: int(count) for n, count in enumerate(lengths.tolist()) if count and n not in left_out}
    longest, batches = max(counts.values(), default=1), dict[int, list[int]]()
    for n, count in counts.items():
        batches.setdefault(int(math.log(longest / count, within)), []).append(n)
    for _, alike in sorted(batches.items()):
        numbers = torch.tensor(alike, device=cu_seqlens.device)
        places = torch.arange(int(lengths[numbers].max()), device=cu_seqlens.device)
        steps = (cu_seqlens[numbers, None].long() + places).clamp(max=length - 1)
        yield SimilarSequences(numbers, lengths[numbers], steps, places < lengths[numbers, None])


def renewed(who: str, state: "State", initial: "Callable[[int], State]", starts: Tensor, step: Tensor) -> "State":
    """Return the state of B rows, but that before any input for the rows where starts (B,) is True.

    who, initial: as in `restarted`.   step: (B, ...), what is read next.
    """
    if not isinstance(starts, Tensor) or starts.ndim != 1:
        actual = f"of shape {tuple(starts.shape)}" if isinstance(starts, Tensor) else f"a {type(starts).__name__}"
        raise ShapeError(f"{who}: starts is {actual}, expected torch.bool ({len(step)},), a truth for each row")
    return _entering(who, cut(who, starts[:, None], step[:, None], None), state, initial, len(step))


def _entering(who: str, rows: CutRows, state: "State", initial: "Callable[[int], State]", count: int) -> "State":
    """Return the state of `count` pieces. Raises ShapeError for one that does not have a row for each row of x."""
    if state is None or rows.begins is None:
        return state
    fresh = initial(count)
    expected = {path: (len(rows.begins), *leaf.shape[1:]) for path, leaf in leaves(fresh)}
    for path, leaf in leaves(state):
        if leaf.shape != expected.get(path):
            fitting = expected.get(path, "no tensor")
            raise ShapeError(f"{who}: {path} has shape {tuple(leaf.shape)}, expected {fitting} because of starts")
    return map_leaves(rows.enter, state, fresh)


def padded(layer: Any, x: Tensor, mask: Tensor, state: "State" = None) -> "tuple[Tensor, State]":
    """Run a layer over a batch with padding on the left or right. Each row has the same result as without padding.

    x: (B, T, D).   mask: (B, T) bool, True at valid steps.   Returns y (B, T, D), zero at padding, and the
    state of each row after its last valid step.
    """
    packed, cu_seqlens = pack(x, mask)
    y, state = layer(packed, state, cu_seqlens=cu_seqlens)
    return unpack(y, mask), state
