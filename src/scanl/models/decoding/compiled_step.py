"""A step of a model as one kernel of the CPU.

A step of a small model is hundreds of calls of torch, and most of its time goes to the calls. The step runs once
without numbers; what it computes becomes the loops of one kernel, which reads each weight once.
"""

import importlib.util
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from scanl.errors import BackendError, ConfigError, ShapeError
from scanl.layers.packing import renewed
from scanl.layers.state import State, map_leaves
from scanl.ops._frame.context import exactly, portably

if TYPE_CHECKING:
    from scanl.ops._compiler.recorded import RecordedFunction

MIN_TOKENS = 64  # tokens: to record and compile takes the time of 50 to 150 ordinary ones
MAX_ROWS = 16  # rows of a kernel; more rows run in parts
GLOBAL_HOOKS = torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks
MODULE_ATTRIBUTES = vars(nn.Module()).keys()

_form = attrgetter("dtype", "is_cpu", "shape")


class Makeup:
    """Contents of a model: modules, tensors, hooks and other attributes. They are compared by identity."""

    def __init__(self, model: nn.Module) -> None:
        self.tensors = [*model.parameters(), *model.buffers()]
        self._forms = self._forms_now()
        self._holders: list[Collection[Any]] = []  # whose sizes tell of what was added
        self._views: list[Iterable[Any]] = []
        self._attributes: list[tuple[Callable[..., Any], dict[str, Any]]] = []
        for module in model.modules():
            attributes = vars(module)
            own = attributes.keys() - MODULE_ATTRIBUTES
            groups = [module._modules, module._parameters, module._buffers]
            groups += [attributes[name] for name in own if isinstance(attributes[name], dict | list | set)]
            self._holders += [attributes, module._forward_hooks, module._forward_pre_hooks, *groups]
            self._views += [group.values() if isinstance(group, dict) else group for group in groups if group]
            self._attributes.append((itemgetter("training", "_modules", *own), attributes))
        self._holders += GLOBAL_HOOKS
        self._sizes, self._members = list(map(len, self._holders)), list(self._members_now())

    def holds(self) -> bool:
        """Return whether the model still consists of this. It runs for every token."""
        try:
            return (
                list(map(len, self._holders)) == self._sizes
                and all(map(is_, self._members_now(), self._members))
                and self._forms_now() == self._forms
            )
        except KeyError:  # an attribute was removed, and another one added
            return False

    def _members_now(self) -> Iterator[Any]:
        return chain(*self._views, *[read(attributes) for read, attributes in self._attributes])

    def _forms_now(self) -> list[Any]:
        return list(map(_form, self.tensors))


class CompiledStep:
    """The step of a model of tokens: step(tokens, state) returns what the ordinary step returns, within rounding.

    enter: the part before the kernel; checks the tokens (B,), returns rows (B, D) of numbers.   finish: called as
    finish(rows, state), returns the results and the state; no row depends on another.

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
        enter: Callable[[Tensor], Tensor],
        finish: Callable[[Tensor, State], tuple[Tensor, State]],
    ) -> None:
        self.model, self._enter, self._finish = model, enter, finish
        self.reason: str | None = None
        self._kernels: dict[tuple[int, bool], RecordedFunction] = {}  # by the number of rows, and whether portable
        self._made_for: Makeup | None = None
        self._asked = False  # whether `compile` was called
        self._tokens = Counter[int]()  # decoded or expected, by the number of rows

    def __getstate__(self) -> dict[str, Any]:
        """Leave the kernels out of copies: they read this model's parameters."""
        return {**vars(self), "_kernels": {}, "_made_for": None}

    def __call__(self, tokens: Tensor, state: State = None, *, starts: Tensor | None = None) -> tuple[Any, State]:
        """Return the results and the state after one token (B,) of each row.

        starts: (B,) bool, True for rows whose state begins anew before the token.
        """
        rows = self._enter(tokens)
        if starts is not None:
            state = renewed("compiled step", state, self.model.init_state, starts, rows)  # pyright: ignore[reportArgumentType]
        kernel = self._kernel(rows)
        if kernel is None:
            return self._finish(rows, state)
        operands = [rows]
        _gather(self.model.init_state(len(rows)) if state is None else state, operands)  # pyright: ignore
        if torch.is_grad_enabled() and self._differentiated(operands):
            return self._finish(rows, state)
        try:
            return kernel(*operands)
        except ShapeError:  # the ordinary step casts a state of another dtype, and has an error for another shape
            return self._finish(rows, state)

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
            operands = self._examples(batch_size)
            kernel = self._kernel(operands[0])
            if kernel is not None:
                kernel(*operands)

    def refusal(self) -> str | None:
        """Return why no kernel can run the step; None if one can."""
        with torch.no_grad():
            self._kernel(self._examples(1)[0])
        return self.reason

    def _examples(self, batch_size: int) -> list[Tensor]:
        """Return rows of zeros and a first state."""
        operands = [self._enter(torch.zeros(batch_size, dtype=torch.long, device=_device(self.model)))]
        _gather(self.model.init_state(batch_size), operands)  # pyright: ignore[reportCallIssue]
        return [operand.detach().clone(memory_format=torch.contiguous_format) for operand in operands]

    def _kernel(self, rows: Tensor) -> "RecordedFunction | None":
        """Return the kernel for these rows of numbers; None if the ordinary step runs."""
        if self._made_for is None or not self._made_for.holds():
            self._kernels, self.reason, self._made_for = {}, None, Makeup(self.model)
        batch = len(rows)
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

        if importlib.util.find_spec("numba") is None:
            return "package numba is not installed", None
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
            state = self.model.init_state(size)  # pyright: ignore[reportCallIssue]

            def flat(rows: Tensor, *leaves: Tensor) -> tuple[Tensor, State]:
                members = iter(leaves)
                return self._finish(rows, map_leaves(lambda _: next(members), state))

            try:
                return None, RecordedFunction(flat, *self._examples(size), by_rows=True, portable=portable)
            except UnsupportedOperation as error:
                return str(error), None


def rows_of_kernel(batch: int) -> int:
    """Return how many rows the kernel for a batch has. Five kernels serve batches of any size."""
    units = max(-(-batch // MAX_ROWS), min(torch.get_num_threads(), batch // 4), 1)
    return 1 << max(0, (-(-batch // units)).bit_length() - 1)


def _gather(state: State, tensors: list[Tensor]) -> None:
    """Append the tensors of a state. This runs for every token, and takes a third of the time of `map_leaves`."""
    if isinstance(state, Tensor):
        tensors.append(state)
    elif state is not None:
        for member in state.values() if isinstance(state, dict) else state:
            _gather(member, tensors)


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
