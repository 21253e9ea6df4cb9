"""How each operation of a module can run on pieces of a sequence. It is found by one run over an example."""

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import lcm, prod
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from scanl.errors import ConfigError
from scanl.hub.streaming.parts import (
    CarriedLoop,
    FilledTensor,
    HeldPart,
    LastEntry,
    LeadingEntries,
    Part,
    Recurrence,
    RunningMean,
    RunningSum,
    SlidingWindow,
    StepwisePart,
    ViewSize,
    bound,
)

LEAST_ENTRIES = 3  # of each tensor of the example: a shift by one step then leaves two to compare


class UnstreamableError(ConfigError):
    """A part of a module that has no streaming form.

    place: number of the operation.   ahead: whether the reason is that it reads later steps.   multiple: an example of
    so many steps, or twice as many, could tell more; 0 if none could.   time: the axis that was tried.
    """

    time = 0

    def __init__(self, message: str, place: int, *, ahead: bool = False, multiple: int = 0) -> None:
        super().__init__(message)
        self.place, self.ahead, self.multiple = place, ahead, multiple


@dataclass(frozen=True)
class Entries:
    """A tensor with a time axis. After n steps of the input it has (n + lead) // stride entries in a stream.

    ahead: the part that last put entries behind the end; empty if none did.   joined: the axis has the entries of the
    first row, then those of the second one, and so on.
    """

    axis: int
    batch: int
    lead: int = 0
    stride: int = 1
    ahead: str = ""
    joined: bool = False


@dataclass(frozen=True)
class EndResult:
    """A tensor that depends on the input and has no time axis, such as the last state of a GRU."""


Fact = Entries | EndResult | None


class Survey:
    """Parts of a graph of operations, found by running it over x, whose axis `time` is time.

    parts: by operation.   outputs: facts of the results.   rows_first: whether the first axis of each result is that of
    the batch.   Raises UnstreamableError for the first operation that has
    none.
    """

    def __init__(self, module: fx.GraphModule, x: Tensor, time: int) -> None:
        self.parts: dict[fx.Node, Part] = {}
        self._facts: dict[fx.Node, Any] = {}
        self._values: dict[fx.Node, Any] = {}
        self._steps, self._rows = x.shape[time], x.shape[int(time == 0)]
        self.outputs: list[Fact] = []
        self.holds: list[SlidingWindow | None] = []
        self.rows_first = False
        for place, node in enumerate(module.graph.nodes):
            self._node, self._place = node, place
            match node.op:
                case "placeholder":
                    self._values[node], self._facts[node] = x, Entries(time, _batch(node, node.meta["val"], time))
                case "get_attr":
                    self._values[node] = operator.attrgetter(node.target)(module)
                    self._facts[node] = None
                case "output":
                    values = pytree.tree_leaves(self._of(self._values, node.args[0]))
                    self.outputs = pytree.tree_leaves(self._of(self._facts, node.args[0]))
                    self.rows_first = all(map(_has_rows_first, self.outputs, pytree.tree_leaves(node.args[0])))
                    self.holds = [
                        self._hold_output(fact, value) for fact, value in zip(self.outputs, values, strict=True)
                    ]
                case "call_function":
                    self._call(node)
                case _:
                    raise self._refused("is a call that torch.export left whole")

    @property
    def stride(self) -> int:
        """Number of steps between two entries of the results, which the length of a whole sequence has to divide by."""
        facts = [fact for fact in pytree.tree_leaves(list(self._facts.values())) if isinstance(fact, Entries)]
        return lcm(*(fact.stride for fact in facts))

    def _of(self, found: dict[fx.Node, Any], arguments: Any) -> Any:
        return map_arg(arguments, found.__getitem__)

    def _call(self, node: fx.Node) -> None:
        args, kwargs = self._of(self._values, node.args), self._of(self._values, node.kwargs)
        facts = self._of(self._facts, node.args), self._of(self._facts, node.kwargs)
        known = [fact for fact in pytree.tree_leaves(facts) if isinstance(fact, Entries | EndResult)]
        result = node.target(*args, **kwargs)  # pyright: ignore[reportCallIssue]
        self._values[node] = result
        if node.target is operator.getitem:
            self._facts[node] = facts[0][0][args[1]] if facts[0][0] is not None else None
        elif not known or _is_number(result):
            self._facts[node] = pytree.tree_map(lambda _: None, result)
        elif not any(isinstance(fact, Entries) for fact in known):
            self._facts[node] = pytree.tree_map(lambda _: EndResult(), result)
        else:
            holds, facts = self._aligned(args, kwargs, facts)
            rule = None if _any_joined(known) else _RULES.get(_name(node))
            made = None if rule is None else rule(self, args, kwargs, facts)
            part, fact = self._stepwise(args, kwargs, facts, result) if made is None else made
            self.parts[node], self._facts[node] = HeldPart(part, holds) if holds else part, fact

    def _aligned(self, args: Any, kwargs: Any, facts: Any) -> tuple[dict[int, SlidingWindow], Any]:
        """Return which arguments have to be held back until the others have as many entries, and the facts after it.

        The end of an argument counts where the result is one of the end: what the whole leaves out is then held back.
        """
        values, known = pytree.tree_leaves((args, kwargs)), pytree.tree_leaves(facts)
        timed = {number: fact for number, fact in enumerate(known) if isinstance(fact, Entries)}
        if len({fact.stride for fact in timed.values()}) > 1:
            raise self._refused("joins entries of different lengths in time")
        end = _name(self._node) in _READ_THE_END
        leads = [
            fact.lead + end * fact.stride * min(0, self._missing(values[number], fact))
            for number, fact in timed.items()
        ]
        ahead = next((fact.ahead for fact in timed.values() if fact.ahead), "")
        if len(set(leads)) > 1 and _any_joined(list(timed.values())):
            raise self._refused("joins entries of different times, and those of several sequences")
        holds = {number: hold for number, fact in timed.items() if (hold := _hold(fact, min(leads))) is not None}
        after = [
            replace(fact, lead=min(leads), ahead=ahead) if number in timed else fact
            for number, fact in enumerate(known)
        ]
        return holds, pytree.tree_unflatten(after, pytree.tree_structure(facts))

    def _stepwise(self, args: Any, kwargs: Any, facts: Any, result: Any) -> tuple[Part, Any]:
        """Return the part of an operation that has no rule: it must give the same for each entry by itself.

        It runs on random numbers: on all entries, on all but the first and on all but the last one.
        """
        known = pytree.tree_leaves(facts)
        if any(isinstance(fact, EndResult) for fact in known):
            raise self._refused("uses the end of the sequence at every step", ahead=True)
        leaves, form = pytree.tree_flatten((args, kwargs))
        timed = {number: fact for number, fact in enumerate(known) if isinstance(fact, Entries)}
        fact = next(iter(timed.values()))
        axes = {number: fact.axis for number, fact in timed.items()}
        counts = {leaves[number].shape[axis] for number, axis in axes.items()}
        if len(counts) > 1 or len({fact.joined for fact in timed.values()}) > 1:
            raise self._refused(f"joins tensors of {' and '.join(map(str, sorted(counts)))} entries", ahead=True)
        count = counts.pop() // (self._rows if fact.joined else 1)
        if count < LEAST_ENTRIES:
            reason = f"has {count} entries of the example, expected at least {LEAST_ENTRIES}; give a longer one"
            message = f"convert: {described(self._node)} {reason}"
            raise UnstreamableError(message, self._place, multiple=10 * self._steps)
        drawn = torch.Generator().manual_seed(0)
        probe = [_drawn(leaf, drawn) if number in axes else leaf for number, leaf in enumerate(leaves)]
        view = self._view(leaves, timed, result) if _name(self._node) in _VIEWS else None
        part = StepwisePart(self._node.target, axes, (), view)  # pyright: ignore[reportArgumentType]
        try:
            whole, late, early = (
                pytree.tree_leaves(part(*self._cut(probe, form, timed, start, count - kept), None)[0])
                for start, kept in ((0, 0), (1, 1), (0, 1))
            )
        except (RuntimeError, IndexError) as error:
            raise self._refused(f"has no form for fewer steps: {str(error).splitlines()[0]}") from error
        values = pytree.tree_leaves(self._node.meta["val"])
        found = [
            self._fact_after(fact, tensors, value)
            for tensors, value in zip(zip(whole, late, early, strict=True), values, strict=True)
        ]
        after = tuple(each.axis for each in found)
        return replace(part, after=after), pytree.tree_unflatten(found, pytree.tree_structure(result))

    def _cut(
        self, leaves: list[Any], form: pytree.TreeSpec, facts: dict[int, Entries], start: int, count: int
    ) -> tuple[Any, Any]:
        """Return the arguments with some of the entries."""
        cut = [
            self._some(leaf, facts[number].axis, facts[number].joined, start, count) if number in facts else leaf
            for number, leaf in enumerate(leaves)
        ]
        return pytree.tree_unflatten(cut, form)

    def _some(self, tensor: Tensor, axis: int, joined: bool, start: int, count: int) -> Tensor:
        if not joined:
            return tensor.narrow(axis, start, count).clone()
        rows = tensor.unflatten(axis, (self._rows, -1))
        return rows.narrow(axis + 1, start, count).flatten(axis, axis + 1)

    def _fact_after(self, fact: Entries, tensors: tuple[Tensor, ...], value: Any) -> Entries:
        """Return the fact of a result, from that on all entries, on all but the first, and on all but the last one."""
        whole, late, early = tensors
        axes = [axis for axis in range(whole.ndim) if whole.shape[axis] != early.shape[axis]]
        if len(axes) != 1:
            raise self._refused("mixes all steps of the sequence", ahead=True)
        (axis,) = axes
        lost = whole.shape[axis] - early.shape[axis]
        joined = lost > 1
        if lost not in (1, self._rows):
            raise self._refused("moves entries from the time axis to another one")
        count = whole.shape[axis] // lost
        pieces = (self._some(whole, axis, joined, start, count - 1) for start in (1, 0))
        if not all(map(same, pieces, (late, early))):
            raise self._refused("mixes steps of the sequence, and is no part that has a streaming form", ahead=True)
        return replace(fact, axis=axis, joined=joined, batch=axis if joined else _batch(self._node, value, axis))

    def _view(self, leaves: list[Any], facts: dict[int, Entries], result: Tensor) -> ViewSize | None:
        """Return which argument of a view is the number of entries: a program may hold that of its example."""
        ((number, fact),) = facts.items()
        shape, axis, rows = leaves[number].shape, fact.axis, self._rows
        if _name(self._node) == "expand":
            return ViewSize(number + 1 + axis + result.ndim - len(shape), "same")
        if _name(self._node) == "unflatten":
            return ViewSize(number + 3, "split") if fact.joined and leaves[number + 1] % len(shape) == axis else None
        kinds = {"same": (shape[axis : axis + 1], shape[:axis])}
        if fact.joined:
            kinds["split"] = ((rows, shape[axis] // rows), shape[:axis])
        elif axis and fact.batch == axis - 1:
            kinds["joined"] = ((rows * shape[axis],), shape[: axis - 1])
        for kind, (sizes, before) in reversed(kinds.items()):
            for place in range(result.ndim):
                if tuple(result.shape[place : place + len(sizes)]) == tuple(sizes) and prod(
                    result.shape[:place]
                ) == prod(before):
                    return ViewSize(number + place + len(sizes), kind)
        raise self._refused("joins the time axis and another one")

    def _hold_output(self, fact: Fact, value: Any) -> SlidingWindow | None:
        """Return what holds back the entries of a result that the whole sequence leaves out at the end."""
        if self._steps % self.stride:
            message = f"convert: example has {self._steps} steps, expected a multiple of {self.stride}"
            raise UnstreamableError(message, self._place, multiple=self.stride)
        if not isinstance(fact, Entries):
            return None
        if fact.joined:
            raise self._refused("has the steps of all sequences in one axis", part="the result")
        missing = self._missing(value, fact)
        if missing > 0:
            reason = f"reads {missing * fact.stride} steps ahead"
            raise self._refused(reason, part=fact.ahead or "the result", ahead=True)
        return _hold(fact, fact.lead + fact.stride * missing)

    def _missing(self, value: Tensor, fact: Entries) -> int:
        """Return how many entries more the whole sequence has than a stream has after its last step."""
        return value.shape[fact.axis] // (self._rows if fact.joined else 1) - (self._steps + fact.lead) // fact.stride

    def _refused(self, reason: str, *, part: str = "", ahead: bool = False) -> UnstreamableError:
        return UnstreamableError(f"convert: {part or described(self._node)} {reason}", self._place, ahead=ahead)

    # ------------------------------------------------------------------------------------------------------- rules

    def _window(
        self,
        operation: Callable[..., Tensor],
        fact: Entries,
        *,
        span: int,
        stride: int = 1,
        before: int = 0,
        after: int = 0,
        value: float = 0.0,
    ) -> tuple[Part, Entries]:
        part = SlidingWindow(operation, fact.axis, fact.batch, span, stride, before, value)
        lead = fact.lead + fact.stride * (before - part.wait - 1 + stride)
        ahead = described(self._node) if after > 0 else fact.ahead
        return part, replace(fact, lead=lead, stride=fact.stride * stride, ahead=ahead)

    def _convolution(self, args: Any, kwargs: Any, facts: Any) -> tuple[Part, Entries] | None:
        target: Any = self._node.target
        given, known = bound(target, args, kwargs), bound(target, *facts)
        fact, x, weight = known["input"], given["input"], given["weight"]
        if not isinstance(fact, Entries) or any(
            isinstance(other, Entries) for name, other in known.items() if name != "input"
        ):
            raise self._refused("has weights that are different at each step")
        at = fact.axis - 2
        spatial = weight.ndim - 2
        if fact.axis == 0:
            return None
        if at < 0 or x.ndim != weight.ndim:
            raise self._refused("has the time axis among its channels or rows")
        if given.get("transposed"):
            raise self._refused("is a transposed convolution")
        stride, dilation = (_each(given[name], spatial) for name in ("stride", "dilation"))
        span = [(size - 1) * gap for size, gap in zip(weight.shape[2:], dilation, strict=True)]
        if isinstance(given["padding"], str):
            valid = given["padding"] == "valid"
            before = [0 if valid else width // 2 for width in span]
            after = [0 if valid else width - width // 2 for width in span]
            if any(left != right for place, (left, right) in enumerate(zip(before, after, strict=True)) if place != at):
                raise self._refused("is padded on one side more than on the other")
        else:
            before = after = _each(given["padding"], spatial)
        inner = [0 if place == at else width for place, width in enumerate(before)]
        whole = getattr(torch.ops.aten, _name(self._node)).default

        def operation(x: Tensor, *rest: Any, **named: Any) -> Tensor:
            return whole(**{**bound(target, (x, *rest), named), "padding": inner})

        return self._window(operation, fact, span=span[at], stride=stride[at], before=before[at], after=after[at])

    def _pool(self, args: Any, kwargs: Any, facts: Any) -> tuple[Part, Entries] | None:
        target: Any = self._node.target
        given, fact = bound(target, args, kwargs), facts[0][0]
        spatial = int(_name(self._node)[-2])
        at = fact.axis - (given["self"].ndim - spatial)
        if at < 0:
            return None
        size, padding = _each(given["kernel_size"], spatial), _each(given["padding"], spatial)
        stride = _each(given["stride"] or size, spatial)
        dilation = _each(given.get("dilation", 1), spatial)
        if given["ceil_mode"] or padding[at]:
            raise self._refused("reads beyond the ends of the sequence (padding or ceil_mode)", ahead=True)
        return self._window(target, fact, span=(size[at] - 1) * dilation[at], stride=stride[at])

    def _unfold(self, args: Any, kwargs: Any, facts: Any) -> tuple[Part, Entries] | None:
        given, fact = bound(self._node.target, args, kwargs), facts[0][0]
        if given["dimension"] % given["self"].ndim != fact.axis:
            return None
        return self._window(self._node.target, fact, span=given["size"] - 1, stride=given["step"])  # pyright: ignore

    def _pad(self, args: Any, kwargs: Any, facts: Any) -> tuple[Part, Entries] | None:
        target: Any = self._node.target
        given, fact = bound(target, args, kwargs), facts[0][0]
        pads, place = list(given["pad"]), 2 * (given["self"].ndim - 1 - fact.axis)
        left, right = pads[place : place + 2] if place < len(pads) else (0, 0)
        if not left and not right:
            return None
        if given.get("mode", "constant") != "constant":
            raise self._refused(f"pads the time axis by {given['mode']}")
        if left < 0 or right < 0:
            raise self._refused("cuts the time axis by a negative pad")
        pads[place : place + 2] = [left, 0][: len(pads[place : place + 2])]

        def operation(x: Tensor, *rest: Any, **named: Any) -> Tensor:
            return target(**{**bound(target, (x, *rest), named), "pad": pads})

        ahead = described(self._node) if right else fact.ahead
        return LeadingEntries(operation, fact.axis, left), replace(
            fact, lead=fact.lead + fact.stride * left, ahead=ahead
        )

    def _cat(self, args: Any, kwargs: Any, facts: Any) -> tuple[Part, Entries] | None:
        given, known = bound(self._node.target, args, kwargs), bound(self._node.target, *facts)["tensors"]
        timed = [fact for fact in known if isinstance(fact, Entries)]
        if given["dim"] % given["tensors"][0].ndim != timed[0].axis:
            return None
        if len(timed) > 1 or known[-1] is not timed[0]:
            raise self._refused("puts something behind the sequence", ahead=True)
        (fact,) = timed
        count = sum(tensor.shape[fact.axis] for tensor in given["tensors"][:-1])
        part = LeadingEntries(self._node.target, fact.axis, count)  # pyright: ignore[reportArgumentType]
        return part, replace(fact, lead=fact.lead + fact.stride * count)

    def _slice(self, args: Any, kwargs: Any, facts: Any) -> tuple[Part, Fact] | None:
        given, fact = bound(self._node.target, args, kwargs), facts[0][0]
        axis, count = given["dim"] % given["self"].ndim, given["self"].shape[fact.axis]
        if axis != fact.axis:
            return None
        first, end, step = slice(given["start"], given["end"], given["step"]).indices(count)
        if first == count - 1:
            return LastEntry(axis, fact.batch, keepdim=True), EndResult()
        if (given["start"] or 0) < 0 or first > count // 2:
            raise self._refused("keeps the last steps alone")
        if count - end >= self._missing(given["self"], fact):
            fact = replace(fact, ahead="")
        if first == 0 and step == 1:
            return StepwisePart(lambda x, *_, **__: x, {0: axis}, (axis,)), fact

        def operation(x: Tensor, *_: Any, **__: Any) -> Tensor:
            kept = x.narrow(axis, first, x.shape[axis] - first)
            return kept[(slice(None),) * axis + (slice(None, None, step),)]

        return self._window(operation, fact, span=first, stride=step)

    def _select(self, args: Any, kwargs: Any, facts: Any) -> tuple[Part, Fact] | None:
        given, fact = bound(self._node.target, args, kwargs), facts[0][0]
        axis, count = given["dim"] % given["self"].ndim, given["self"].shape[fact.axis]
        if axis != fact.axis:
            return None
        if given["index"] % count != count - 1:
            raise self._refused("takes one step of the sequence")
        return LastEntry(axis, fact.batch, keepdim=False), EndResult()

    def _mean(self, args: Any, kwargs: Any, facts: Any) -> tuple[Part, Fact] | None:
        given, fact = bound(self._node.target, args, kwargs), facts[0][0]
        axes = [axis % given["self"].ndim for axis in given["dim"] or range(given["self"].ndim)]
        if fact.axis not in axes:
            return None
        if len(axes) > 1:
            raise self._refused("takes the mean over time and another axis; take them one after the other")
        return RunningMean(fact.axis, fact.batch, given["keepdim"]), EndResult()

    def _made_new(self, args: Any, kwargs: Any, facts: Any) -> tuple[Part, Fact]:
        return FilledTensor(self._node.target), None  # pyright: ignore[reportArgumentType]

    def _cumsum(self, args: Any, kwargs: Any, facts: Any) -> tuple[Part, Fact] | None:
        given, fact = bound(self._node.target, args, kwargs), facts[0][0]
        if given["dim"] % given["self"].ndim != fact.axis:
            return None
        return RunningSum(self._node.target, fact.axis, fact.batch), fact  # pyright: ignore[reportArgumentType]

    def _recurrence(self, args: Any, kwargs: Any, facts: Any) -> tuple[Part, Any]:
        given, known = bound(self._node.target, args, kwargs), bound(self._node.target, *facts)
        fact = known["input"]
        if "input" not in given or "data" in given:
            raise self._refused("reads packed sequences")
        if any(other is not None for name in ("hx", "params") for other in pytree.tree_leaves(known[name])):
            raise self._refused("begins with the end of another part, so it waits for the whole sequence", ahead=True)
        if not isinstance(fact, Entries) or fact.axis != (1 if given["batch_first"] else 0):
            raise self._refused("has another time axis")
        if given["bidirectional"]:
            raise self._refused("reads later steps (bidirectional)", ahead=True)
        members = len(given["hx"]) if isinstance(given["hx"], list | tuple) else 1
        if len(given["params"]) // given["num_layers"] % 2 and given["hx"][0].any():
            raise self._refused("begins with a projected state (proj_size) that is not zero")
        return Recurrence(self._node.target, fact.axis), (fact, *[EndResult()] * members)

    def _scan(self, args: Any, kwargs: Any, facts: Any) -> tuple[Part, Any]:
        _, initial, read, others = facts[0]
        if any(fact is not None for fact in (*initial, *others)):
            raise self._refused("reads the whole sequence at each step", ahead=True)
        if not all(isinstance(fact, Entries) and fact.axis == 0 for fact in read):
            raise self._refused("has another time axis")
        batches = tuple(_batch(self._node, node.meta["val"], -1) for node in self._node.args[1])  # pyright: ignore
        results = [replace(read[0], batch=_batch(self._node, value, 0)) for value in self._node.meta["val"]]
        ends = [EndResult()] * len(batches)
        return CarriedLoop(self._node.target, batches), [*ends, *results[len(batches) :]]  # pyright: ignore


_VIEWS = ("view", "reshape", "_unsafe_view", "expand", "unflatten")
# Operations with a result that depends on the last entry.
_READ_THE_END = {"gru", "lstm", "rnn_tanh", "rnn_relu", "slice", "select", "mean", "scan"}
_RULES: dict[str, Callable[[Survey, Any, Any, Any], tuple[Part, Any] | None]] = {
    **dict.fromkeys(("conv1d", "conv2d", "conv3d", "convolution"), Survey._convolution),
    **dict.fromkeys(("max_pool1d", "avg_pool1d", "max_pool2d", "avg_pool2d"), Survey._pool),
    **dict.fromkeys(("pad", "constant_pad_nd"), Survey._pad),
    **dict.fromkeys(("gru", "lstm", "rnn_tanh", "rnn_relu"), Survey._recurrence),
    "scan": Survey._scan,
    "unfold": Survey._unfold,
    "cat": Survey._cat,
    "slice": Survey._slice,
    "select": Survey._select,
    "cumsum": Survey._cumsum,
    "mean": Survey._mean,
    **dict.fromkeys(("new_zeros", "new_ones", "new_full", "new_empty"), Survey._made_new),
}


def _any_joined(facts: list[Any]) -> bool:
    return any(isinstance(fact, Entries) and fact.joined for fact in facts)


def _hold(fact: Entries, lead: int) -> SlidingWindow | None:
    """Return what holds back entries until a stream has so few of them; None if it has."""
    count, axis = (fact.lead - lead) // fact.stride, fact.axis
    if count == 0:
        return None
    return SlidingWindow(lambda x: x.narrow(axis, 0, x.shape[axis] - count), axis, fact.batch, count)


def described(node: fx.Node) -> str:
    """Return the name of the module that an operation is of, and its class; or the name of the operation."""
    stack = list(node.meta.get("nn_module_stack", {}).values())
    path, kind = stack[-1] if stack else ("", "")
    _, _, name = str(kind).rpartition(".")
    if not path and not str(kind).startswith("torch.nn."):
        return f"operation {_name(node)}"
    return f"{path} ({name})" if path else name


def path_of(node: fx.Node) -> str:
    """Return the name of the module that an operation is of, or the name of the operation."""
    stack = list(node.meta.get("nn_module_stack", {}).values())
    return (stack[-1][0] if stack else "") or node.name


def _name(node: fx.Node) -> str:
    schema = getattr(node.target, "_schema", None)
    return getattr(node.target, "__name__", "") if schema is None else schema.name.partition("::")[2]


def _is_number(result: Any) -> bool:
    return not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(result))


def _each(value: Any, count: int) -> list[int]:
    values = [value] if isinstance(value, int) else list(value)
    return values * count if len(values) == 1 else values


def _batch(node: fx.Node, value: Any, time: int) -> int:
    """Return the batch axis: the one whose size is open in the program, or else the first that is not time."""
    sizes = [] if value is None else value.shape
    opened = [axis for axis, size in enumerate(sizes) if axis != time and not isinstance(size, int)]
    return opened[0] if len(opened) == 1 else int(time == 0)


def _has_rows_first(fact: Fact, node: fx.Node) -> bool:
    if isinstance(fact, Entries):
        return fact.batch == 0
    open_axes = [axis for axis, size in enumerate(node.meta["val"].shape) if not isinstance(size, int)]
    return isinstance(fact, EndResult) and open_axes == [0]


def _drawn(leaf: Tensor, generator: torch.Generator) -> Tensor:
    """Return random numbers above 0 in the place of numbers; whole numbers may be indices and stay."""
    if not leaf.is_floating_point():
        return leaf.clone()
    return torch.rand(leaf.shape, generator=generator).to(leaf) + 0.1


def same(one: Tensor, other: Tensor) -> bool:
    """Return whether two results are equal within rounding."""
    if one.shape != other.shape:
        return False
    if not one.is_floating_point():
        return torch.equal(one, other)
    tolerance = torch.finfo(one.dtype).eps ** 0.5
    return torch.allclose(one, other, rtol=tolerance, atol=tolerance, equal_nan=True)


def named_parts(parts: dict[fx.Node, Part]) -> Iterator[tuple[fx.Node, str]]:
    """Yield each operation with the name of its part's state."""
    names: set[str] = set()
    for node in parts:
        name = path_of(node)
        name = f"{name}.{node.name}" if name in names else name
        names.add(name)
        yield node, name
