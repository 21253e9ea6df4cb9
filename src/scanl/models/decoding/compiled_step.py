"""A step of a model as one kernel of the CPU.

A step of a small model is hundreds of calls of torch, and most of its time goes to the calls. The step runs once
without numbers; what it computes becomes the loops of one kernel, which reads each weight once.
"""

import functools
import importlib.util
import time
from collections import Counter
from collections.abc import Callable, Collection
from itertools import chain
from operator import is_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from scanl.errors import BackendError, ConfigError, ShapeError
from scanl.layers.packing import renewed
from scanl.layers.state import State, leaves, map_leaves
from scanl.ops._frame.context import exactly, portably

if TYPE_CHECKING:
    from scanl.ops._compiler.recorded import RecordedFunction

MIN_TOKENS = 64  # tokens: to record and compile takes the time of 50 to 150 ordinary ones
MAX_TIME = 2000  # nanoseconds a row that a kernel may take for an operation, about, without being timed
MAX_ROWS = 16  # rows of a kernel; more rows run in parts
UNREAD_NAMES = vars(nn.Module()).keys() - {"training", "_modules"}  # attributes of modules that no function sets
GLOBAL_HOOKS = torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks


class Makeup:
    """Contents of a model: modules, tensors, hooks and other attributes. They are compared by identity."""

    def __init__(self, model: nn.Module) -> None:
        from scanl.ops._compiler.snapshot import Snapshot

        self.tensors = [*model.parameters(), *model.buffers()]
        dicts: list[dict[Any, Any]] = [*GLOBAL_HOOKS]
        self._lists: list[Collection[Any]] = []
        for module in model.modules():
            attributes = vars(module)
            own = [value for name, value in attributes.items() if name not in UNREAD_NAMES]
            dicts += [attributes, module._forward_hooks, module._forward_pre_hooks, module._parameters, module._buffers]
            dicts += [value for value in own if isinstance(value, dict)]
            self._lists += [value for value in own if isinstance(value, list | set)]
        self._snapshot, self._members = Snapshot(dicts, self.tensors, UNREAD_NAMES), self._members_now()

    def holds(self) -> bool:
        """Return whether the model still consists of this, and its numbers lie there. It runs for every token."""
        return self._snapshot.holds() and (not self._lists or self._same_members(self._members_now()))

    def equals(self, other: "Makeup") -> bool:
        """Return whether another one has the same, though its numbers may lie elsewhere."""
        return self._snapshot.equals(other._snapshot) and self._same_members(other._members)

    def _members_now(self) -> list[list[Any]]:
        return list(map(list, self._lists))

    def _same_members(self, others: list[list[Any]]) -> bool:
        return list(map(len, others)) == list(map(len, self._members)) and all(
            map(is_, chain(*others), chain(*self._members))
        )


class CompiledStep:
    """The step of a model: step(inputs, state) returns what the ordinary step returns, within rounding.

    inputs: tokens (B,), or nested tuples of tensors, batch first.
    check: returns inputs as the step reads them, or raises an error for others.   step: the ordinary step, called as
    step(inputs, state), returns the results and the state; no row depends on another.   example: returns inputs of
    a number of rows.

    Parameters are read where they lie, in each call. When the model has changed, the kernel is made anew: other
    modules, parameters or buffers, also by an adapter or a parametrization; another dtype, shape or device; another
    attribute of a module, such as its mode (train, eval).

    Under `scanl.exact(portable=True)` its bits are those of every machine, or a BackendError says why they are not.
    The ordinary step runs instead, with the same results, where no kernel can run it (`reason` says why; a hook may do
    anything, so it is a reason), under `scanl.exact()` and `torch.autocast`, and where autograd needs the derivatives.
    A batch size may need a kernel that is not compiled yet.
    """

    def __init__(
        self,
        model: nn.Module,
        check: Callable[[Any], Any],
        step: Callable[[Any, State], tuple[Any, State]],
        example: Callable[[int], Any],
    ) -> None:
        self.model, self.check, self._step, self._example = model, check, step, example
        self.reason: str | None = None
        self._kernels: dict[tuple[int, bool], RecordedFunction] = {}  # by the number of rows, and whether portable
        self._read: Callable[[Any], list[Tensor]] = list  # the tensors of inputs and a state
        self._made_for: Makeup | None = None
        self._asked = False  # whether `compile` was called
        self._tokens = Counter[int]()  # decoded or expected, by the number of rows

    def __getstate__(self) -> dict[str, Any]:
        """Leave the kernels out of copies: they read this model's parameters."""
        return {**vars(self), "_kernels": {}, "_made_for": None, "_read": list}

    def __call__(self, inputs: Any, state: State = None, *, starts: Tensor | None = None) -> tuple[Any, State]:
        """Return the results and the state after one step of each row.

        starts: (B,) bool, True for rows whose state begins anew before the step.
        """
        inputs = self.check(inputs)
        first = inputs if isinstance(inputs, Tensor) else next(leaves(inputs))[1]
        if starts is not None:
            state = renewed("compiled step", state, self.model.init_state, starts, first)  # pyright: ignore[reportArgumentType]
        kernel = self.kernel(len(first))
        if kernel is None:
            return self._step(inputs, state)
        before = self.model.init_state(len(first)) if state is None else state  # pyright: ignore
        operands = self.tensors(inputs, before)
        if operands is None or (torch.is_grad_enabled() and self._differentiated(operands)):
            return self._step(inputs, state)
        try:
            return kernel(*operands)
        except ShapeError:  # the ordinary step casts a state of another dtype, and has an error for another shape
            return self._step(inputs, state)

    def tensors(self, inputs: Any, state: State) -> list[Tensor] | None:
        """Return the tensors of inputs and a state; None if they have another form, for which the ordinary step has an
        error.
        """
        try:
            return self._read((inputs, state))
        except (TypeError, ValueError, KeyError):  # what Python raises where it cannot unpack a value
            return None

    def pays(self, batch_size: int) -> bool:
        """Return whether to decode the next token of `batch_size` rows by the compiled step. That token then counts.

        It pays from token `MIN_TOKENS` on, of all calls together, and at once if `compile` was called, or if so many
        tokens were expected. Where no kernel can run the step, whether one can now is asked as rarely.
        """
        size = rows_of_kernel(batch_size)
        self._tokens[size] += 1
        if self.reason is not None:
            return self._tokens[size] % MIN_TOKENS == 0
        return self._asked or self._tokens[size] > MIN_TOKENS

    def expect(self, batch_size: int, tokens: int) -> None:
        """Take note that so many tokens of `batch_size` rows will be decoded."""
        if tokens >= MIN_TOKENS:
            size = rows_of_kernel(batch_size)
            self._tokens[size] = max(self._tokens[size], MIN_TOKENS)

    def compile(self, batch_size: int) -> None:
        """Compile the kernel for `batch_size` rows, by a call of it. Raises ConfigError unless that is 1 or more.

        From then on the step is always the compiled one.
        """
        if batch_size < 1:
            raise ConfigError(f"compile_step: batch_size is {batch_size}, expected at least 1")
        self._asked = True
        with torch.no_grad():
            kernel = self.kernel(batch_size)
            if kernel is not None:
                kernel(*self._read(self._examples(batch_size)))

    def refusal(self) -> str | None:
        """Return why no kernel can run the step; None if one can."""
        with torch.no_grad():
            self.kernel(1)
        return self.reason

    def _examples(self, batch_size: int) -> tuple[Any, State]:
        """Return inputs and a first state, each tensor in memory of its own."""
        both = self._example(batch_size), self.model.init_state(batch_size)  # pyright: ignore[reportCallIssue]
        return map_leaves(lambda leaf: leaf.detach().clone(memory_format=torch.contiguous_format), both)

    def kernel(self, batch: int) -> "RecordedFunction | None":
        """Return the kernel for this number of rows; None if the ordinary step runs. It is another one after a change
        of the model.
        """
        if not _has_numba():
            self.reason = "package numba is not installed"
            return None
        if self._made_for is None or not self._made_for.holds():
            makeup = Makeup(self.model)
            if self._made_for is None or not self._made_for.equals(makeup):
                self._kernels, self.reason = {}, None
            self._made_for = makeup
        portable = portably()
        if batch == 0 or (exactly() and not portable) or torch.is_autocast_enabled("cpu"):
            return None
        size = rows_of_kernel(batch)
        kernel = self._kernels.get((size, portable))
        if kernel is None and self.reason is None:
            reason, kernel = self._record(size, portable)
            if kernel is not None:
                self._kernels[size, portable] = kernel
            elif portable:
                raise BackendError(f"compiled step: it cannot have the bits of every machine: {reason}")
            else:
                self.reason = reason
        return kernel

    def _differentiated(self, operands: list[Tensor]) -> bool:
        """Return whether autograd needs the derivative by a parameter or an operand."""
        read = [] if self._made_for is None else self._made_for.tensors
        return any(tensor.requires_grad for tensor in (*operands, *read))

    def _record(self, size: int, portable: bool) -> "tuple[str | None, RecordedFunction | None]":
        """Return why no kernel can run `size` rows, or the kernel."""
        from scanl.ops._compiler.recorded import RecordedFunction  # with torch's tracer, which takes long to import
        from scanl.ops._compiler.rules import UnsupportedOperation

        if any(map(len, GLOBAL_HOOKS)):
            return "all modules have hooks", None
        for name, module in self.model.named_modules():
            if module._forward_hooks or module._forward_pre_hooks:
                return f"{name or 'the model'} has hooks", None
        for name, tensor in (*self.model.named_parameters(), *self.model.named_buffers()):
            if tensor.device.type != "cpu":
                return f"device {tensor.device.type} (runs on cpu)", None
            if tensor.is_floating_point() and tensor.dtype not in (torch.float32, torch.float64):
                return f"{name.rpartition('.')[2]} is {tensor.dtype} (takes float32 and float64)", None
        with torch.inference_mode(False), torch.no_grad():
            examples = self._examples(size)
            self._read = _reader(examples)

            def flat(*operands: Tensor) -> tuple[Any, State]:
                members = iter(operands)
                return self._step(*map_leaves(lambda _: next(members), examples))

            try:
                operands = self._read(examples)
                kernel = RecordedFunction(flat, *operands, by_rows=True, portable=portable, conditions=True)
            except UnsupportedOperation as error:
                return str(error), None
            if not portable and kernel.time_of_an_operation > MAX_TIME * size and self._slower(kernel, *examples):
                return "a kernel takes longer: it computes in each step what the ordinary one computes in few", None
            return None, kernel

    def _slower(self, kernel: "RecordedFunction", inputs: Any, state: State) -> bool:
        """Return whether a kernel takes more than twice the time of the ordinary step."""
        _, state = self._step(inputs, state)
        operands, times = self._read((inputs, state)), list[float]()
        for call in (lambda: self._step(inputs, state), lambda: kernel(*operands)):
            begins = [(time.thread_time(), call(), time.thread_time()) for _ in range(3)]
            times.append(min(end - begin for begin, _, end in begins))
        return times[1] > 2 * times[0]


@functools.cache
def _has_numba() -> bool:
    return importlib.util.find_spec("numba") is not None


def rows_of_kernel(batch: int) -> int:
    """Return how many rows the kernel for a batch has. Five kernels serve batches of any size and any threads."""
    parts = -(-batch // MAX_ROWS)
    return 1 << (-(-batch // parts)).bit_length() - 1


def _reader(state: State) -> Callable[[State], list[Tensor]]:
    """Return the function that lists the tensors of a state of this form. It raises TypeError, ValueError or KeyError
    for another form.
    """
    names, lines = list[str](), list[str]()
    target = _target(state, names, lines)
    scope: dict[str, Any] = {}
    source = ["def read(state):", f"    {target} = state", *lines, f"    return [{', '.join(names)}]"]
    exec("\n".join(source), scope)
    return scope["read"]


def _target(state: State, names: list[str], lines: list[str]) -> str:
    """Return what a state is assigned to. names: of its tensors.   lines: further assignments, of members of dicts."""
    name = f"v{len(names)}_{len(lines)}"
    if isinstance(state, Tensor):
        names.append(name)
    elif isinstance(state, dict):
        for key, member in state.items():
            at = len(lines)
            lines.append("")
            lines[at] = f"    {_target(member, names, lines)} = {name}[{key!r}]"
    elif state is not None:
        return f"({''.join(f'{_target(member, names, lines)}, ' for member in state)})"
    return name
