"""The streaming form of a module."""

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from scanl.errors import ConfigError, ShapeError
from scanl.hub.streaming.parts import Part
from scanl.hub.streaming.survey import Entries, Survey, named_parts, same
from scanl.layers.state import Device, DType
from scanl.models.decoding.compiled_step import CompiledStep


@dataclass(frozen=True)
class _Result:
    """The place of an earlier operation's result among the arguments of another."""

    number: int


@dataclass(frozen=True)
class _Operation:
    """One operation.

    arguments: returns them, from the results of earlier operations.   part: None for an operation that a stream runs as
    the module does.   name: of the part's state.   parameter: name of the parameter or buffer that this is.
    """

    target: Any
    arguments: Callable[[Sequence[Any]], tuple[tuple[Any, ...], dict[str, Any]]]
    part: Part | None
    name: str
    parameter: str = ""


def _operations(module: fx.GraphModule, parts: dict[fx.Node, Part]) -> Iterator[_Operation]:
    places = {node: _Result(number) for number, node in enumerate(module.graph.nodes)}
    names = dict(named_parts(parts))
    for node in module.graph.nodes:
        args, kwargs = pytree.tree_map_only(fx.Node, places.__getitem__, (node.args, node.kwargs))
        parameter = node.target if node.op == "get_attr" else ""
        target = node.target if node.op == "call_function" else None
        yield _Operation(target, _filler((args, kwargs)), parts.get(node), names.get(node, ""), parameter)


def _filler(template: Any) -> Callable[[Sequence[Any]], Any]:
    """Return the function that puts values in the places of `_Result`. As Python's own code it takes a microsecond."""
    constants: list[Any] = []
    return eval(f"lambda values: {_expression(template, constants)}", {"constants": constants})


def _expression(template: Any, constants: list[Any]) -> str:
    match template:
        case _Result(number):
            return f"values[{number}]"
        case tuple() if type(template) is tuple:
            return f"({''.join(f'{_expression(member, constants)}, ' for member in template)})"
        case list():
            return f"[{', '.join(_expression(member, constants) for member in template)}]"
        case dict() if all(isinstance(key, str) for key in template):
            return f"{{{', '.join(f'{key!r}: {_expression(member, constants)}' for key, member in template.items())}}}"
    if any(isinstance(leaf, _Result) for leaf in pytree.tree_leaves(template)):
        leaves, form = pytree.tree_flatten(template)
        constants.append(form)
        return f"constants[{len(constants) - 1}].unflatten({_expression(leaves, constants)})"
    constants.append(template)
    return f"constants[{len(constants) - 1}]"


def _batch_axis(x: Tensor, time: int) -> int | None:
    return None if time == 0 and x.ndim == 2 and x.is_floating_point() else int(time == 0)


def _weights(program: fx.GraphModule) -> nn.Module:
    """Return modules that hold the tensors of a program under their names, and nothing else of it."""
    root = nn.Module()
    for node in program.graph.find_nodes(op="get_attr"):
        *path, name = str(node.target).split(".")
        holder = root
        for part in path:
            if part not in holder._modules:
                holder.add_module(part, nn.Module())
            holder = holder._modules[part]
            assert holder is not None
        tensor = operator.attrgetter(str(node.target))(program)
        if isinstance(tensor, nn.Module):  # the function of a loop
            holder.add_module(name, tensor)
        elif isinstance(tensor, nn.Parameter):
            holder.register_parameter(name, tensor)
        else:
            holder.register_buffer(name, tensor)
    return root


class StreamingModule(nn.Module):
    """A module that reads a sequence in pieces: y, state = stream(piece, state).

        y_1, ..., y_n = module(x_1, ..., x_n)    and    y_t, s_t = stream(x_t, s_{t-1})

    Its parameters are those of the module, and gradients reach them. It computes what the module computes in its mode
    `eval`, and the results for the pieces, one behind the other, are the result for the whole sequence.

    time: the time axis of the input.   batch: its batch axis, the first other one; None for real numbers (T, D), which
    are one sequence.   stride: number of steps for which each
    result with a time axis has one entry more, or a whole number of them: pieces may be of any length, and a whole
    sequence has a multiple of it. Results without a time axis are those at the end of the piece.

    The state is a dict of tensors, batch first: what each recurrence and each window keeps.

    After some pieces of `stride` steps without gradients, such a piece is one kernel of the CPU, within rounding.
    """

    def __init__(self, module: fx.GraphModule, form: pytree.TreeSpec, x: Tensor, time: int) -> None:
        super().__init__()
        with torch.no_grad():
            survey = Survey(module, x, time)
        self.module, self.time, self.stride = _weights(module), time, survey.stride
        self._operations = list(_operations(module, survey.parts))
        self._joined = _filler(pytree.tree_unflatten([_Result(number) for number in range(form.num_leaves)], form))
        self._example, self.batch = x, _batch_axis(x, time)
        self._fixed = [(axis, size) for axis, size in enumerate(x.shape) if axis not in (time, self.batch)]
        self._outputs, self._holds = survey.outputs, survey.holds
        rows_first = (self.batch is None and self.stride == 1) or (self.batch == 0 and survey.rows_first)
        self._compiled = CompiledStep(self, lambda x: x, self._run, self.piece) if rows_first else None
        self._keys: dict[str, list[str]] = {}
        with torch.no_grad():
            for name in self.init_state(1 if self.batch is None else x.shape[self.batch]):
                part, _, key = name.rpartition(".")
                self._keys.setdefault(part, []).append(key)

    def init_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> dict[str, Tensor]:
        """Return the state before the first step. device, dtype: None for those of the module."""
        shape = [*self._example.shape]
        shape[self.time] = 0
        if self.batch is not None:
            shape[self.batch] = batch_size
        elif batch_size != 1:
            raise ConfigError(f"stream: batch_size is {batch_size}, expected 1: the module reads one sequence")
        state = self._run(torch.zeros(shape, dtype=self._example.dtype, device=device or self._device()), None)[1]
        return {
            name: part if dtype is None or not part.is_floating_point() else part.to(dtype)
            for name, part in state.items()
        }

    def forward(self, x: Tensor, state: dict[str, Tensor] | None = None) -> tuple[Any, dict[str, Tensor]]:
        """Return the result for a piece, and the state after it. state: None before the first piece.

        Raises ShapeError unless x has the sizes of the example on all axes but time and batch.
        """
        if x.ndim != self._example.ndim or any(x.shape[axis] != size for axis, size in self._fixed):
            sizes = [
                "T" if axis == self.time else "B" if axis == self.batch else size
                for axis, size in enumerate(self._example.shape)
            ]
            raise ShapeError(f"stream: x has shape {tuple(x.shape)}, expected ({', '.join(map(str, sizes))})")
        compiled = self._compiled
        one = type(x) is Tensor and state is not None and x.shape[self.time] == self.stride
        if one and compiled is not None and compiled.pays(len(x)):
            return compiled(x, state)
        return self._run(x, state)

    def piece(self, batch_size: int) -> Tensor:
        """Return the first steps of a sequence of the example, up to one result, for each of some rows."""
        first = self._example.narrow(self.time, 0, self.stride)
        return first if self.batch is None else first.narrow(self.batch, 0, 1).expand(batch_size, *first.shape[1:])

    def example(self) -> Tensor:
        """Return the input from which the stream was made."""
        return self._example

    def joins(self, pieces: Sequence[Any], whole: Any) -> bool:
        """Return whether results for pieces, one behind the other, are the result for the whole, within rounding."""
        parts = zip(*map(pytree.tree_leaves, pieces), strict=True)
        return all(
            same(torch.cat(part, fact.axis) if isinstance(fact, Entries) else part[-1], leaf)
            for fact, part, leaf in zip(self._outputs, parts, pytree.tree_leaves(whole), strict=True)
        )

    def _device(self) -> torch.device:
        return next(
            (tensor.device for tensor in (*self.module.parameters(), *self.module.buffers())), torch.device("cpu")
        )

    def _run(self, x: Tensor, state: dict[str, Tensor] | None) -> tuple[Any, dict[str, Tensor]]:
        values: list[Any] = []
        after: dict[str, Tensor] = {}
        for operation in self._operations:
            args, kwargs = operation.arguments(values)
            if operation.parameter:
                values.append(operator.attrgetter(operation.parameter)(self.module))
            elif (
                operation.target is None
            ):  # the input has no arguments, and the results are the one of the last operation
                values.append(args[0] if args else x)
            elif operation.part is None:
                values.append(operation.target(*args, **kwargs))
            else:
                name = operation.name
                own = None if state is None else {key: state[f"{name}.{key}"] for key in self._keys.get(name, ())}
                result, kept = operation.part(args, kwargs, own)
                values.append(result)
                after |= {f"{name}.{key}": tensor for key, tensor in kept.items()}
        results = pytree.tree_leaves(values[-1])
        for number, hold in enumerate(self._holds):
            if hold is not None:
                name = f"result{number}.window"
                results[number], kept = hold((results[number],), {}, None if state is None else {"window": state[name]})
                after[name] = kept["window"]
        return self._joined(results), after
