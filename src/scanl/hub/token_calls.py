"""Calls of accelerated models for one token of each row, as kernels of the CPU.

A call of a small model is thousands of calls of torch. Here it runs once without numbers, with all patches, and what it
computes becomes one kernel: of the whole model where all that its cache holds has a constant size; otherwise of each
part for which that is so, such as a block with a recurrence, or the channel mixer beside an attention.
"""

import functools
import importlib.util
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from itertools import islice
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from scanl.errors import ShapeError
from scanl.hub.cached_tensors import CACHES, LAYER_ATTRIBUTE, CacheKind, Places, kind_of, tensors_at, write
from scanl.hub.key_buffers import AttentionByProducts, KeyBuffer, RecordedKeys, buffers, with_masks
from scanl.layers.adapters import has_hooks
from scanl.models.decoding.compiled_step import GLOBAL_HOOKS, Makeup, rows_of_kernel
from scanl.ops._compiler.rules import UnsupportedOperation
from scanl.ops._frame.context import exactly

MIN_TOKENS = 16  # tokens: to record and compile takes the time of 10 to 20 ordinary ones of a model of 130 M weights

Build = Callable[[Sequence[Tensor], Sequence[Any]], Any]  # makes a result of tensors and caches

_running: ContextVar["_Running | None"] = ContextVar("token_calls", default=None)


class _UnreadMask:
    """Stands for the mask of attention in a part of a model, where it marks no padding, and attention has no kernel."""

    def __getattr__(self, name: str) -> Any:
        raise UnsupportedOperation("it reads the mask of attention")


UNREAD_MASK = _UnreadMask()


class _Running(NamedTuple):
    """The call of a model in progress, whose parts may run as kernels."""

    calls: "TokenCalls"
    batch: int


class TokenCalls:
    """Kernels of a model and of its parts, for calls of one token of each row.

    Parameters are read where they lie, in each call. When the model has changed, its kernels are made anew: see
    `Makeup`. Copies have no kernels, because these read other parameters.

    reasons: why no kernel runs a part, by the part. The parts inside of it may have kernels.
    """

    def __init__(self) -> None:
        self.reasons: dict[nn.Module, str] = {}
        self._refused: set[nn.Module] = set()
        self._kernels: dict[Any, _PartKernel] = {}  # by the part, the number of rows and the form of the arguments
        self._layers: dict[nn.Module, tuple[int, ...]] = {}  # indices of layers in the cache, by the part
        self._model: Any = lambda: None  # a weak reference
        self._made_for: Makeup | None = None
        self._tokens = 0  # calls since the model last changed

    def __reduce__(self) -> Any:
        return TokenCalls, ()

    def within(self, model: nn.Module, original: Callable[..., Any], arguments: dict[str, Any], batch: int) -> Any:
        """Run a call of the model for one token of each row, without padding."""
        if not self._pays(model, arguments):
            return original(**arguments)
        token = _running.set(_Running(self, batch))
        try:
            return self.part(model, original, arguments, batch, True)
        finally:
            _running.reset(token)

    def part(
        self, part: nn.Module, original: Callable[..., Any], arguments: dict[str, Any], batch: int, is_model: bool
    ) -> Any:
        """Run the model or a part of it: by a kernel, or else its own forward, whose parts may have kernels."""
        if part not in self._refused:
            try:
                call = _PartCall.of(arguments, self._layers_of(part), batch, is_model)
                kernel = None if call is None else self._kernel(part, original, call)
                if call is not None and kernel is not None:
                    return kernel.run(call)
            except UnsupportedOperation as error:  # the arguments of another call may be others
                self.reasons[part] = str(error)
            except ShapeError:  # the part's own forward has an error for another shape
                pass
        return original(**arguments)

    def explain(self) -> list[str]:
        """Return what runs the calls for one token, in lines."""
        if self._made_for is None or self._tokens <= MIN_TOKENS:
            return [f"one kernel after {MIN_TOKENS} such calls, if they have a cache and no gradients"]
        runs = sorted({type(key[0]).__name__ for key in self._kernels})
        reasons: dict[str, str] = {}
        for part, reason in self.reasons.items():
            reasons.setdefault(type(part).__name__, reason)
        return [f"one kernel runs a {name}" for name in runs] + [
            f"no kernel runs a {name}: {reason}" for name, reason in reasons.items()
        ]

    def _pays(self, model: nn.Module, arguments: dict[str, Any]) -> bool:
        """Return whether kernels run this call. It then counts."""
        tokens = arguments.get("input_ids")
        tokens = arguments.get("inputs_embeds") if tokens is None else tokens
        if type(tokens) is not Tensor or not tokens.is_cpu or not len(tokens) or torch.is_grad_enabled() or exactly():
            return False
        if all(arguments.get(name) is None for name in (*CACHES, "state")):
            return False
        if torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling() or any(GLOBAL_HOOKS):
            return False
        if self._made_for is None or self._model() is not model or not self._made_for.holds():
            self.reasons, self._refused, self._kernels, self._layers, self._tokens = {}, set(), {}, {}, 0
            self._model, self._made_for = weakref.ref(model), Makeup(model)
        self._tokens += 1
        return self._tokens > MIN_TOKENS and importlib.util.find_spec("numba") is not None

    def _layers_of(self, part: nn.Module) -> tuple[int, ...]:
        if part not in self._layers:
            indices = {module.__dict__.get(LAYER_ATTRIBUTE) for module in part.modules()}
            self._layers[part] = tuple(sorted(index for index in indices if index is not None))
        return self._layers[part]

    def _kernel(self, part: nn.Module, original: Callable[..., Any], call: "_PartCall") -> "_PartKernel | None":
        key = part, rows_of_kernel(call.batch), call.form
        kernel = self._kernels.get(key)
        if kernel is None:
            hooked = [name for name, module in part.named_modules() if _runs_more(module, part)]
            try:
                if hooked:
                    raise UnsupportedOperation(f"{hooked[0] or 'it'} has hooks")
                kernel = self._kernels[key] = _PartKernel(original, call, key[1])
            except UnsupportedOperation as error:
                self.reasons[part] = str(error)
                self._refused.add(part)
        return kernel


def _runs_more(module: nn.Module, part: nn.Module) -> bool:
    """Return whether a call of the part runs hooks of the module beside its forward, or such as move its weights."""
    return hasattr(module, "_hf_hook") or (module is not part and has_hooks(module))


def of_part(
    names: Sequence[str],
    run: Callable[..., Any] | None,
    part: nn.Module,
    original: Callable[..., Any],
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run the forward of a part of a model. names: of its parameters, in order.   run: computes it in its place."""
    own = original if run is None else functools.partial(run, part, original)
    running = _running.get()
    if running is None:
        return own(*args, **kwargs)
    arguments = dict(zip(names, args, strict=False)) | kwargs
    return running.calls.part(part, own, arguments, running.batch, "input_ids" in names)


class _PartCall(NamedTuple):
    """A call of a part: its arguments taken apart.

    operands: its tensors, with a row for each of the batch; those of the caches last.   form: what a kernel depends on.
    caches: the caches, and where their tensors are.
    """

    arguments: dict[str, Any]
    layers: tuple[int, ...]
    batch: int
    operands: list[Tensor]
    form: Any
    caches: list[tuple[CacheKind, Any, Places]]
    buffers: dict[int, KeyBuffer]

    @classmethod
    def of(cls, arguments: dict[str, Any], layers: tuple[int, ...], batch: int, is_model: bool) -> "_PartCall | None":
        """Take arguments apart; None if a cache has not all of its tensors yet."""
        made: dict[int, KeyBuffer] = {}
        if is_model:
            arguments, made = _with_buffers(arguments)
        elif arguments.get("attention_mask") is not None:
            arguments = {**arguments, "attention_mask": UNREAD_MASK}
        call = cls(arguments, layers, batch, [], None, [], made)
        form, given = call._form(arguments), len(call.operands)
        operands = call.operands
        for kind, cache, places in call.caches:
            found = kind.places(cache, layers)
            if found is None:
                return None
            places += found
            operands += tensors_at(found)
        for buffer in made.values():
            operands += buffer.keys, buffer.values
        return call._replace(form=(form, *[operand.shape[1:] for operand in operands[given:]]))

    def _form(self, value: Any) -> Any:
        if value is None or value is UNREAD_MASK or isinstance(value, bool | int | float | str):
            return type(value), value
        if isinstance(value, Tensor):
            return self._operand(value)
        if isinstance(value, dict):
            return tuple((name, self._form(member)) for name, member in value.items())
        kind = kind_of(value)
        if kind is not None:
            known = next((at for at, (_, cache, _) in enumerate(self.caches) if cache is value), None)
            if known is None:
                self.caches.append((kind, value, []))
            return kind.name, known
        if isinstance(value, tuple | list):
            return tuple(map(self._form, value))
        raise UnsupportedOperation(f"an argument is a {type(value).__name__}")

    def _operand(self, tensor: Tensor) -> Any:
        if tensor.ndim > 1 and len(tensor) == 1:  # positions that are those of all rows
            tensor = tensor.expand(self.batch, *tensor.shape[1:])
        if tensor.ndim == 0 or len(tensor) != self.batch:
            raise UnsupportedOperation(f"an argument is a tensor {tuple(tensor.shape)} without a row for each token")
        self.operands.append(tensor)
        return tensor.dtype, tensor.shape[1:]

    def arguments_of(self, tensors: Iterator[Tensor], caches: Sequence[Any]) -> dict[str, Any]:
        """Return the arguments with other tensors and caches."""

        def other(value: Any) -> Any:
            if isinstance(value, Tensor):
                return next(tensors)
            at = next((at for at, (_, cache, _) in enumerate(self.caches) if cache is value), None)
            if at is not None:
                return caches[at]
            if isinstance(value, dict):
                return type(value)({name: other(member) for name, member in value.items()})
            return type(value)(map(other, value)) if isinstance(value, tuple | list) else value

        return other(self.arguments)


def _with_buffers(arguments: dict[str, Any]) -> tuple[dict[str, Any], dict[int, KeyBuffer]]:
    """Return the arguments of a model for a kernel, and the buffers of its keys and values; none, if it can have none.

    A mask of padding is dropped where there is no attention: the token of no row is padding.
    """
    plain = {**arguments, "attention_mask": None} if "attention_mask" in arguments else arguments
    cache: Any = next((value for value in map(arguments.get, CACHES) if value is not None), None)
    made = buffers(cache)
    if not made:
        return plain, {}
    changed = with_masks(arguments, cache, made)
    if changed is None:
        return plain, {}
    if changed.get("position_ids") is None:
        changed["position_ids"] = torch.tensor([[cache.get_seq_length()]])
    return changed, made


class _PartKernel:
    """The kernel of a part for arguments of one form. original: the part's forward."""

    def __init__(self, original: Callable[..., Any], call: _PartCall, rows: int) -> None:
        from scanl.ops._compiler.recorded import RecordedFunction  # which takes long to import

        self._added: list[int] = []
        self._build: Build

        def function(*operands: Tensor) -> tuple[list[Tensor], list[Tensor]]:
            members = iter(operands)
            blanks = [kind.blank(cache, call.layers) for kind, cache, _ in call.caches]
            count = len(operands) - sum(len(places) for *_, places in call.caches) - 2 * len(call.buffers)
            given = list(islice(members, count))
            found = [kind.places(blank, call.layers) for (kind, *_), blank in zip(call.caches, blanks, strict=True)]
            for places in found:
                # what a patch writes in place is a copy: several threads may compute a row
                write(places or [], [next(members).clone() for _ in places or []])
            for index in call.buffers:
                recorded = RecordedKeys(next(members), next(members))
                blanks[0].layers[index] = recorded.beside(blanks[0].layers[index])
            token = _running.set(None)
            try:
                with AttentionByProducts():
                    result = original(**call.arguments_of(iter(given), blanks))
            finally:
                _running.reset(token)
            results: list[Tensor] = []
            self._build = _builder(result, results, blanks)
            self._added = [kind.tokens_in(blank) for (kind, *_), blank in zip(call.caches, blanks, strict=True)]
            return results, [tensor for places in found for tensor in tensors_at(places or [])]

        with torch.inference_mode(False), torch.no_grad():
            examples = [operand[:rows].clone(memory_format=torch.contiguous_format) for operand in call.operands]
            self._function = RecordedFunction(function, *examples, by_rows=True)

    def run(self, call: _PartCall) -> Any:
        """Return the result, and write the caches."""
        results, states = self._function(*call.operands)
        at = 0
        for (kind, cache, places), tokens in zip(call.caches, self._added, strict=True):
            write(places, states[at : at + len(places)])
            kind.add_tokens(cache, tokens)
            at += len(places)
        for index, buffer in call.buffers.items():
            buffer.advance(call.caches[0][1].layers[index])
        return self._build(results, [cache for _, cache, _ in call.caches])


def _builder(value: Any, tensors: list[Tensor], caches: Sequence[Any]) -> Build:
    """Append the tensors of a result, and return the function that makes a result of the same form of others."""
    for at, cache in enumerate(caches):
        if value is cache or _is_copy(value, cache):
            return lambda _, others: others[at]
    if isinstance(value, Tensor):
        at = len(tensors)
        tensors.append(value)
        return lambda others, _: others[at]
    if value is None:
        return lambda *_: None
    kind: Any = type(value)
    if hasattr(value, "to_tuple"):  # an output of transformers
        members = {name: _builder(member, tensors, caches) for name, member in value.items()}
        return lambda *others: kind(**{name: member(*others) for name, member in members.items()})
    if kind in (tuple, list):
        items = [_builder(member, tensors, caches) for member in value]
        return lambda *others: kind([item(*others) for item in items])
    raise UnsupportedOperation(f"a result is a {kind.__name__}")


def _is_copy(value: Any, cache: Any) -> bool:
    """Return whether a value is another list of the same tensors."""
    lists = isinstance(value, list) and isinstance(cache, list)
    return lists and len(value) == len(cache) and all(map(is_, value, cache))
