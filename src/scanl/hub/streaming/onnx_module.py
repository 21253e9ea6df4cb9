"""A module of torch made of an ONNX file: its operators run one by one."""

import importlib.util
import operator
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.errors import ConfigError

ANY_SIZE = 12  # of an open axis of an example
ROWS = 2  # of an open axis that is named as that of the batch
_MAX_NUMBER = (1 << 63) - 1
_Node = tuple[str, list[str], list[str], dict[str, Any]]  # operator, inputs, outputs, attributes
_KINDS: dict[int, torch.dtype] = {
    1: torch.float32, 2: torch.uint8, 3: torch.int8, 6: torch.int32, 7: torch.int64, 9: torch.bool, 10: torch.float16,
    11: torch.float64,
}  # fmt: skip


class ONNXModule(nn.Module):
    """The outputs of an ONNX file as a function of its inputs: y = module(x, ...), a tuple where it has several.

    path: the file.   inputs: values of inputs by name. The module reads the others, in the file's order, but for those
    that are the first state of a recurrence: they are zeros, and the last states are then no results.

    The file's weights are parameters.   Raises ConfigError for a file with an operator that is not known here, and
    names it.
    """

    def __init__(self, path: str | PathLike[str], inputs: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        if importlib.util.find_spec("onnx") is None:
            raise ConfigError("convert: an ONNX file needs onnx: pip install 'scanl[export]'")
        import onnx  # pyright: ignore[reportMissingImports]

        graph, inputs = onnx.load(path).graph, inputs or {}
        self._names: dict[str, str] = {}
        self._constants: dict[str, Any] = {}
        known = {weight.name for weight in graph.initializer}
        read = {one.name: one for one in graph.input if one.name not in known}
        unknown = sorted(inputs.keys() - read.keys())
        if unknown:
            raise ConfigError(f"convert: inputs has {unknown[0]!r}, expected names of {list(read)}")
        self._constants |= {name: torch.as_tensor(value) for name, value in inputs.items()}
        self._nodes = self._read_nodes(graph)
        self._results, self._open = [one.name for one in graph.output], read.keys() - inputs.keys()
        self._nodes = self._fold(self._nodes)
        self._check_states(self._open - self._read()[1])
        self._nodes, needed = self._read()
        bodies = (attributes["body"].nodes for kind, _, _, attributes in self._nodes if kind == "Scan")
        for kind, *_ in chain(self._nodes, *bodies):
            if kind not in {*_OPERATORS, *_RECURRENCES, "Scan"}:
                raise ConfigError(f"convert: {Path(path).name} has the operator {kind}, which has no function here")
        self._inputs = [name for name in read if name in needed - inputs.keys()]
        if not self._inputs:
            raise ConfigError(f"convert: {Path(path).name} reads none of its inputs {list(read)}")
        shapes = {
            name: [size.dim_value or size.dim_param for size in one.type.tensor_type.shape.dim]
            for name, one in read.items()
        }
        self.shape, self.dtype = shapes[self._inputs[0]], _KINDS[read[self._inputs[0]].type.tensor_type.elem_type]
        carried = {name for kind, names, *_ in self._nodes if kind == "Scan" for name in names}
        self._zeros = {name: shapes[name] for name in carried & self._open - {*self._inputs}}
        for name, shape in self._zeros.items():
            if any(isinstance(size, str) and size not in self.shape for size in shape):
                raise ConfigError(
                    f"convert: {name} has the shape {shape}, expected sizes, or axes of {self._inputs[0]}"
                )
        for number, (kind, names, outputs, attributes) in enumerate(self._nodes):
            if kind in _RECURRENCES:
                self.add_module(
                    f"recurrence{number}", _recurrence(kind, self._weights(names[1:4]), attributes, outputs)
                )
        self._forget_weights()

    def example(self) -> Tensor:
        """Return a first input of the sizes that the file says, with numbers where it leaves them open."""
        sizes = [size if isinstance(size, int) else ROWS if "batch" in size else ANY_SIZE for size in self.shape]
        x = torch.randn(sizes)
        return (x if self.dtype.is_floating_point else x > 0).to(self.dtype)  # small numbers: they may be indices

    def _keep(self, name: str, tensor: Tensor) -> None:
        if not tensor.is_floating_point():
            self._constants[name] = tensor
            return
        place = re.sub(r"\W", "_", name) or "weight"
        while hasattr(self, place):
            place += "_"
        self._names[name] = place
        self.register_parameter(place, nn.Parameter(tensor))

    def _read_nodes(self, graph: Any) -> list[_Node]:
        """Return the operators of a graph, and keep its constants. The body of a Scan is a tuple of attributes."""
        import onnx  # pyright: ignore[reportMissingImports]
        from onnx import numpy_helper  # pyright: ignore[reportMissingImports]

        nodes: list[_Node] = []
        for weight in graph.initializer:
            self._keep(weight.name, torch.from_numpy(numpy_helper.to_array(weight).copy()))
        for node in graph.node:
            attributes = {one.name: onnx.helper.get_attribute_value(one) for one in node.attribute}
            kind, outputs = node.op_type, list(node.output)
            if kind == "Constant":
                (value,) = attributes.values()
                array = numpy_helper.to_array(value) if hasattr(value, "raw_data") else value
                self._constants[outputs[0]] = torch.as_tensor(array.copy() if hasattr(array, "copy") else array)
                continue
            if kind == "Scan":
                body = attributes["body"]
                ends = ([one.name for one in ends] for ends in (body.input, body.output))
                attributes["body"] = _Body(self._read_nodes(body), *ends)
                _check_scan(attributes, outputs)
            nodes.append((kind, list(node.input), outputs, attributes))
        return nodes

    def _weights(self, names: Sequence[str]) -> list[Tensor | None]:
        """Return parameters, or constants."""
        return [
            getattr(self, self._names[name]) if name in self._names else self._constants.get(name) for name in names
        ]

    def _forget_weights(self) -> None:
        """Leave out what recurrences have copied and no other operator reads."""
        read = set[str]().union(*(self._needs(node) for node in self._nodes if node[0] not in _RECURRENCES))
        for name in self._names.keys() - read - {*self._results}:
            del self._parameters[self._names.pop(name)]

    def _fold(self, nodes: list[_Node]) -> list[_Node]:
        """Run what depends on constants alone, and return the other operators. An If of a constant is its branch."""
        left = []
        for kind, names, outputs, attributes in nodes:
            if kind == "If" and names[0] in self._constants:
                branch = attributes["then_branch" if self._constants[names[0]] else "else_branch"]
                ends = [("Identity", [one.name], [name], {}) for one, name in zip(branch.output, outputs, strict=True)]
                left += self._fold(self._read_nodes(branch) + ends)
                continue
            if kind == "Scan":
                body = attributes["body"]
                attributes = {**attributes, "body": body._replace(nodes=self._fold(body.nodes))}
            if kind in _OPERATORS and all(name in self._constants or not name for name in names):
                values = [self._constants.get(name) for name in names]
                for name, value in zip(outputs, _listed(_OPERATORS[kind](values, attributes)), strict=False):
                    self._constants[name] = value
            else:
                left.append((kind, names, outputs, attributes))
        return left

    def _check_states(self, states: Collection[str]) -> None:
        """Raise ConfigError unless each first state is zeros or one of some inputs, and leave last states out."""
        values = self._constants | {name: getattr(self, place) for name, place in self._names.items()}
        zeros = {name for name, value in values.items() if isinstance(value, Tensor) and not value.any()}
        first, last, begun = zeros | set(states), set[str](), False
        for kind, names, outputs, attributes in self._nodes:
            if kind in _RECURRENCES:
                if any(name and (at == 0 or name not in first) for at, name in enumerate(names[4:])):
                    raise ConfigError(f"convert: {kind} of {outputs[0]} has lengths, or a first state that is computed")
                begun = begun or any(name and name not in zeros for name in names[5:])
                last |= set(outputs[1:])
            elif kind == "Scan":
                carried = names[: -attributes["num_scan_inputs"]]
                begun = begun or any(name in states for name in carried)
                last |= set(outputs[: len(carried)])
            elif kind == "ConstantOfShape" and not _filled([[1]], attributes).any():
                first, zeros = first | set(outputs), zeros | set(outputs)
            elif kind in _MOVES:
                for moved in (first, last, zeros):
                    if all(name in moved for name in (names if kind == "Concat" else names[:1])):
                        moved |= set(outputs)
        if begun:
            self._results = [name for name in self._results if name not in last] or self._results

    def _read(self) -> tuple[list[_Node], set[str]]:
        """Return the operators that results need, and the names that they read but for first states."""
        read, needed = set(self._results), []
        for node in reversed(self._nodes):
            if not read.isdisjoint(node[2]):
                needed.append(node)
                read |= self._needs(node)
        return needed[::-1], read

    def _needs(self, node: _Node) -> set[str]:
        """Return the names that an operator reads, but for first states that are zeros or inputs of the file."""
        kind, names, _, attributes = node
        if kind in _RECURRENCES:
            return set(names[:4])
        if kind != "Scan":
            return set(names)
        begins = self._open.intersection(names[: -attributes["num_scan_inputs"]])
        return set(names).difference(begins).union(attributes["body"].reads())

    def forward(self, first: Tensor, *others: Tensor) -> Any:
        if len(others) != len(self._inputs) - 1:
            raise ConfigError(
                f"convert: the file has the inputs {self._inputs}, expected {1 + len(others)}: a module that calls "
                f"hub.ONNXModule with all of them, or values in inputs"
            )
        values: dict[str, Any] = {**self._constants, **dict(zip(self._inputs, (first, *others), strict=True))}
        values |= {name: getattr(self, place) for name, place in self._names.items()}
        for name, shape in self._zeros.items():
            sizes = [size if isinstance(size, int) else first.shape[self.shape.index(size)] for size in shape]
            values[name] = first.new_zeros(sizes)
        self._run(self._nodes, values)
        results = tuple(values[name] for name in self._results)
        return results[0] if len(results) == 1 else results

    def _run(self, nodes: list[_Node], values: dict[str, Any]) -> None:
        """Add the results of operators to values."""
        for number, (kind, names, outputs, attributes) in enumerate(nodes):
            if kind in _RECURRENCES:
                y, *ends = self.get_submodule(f"recurrence{number}")(values[names[0]])
                results = [y[:, None], *ends]
            elif kind == "Scan":
                results = self._scan(names, attributes, values)
            else:
                given = [values.get(name) for name in names]
                sizes = kind in _OF_SIZES and not all(isinstance(value, Tensor) for value in given)
                results = _listed(_of_sizes(kind, given) if sizes else _OPERATORS[kind](given, attributes))
            values |= dict(zip(outputs, results, strict=False))

    def _scan(self, names: list[str], attributes: dict[str, Any], values: dict[str, Any]) -> list[Tensor]:
        """Return last states, and results of all steps, by torch's own scan, which torch.export knows."""
        from torch._higher_order_ops.scan import scan_op

        body, count = attributes["body"], attributes["num_scan_inputs"]
        axes, after = (attributes.get(f"scan_{kind}_axes") for kind in ("input", "output"))
        read = [values[name].movedim(axis, 0) for name, axis in zip(names[-count:], axes or [0] * count, strict=True)]
        held = sorted(name for name in body.reads() & values.keys() - self._constants.keys())
        held = [name for name in held if isinstance(values[name], Tensor)]

        def step(*tensors: Tensor) -> list[Tensor]:
            inner = {**self._constants, **dict(zip([*body.inputs, *held], tensors, strict=True))}
            self._run(body.nodes, inner)
            return [inner[name].clone() for name in body.outputs]  # a result may be no other tensor again

        first = [values[name] for name in names[:-count]]
        results = scan_op(step, first, read, tuple(values[name] for name in held))
        made = results[len(first) :]
        moved = [y.movedim(0, axis) for y, axis in zip(made, after or [0] * len(made), strict=True)]
        return [*results[: len(first)], *moved]


class _Body(NamedTuple):
    """The operators of one step of a Scan."""

    nodes: list[_Node]
    inputs: list[str]
    outputs: list[str]

    def reads(self) -> set[str]:
        """Return all names that its operators read, its own too."""
        return {name for _, names, _, _ in self.nodes for name in names}.union(self.outputs)


def _check_scan(attributes: dict[str, Any], outputs: list[str]) -> None:
    inner = next((kind for kind, *_ in attributes["body"].nodes if kind in {*_RECURRENCES, "Scan"}), None)
    if inner is not None:
        raise ConfigError(f"convert: Scan of {outputs[0]} has the recurrence {inner} in its body")
    if any(any(attributes.get(f"scan_{kind}_directions", ())) for kind in ("input", "output")):
        raise ConfigError(f"convert: Scan of {outputs[0]} reads later steps (backwards)")


class _Recurrence(nn.Module):
    """A recurrence of torch with what ONNX returns: y (T, B, H), and the last states."""

    def __init__(self, rnn: nn.RNNBase) -> None:
        super().__init__()
        self.rnn = rnn

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y, ends = self.rnn(x)
        return y, *(ends if isinstance(ends, tuple) else (ends,))


# Gates of ONNX in the order of torch
_RECURRENCES: dict[str, tuple[Any, list[int]]] = {
    "LSTM": (nn.LSTM, [0, 2, 3, 1]),
    "GRU": (nn.GRU, [1, 0, 2]),
    "RNN": (nn.RNN, [0]),
}


def _recurrence(kind: str, weights: list[Tensor | None], attributes: dict[str, Any], outputs: list[str]) -> nn.Module:
    made, order = _RECURRENCES[kind]
    direction = attributes.get("direction", b"forward").decode()
    usual = {"LSTM": ["Sigmoid", "Tanh", "Tanh"], "GRU": ["Sigmoid", "Tanh"], "RNN": ["Tanh"]}[kind]
    functions = [name.decode() for name in attributes.get("activations", [])] or usual
    if direction != "forward":
        raise ConfigError(f"convert: {kind} of {outputs[0]} reads later steps ({direction})")
    if functions not in (usual, ["Relu"]) or "clip" in attributes or attributes.get("layout", 0):
        raise ConfigError(
            f"convert: {kind} of {outputs[0]} has functions {functions}, a clip or a layout, expected none"
        )
    if kind == "GRU" and not attributes.get("linear_before_reset", 0):
        raise ConfigError(f"convert: GRU of {outputs[0]} resets before the product; torch resets after it")
    of_input, of_state, bias = weights
    if of_input is None or of_state is None:
        raise ConfigError(f"convert: {kind} of {outputs[0]} has weights that are computed")
    hidden = attributes["hidden_size"]
    options: dict[str, Any] = {"nonlinearity": "relu"} if functions == ["Relu"] else {}
    rnn = made(of_input.shape[2], hidden, bias=bias is not None, **options).to(of_input)

    def ordered(weight: Tensor) -> Tensor:
        return weight.detach().unflatten(0, (len(order), hidden))[order].flatten(0, 1)

    with torch.no_grad():
        rnn.weight_ih_l0.copy_(ordered(of_input[0]))  # pyright: ignore[reportCallIssue]
        rnn.weight_hh_l0.copy_(ordered(of_state[0]))  # pyright: ignore[reportCallIssue]
        if bias is not None:
            first, second = bias[0].chunk(2)
            rnn.bias_ih_l0.copy_(ordered(first))  # pyright: ignore[reportCallIssue]
            rnn.bias_hh_l0.copy_(ordered(second))  # pyright: ignore[reportCallIssue]
    return _Recurrence(rnn)


def _listed(result: Any) -> Sequence[Any]:
    return result if isinstance(result, tuple) else (result,)


def _numbers(value: Any) -> list[Any]:
    """Return sizes, axes or places as numbers: of a constant, or of a shape."""
    listed = value.tolist() if isinstance(value, Tensor) else value
    return listed if isinstance(listed, list) else [listed]


def _of_sizes(kind: str, values: Sequence[Any]) -> Any:
    """Return the result of an operator of two sizes of a tensor, or lists of sizes."""
    one, other = map(_numbers, values)
    count = max(len(one), len(other))
    pairs = zip(one * (count // len(one)), other * (count // len(other)), strict=True)
    results = [_OF_SIZES[kind](*pair) for pair in pairs]
    return results if any(isinstance(value, list) or getattr(value, "ndim", 0) for value in values) else results[0]


def _axes(values: Sequence[Any], attributes: dict[str, Any], at: int = 1) -> list[int] | None:
    """Return the axes of an operator: an input, or an attribute in older files."""
    if len(values) > at and values[at] is not None:
        return _numbers(values[at])
    return attributes.get("axes")


def _convolution(values: Sequence[Any], attributes: dict[str, Any]) -> Tensor:
    x, weight, bias = *values[:2], values[2] if len(values) > 2 else None
    spatial = weight.ndim - 2
    if attributes.get("auto_pad", b"NOTSET") != b"NOTSET":
        raise ConfigError(f"convert: Conv has auto_pad {attributes['auto_pad'].decode()}, expected pads")
    pads = attributes.get("pads", [0] * 2 * spatial)
    if any(pads):
        x = F.pad(x, [pads[side * spatial + axis] for axis in reversed(range(spatial)) for side in (0, 1)])
    function = (F.conv1d, F.conv2d, F.conv3d)[spatial - 1]
    stride, dilation = (attributes.get(name, [1] * spatial) for name in ("strides", "dilations"))
    return function(x, weight, bias, stride, 0, dilation, attributes.get("group", 1))


def _transposed_convolution(values: Sequence[Any], attributes: dict[str, Any]) -> Tensor:
    x, weight, bias = *values[:2], values[2] if len(values) > 2 else None
    spatial = weight.ndim - 2
    if attributes.get("auto_pad", b"NOTSET") != b"NOTSET" or "output_shape" in attributes:
        raise ConfigError("convert: ConvTranspose has auto_pad or output_shape, expected pads")
    stride, dilation = (attributes.get(name, [1] * spatial) for name in ("strides", "dilations"))
    more, pads = attributes.get("output_padding", [0] * spatial), attributes.get("pads", [0] * 2 * spatial)
    if pads[:spatial] != pads[spatial:]:
        raise ConfigError(f"convert: ConvTranspose has pads {pads}, expected the same on both sides")
    function = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[spatial - 1]
    return function(x, weight, bias, stride, pads[:spatial], more, attributes.get("group", 1), dilation)


def _pool(function: Callable[..., Tensor]) -> Callable[[Sequence[Any], dict[str, Any]], Tensor]:
    def pool(values: Sequence[Any], attributes: dict[str, Any]) -> Tensor:
        if any(attributes.get("pads", [])) or attributes.get("ceil_mode", 0):
            raise ConfigError("convert: a pooling is padded, expected none")
        size = attributes["kernel_shape"]
        x = values[0]
        kind = getattr(F, f"{function.__name__[:-2]}{len(size)}d")
        return kind(x, size, attributes.get("strides", [1] * len(size)))

    return pool


def _pad(values: Sequence[Any], attributes: dict[str, Any]) -> Tensor:
    x = values[0]
    pads = _numbers(values[1]) if len(values) > 1 else attributes["pads"]
    mode = attributes.get("mode", b"constant").decode()
    axes = _axes(values, {}, 3) or list(range(x.ndim))
    sizes = [(0, 0)] * x.ndim
    for place, axis in enumerate(axes):
        sizes[axis % x.ndim] = int(pads[place]), int(pads[place + len(axes)])
    while sizes and sizes[0] == (0, 0):
        sizes.pop(0)
    flat = [size for pair in reversed(sizes) for size in pair]
    if mode == "constant":
        value = values[2] if len(values) > 2 and values[2] is not None else 0.0
        return F.pad(x, flat, value=float(value))
    if x.ndim < 3:
        return F.pad(x[None], flat, mode="replicate" if mode == "edge" else mode)[0]
    return F.pad(x, flat, mode="replicate" if mode == "edge" else mode)


def _slice(values: Sequence[Any], attributes: dict[str, Any]) -> Any:
    x, starts, ends = values[0], _numbers(values[1]), _numbers(values[2])
    if not isinstance(x, Tensor):
        return x[starts[0] : ends[0]]
    axes = _axes(values, {}, 3) or list(range(len(starts)))
    steps = _numbers(values[4]) if len(values) > 4 else [1] * len(starts)
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        if step < 0:
            if (start, step) != (-1, -1) or end > -x.shape[axis]:
                raise ConfigError(f"convert: Slice has a step of {step}, expected all of an axis backwards, or above 0")
            x = x.flip(axis)
        else:
            x = x[(slice(None),) * (axis % x.ndim) + (slice(start, None if end >= _MAX_NUMBER else end, step),)]
    return x


def _gather(values: Sequence[Any], attributes: dict[str, Any]) -> Any:
    x, index = values
    axis = attributes.get("axis", 0)
    if not isinstance(x, Tensor):
        places = _numbers(index)
        return x[places[0]] if index.ndim == 0 else [x[place] for place in places]
    if index.ndim == 0:
        return x.select(axis, _numbers(index)[0])
    if x.ndim == 2 and axis == 0:
        return F.embedding(index, x)
    return x.index_select(axis, index.flatten()).unflatten(axis, index.shape)


def _reshape(values: Sequence[Any], attributes: dict[str, Any]) -> Any:
    x, sizes = values[0], _numbers(values[1])
    if not isinstance(x, Tensor):
        return _numbers(x)
    return x.reshape([x.shape[place] if size == 0 else size for place, size in enumerate(sizes)])


def _expand(values: Sequence[Any], attributes: dict[str, Any]) -> Tensor:
    x, sizes = values[0], _numbers(values[1])
    x = x.reshape([1] * (len(sizes) - x.ndim) + list(x.shape))
    sizes = [1] * (x.ndim - len(sizes)) + sizes
    return x.expand([have if size == 1 else size for have, size in zip(x.shape, sizes, strict=True)])


def _concat(values: Sequence[Any], attributes: dict[str, Any]) -> Any:
    if all(isinstance(value, Tensor) for value in values):
        return torch.cat(list(values), attributes["axis"])
    return [number for value in values for number in _numbers(value)]


def _squeeze(values: Sequence[Any], attributes: dict[str, Any]) -> Any:
    axes = _axes(values, attributes)
    if not isinstance(values[0], Tensor):
        return values[0][0]
    return values[0].squeeze() if axes is None else values[0].squeeze(tuple(int(axis) for axis in axes))


def _unsqueeze(values: Sequence[Any], attributes: dict[str, Any]) -> Any:
    x = values[0]
    if not isinstance(x, Tensor):
        return [x]
    axes = _axes(values, attributes) or []
    for axis in sorted(int(axis) % (x.ndim + len(axes)) for axis in axes):
        x = x.unsqueeze(axis)
    return x


def _gemm(values: Sequence[Any], attributes: dict[str, Any]) -> Tensor:
    a, b = values[:2]
    a, b = a.T if attributes.get("transA") else a, b.T if attributes.get("transB") else b
    y = attributes.get("alpha", 1.0) * (a @ b)
    return y if len(values) < 3 else y + attributes.get("beta", 1.0) * values[2]


def _reduced(function: Callable[..., Tensor]) -> Callable[[Sequence[Any], dict[str, Any]], Tensor]:
    def reduced(values: Sequence[Any], attributes: dict[str, Any]) -> Tensor:
        axes = _axes(values, attributes) or list(range(values[0].ndim))
        return function(values[0], [int(axis) for axis in axes], bool(attributes.get("keepdims", 1)))

    return reduced


def _cast(values: Sequence[Any], attributes: dict[str, Any]) -> Any:
    return values[0].to(_KINDS[attributes["to"]]) if isinstance(values[0], Tensor) else values[0]


def _split(values: Sequence[Any], attributes: dict[str, Any]) -> tuple[Tensor, ...]:
    axis, x = attributes.get("axis", 0), values[0]
    sizes = _numbers(values[1]) if len(values) > 1 else attributes.get("split")
    parts = attributes.get("num_outputs")
    return x.split(sizes, axis) if sizes else x.chunk(parts, axis)


def _batch_norm(values: Sequence[Any], attributes: dict[str, Any]) -> Tensor:
    x, weight, bias, mean, variance = values
    return F.batch_norm(x, mean, variance, weight, bias, False, 0.0, attributes.get("epsilon", 1e-5))


def _layer_norm(values: Sequence[Any], attributes: dict[str, Any]) -> Tensor:
    x, axis = values[0], attributes.get("axis", -1)
    bias = values[2] if len(values) > 2 else None
    return F.layer_norm(x, x.shape[axis:], values[1], bias, attributes.get("epsilon", 1e-5))


def _filled(values: Sequence[Any], attributes: dict[str, Any]) -> Tensor:
    value = attributes.get("value")
    if value is None:
        return torch.zeros(_numbers(values[0]))
    from onnx import numpy_helper  # pyright: ignore[reportMissingImports]

    return torch.from_numpy(numpy_helper.to_array(value).copy()).expand(_numbers(values[0]))


def _by_element(function: Callable[..., Any]) -> Callable[[Sequence[Any], dict[str, Any]], Any]:
    return lambda values, attributes: function(*values)


# Operators that move numbers of their first input, or of all inputs of Concat
_MOVES = {
    "Squeeze", "Unsqueeze", "Slice", "Gather", "Split", "Concat", "Reshape", "Transpose", "Identity", "Expand",
}  # fmt: skip
# Operators of sizes, which are numbers of Python
_OF_SIZES: dict[str, Callable[[Any, Any], Any]] = {
    "Add": operator.add, "Sub": operator.sub, "Mul": operator.mul, "Div": operator.floordiv,
}  # fmt: skip
_OPERATORS: dict[str, Callable[[Sequence[Any], dict[str, Any]], Any]] = {
    "Conv": _convolution, "ConvTranspose": _transposed_convolution, "Pad": _pad, "Slice": _slice, "Gather": _gather,
    "Reshape": _reshape, "Concat": _concat, "Squeeze": _squeeze, "Unsqueeze": _unsqueeze, "Gemm": _gemm, "Cast": _cast,
    "Split": _split, "Einsum": lambda values, attributes: torch.einsum(attributes["equation"].decode(), *values),
    "MaxPool": _pool(F.max_pool1d), "AveragePool": _pool(F.avg_pool1d), "ConstantOfShape": _filled,
    "BatchNormalization": _batch_norm, "LayerNormalization": _layer_norm,
    "ReduceMean": _reduced(torch.mean), "ReduceSum": _reduced(torch.sum), "ReduceMax": _reduced(torch.amax),
    "ReduceMin": _reduced(torch.amin), "ReduceL2": _reduced(lambda x, *rest: torch.linalg.vector_norm(x, 2, *rest)),
    "Expand": _expand,
    "Shape": lambda values, attributes: list(values[0].shape)[attributes.get("start", 0) : attributes.get("end")],
    "Transpose": lambda values, attributes: values[0].permute(attributes["perm"]),
    "Flatten": lambda values, attributes: values[0].flatten(attributes.get("axis", 1)),
    "Softmax": lambda values, attributes: values[0].softmax(attributes.get("axis", -1)),
    "LogSoftmax": lambda values, attributes: values[0].log_softmax(attributes.get("axis", -1)),
    "LeakyRelu": lambda values, attributes: F.leaky_relu(values[0], attributes.get("alpha", 0.01)),
    "Elu": lambda values, attributes: F.elu(values[0], attributes.get("alpha", 1.0)),
    "Gelu": lambda values, attributes: F.gelu(values[0], approximate=attributes.get("approximate", b"none").decode()),
    "HardSigmoid": lambda values, attributes: (
        attributes.get("alpha", 0.2) * values[0] + attributes.get("beta", 0.5)
    ).clamp(0, 1),
    "Clip": lambda values, attributes: values[0].clamp(*values[1:3]),
    **{
        name: _by_element(function)
        for name, function in {
            "Add": torch.add, "Sub": torch.sub, "Mul": torch.mul, "Div": torch.div, "Pow": torch.pow,
            "MatMul": torch.matmul, "Relu": torch.relu, "Sigmoid": torch.sigmoid, "Tanh": torch.tanh,
            "Sqrt": torch.sqrt, "Exp": torch.exp, "Log": torch.log, "Abs": torch.abs, "Neg": torch.neg,
            "Erf": torch.erf, "Softplus": F.softplus, "HardSwish": F.hardswish, "Mish": F.mish, "Softsign": F.softsign,
            "Floor": torch.floor, "Ceil": torch.ceil, "Round": torch.round, "Sign": torch.sign,
            "Not": torch.logical_not, "And": torch.logical_and, "Or": torch.logical_or, "GreaterOrEqual": torch.ge,
            "LessOrEqual": torch.le, "Sum": lambda *x: sum(x), "CastLike": lambda x, other: x.to(other.dtype),
            "PRelu": lambda x, slope: torch.where(x < 0, slope * x, x), "Reciprocal": torch.reciprocal,
            "Where": torch.where, "Equal": torch.eq, "Greater": torch.gt, "Less": torch.lt, "Identity": lambda x: x,
            "Dropout": lambda x, *_: x, "Max": torch.maximum, "Min": torch.minimum, "Sin": torch.sin, "Cos": torch.cos,
        }.items()
    },
}  # fmt: skip
