"""Record a function of tensors of constant shapes, and run it as one kernel of the CPU.

A call of torch takes microseconds, however few numbers it computes; a step of a small model, and of its gradient, is
hundreds of calls. Here the function runs once. What it computes is recorded, views become offsets and
strides, and the rest becomes the source of one kernel.
"""

import functools
import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from scanl.errors import ShapeError
from scanl.ops._compiler.kept_values import KeptValues, time_of_an_operation
from scanl.ops._compiler.operations import add
from scanl.ops._compiler.recording import OperationRecorder, record, writes
from scanl.ops._compiler.rules import JOINS, UnsupportedOperation
from scanl.ops._compiler.schedule import Schedule
from scanl.ops._compiler.views import Memory, View
from scanl.ops._cpu._memory import empty
from scanl.ops._frame.context import backend, conditions_recorded
from scanl.ops.products.constants import Constants

if TYPE_CHECKING:
    from scanl.ops._compiler.machine_code import NativeKernel
    from scanl.ops._compiler.snapshot import Snapshot

MAX_OPERATIONS = 8000  # operations: a kernel of more takes longer than 2 s to record and compile
STORED_DTYPES: dict[Any, torch.dtype] = {torch.uint8: torch.float32}  # as what kernels have operands and results
KINDS = {torch.float32: "float32", torch.float64: "float64", torch.bool: "float32", torch.uint8: "float32",
         torch.int64: "float64"}  # fmt: skip
# Kinds of memory from outside, where whole numbers and truths are read and written as torch has them.
OUTER_KINDS = {**KINDS, torch.bool: "int8", torch.int64: "int64", torch.int8: "int8"}
HALF = {torch.bfloat16, torch.float16}
MAX_HALF = 64  # numbers of a tensor of half precision that is copied in each call: a scale, not a weight
ROW_KINDS = {**KINDS, torch.int8: "float32"}  # of rows of a tensor, which are to be multiplied by their scales
SMALL_RESULT = 1 << 18  # numbers: less than `empty` keeps memory for
AS_THEY_ARE = {torch.float32, torch.float64, torch.int64, torch.bool}  # contiguous operands are read where they lie
aten = torch.ops.aten
_dtype = operator.attrgetter("dtype")


class RecordedFunction:
    """A function of tensors that runs as a kernel, for operands of these shapes and dtypes, on a CPU.

    function: takes tensors, and returns nested tuples, lists and dicts of tensors and None. It may read other tensors,
    such as parameters, which the kernel reads anew in every call, and copy results to buffers. Its operations may not
    depend on the numbers. examples: operands.

    by_rows: the first axis of operands and results has rows, none of which depends on another. Then a call may have
    more rows than the examples: the kernel runs for as many as they have at a time, on several threads.

    portable: the bits of the results are those of every machine, every number of threads and of rows.

    conditions: whether it may have conditions (`holds` of the frame's context). Each call looks at them before anything
    is computed, and raises ShapeError where one is not true.

    What depends on other tensors alone may be kept from call to call, until those have other numbers.

    constants: for a file: other tensors never have other numbers, and this is what becomes of them.

    Results are within rounding of the function's: sums have another order. They are new tensors in every call.
    Raises UnsupportedOperation, before anything is computed, for a function that no kernel can run.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *examples: Tensor,
        by_rows: bool = False,
        portable: bool = False,
        conditions: bool = False,
        constants: Constants | None = None,
    ) -> None:
        self.schedule = Schedule(portable)
        self.rows = examples[0].shape[0] if by_rows else 0
        self.captured: dict[str, Tensor] = {}
        self.kinds: dict[str, str] = {"team": "team", "scratch32": "float32", "scratch64": "float64"}
        self._memories: dict[int, Memory] = {}  # by the storage of the tensor that stands for it
        self._values: dict[fx.Node, Any] = {}
        self._built: Callable[[list[Tensor]], Any]  # makes a result of tensors
        self._widened: list[tuple[Tensor, Tensor]] = []  # copies, and the tensors of half precision that they are of
        self._storages: list[Any] = []  # kept, so that no two have one address
        found = list[Tensor]()
        recording = self._record(function, examples, found if conditions else None, constants)
        # A kernel of its own, so that none reads at positions that a condition rules out.
        self.guard = RecordedFunction(_conditions_of(function), *examples, by_rows=by_rows) if found else None
        reads = Counter(str(node.target) for node in recording.graph.nodes if node.op == "get_attr")
        self._uses = {node: reads[str(node.target)] for node in recording.graph.nodes if node.op == "get_attr"}
        inputs: list[tuple[torch.Size, torch.dtype]] = []
        self.kept = KeptValues(recording) if by_rows and not portable else None  # torch's bits are of one machine
        self.time_of_an_operation = time_of_an_operation(recording, self.kept.made if self.kept is not None else set())
        for node in recording.graph.nodes:
            if self.kept is not None and node in self.kept.made:
                if node in self.kept.values:
                    self._values[node] = self._captured_value(self.kept.values[node])
            elif node.op == "placeholder":
                self._values[node] = self._outside(f"x{len(inputs)}", node.meta["val"])
                inputs.append((node.meta["val"].shape, node.meta["val"].dtype))
            elif node.op == "get_attr":
                self._values[node] = self._attribute(recording.read[str(node.target)], node)
            elif node.op == "call_function":
                self._call(node)
            elif node.op == "output":
                self._outputs(node.args[0])
        self.inputs = inputs
        self.scratch = self.schedule.allocate()
        self._called = frozenset(self.schedule.called)
        self.starts = [int(tensor.storage_offset()) * tensor.itemsize for tensor in self.captured.values()]
        self.work = sum(self.scratch.values()) + sum(map(Tensor.numel, self.captured.values()))
        self._row = self._numbers_of_a_row()
        self._source = self.schedule.source(self.kinds, self.rows, self._row)
        self._tensors = list(self.captured.values())
        self._places: tuple[Snapshot, list[int]] | None = None  # the tensors, and the addresses of their memory
        self._calls: _CallsOfRows | None = None  # of the number of rows of the last call

    @functools.cached_property
    def kernel(self) -> "NativeKernel":
        """The kernel, which is compiled when it first runs."""
        from scanl.ops._compiler.machine_code import NativeKernel

        return NativeKernel(self._source)

    @functools.cached_property
    def team(self) -> Callable[[int], int]:
        """The function of the number of units that returns the address of what the kernel calls others by."""
        if not self._called:
            return lambda units: 0
        from scanl.ops.products.in_team import team

        return functools.partial(team, used=self._called)

    def _numbers_of_a_row(self) -> dict[str, int]:
        """Return how many numbers a row has in each memory that has rows, and in the scratch memory of a unit."""
        if not self.rows:
            return {}
        numbers = {}
        for letter, tensors in (("x", self.inputs), ("y", self.results)):
            for at, (shape, dtype) in enumerate(tensors):
                if shape[:1] != (self.rows,):
                    raise UnsupportedOperation(f"a tensor {tuple(shape)} without a row for each of {self.rows}")
                numbers[f"{letter}{at}"] = prod(shape[1:]) * (2 if dtype.is_complex else 1)
        return numbers

    def _record(
        self,
        function: Callable[..., Any],
        examples: Sequence[Tensor],
        conditions: list[Tensor] | None,
        constants: Constants | None,
    ) -> OperationRecorder:
        """Return the operations of a function. conditions: gets those that it has; None: it may have none."""

        def flat(*operands: Tensor) -> list[Any]:
            leaves: list[Any] = []
            with nullcontext() if conditions is None else conditions_recorded(conditions):
                self._built = _builder(function(*operands), leaves)
            return leaves

        try:
            with backend("reference"):
                recording = record(flat, examples, constants)
        except (RuntimeError, ValueError) as error:
            # torch has no common class for operations that depend on numbers
            raise UnsupportedOperation(
                f"its operations depend on the numbers, or cannot be recorded: {str(error).splitlines()[0]}"
            ) from error
        if len(recording.graph.nodes) > MAX_OPERATIONS:
            raise UnsupportedOperation(
                f"it has {len(recording.graph.nodes)} operations, expected at most {MAX_OPERATIONS}"
            )
        return recording

    # --- values

    def _kind(self, tensor: Tensor, kinds: Mapping[torch.dtype, str] = KINDS) -> str:
        """Return the kind of memory that has a tensor."""
        dtype = torch.view_as_real(tensor).dtype if tensor.is_complex() else tensor.dtype
        if dtype not in kinds:
            raise UnsupportedOperation(f"a tensor of {tensor.dtype}")
        return kinds[dtype]

    def _outside(self, name: str, tensor: Tensor) -> View:
        """Return the value of a tensor whose memory the kernel gets."""
        memory = self._memories.get(tensor.untyped_storage()._cdata)
        if memory is None:
            numbers = tensor.untyped_storage().nbytes() // tensor.itemsize * (2 if tensor.is_complex() else 1)
            self.kinds[name] = self._kind(tensor, OUTER_KINDS)
            memory = self._memory(tensor, Memory(name, numbers, self.kinds[name]))
        return _view(tensor, memory)

    def _attribute(self, tensor: Tensor, node: fx.Node) -> View:
        """Return the value of a tensor that is no operand."""
        shaped = node.meta["val"]
        if tensor.dtype in STORED_DTYPES:
            if any(user.target is not aten.lift_fresh_copy.default for user in node.users):
                raise UnsupportedOperation(f"a tensor of {tensor.dtype} that is no operand")
            tensor = tensor.to(STORED_DTYPES[tensor.dtype])
            shaped = tensor
        if tensor.dtype in HALF and tensor.numel() <= MAX_HALF:
            shaped = tensor.float()
            self._widened.append((shaped, tensor))
            tensor = shaped
        return self._captured_value(tensor, shaped)

    def _captured_value(self, tensor: Tensor, shaped: Tensor | None = None) -> View:
        """Return the value of a tensor that the kernel reads where it lies. shaped: the tensor in another shape."""
        name = f"a{len(self.captured)}"
        value = self._outside(name, tensor if shaped is None else shaped)
        if value.memory.name == name:
            self.captured[name] = tensor
        return value

    def _memory(self, tensor: Tensor, memory: Memory) -> Memory:
        storage = tensor.untyped_storage()
        self._storages.append(storage)
        self._memories[storage._cdata] = memory
        return memory

    def _result(self, tensor: Tensor, kinds: Mapping[torch.dtype, str] = KINDS) -> View:
        """Return the value of a tensor that an operation makes, in memory of its own."""
        numbers = tensor.untyped_storage().nbytes() // tensor.itemsize * (2 if tensor.is_complex() else 1)
        return _view(tensor, self._memory(tensor, Memory("", numbers, self._kind(tensor, kinds))))

    def _view(self, tensor: Tensor) -> View:
        """Return the view of known memory that a tensor is."""
        return _view(tensor, self._memories[tensor.untyped_storage()._cdata])

    def _value(self, argument: Any) -> Any:
        return self._values[argument] if isinstance(argument, fx.Node) else argument

    # --- operations

    def _call(self, node: fx.Node) -> None:
        if node.target is operator.getitem:
            self._values[node] = self._values[node.args[0]][node.args[1]]  # pyright: ignore
            return
        target = node.target
        if not isinstance(target, torch._ops.OpOverload):
            raise UnsupportedOperation(f"{target}")
        results, form = pytree.tree_flatten(node.meta["val"])
        operands: Any = map_arg((node.args, node.kwargs), self._value)
        args, kwargs = operands
        if not all(isinstance(result, Tensor) for result in results):
            raise UnsupportedOperation(f"its operations depend on the numbers: {target}")
        if writes(node):
            once = self._uses.get(node.args[0]) == 1
            if target is aten.copy_.default and once and self._made_there(args[0], args[1]):
                self._values[node] = args[1]
                return
            if args[0].memory.name.startswith("a") and (self.rows or target is not aten.copy_.default):
                raise UnsupportedOperation(f"{target} of a tensor that is no operand")
            out = self.schedule.written(args[0])
            self._values[node] = out
            add(self.schedule, target, out, args, kwargs)
            return
        if all(result.untyped_storage()._cdata in self._memories for result in results):  # views
            self._values[node] = pytree.tree_unflatten([self._view(result) for result in results], form)
            return
        if len(results) != 1:
            raise UnsupportedOperation(f"{target}")
        if target._opname in JOINS:
            self._join(node, results[0])
            return
        out = self._result(results[0], ROW_KINDS if target is aten.embedding.default else KINDS)
        self._values[node] = out
        add(self.schedule, target, out, args, kwargs)

    def _join(self, node: fx.Node, result: Tensor) -> None:
        """Make a tensor of parts of others."""
        self._values[node] = self._result(result)
        args, kwargs = map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
        known = {id(source.meta["val"]): self._values[source] for source in node.all_input_nodes}
        parts = JOINS[node.target._opname](result, *args, **kwargs)  # pyright: ignore
        if parts is None:
            raise UnsupportedOperation(f"{node.target}")
        for at, value in parts:
            source = known.get(id(value)) or self._view(value) if isinstance(value, Tensor) else value
            self.schedule.copy(self._view(at), source)

    def _made_there(self, target: View, source: View) -> bool:
        """Let a value be made in the memory to which it would be copied; return whether that can be."""
        fresh = not source.memory.name and source.memory.fill is None and source.whole
        unused = bool(target.memory.name) and not self.schedule.uses(target.memory) and target.ordered
        if fresh and unused and (source.form, source.memory.kind) == (target.form, target.memory.kind):
            source.memory.name, source.memory.offset = target.memory.name, target.offset
            return True
        return False

    def _outputs(self, leaves: Sequence[Any]) -> None:
        """Let results be written to tensors of their own: where they are made, or by a copy at the end."""
        self.results: list[tuple[tuple[int, ...], torch.dtype]] = []
        for leaf in leaves:
            value, fake = self._value(leaf), leaf.meta["val"]
            if fake.dtype not in KINDS and not fake.is_complex():
                raise UnsupportedOperation(f"a result of {fake.dtype}")
            name = f"y{len(self.results)}"
            kind = self.kinds[name] = self._kind(fake, OUTER_KINDS)
            self.results.append((value.shape, fake.dtype))
            fresh = not value.memory.name and value.memory.fill is None and value.whole
            if fresh and value.memory.kind == kind:
                value.memory.name = name
                continue
            like = torch.empty(value.shape, dtype=fake.dtype, device="meta")
            self.schedule.copy(_view(like, Memory(name, like.numel() * (2 if like.is_complex() else 1), kind)), value)

    # --- calls

    def memory(self, units: int = 1) -> list[Tensor]:
        """Return scratch memory for a number of units."""
        return [
            torch.empty(self.scratch[kind] * units, dtype=dtype)
            for kind, dtype in (("float32", torch.float32), ("float64", torch.float64))
        ]

    def __call__(self, *operands: Tensor) -> Any:
        """Return what the function returns of these operands. A kernel of a small step takes no longer than this."""
        if self.guard is not None:
            _check(self.guard(*operands))
        lead = (operands[0].shape[0],) if self.rows else ()
        calls = self._calls  # another thread may set it
        if calls is None or calls.lead != lead:
            calls = self._calls = _CallsOfRows(self, lead)
        return self._built(calls.results(operands))

    @property
    def binds(self) -> bool:
        """Whether the kernel reads and writes all operands and results as torch has them, as `bound` needs it."""
        return all(dtype not in STORED_DTYPES for _, dtype in (*self.inputs, *self.results))

    def inputs_of(self, rows: int) -> list[tuple[torch.Size, torch.dtype]]:
        """Return the forms of the operands of a call with so many rows."""
        return [(torch.Size((rows, *shape[1:])), dtype) for shape, dtype in self.inputs]

    def blank(self, rows: int) -> tuple[list[Tensor], Any]:
        """Return tensors for the results of a call with so many rows, and what the function returns of them."""
        tensors = _CallsOfRows(self, (rows,)).blank()
        return tensors, self._built(tensors)

    def bound(self, operands: Sequence[Tensor], results: Sequence[Tensor]) -> Callable[[], None]:
        """Return a call that reads these operands and writes these results, at the addresses that they have now.

        They are contiguous, of the shapes and dtypes of the examples. One thread at a time may call it. It raises
        ShapeError where a condition is not true.
        """
        kernel = _KernelOfRows(self, operands[0].shape[:1] if self.rows else ())
        kernel.put(operands, results)
        if self.guard is None:
            return kernel
        (truths,), _ = self.guard.blank(len(operands[0]))
        look = self.guard.bound(operands, [truths])

        def run() -> None:
            look()
            _check(truths)
            kernel()

        return run

    def refresh(self) -> None:
        """Make what the kernel reads beside its operands anew, where tensors have other numbers."""
        for wide, half in self._widened:
            wide.copy_(half)
        if self.kept is not None:
            self.kept.refresh()

    def places(self) -> list[int]:
        """Return the addresses of the tensors that are no operands: the same list as long as they are the same."""
        known = self._places
        if known is None or not known[0].holds():
            from scanl.ops._compiler.snapshot import Snapshot

            starts = zip(self._tensors, self.starts, strict=True)
            known = Snapshot((), self._tensors), [tensor.data_ptr() - start for tensor, start in starts]
            self._places = known
        return known[1]


class _CallsOfRows:
    """Calls of a recorded function with this many rows."""

    def __init__(self, recorded: RecordedFunction, lead: tuple[int, ...]) -> None:
        self.lead, self._recorded = lead, recorded
        inputs, made = self._with_rows(recorded.inputs), self._with_rows(recorded.results)
        self._shapes, self._dtypes = [torch.Size(shape) for shape, _ in inputs], [dtype for _, dtype in inputs]
        self._as_they_are = AS_THEY_ARE.issuperset(self._dtypes)
        stored: list[Any] = [(shape, STORED_DTYPES.get(dtype, dtype)) for shape, dtype in made]
        self._empty = [
            functools.partial(torch.empty_like, torch.empty(shape, dtype=dtype))
            if prod(shape) < SMALL_RESULT
            else functools.partial(empty, shape, dtype)
            for shape, dtype in stored
        ]
        self._made = [dtype for _, dtype in made] if any(dtype in STORED_DTYPES for _, dtype in made) else None
        self._kernels: list[_KernelOfRows] = []  # which no call is using

    def _with_rows(self, forms: Sequence[Any]) -> list[Any]:
        return [((*self.lead, *shape[1:]) if self.lead else shape, dtype) for shape, dtype in forms]

    def blank(self) -> list[Tensor]:
        return [make() for make in self._empty]

    def results(self, operands: Sequence[Tensor]) -> list[Tensor]:
        read = operands
        if not (
            self._as_they_are
            and list(map(Tensor.size, operands)) == self._shapes
            and list(map(_dtype, operands)) == self._dtypes
            and all(map(Tensor.is_contiguous, operands))
        ):
            forms = zip(operands, self._shapes, self._dtypes, strict=True)
            read = [as_stored(operand, shape, dtype) for operand, shape, dtype in forms]
        results = self.blank()
        try:
            kernel = self._kernels.pop()
        except IndexError:  # at first, or other threads use them
            kernel = _KernelOfRows(self._recorded, self.lead)
        kernel.put(read, results)
        kernel()
        self._kernels.append(kernel)
        if self._made is not None:
            results = [result.to(dtype) for result, dtype in zip(results, self._made, strict=True)]
        return results


class _KernelOfRows:
    """A kernel with the scratch memory that it needs. One thread may run it at a time."""

    def __init__(self, recorded: RecordedFunction, lead: tuple[int, ...]) -> None:
        self._recorded, self._units = recorded, -(-lead[0] // recorded.rows) if lead else 1
        self._scratch, self._places = recorded.memory(self._units), recorded.places()
        first = [recorded.team(self._units), *map(Tensor.data_ptr, self._scratch)]
        self._inputs = len(first)
        self._others = self._inputs + len(recorded.inputs)
        self._outputs = self._others + len(self._places)
        packed = [*first, *[0] * len(recorded.inputs), *self._places, *[0] * len(recorded.results), *lead]
        self._call = recorded.kernel.prepared(packed, self._units, recorded.work * self._units)

    def put(self, operands: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        """Let the kernel read and write these from now on."""
        self._call.put(self._inputs, list(map(Tensor.data_ptr, operands)))
        self._call.put(self._outputs, list(map(Tensor.data_ptr, results)))

    def __call__(self) -> None:
        self._recorded.refresh()
        call, places = self._call, self._recorded.places()
        if places is not self._places:
            call.put(self._others, places)
            self._places = places
        call.put(0, (self._recorded.team(self._units),))
        call()


def _conditions_of(function: Callable[..., Any]) -> Callable[..., Tensor]:
    """Return the function of the same operands that returns whether each row (B,) meets all conditions of another."""

    def truths(*operands: Tensor) -> Tensor:
        with conditions_recorded(found := []):
            function(*operands)
        return functools.reduce(torch.logical_and, found)

    return truths


def _check(truths: Tensor) -> None:
    if not truths.all():
        raise ShapeError("recorded function: an operand does not meet a condition of the function")


def as_stored(operand: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return an operand as a kernel has it. Raises ShapeError for another shape or dtype than these."""
    if operand.shape != shape or operand.dtype != dtype:
        raise ShapeError(
            f"recorded function: an operand is {operand.dtype} {tuple(operand.shape)}, expected {dtype} "
            f"{tuple(shape)} because of the example"
        )
    operand = operand.to(STORED_DTYPES[dtype]) if dtype in STORED_DTYPES else operand
    return operand.contiguous().resolve_conj()


def _builder(result: Any, leaves: list[Any]) -> Callable[[list[Tensor]], Any]:
    """Append the tensors of a result, and return the function that makes a result of the same form of others."""
    scope: dict[str, Any] = {}
    return eval(f"lambda tensors: {_form(result, leaves, scope)}", scope)


def _form(result: Any, leaves: list[Any], scope: dict[str, Any]) -> str:
    """Return the expression that makes a result of `tensors`. scope: the classes and keys in it, by their names."""
    if isinstance(result, Tensor):
        leaves.append(result)
        return f"tensors[{len(leaves) - 1}]"
    if result is None:
        return "None"
    if not isinstance(result, dict | list | tuple):
        raise UnsupportedOperation(f"a result of {type(result).__name__}")
    if isinstance(result, dict):
        return f"{{{', '.join(f'{_named(key, scope)}: {_form(each, leaves, scope)}' for key, each in result.items())}}}"
    members = "".join(f"{_form(member, leaves, scope)}, " for member in result)
    if type(result) is tuple:
        return f"({members})"
    name = _named(type(result), scope)
    if hasattr(result, "_fields"):  # the class itself would check its arguments
        return f"{_named(tuple.__new__, scope)}({name}, ({members}))"
    return f"{name}([{members}])"


def _named(value: Any, scope: dict[str, Any]) -> str:
    name = f"v{len(scope)}"
    scope[name] = value
    return name


def _view(tensor: Tensor, memory: Memory) -> View:
    width = 2 if tensor.is_complex() else 1
    form = "complex" if tensor.is_complex() else "truth" if tensor.dtype == torch.bool else "real"
    strides = tuple(stride * width for stride in tensor.stride())
    return View(memory, int(tensor.storage_offset()) * width, tuple(tensor.shape), strides, form)
