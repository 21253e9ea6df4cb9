"""Forms of scanl's operators in a program for other runtimes.

`NATIVE` is the table: an op's name, and the function that says with which operator of ONNX. Any other op becomes a
scan whose body is one step of the op's reference.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._higher_order_ops.scan import scan_op
from torch.export import ExportedProgram

from scanl.errors import ConfigError
from scanl.ops.registry import Op, of_operator


class LoweredCall(NamedTuple):
    """A call of an op: its operands by name, without the state and those that are None."""

    op: Op[..., Any]
    operands: dict[str, Tensor]
    state: Tensor
    options: dict[str, Any]


Native = Callable[[LoweredCall], tuple[Tensor, Tensor] | None]


def lowered(program: ExportedProgram, native: dict[str, Native]) -> ExportedProgram:
    """Return the program with operators of torch, and of `native`, in the place of the kernels of scanl.

    native: functions by the name of an op; None from one stands for a call that it has no operator for. Raises
    ConfigError for an operator that is no recurrence step by step.
    """
    targets = {node.target for node in program.graph.nodes if isinstance(node.target, torch._ops.OpOverload)}
    ours = {target for target in targets if target.namespace == "scanl"}
    table = {target: _decomposition(target, native) for target in ours}
    if not table:
        return program
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of torch, about itself
        return program.run_decompositions({**torch.export.default_decompositions(), **table})


def _decomposition(target: Any, native: dict[str, Native]) -> Callable[..., Any]:
    op = of_operator(target)
    if op is None:
        raise ConfigError(f"export: the model uses {target}, expected ops that go step by step")

    def run(*args: Any) -> tuple[Tensor, ...]:
        count = len(op.names)
        reverse, cu_seqlens, *options = args[count:]
        if cu_seqlens is not None:
            raise ConfigError("export: the model packs its sequences, expected a batch of sequences")
        operands = {name: value for name, value in zip(op.names, args[: count - 1], strict=False) if value is not None}
        time = _times(op, args[:count])
        if reverse:
            operands |= {name: operands[name].flip(axis) for name, axis in time.items()}
        call = LoweredCall(op, operands, args[count - 1], dict(zip(op.options, options, strict=False)))
        result = native[op.name](call) if op.name in native else None
        y, last = _scan(call, time) if result is None else result
        results = (y.flip(1) if reverse else y), last
        if len(target._schema.returns) == 2:
            return results
        return *results, y.new_empty((*y.shape[:2], 0))  # what a backward pass would read

    return run


def _times(op: Op[..., Any], values: Sequence[Tensor | None]) -> dict[str, int]:
    """Return the time axes of the operands that have one, by name."""
    first = values[0]
    assert first is not None
    axes = {
        operand.name: operand.time_axis(value, first.ndim)
        for operand, value in zip(op.operands[:-1], values[:-1], strict=True)
        if value is not None
    }
    return {name: axis for name, axis in axes.items() if axis is not None}


def _scan(call: LoweredCall, time: dict[str, int]) -> tuple[Tensor, Tensor]:
    """Run the reference for one step after the other. Complex numbers enter and leave a step as pairs."""
    op = call.op
    steps = {name: call.operands[name].movedim(axis, 0) for name, axis in time.items()}
    constant = {name: value for name, value in call.operands.items() if name not in time}
    pairs = [value.is_complex() for value in (call.state, *steps.values(), *constant.values())]

    def step(*pairs_or_reals: Tensor) -> list[Tensor]:
        parts = zip(pairs_or_reals, pairs, strict=True)
        state, *values = (torch.view_as_complex(value) if pair else value for value, pair in parts)
        now = {name: value.unsqueeze(axis) for (name, axis), value in zip(time.items(), values, strict=False)}
        now |= dict(zip(constant, values[len(time) :], strict=True))
        y, after = op.backends["reference"].run(*[now.get(name) for name in op.names[:-1]], state, **call.options)
        return [_real(after).clone(), _real(y.squeeze(1)).clone()]  # a scan's results may not be one tensor

    last, y = scan_op(step, [_real(call.state)], [*map(_real, steps.values())], tuple(map(_real, constant.values())))
    y = torch.view_as_complex(y) if pairs[1] else y
    return y.movedim(0, 1), torch.view_as_complex(last) if pairs[0] else last


def _real(value: Tensor) -> Tensor:
    return torch.view_as_real(value) if value.is_complex() else value
