"""Values of a recorded function that depend on weights alone: they are kept until the weights have other numbers.

Many layers compute their transition from their weights in every step: exponentials of them, products of them, or a
whole filter. To see whether the weights' bytes are those of the last computation takes much less time.
"""

import ctypes
import functools
from array import array
from collections.abc import Sequence, Set
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
MIN_GAIN = 3  # times the digest
NEAR_SIZE = 1 << 20  # bytes that stay in a core's cache from call to call
NEAR_TIME, FAR_TIME = 0.01, 0.05  # nanoseconds to read a byte there, and in memory
WIDTH, VECTORS = 16, 4  # numbers of 32 bits of a vector, and vectors, of a digest
LANES = WIDTH * VECTORS
# Nanoseconds for a number of a result, about; another operation than these has no loop, or may have none.
FAST_TIME, SLOW_TIME = 0.15, 1.0
PRODUCT_TIME = 0.1  # for each term of a product of matrices
SLOW_OPERATIONS = {"exp", "log", "log1p", "expm1", "sin", "cos", "tan", "erf", "sigmoid", "tanh", "softplus", "pow",
                   "polar", "silu", "gelu", "log_sigmoid_forward", "sgn", "angle"}  # fmt: skip
FAST_OPERATIONS = rules.ELEMENTWISE_OPERATIONS | rules.REDUCTIONS | rules.JOINS.keys()
FAST_OPERATIONS |= {"complex", "real", "_conj_physical", "conj_physical", "lift_fresh_copy", "arange", "flip"}


class KeptValues:
    """The values of a recording that are kept, by the operation that makes them: those that others read.

    Empty if to compute them in every call takes little more time than to look at the weights.
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
        read = sum(tensor.nbytes for tensor in self._sources.values())
        digesting = read * (NEAR_TIME if read <= NEAR_SIZE else FAR_TIME)
        if able and saved > max(MIN_TIME, MIN_GAIN * digesting):
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
                kept = self.values[node]
                # Of rows that are one in memory the first stands for all: torch writes to none of them.
                once = tuple(slice(1) if stride == 0 else slice(None) for stride in kept.stride())
                kept[once].copy_(known[node][once])


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


def time_of_an_operation(recording: OperationRecorder, kept: Set[fx.Node]) -> float:
    """Return about how many nanoseconds a kernel takes for an operation, on average. Products by matrices do not count,
    which take as long elsewhere.   kept: operations that no call computes.
    """
    nodes = [node for node in recording.graph.nodes if node.op == "call_function" and node not in kept]
    times = [min(_nanoseconds(node), SLOW_TIME * node.meta["val"].numel()) for node in nodes if _counts(node)]
    return sum(times) / max(1, len(nodes))


def _counts(node: fx.Node) -> bool:
    return isinstance(node.meta["val"], Tensor) and str(node.target) not in ("aten.mm.default", "aten.addmm.default")


class BytesOfTensors:
    """The digest of the bytes of contiguous tensors at one moment.

    A change of one number, or of numbers in different lanes of the digest, is never missed, and another change hardly
    ever: each lane has 32 bits. A comparison with a copy would read twice as much.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._places, self._digest = Snapshot((), tensors), _digest()
        parts = [number for tensor in tensors for number in (tensor.data_ptr(), tensor.nbytes)]
        self._table = array("q", [len(tensors), *parts])
        self._tensors, self._now = tensors, ctypes.create_string_buffer(4 * LANES + 8)
        self._at = self._table.buffer_info()[0], ctypes.addressof(self._now)
        self._digest(*self._at)
        self._kept = self._now.raw

    def same(self) -> bool:
        """Return whether the tensors have these bytes. It runs for every token."""
        if not self._places.holds():
            return BytesOfTensors(self._tensors)._kept == self._kept
        self._digest(*self._at)
        return self._now.raw == self._kept


@functools.cache
def _digest() -> Any:
    """Return the function of the addresses of a table and of the digest that it writes."""
    code = address(KernelSource(_source(), frozenset()))
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(code)


def _source() -> str:
    four = range(VECTORS)
    kind, factor, shift = f"<{WIDTH} x i32>", _vector(0x9E3779B1), _vector(15)

    def step(name: str, before: str, place: str, offset: str) -> str:
        """Return the code that takes a vector into the digest."""
        return f"""
  %{name}.at = getelementptr i8, ptr {place}, i64 {offset}
  %{name}.x = load {kind}, ptr %{name}.at, align 1
  %{name}.xor = xor {kind} {before}, %{name}.x
  %{name}.times = mul {kind} %{name}.xor, {factor}
  %{name}.high = lshr {kind} %{name}.times, {shift}
  %{name} = xor {kind} %{name}.times, %{name}.high"""

    lines = {
        "all": [f"  %t{n} = phi {kind} [{_vector(n + 1)}, %entry], [%{'o' if n == 0 else 'm'}{n}, %end]" for n in four],
        "many": [f"  %m{n} = phi {kind} [%t{n}, %tensor], [%m{n}.next, %many.read]" for n in four],
        "steps": [step(f"m{n}.next", f"%m{n}", "%place", f"%i{n}") for n in four],
        "offsets": [f"  %i{n} = add i64 %i, {4 * WIDTH * n}" for n in four],
        "stores": [
            f"  %s{n} = getelementptr i8, ptr %out, i64 {4 * WIDTH * n}\n  store {kind} %t{n}, ptr %s{n}, align 1"
            for n in four
        ],
    }
    return _TEXT.format(
        name=KERNEL, kind=kind, one=step("o0.next", "%o0", "%place", "%j"), large=4 * LANES, small=4 * WIDTH,
        **{name: "\n".join(code) for name, code in lines.items()},
    )  # fmt: skip


def _vector(number: int) -> str:
    return f"<{', '.join([f'i32 {number}'] * WIDTH)}>"


_TEXT = """
define void @{name}(ptr %table, ptr %out) nounwind {{
entry:
  %count = load i64, ptr %table
  br label %head

head:
  %t = phi i64 [0, %entry], [%t.next, %end]
  %rest = phi i64 [0, %entry], [%r, %end]
{all}
  %more = icmp slt i64 %t, %count
  br i1 %more, label %tensor, label %done
tensor:
  %twice = mul i64 %t, 2
  %at0 = add i64 %twice, 1
  %at1 = add i64 %twice, 2
  %slot0 = getelementptr i64, ptr %table, i64 %at0
  %slot1 = getelementptr i64, ptr %table, i64 %at1
  %place = load ptr, ptr %slot0
  %bytes = load i64, ptr %slot1
  %large = and i64 %bytes, -{large}
  %small = and i64 %bytes, -{small}
  br label %many

many:
  %i = phi i64 [0, %tensor], [%i.next, %many.read]
{many}
  %i.more = icmp slt i64 %i, %large
  br i1 %i.more, label %many.read, label %one
many.read:
{offsets}
{steps}
  %i.next = add i64 %i, {large}
  br label %many

one:
  %j = phi i64 [%large, %many], [%j.next, %one.read]
  %o0 = phi {kind} [%m0, %many], [%o0.next, %one.read]
  %j.more = icmp slt i64 %j, %small
  br i1 %j.more, label %one.read, label %byte
one.read:
{one}
  %j.next = add i64 %j, {small}
  br label %one

byte:
  %k = phi i64 [%small, %one], [%k.next, %byte.read]
  %r = phi i64 [%rest, %one], [%r.next, %byte.read]
  %k.more = icmp slt i64 %k, %bytes
  br i1 %k.more, label %byte.read, label %end
byte.read:
  %b.at = getelementptr i8, ptr %place, i64 %k
  %b = load i8, ptr %b.at
  %b.wide = zext i8 %b to i64
  %b.xor = xor i64 %r, %b.wide
  %b.times = mul i64 %b.xor, 1099511628211
  %b.high = lshr i64 %b.times, 29
  %r.next = xor i64 %b.times, %b.high
  %k.next = add i64 %k, 1
  br label %byte
end:
  %t.next = add i64 %t, 1
  br label %head

done:
{stores}
  %last = getelementptr i8, ptr %out, i64 {large}
  store i64 %rest, ptr %last, align 1
  ret void
}}
"""
