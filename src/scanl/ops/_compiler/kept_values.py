"""Values of a recorded function that depend on weights alone: they are kept until the weights have other numbers.

Many layers compute their transition from their weights in every step: exponentials of them, products of them, or a
whole filter. A comparison of the weights' bytes with those of the last computation takes much less time.
"""

import ctypes
import functools
from array import array
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg
from torch.utils._python_dispatch import _disable_current_modes

from scanl.ops._compiler import rules
from scanl.ops._compiler.machine_code import address
from scanl.ops._compiler.print_llvm import KERNEL, KernelSource
from scanl.ops._compiler.recording import OperationRecorder, writes
from scanl.ops._compiler.snapshot import Snapshot

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
            self._bytes = BytesOfTensors(list(self._sources.values()))

    def refresh(self) -> None:
        """Compute the values anew if the weights have changed. This runs for every call."""
        if self.values and not self._bytes.same():
            now = BytesOfTensors(list(self._sources.values()))
            with torch.no_grad(), _disable_current_modes():
                self._compute()
            self._bytes = now

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


class BytesOfTensors:
    """The bytes of contiguous tensors at one moment."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors, self._same = tensors, _comparison()
        self._kept = [ctypes.create_string_buffer(_bytes(tensor), tensor.nbytes) for tensor in tensors]
        self._places = Snapshot((), tensors)
        table = array("q", [len(tensors)])
        for tensor, kept in zip(tensors, self._kept, strict=True):
            table.extend([tensor.data_ptr(), ctypes.addressof(kept), tensor.nbytes])
        self._table, self._at = table, table.buffer_info()[0]

    def same(self) -> bool:
        """Return whether the tensors have these bytes, which are compared where they lie. It runs for every token."""
        if self._places.holds():
            return self._same(self._at) == 1
        return all(_bytes(tensor) == kept.raw for tensor, kept in zip(self._tensors, self._kept, strict=True))


def _bytes(tensor: Tensor) -> bytes:
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


@functools.cache
def _comparison() -> Any:
    """Return the function of the address of a table, which returns 1 if all bytes are the same, and 0 otherwise."""
    code = address(KernelSource(_TEXT.format(name=KERNEL), frozenset()))
    return ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p)(code)


_TEXT = """
declare i64 @llvm.vector.reduce.or.v16i64(<16 x i64>)

define i64 @{name}(ptr %table) nounwind {{
entry:
  %count = load i64, ptr %table
  br label %tensor.head

tensor.head:
  %t = phi i64 [0, %entry], [%t.next, %tensor.end]
  %all = phi i64 [0, %entry], [%all.next, %tensor.end]
  %more = icmp slt i64 %t, %count
  br i1 %more, label %tensor, label %end
tensor:
  %at = mul i64 %t, 3
  %at0 = add i64 %at, 1
  %at1 = add i64 %at, 2
  %at2 = add i64 %at, 3
  %place0 = getelementptr i64, ptr %table, i64 %at0
  %place1 = getelementptr i64, ptr %table, i64 %at1
  %place2 = getelementptr i64, ptr %table, i64 %at2
  %now = load ptr, ptr %place0
  %kept = load ptr, ptr %place1
  %bytes = load i64, ptr %place2
  %wide = and i64 %bytes, -128
  br label %wide.head

wide.head:
  %i = phi i64 [0, %tensor], [%i.next, %wide.read]
  %or = phi <16 x i64> [zeroinitializer, %tensor], [%or.next, %wide.read]
  %i.more = icmp slt i64 %i, %wide
  br i1 %i.more, label %wide.read, label %wide.end
wide.read:
  %x.at = getelementptr i8, ptr %now, i64 %i
  %y.at = getelementptr i8, ptr %kept, i64 %i
  %x = load <16 x i64>, ptr %x.at, align 1
  %y = load <16 x i64>, ptr %y.at, align 1
  %differ = xor <16 x i64> %x, %y
  %or.next = or <16 x i64> %or, %differ
  %i.next = add i64 %i, 128
  br label %wide.head
wide.end:
  %reduced = call i64 @llvm.vector.reduce.or.v16i64(<16 x i64> %or)
  %begun = or i64 %all, %reduced
  br label %byte.head

byte.head:
  %j = phi i64 [%wide, %wide.end], [%j.next, %byte.read]
  %all.next = phi i64 [%begun, %wide.end], [%with, %byte.read]
  %j.more = icmp slt i64 %j, %bytes
  br i1 %j.more, label %byte.read, label %tensor.end
byte.read:
  %a.at = getelementptr i8, ptr %now, i64 %j
  %b.at = getelementptr i8, ptr %kept, i64 %j
  %a = load i8, ptr %a.at
  %b = load i8, ptr %b.at
  %ab = xor i8 %a, %b
  %ab.wide = zext i8 %ab to i64
  %with = or i64 %all.next, %ab.wide
  %j.next = add i64 %j, 1
  br label %byte.head
tensor.end:
  %t.next = add i64 %t, 1
  br label %tensor.head

end:
  %same = icmp eq i64 %all, 0
  %result = zext i1 %same to i64
  ret i64 %result
}}
"""
