"""A program without complex numbers: each of them becomes a pair of real ones on a last axis. ONNX has no others."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.fx.node import map_arg
from torch.fx.proxy import GraphAppendingTracer

from scanl.errors import ConfigError


def without_complex_numbers(program: ExportedProgram) -> ExportedProgram:
    """Return the program with pairs in the place of complex numbers; its inputs and results are real.

    Raises ConfigError for an operation of complex numbers that has no rule here.
    """
    graphs = [part.graph for part in program.graph_module.modules() if isinstance(part, fx.GraphModule)]
    if not any(_is_pair(node) for graph in graphs for node in graph.nodes):
        return program
    for graph in graphs:
        rewrite(graph)
    for part in program.graph_module.modules():
        if isinstance(part, fx.GraphModule):
            part.recompile()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of torch, about itself
        return program.run_decompositions({})  # makes shapes and dtypes anew


def _is_pair(value: Any) -> bool:
    """Return whether a node has complex numbers; one in the place of such a node has pairs, and its old value."""
    example = value.meta.get("val") if isinstance(value, fx.Node) else None
    return isinstance(example, Tensor) and example.is_complex()


def rewrite(graph: fx.Graph) -> None:
    """Put pairs in the place of the complex numbers of a graph."""
    tracer = GraphAppendingTracer(graph)
    proxy: Any = lambda node: fx.Proxy(node, tracer)  # noqa: E731
    for node in list(graph.nodes):
        if node.op != "call_function" or not any(map(_is_pair, [node, *node.all_input_nodes])):
            continue
        name = str(node.target).split(".")[1]
        if name not in RULES:
            raise ConfigError(f"export: the model uses {node.target} of complex numbers, which ONNX does not have")
        with graph.inserting_before(node):
            args: Any = map_arg(node.args, proxy)
            made = RULES[name](node, *args).node
        made.meta = dict(node.meta)
        node.replace_all_uses_with(made)
        graph.erase_node(node)


def _rank(node: fx.Node) -> int:
    """Return the number of axes of the first argument, without the axis of pairs."""
    first: Any = node.args[0]
    return first.meta["val"].ndim


def _pair(real: Any, imaginary: Any) -> Any:
    return torch.stack([real, imaginary], -1)


def _parts(value: Any) -> tuple[Any, Any]:
    return value.select(-1, 0), value.select(-1, 1)


def _wide(argument: Any, value: Any) -> Any:
    """Return a real argument with an axis on which pairs are broadcast."""
    return value.unsqueeze(-1) if isinstance(argument, fx.Node) and not _is_pair(argument) else value


def _sum(sign: int) -> Callable[..., Any]:
    def run(node: fx.Node, a: Any, b: Any) -> Any:
        if all(map(_is_pair, node.args)):
            return a + sign * b
        real, imaginary = _parts(a if _is_pair(node.args[0]) else sign * b)
        return _pair(real + sign * b, imaginary) if _is_pair(node.args[0]) else _pair(a + real, imaginary)

    return run


def _product(times: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def run(node: fx.Node, a: Any, b: Any) -> Any:
        (a, c), (b, d) = (
            _parts(value) if _is_pair(argument) else (value, None)
            for argument, value in zip(node.args, (a, b), strict=True)
        )
        if c is None:
            return _pair(times(a, b), times(a, d))
        if d is None:
            return _pair(times(a, b), times(c, b))
        return _pair(times(a, b) - times(c, d), times(a, d) + times(c, b))

    return run


def _reciprocal(node: fx.Node, z: Any) -> Any:
    real, imaginary = _parts(z)
    size = real * real + imaginary * imaginary
    return _pair(real / size, -imaginary / size)


def _quotient(node: fx.Node, a: Any, b: Any) -> Any:
    if not _is_pair(node.args[1]):
        return a / _wide(node.args[1], b)
    inverse = _reciprocal(node, b)
    if not _is_pair(node.args[0]):
        return inverse * _wide(node.args[0], a)
    return _product(torch.mul)(node, a, inverse)


def _exponential(node: fx.Node, z: Any) -> Any:
    real, imaginary = _parts(z)
    return _pair(real.exp() * imaginary.cos(), real.exp() * imaginary.sin())


def _same(node: fx.Node, z: Any, *_: Any) -> Any:
    return torch.ops.aten.alias(z)


def _converted(node: fx.Node, x: Any, *_: Any) -> Any:
    """Return numbers in another dtype."""
    if not _is_pair(node):
        return x.select(-1, 0).to(node.meta["val"].dtype)
    pair = x if _is_pair(node.args[0]) else _pair(x, torch.zeros_like(x))
    return pair.to(node.meta["val"].real.dtype)


def _filled(node: fx.Node, x: Any, number: complex) -> Any:
    like = (x.select(-1, 0) if _is_pair(node.args[0]) else x).to(node.meta["val"].real.dtype)
    return _pair(torch.full_like(like, complex(number).real), torch.full_like(like, complex(number).imag))


def _scalar(node: fx.Node, number: complex) -> Any:
    parts = complex(number).real, complex(number).imag
    made = [node.graph.call_function(torch.full, ((), part), {"dtype": node.meta["val"].real.dtype}) for part in parts]
    return fx.Proxy(node.graph.call_function(torch.stack, (made, -1)))


def _of_sizes(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda node, z, sizes: function(z, [*sizes, 2])


def _along(function: Callable[..., Any], more: int = 0) -> Callable[..., Any]:
    """Return the rule of a function of an axis, or of several. more: axes that its result has more."""

    def run(node: fx.Node, z: Any, axis: int | Sequence[int] = 0, *rest: Any) -> Any:
        rank = _rank(node) + more
        return function(z, axis % rank if isinstance(axis, int) else [each % rank for each in axis], *rest)

    return run


def _joined(node: fx.Node, parts: Sequence[Any], axis: int = 0) -> Any:
    first: Any = node.args[0]
    return torch.cat(list(parts), axis % first[0].meta["val"].ndim)


aten = torch.ops.aten
RULES: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("view_as_complex", "view_as_real", "clone", "alias", "detach", "contiguous"), _same),
    "_assert_tensor_metadata": _same,
    "_to_copy": _converted,
    "full_like": _filled,
    "scalar_tensor": _scalar,
    "complex": lambda node, real, imaginary: _pair(real, imaginary),
    "polar": lambda node, size, angle: _pair(size * angle.cos(), size * angle.sin()),
    "real": lambda node, z: z.select(-1, 0),
    "imag": lambda node, z: z.select(-1, 1),
    "abs": lambda node, z: (z * z).sum(-1).sqrt(),
    **dict.fromkeys(("_conj", "conj_physical"), lambda node, z: _pair(z.select(-1, 0), -z.select(-1, 1))),
    "neg": lambda node, z: -z,
    "add": _sum(1),
    "sub": _sum(-1),
    **{name: _product(getattr(torch, name)) for name in ("mul", "mm", "bmm", "matmul")},
    "div": _quotient,
    "reciprocal": _reciprocal,
    "exp": _exponential,
    **{name: _of_sizes(getattr(aten, name)) for name in ("view", "reshape", "expand", "_unsafe_view")},
    "permute": lambda node, z, axes: z.permute([*(axis % _rank(node) for axis in axes), _rank(node)]),
    "transpose": lambda node, z, a, b: z.transpose(a % _rank(node), b % _rank(node)),
    **{name: _along(getattr(aten, name)) for name in ("slice", "select", "squeeze", "sum", "flip")},
    "unsqueeze": _along(aten.unsqueeze, 1),
    "cat": _joined,
    "where": lambda node, truth, a, b: torch.where(truth.unsqueeze(-1), a, b),
}
