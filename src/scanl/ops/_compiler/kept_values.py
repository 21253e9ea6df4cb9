"""Values of a recorded function that depend on weights alone: they are kept until the weights have other numbers.

Many layers compute their transition from their weights in every step: exponentials of them, products of them, or a
whole filter. A comparison of the weights' bytes with those of the last computation takes much less time.
"""

import ctypes
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg
from torch.utils._python_dispatch import _disable_current_modes

from scanl.ops._compiler import rules
from scanl.ops._compiler.recording import OperationRecorder, writes

KEPT_DTYPES = {torch.float32, torch.float64, torch.int64, torch.bool, torch.complex64, torch.complex128}
MIN_TIME = 5e3  # nanoseconds that a computation must take
MIN_GAIN = 3  # times the comparison
COMPARISON_TIME = 0.1  # nanoseconds for a byte
# Nanoseconds for a number of a result, about; another operation than these has no loop, or may have none.
FAST_TIME, SLOW_TIME = 0.15, 1.0
PRODUCT_TIME = 0.1  # for each term of a product of matrices
SLOW_OPERATIONS = {"exp", "log", "log1p", "expm1", "sin", "cos", "tan", "erf", "sigmoid", "tanh", "softplus", "pow",
                   "polar", "silu", "gelu", "log_sigmoid_forward", "sgn", "angle"}  # fmt: skip
FAST_OPERATIONS = rules.ELEMENTWISE_OPERATIONS | rules.REDUCTIONS | rules.JOINS.keys()
FAST_OPERATIONS |= {"complex", "real", "_conj_physical", "conj_physical", "lift_fresh_copy", "arange", "flip"}


class KeptValues:
    """The values of a recording that are kept, by the operation that makes them: those that others read.

    Empty if to compute them in every call takes little more time than to compare the weights.
    """

    def __init__(self, recording: OperationRecorder) -> None:
        self.made = set[fx.Node]()  # operations that no call computes
        self.values: dict[fx.Node, Tensor] = {}
        outside = {tensor.untyped_storage()._cdata for tensor in recording.read.values()}
        constant = _constant(recording)
        # A view of a weight is no computation.
        computed = {node for node in constant if node.op == "call_function" and not _storages(node) <= outside}
        roots = [node for node in computed if any(user not in computed for user in node.users)]
        needed = set(computed)
        for node in reversed(recording.graph.nodes):
            if any(user in needed for user in node.users):
                needed.add(node)
        self._order = [node for node in recording.graph.nodes if node in needed]
        names = {str(node.target) for node in self._order if node.op == "get_attr"}
        self._sources = {name: recording.read[name] for name in names}
        able = all(isinstance(node.meta["val"], Tensor) and node.meta["val"].dtype in KEPT_DTYPES for node in roots)
        able = able and all(tensor.is_contiguous() for tensor in self._sources.values())
        saved = sum(map(_nanoseconds, computed))
        comparing = COMPARISON_TIME * sum(tensor.nbytes for tensor in self._sources.values())
        if able and saved > max(MIN_TIME, MIN_GAIN * comparing):
            self.made, self.values = computed, {node: node.meta["val"] for node in roots}
            self._read = recording.read
            self._bytes = self._bytes_now()

    def refresh(self) -> None:
        """Compute the values anew if the weights have changed. This runs for every call."""
        if self.values and (now := self._bytes_now()) != self._bytes:
            with torch.no_grad(), _disable_current_modes():
                self._compute()
            self._bytes = now

    def _bytes_now(self) -> list[bytes]:
        return [ctypes.string_at(tensor.data_ptr(), tensor.nbytes) for tensor in self._sources.values()]

    def _compute(self) -> None:
        known: dict[fx.Node, Any] = {}
        for node in self._order:
            if node.op == "get_attr":
                known[node] = self._read[str(node.target)].detach()
                continue
            args, kwargs = map_arg((node.args, node.kwargs), known.__getitem__)
            known[node] = node.target(*args, **kwargs)  # pyright: ignore[reportCallIssue]
            if node in self.values:
                self.values[node].copy_(known[node])


def _constant(recording: OperationRecorder) -> set[fx.Node]:
    """Return the operations that depend on no operand, and whose results nothing writes."""
    nodes, constant = list(recording.graph.nodes), set[fx.Node]()
    written = set().union(*(_storages(node.args[0]) for node in nodes if writes(node)))
    for node in nodes:
        if node.op not in ("get_attr", "call_function") or writes(node):
            continue
        if constant.issuperset(node.all_input_nodes) and _storages(node).isdisjoint(written):
            constant.add(node)
    return constant


def _storages(node: Any) -> set[int]:
    """Return the storages of what an operation returns."""
    value = node.meta["val"]
    results = value if isinstance(value, tuple | list) else [value]
    return {result.untyped_storage()._cdata for result in results if isinstance(result, Tensor)}


def _nanoseconds(node: fx.Node) -> float:
    """Return about how long a kernel takes for an operation."""
    value, target = node.meta["val"], node.target
    if not isinstance(target, torch._ops.OpOverload) or not isinstance(value, Tensor):
        return 0.0
    if any(_storages(node) == _storages(source) for source in node.all_input_nodes):  # a view
        return 0.0
    numbers, name = value.numel() * (4 if value.is_complex() else 1), target._opname
    if name in ("mm", "bmm", "addmm", "baddbmm"):
        left: Any = node.args[1 if name.startswith(("add", "badd")) else 0]
        return PRODUCT_TIME * numbers * left.meta["val"].shape[-1]
    if name in SLOW_OPERATIONS:
        return SLOW_TIME * numbers
    return FAST_TIME * numbers if name in FAST_OPERATIONS or rules.constant(name, [0, 0, 0]) is not None else 1e6
