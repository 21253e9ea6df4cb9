"""What an operation of a module does with a piece of a sequence: each part computes some entries and keeps a state.

An entry is what a tensor holds at one place of its time axis. An operation with a stride has fewer entries than the
input has steps. One that waits for further steps has no entry yet.

A part is called as part(args, kwargs, state): the arguments of the operation for this piece, and the part's own state,
None before the first piece. It returns the result for this piece, and the state after it: tensors by name, batch first.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from scanl.layers import GRU, LSTM, Elman
from scanl.ops import elman, gru, lstm
from scanl.ops._frame.context import exactly, plain, undirected
from scanl.ops._recurrent.layer import without_gradients

States = dict[str, Tensor]


class Part(Protocol):
    """One operation of a stream."""

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any], state: States | None) -> tuple[Any, States]:
        """Return the result for a piece, and the state after it."""
        ...


def entries_like(tensor: Tensor, axis: int, count: int, value: float = 0.0) -> Tensor:
    """Return `count` entries of one value, with the sizes of `tensor` on all axes but `axis`."""
    shape = list(tensor.shape)
    shape[axis] = count
    return tensor.new_full(shape, value)


def bound(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return all arguments of an operation of torch by name."""
    names = operation._schema.arguments
    given = {argument.name: value for argument, value in zip(names, args, strict=False)} | kwargs
    return {argument.name: given.get(argument.name, argument.default_value) for argument in names}


@dataclass(frozen=True)
class ViewSize:
    """The size among the arguments of a view that counts entries.

    number: of the argument, among all leaves.   kind: "same"; "joined", with the rows of the axis before; or "split",
    from the rows, whose size stands before it.
    """

    number: int
    kind: str

    def settled(self, leaves: list[Any], size: int, before: int) -> list[Any]:
        """Return the arguments for a tensor with this size of the time axis, and that of the axis before it."""
        settled = list(leaves)
        if self.kind == "split" and leaves[self.number - 1] == -1:
            return settled
        settled[self.number] = (
            size * before
            if self.kind == "joined"
            else size // leaves[self.number - 1]
            if self.kind == "split"
            else size
        )
        return settled


@dataclass(frozen=True)
class StepwisePart:
    """An operation whose result at one entry depends on its arguments at that entry alone.

    axes: time axis of each argument that has one, by its number among all leaves of the arguments.   after: the time
    axis of each tensor of the result.   view: the size that counts the entries, for a view.
    """

    operation: Callable[..., Any]
    axes: Mapping[int, int]
    after: tuple[int, ...]
    view: ViewSize | None = None

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any], state: States | None) -> tuple[Any, States]:
        leaves, form = pytree.tree_flatten((args, kwargs))
        number, axis = next(iter(self.axes.items()))
        if leaves[number].shape[axis] > 0:
            return self._run(leaves, form), {}
        rows = leaves[self.view.number - 1] if self.view is not None and self.view.kind == "split" else 1
        filled = [
            entries_like(leaf, self.axes[number], max(1, rows)) if number in self.axes else leaf
            for number, leaf in enumerate(leaves)
        ]
        result, form = pytree.tree_flatten(self._run(filled, form))
        none = [leaf.narrow(axis, 0, 0) for leaf, axis in zip(result, self.after, strict=True)]
        return pytree.tree_unflatten(none, form), {}

    def _run(self, leaves: list[Any], form: pytree.TreeSpec) -> Any:
        if self.view is not None:
            number, axis = next(iter(self.axes.items()))
            shape = leaves[number].shape
            leaves = self.view.settled(leaves, shape[axis], shape[axis - 1] if axis else 1)
        args, kwargs = pytree.tree_unflatten(leaves, form)
        return self.operation(*args, **kwargs)


@dataclass(frozen=True)
class SlidingWindow:
    """An operation whose entry i reads the entries stride i to stride i + span of its first argument.

    operation: called with these entries of all windows, and the other arguments.   before: number of entries that stand
    before the first one.   value: their value.   batch: the batch axis of the first argument.

    State: the entries that the next windows read.
    """

    operation: Callable[..., Tensor]
    axis: int
    batch: int
    span: int
    stride: int = 1
    before: int = 0
    value: float = 0.0

    @property
    def wait(self) -> int:
        """Number of entries after the first one of a window that have to be there before it is read.

        A stride beyond the window waits for all entries up to the next window, so that what is kept begins there.
        """
        return max(self.span, self.stride - 1)

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any], state: States | None) -> tuple[Any, States]:
        x, *rest = args
        kept = (
            entries_like(x, self.axis, self.before, self.value)
            if state is None
            else state["window"].movedim(0, self.batch)
        )
        joined = torch.cat([kept, x], self.axis)
        entries = joined.shape[self.axis]
        count = (entries - self.wait - 1) // self.stride + 1 if entries > self.wait else 0
        if count > 0:
            read = (count - 1) * self.stride + self.span + 1
            result = self.operation(joined.narrow(self.axis, 0, read), *rest, **kwargs)
        else:
            zeros = entries_like(x, self.axis, self.span + 1)
            result = self.operation(zeros, *rest, **kwargs).narrow(self.axis, 0, 0)
        past = count * self.stride
        # A copy: an operation in place on the result must not change the state.
        window = joined.narrow(self.axis, past, entries - past).movedim(self.batch, 0).clone()
        return result, {"window": window}


@dataclass(frozen=True)
class LeadingEntries:
    """An operation that puts `count` entries before the first one of its input."""

    operation: Callable[..., Tensor]
    axis: int
    count: int

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any], state: States | None) -> tuple[Any, States]:
        y = self.operation(*args, **kwargs)
        return (y if state is None else y.narrow(self.axis, self.count, y.shape[self.axis] - self.count)), {}


@dataclass(frozen=True)
class Recurrence:
    """nn.RNN, nn.GRU or nn.LSTM in one direction, by a kernel a layer or by the ops.

    With proj_size the recurrent weights are those of what is projected: U R h for U (R h). Then h is not projected.

    State: h, and c of an LSTM; (B, layers, H) each.
    """

    operation: Any
    axis: int

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any], state: States | None) -> tuple[Any, States]:
        given = bound(self.operation, args, kwargs)
        x, hx = given["input"].movedim(self.axis, 1), given["hx"]
        initial = [hx] if isinstance(hx, Tensor) else list(hx)
        if state is not None:
            initial = [state[name].movedim(0, 1) for name, _ in zip("hc", initial, strict=False)]
        width, last, projections = len(given["params"]) // given["num_layers"], [], []
        if width % 2 and state is None:
            initial[0] = torch.zeros_like(initial[1])
        for layer in range(given["num_layers"]):
            weights = list(given["params"][width * layer : width * (layer + 1)])
            members = [member[layer] for member in initial]
            if width % 2:
                projections.append(weights.pop())
                weights[1] = weights[1] @ projections[-1]
            mode, by_op = _SCANS[self.operation]
            scan = partial(_by_kernel, mode) if _has_kernel(x, *weights, *members) else by_op
            x, after = scan(x, weights, members)
            x = torch.nn.functional.linear(x, projections[-1]) if projections else x
            last.append(after)
        ends = [torch.stack(members) for members in zip(*last, strict=True)]
        kept = {name: end.movedim(1, 0) for name, end in zip("hc", ends, strict=False)}
        if projections:
            ends[0] = ends[0] @ torch.stack(projections).mT
        return (x.movedim(1, self.axis), *ends), kept


def _has_kernel(*tensors: Tensor) -> bool:
    """Return whether one kernel can run all steps of a layer: float32 on a CPU, and no gradients."""
    if exactly() or not (plain(*tensors) and undirected()) or torch.is_autocast_enabled("cpu"):
        return False
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return False
    return all(tensor.dtype == torch.float32 and tensor.numel() and not tensor.is_neg() for tensor in tensors)


def _by_kernel(mode: str, x: Tensor, weights: list[Tensor], state: list[Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
    y, last = without_gradients(mode, x, [member[None] for member in state], weights, None)
    return y, tuple(member[0] for member in last)


def _gru(x: Tensor, weights: list[Tensor], state: list[Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
    y, last = gru(*GRU.operands(x, *weights), *state)
    return y, (last,)


def _lstm(x: Tensor, weights: list[Tensor], state: list[Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
    y, last = lstm(*LSTM.operands(x, *weights), torch.stack(state, 1))
    return y, last.unbind(1)


def _elman(
    nonlinearity: str, x: Tensor, weights: list[Tensor], state: list[Tensor]
) -> tuple[Tensor, tuple[Tensor, ...]]:
    y, last = elman(*Elman.operands(x, *weights), *state, nonlinearity=nonlinearity)
    return y, (last,)


_SCANS: dict[Any, tuple[str, Callable[..., tuple[Tensor, tuple[Tensor, ...]]]]] = {
    torch.ops.aten.gru.input: ("GRU", _gru),
    torch.ops.aten.lstm.input: ("LSTM", _lstm),
    torch.ops.aten.rnn_tanh.input: ("RNN_TANH", partial(_elman, "tanh")),
    torch.ops.aten.rnn_relu.input: ("RNN_RELU", partial(_elman, "relu")),
}


@dataclass(frozen=True)
class CarriedLoop:
    """torch's `scan`: a function that reads what is carried and a step, for each step. State: what is carried.

    batches: batch axis of each carried tensor.
    """

    operation: Callable[..., Any]
    batches: tuple[int, ...]

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any], state: States | None) -> tuple[Any, States]:
        function, carried, read, others = args
        names = {f"carried{number}": batch for number, batch in enumerate(self.batches)}
        if state is not None:
            carried = [state[name].movedim(0, batch) for name, batch in names.items()]
        steps, results = read[0].shape[0], []
        if isinstance(steps, torch.SymInt):  # a program of any number of steps
            results = self.operation(function, list(carried), list(read), tuple(others))
            last, results = results[: len(names)], list(results[len(names) :])
        else:
            last = carried
            for step in zip(*(x if steps else entries_like(x, 0, 1) for x in read), strict=True):
                made = function(*last, *step, *others)
                last = made[: len(names)]
                results.append(made[len(names) :])
            results = [torch.stack(each).narrow(0, 0, steps) for each in zip(*results, strict=True)]
            last = last if steps else carried
        # Copies: an operation in place on a result must not change the state.
        kept = {name: end.movedim(batch, 0).clone() for (name, batch), end in zip(names.items(), last, strict=True)}
        return [*last, *results], kept


@dataclass(frozen=True)
class LastEntry:
    """The last entry so far; zeros before the first one. State: that entry."""

    axis: int
    batch: int
    keepdim: bool

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any], state: States | None) -> tuple[Any, States]:
        x = args[0]
        last = entries_like(x, self.axis, 1) if state is None else state["last"].movedim(0, self.batch)
        last = torch.cat([last, x], self.axis).narrow(self.axis, x.shape[self.axis], 1)
        result = last if self.keepdim else last.squeeze(self.axis)
        return result, {"last": last.movedim(self.batch, 0).clone()}


@dataclass(frozen=True)
class RunningSum:
    """Sums of all entries so far, at each entry. State: the sum up to the last one."""

    operation: Callable[..., Tensor]
    axis: int
    batch: int

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any], state: States | None) -> tuple[Any, States]:
        y = self.operation(*args, **kwargs)
        total = entries_like(y, self.axis, 1) if state is None else state["sum"].movedim(0, self.batch)
        y = y + total
        total = torch.cat([total, y], self.axis).narrow(self.axis, y.shape[self.axis], 1)
        return y, {"sum": total.movedim(self.batch, 0).clone()}


@dataclass(frozen=True)
class RunningMean:
    """The mean of all entries so far; NaN before the first one. State: their sum and their number."""

    axis: int
    batch: int
    keepdim: bool

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any], state: States | None) -> tuple[Any, States]:
        x = args[0]
        total = x.sum(self.axis, keepdim=True)
        count = torch.full_like(total, x.shape[self.axis])
        if state is not None:
            total = total + state["sum"].movedim(0, self.batch)
            count = count + state["count"].movedim(0, self.batch)
        mean = total / count
        kept = {"sum": total.movedim(self.batch, 0), "count": count.movedim(self.batch, 0)}
        return mean if self.keepdim else mean.squeeze(self.axis), kept


@dataclass(frozen=True)
class FilledTensor:
    """An operation that reads the form of a tensor and none of its numbers."""

    operation: Callable[..., Tensor]

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any], state: States | None) -> tuple[Any, States]:
        return self.operation(*args, **kwargs), {}


@dataclass(frozen=True)
class HeldPart:
    """A part some of whose arguments are held back. State: that of the part, and the entries that are held.

    holds: by the number of the argument among all leaves of the arguments.
    """

    part: Part
    holds: Mapping[int, SlidingWindow]

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any], state: States | None) -> tuple[Any, States]:
        leaves, form = pytree.tree_flatten((args, kwargs))
        held: States = {}
        for number, hold in self.holds.items():
            name = f"held{number}"
            leaves[number], kept = hold((leaves[number],), {}, None if state is None else {"window": state[name]})
            held[name] = kept["window"]
        args, kwargs = pytree.tree_unflatten(leaves, form)
        result, after = self.part(args, kwargs, state)
        return result, after | held
