"""Patch the recurrent modules of transformers and torch in a model in place, so that they run on scanl's ops."""

import functools
import importlib.metadata
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from scanl import ops
from scanl.errors import ConfigError
from scanl.hub import call, forwards, patches, token_calls
from scanl.hub.cached_tensors import LAYER_ATTRIBUTE
from scanl.hub.patches import Patch
from scanl.layers.adapters import READS_ATTRIBUTE, check_read

OLDEST_VERSION = 5, 23  # oldest version of transformers: older caches do not keep every state
_MODELS, _TORCH = "transformers.models.", "torch.nn.modules.rnn"
_PLAIN_PACKAGES = "transformers.", "torch.nn.modules."  # where the inner modules are whose weights a patch reads


class AcceleratedModule(NamedTuple):
    """One module of a report.

    module: its name in the model.   kind: its class.   original, now: what computes it without and with the patch.
    note: what the patch corrects. If the module was not patched, `now` is empty and `note` gives the reason.
    calls: what computes calls of which lengths, and why.
    """

    module: str
    kind: str
    original: str
    now: str
    note: str
    calls: tuple[str, ...] = ()


class Report(tuple[AcceleratedModule, ...]):
    """The result of `accelerate` for each module. It prints as a table with one line for all equal modules.

    models: the class of each model of transformers, and what runs its calls for one token, by its name and a dot.
    """

    def __init__(self, rows: Iterable[AcceleratedModule]) -> None:
        self.models: dict[str, tuple[str, token_calls.TokenCalls]] = {}

    @property
    def accelerated(self) -> tuple[AcceleratedModule, ...]:
        """Rows of the modules that now run on scanl."""
        return tuple(row for row in self if row.now)

    def __str__(self) -> str:
        if not self:
            return "this model has no recurrent module of transformers or torch: nothing was changed"
        lines = [("modules", "class", "before", "now", "note")]
        for names, row in self._groups():
            lines.append((names, row.kind, row.original, row.now or "left alone", row.note))
        widths = [max(len(line[i]) for line in lines) for i in range(4)]
        return "\n".join(
            "  ".join([*(cell.ljust(width) for cell, width in zip(line, widths, strict=False)), line[4]]).rstrip()
            for line in lines
        )

    def explain(self) -> str:
        """Return what computes which calls of each module, and why: torch's own forward where it takes less time.

        What runs the calls for one token is known when there have been some.
        """
        groups: list[tuple[str, Sequence[str]]] = [
            (f"{names} ({row.kind})", row.calls or (f"left alone: {row.note}",)) for names, row in self._groups()
        ]
        groups += [
            (f"{name}calls of {kind} for one token", calls.explain()) for name, (kind, calls) in self.models.items()
        ]
        return "\n".join(line for title, texts in groups for line in (f"{title}:", *(f"  {text}" for text in texts)))

    def _groups(self) -> list[tuple[str, AcceleratedModule]]:
        """Return one of all equal modules, with the name of the first and how many more there are."""
        groups: dict[Any, list[AcceleratedModule]] = {}
        for row in self:
            groups.setdefault(row[1:], []).append(row)
        return [
            (rows[0].module if len(rows) == 1 else f"{rows[0].module} and {len(rows) - 1} more", rows[0])
            for rows in groups.values()
        ]


def accelerate(model: nn.Module, *, exact: bool = False) -> Report:
    """Patch the recurrent modules inside `model`, so that scanl's ops compute them. Returns a report.

    Weights, interface, caches and `generate` stay as they are, and the model can be trained. Only this object is
    changed; `restore` undoes it. Results differ by rounding, except where the original is wrong. Prompts in pieces,
    padding and packed sequences (`cu_seq_lens_q`, `seq_idx`) then give the right results, and the report says so.

    A module is not patched when its forward is not the library's own, when its weights are on no device yet, or when an
    inner module whose weights the patch reads has hooks or is wrapped. The report gives the reason. A hook or a wrapper
    that comes later makes the next call raise ConfigError: it would have no effect. On CUDA a module keeps the compiled
    kernels that transformers found for it, and a module of torch keeps torch's.

    On a CPU, calls of a model for one token of each row, without gradients, run as one kernel after a few of them; the
    report's `explain` says what does. Kernels notice when the model has changed.

    exact: run every forward of the model in an `ops.exact` context. On a CPU the logits of a token then have the same
    bits at once, in pieces and token by token, alone and in a batch. In a model that is not of transformers, only the
    patched modules run in it. A later call for the same model may change it.

    Raises ConfigError when `model` is not a module, or when transformers is older than OLDEST.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"accelerate: model is a {type(model).__name__}, expected a torch.nn.Module")
    if any(patch is not None and _home(patch) == _MODELS for patch in map(_patch_for, model.modules())):
        version = importlib.metadata.version("transformers")
        if tuple(map(int, version.split(".")[:2])) < OLDEST_VERSION:
            oldest = ".".join(map(str, OLDEST_VERSION))
            raise ConfigError(
                f"accelerate: transformers is {version}, expected at least {oldest}; pip install -U transformers"
            )
    rows, needs, runs = [], set[str](), dict[nn.Module, forwards.Run]()
    for name, module in model.named_modules():
        patch = _patch_for(module)
        if patch is not None:
            reason = _unable(module, patch)
            if not reason:
                module.__dict__[LAYER_ATTRIBUTE] = _number(name)
                module.__dict__[READS_ATTRIBUTE] = _kinds(module, patch)
                runs[module] = _run(functools.partial(_forward, patch), exact)
                forwards.replace(module, runs[module])
            needs.update(patch.needs_call)
            note = reason or "; ".join(patch.corrects)
            now, calls = ("", ()) if reason else (patch.runs, patch.calls())
            rows.append(AcceleratedModule(name, type(module).__name__, patch.original, now, note, calls))
    report = Report(rows)
    if runs:
        for name, module in model.named_modules():
            if _is_model(module):
                calls = token_calls.TokenCalls()
                run = functools.partial(call.within, _names(module), frozenset(needs), calls)
                forwards.replace(module, _run(run, exact))
                if not any(name.startswith(outer) for outer in report.models):
                    report.models[f"{name}." if name else ""] = type(module).__name__, calls
        for part in _parts(model):
            forwards.replace(part, functools.partial(token_calls.of_part, _names(part), runs.get(part)))
    return report


def restore(model: nn.Module) -> None:
    """Undo `accelerate`. Every module then gives exactly the original results."""
    for module in filter(forwards.replaced, model.modules()):
        module.__dict__.pop(LAYER_ATTRIBUTE, None)
        module.__dict__.pop(READS_ATTRIBUTE, None)
        forwards.restore(module)


def read_modules(model: nn.Module) -> set[nn.Module]:
    """Return the inner modules whose weights patches read, in a model that is accelerated or may be."""
    return {
        inner
        for module in model.modules()
        if (patch := _patch_for(module)) is not None
        for path, child in module.named_children()
        if path in patch.reads
        for inner in child.modules()
    }


@functools.cache
def _patches() -> dict[str, type[Patch]]:
    """Return all patches by the classes that they replace: MODEL.CLASS."""
    classes = [patches.get(name) for name in patches.names()]
    return {path: patch for patch in classes for path in patch.modules}


def _patch_for(module: nn.Module) -> type[Patch] | None:
    """Return the patch for a module's class, or for a class that it inherits from."""
    for cls in type(module).__mro__:
        model = "torch.nn" if cls.__module__ == _TORCH else ""
        if cls.__module__.startswith(_MODELS):
            model = cls.__module__.removeprefix(_MODELS).split(".")[0]
        patch = _patches().get(f"{model}.{cls.__name__}")
        if patch is not None:
            return patch
    return None


def _home(patch: type[Patch]) -> str:
    """Return the package of a patch's classes: the beginning of the names of their Python modules."""
    return _TORCH if patch.modules[0].startswith("torch.nn.") else _MODELS


def _is_model(module: nn.Module) -> bool:
    """Whether the module is a model of transformers, outer or inner, which takes tokens."""
    parameters = inspect.signature(type(module).forward).parameters
    return type(module).__module__.startswith(_MODELS) and "input_ids" in parameters


def _names(module: nn.Module) -> list[str]:
    """Return the names of the parameters of a module's forward, in order."""
    return list(inspect.signature(type(module).forward).parameters)[1:]


def _parts(module: nn.Module, in_model: bool = False) -> Iterator[nn.Module]:
    """Yield the modules of transformers in models that have inner modules, down to the patched ones."""
    for child in module.children():
        in_model |= _is_model(module)
        patched = child.__dict__.get(READS_ATTRIBUTE) is not None
        plain = type(child).forward.__module__.startswith(_MODELS) and forwards.is_own(child)
        if in_model and not _is_model(child) and (patched or (plain and any(child.children()))):
            yield child
        if not patched:
            yield from _parts(child, in_model)


def _number(name: str) -> int | None:
    """Return the last number in the name of a module, the index of its layer."""
    return next((int(segment) for segment in reversed(name.split(".")) if segment.isdigit()), None)


def _unable(module: nn.Module, patch: type[Patch]) -> str:
    """Return why a module cannot be patched; an empty string if it can be or already is."""
    if forwards.replaced(module):
        return ""
    kind = type(module)
    if not kind.forward.__module__.startswith(_home(patch)):
        return f"its forward is {kind.__name__}'s own"
    if not forwards.is_own(module):
        return "its forward was replaced by another library"
    if any(parameter.is_meta for parameter in module.parameters()):
        return "its weights are not loaded yet, or are offloaded; accelerate the model when they are on a device"
    for path, defining in _kinds(module, patch).items():
        if not defining.__module__.startswith(_PLAIN_PACKAGES):
            class_name = f"{defining.__module__}.{defining.__qualname__}"
            return f"its {path} is a {class_name}, and the patch reads the weights of a plain module"
    try:
        _check_reads(module, _kinds(module, patch))
    except ConfigError as error:
        return str(error)
    return patch.unable(module)


def _kinds(module: nn.Module, patch: type[Patch]) -> dict[str, type[nn.Module]]:
    """Return the classes that define the forward of the inner modules that a patch reads, by the modules' names."""
    there = {path: type(child) for path, child in module.named_children() if path in patch.reads}
    return {path: next(cls for cls in kind.__mro__ if "forward" in cls.__dict__) for path, kind in there.items()}


def _check_reads(module: nn.Module, kinds: Mapping[str, type[nn.Module]]) -> None:
    """Raise ConfigError if an inner module that the patch reads has hooks, or something else stands in its place.

    Hooks for offloading move weights and do no more.
    """
    for path, kind in kinds.items():
        child = module._modules.get(path)
        if child is not None and not (hasattr(child, "_hf_hook") and forwards.is_own(child)):
            check_read(f"accelerated {type(module).__name__}", module, path, kind)


def _run(run: forwards.Run, exact: bool) -> forwards.Run:
    return functools.partial(_exactly, run) if exact else run


def _exactly(run: forwards.Run, module: nn.Module, original: Any, /, *args: Any, **kwargs: Any) -> Any:
    with ops.exact():
        return run(module, original, *args, **kwargs)


def _forward(patch: type[Patch], module: nn.Module, original: Any, /, *args: Any, **kwargs: Any) -> Any:
    result = patch.whole(module, *args, **kwargs)
    if result is not None:
        return result
    if not patch.takes(module, *args, **kwargs):
        return original(*args, **kwargs)
    on_cuda = any(isinstance(value, Tensor) and value.is_cuda for value in (*args, *kwargs.values()))
    if on_cuda and _has_kernels(type(module), patch):
        return original(*args, **kwargs)
    _check_reads(module, module.__dict__[READS_ATTRIBUTE])
    return patch.forward(module, *args, **kwargs)


@functools.cache
def _has_kernels(cls: type[nn.Module], patch: type[Patch]) -> bool:
    """Whether transformers found compiled kernels for everything that this class computes."""
    module = inspect.getmodule(cls)
    functions = [getattr(module, name, None) for name in patch.kernels]
    return bool(functions) and all(
        function is not None
        and inspect.getclosurevars(inspect.unwrap(function, stop=_chooses)).nonlocals.get(
            "is_new_implementation", False
        )
        for function in functions
    )


def _chooses(function: Any) -> bool:
    code = getattr(function, "__code__", None)
    return code is not None and "is_new_implementation" in code.co_freevars
