"""Run the recurrent mixers of a transformers model on scanl's ops, in place."""

import functools
import importlib.metadata
import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

from scanl.errors import ConfigError
from scanl.hub import call, patches
from scanl.hub.patches import Patch

OLDEST = 5, 23  # of transformers: before, not every cache keeps every state
_MODELS = "transformers.models."


class Row(NamedTuple):
    """One module of a report.

    module: its name inside the model.   kind: its class.   before, now: what computes it; now is empty where it was
    left alone, with the reason in `note`. Where it runs on scanl, `note` says what that corrects.
    """

    module: str
    kind: str
    before: str
    now: str
    note: str


class Report(tuple[Row, ...]):
    """What `accelerate` did, module by module; printed as a table in which equal modules share a line."""

    @property
    def accelerated(self) -> tuple[Row, ...]:
        """The modules that run on scanl now."""
        return tuple(row for row in self if row.now)

    def __str__(self) -> str:
        if not self:
            return "no recurrent mixer of transformers in this model: nothing was changed"
        groups: dict[tuple[str, ...], list[str]] = {}
        for row in self:
            groups.setdefault(row[1:], []).append(row.module)
        lines = [("modules", "class", "before", "now", "note")]
        for (kind, before, now, note), names in groups.items():
            shown = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
            lines.append((shown, kind, before, now or "left alone", note))
        widths = [max(len(line[i]) for line in lines) for i in range(4)]
        return "\n".join(
            "  ".join([*(cell.ljust(width) for cell, width in zip(line, widths, strict=False)), line[4]]).rstrip()
            for line in lines
        )


def accelerate(model: nn.Module) -> Report:
    """Route the recurrent mixers inside `model` through scanl's ops, and say what was done.

    Weights, interface, caches and `generate` stay as they are, training included; only this object is changed, and
    `restore` undoes it. Results change by rounding alone, but where the original is wrong: prompts in pieces, padding
    and packed sequences (`cu_seq_lens_q`, `seq_idx`) are then right, and the report says so.

    A mixer is left alone, with the reason in the report, when its forward is not transformers' own, or when its
    weights are not on any device yet. On CUDA a mixer whose compiled kernels transformers has found keeps them.

    Raises ConfigError when `model` is not a module, or when transformers is older than OLDEST.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"accelerate: model is a {type(model).__name__}, expected a torch.nn.Module")
    if any(map(_mixer, model.modules())):
        found = importlib.metadata.version("transformers")
        if tuple(map(int, found.split(".")[:2])) < OLDEST:
            raise ConfigError(f"accelerate: transformers is {found}, expected at least {'.'.join(map(str, OLDEST))}")
    rows, before, alone = [], set(_accelerated(model)), set[str]()
    for name, module in model.named_modules():
        mixer = _mixer(module)
        if mixer is not None:
            reason = _unable(module)
            if not reason and module not in before:
                _install(module, mixer, name)
            alone.update(mixer.call_alone)
            note = reason or "; ".join(mixer.corrects)
            rows.append(Row(name, type(module).__name__, mixer.before, "" if reason else mixer.runs, note))
    if any(row.now for row in rows):
        for module in model.modules():
            if _is_model(module) and "_scanl_hooks" not in module.__dict__:
                names = list(inspect.signature(type(module).forward).parameters)[1:]
                begin = functools.partial(call.begin, names=names, alone=frozenset(alone))
                module.__dict__["_scanl_hooks"] = (
                    module.register_forward_pre_hook(begin, with_kwargs=True),
                    module.register_forward_hook(call.end, always_call=True),
                )
    return Report(rows)


def restore(model: nn.Module) -> None:
    """Undo `accelerate`: every module computes again what it computed before, bit for bit."""
    for module in _accelerated(model):
        module.__dict__.pop("_scanl_layer")
        slot, previous = module.__dict__.pop("_scanl_before")
        if previous is None:
            del module.__dict__[slot]
        else:
            module.__dict__[slot] = previous
    for module in model.modules():
        for hook in module.__dict__.pop("_scanl_hooks", ()):
            hook.remove()


def _accelerated(model: nn.Module) -> Iterator[nn.Module]:
    return (module for module in model.modules() if "_scanl_before" in module.__dict__)


@functools.cache
def _families() -> dict[str, type[Patch]]:
    found = [patches.get(name) for name in patches.names()]
    return {path: mixer for mixer in found for path in mixer.modules}


def _mixer(module: nn.Module) -> type[Patch] | None:
    """The family of a module, by its class or one that it inherits from."""
    for cls in type(module).__mro__:
        if cls.__module__.startswith(_MODELS):
            model = cls.__module__.removeprefix(_MODELS).split(".")[0]
            mixer = _families().get(f"{model}.{cls.__name__}")
            if mixer is not None:
                return mixer
    return None


def _is_model(module: nn.Module) -> bool:
    """Whether it takes tokens: a transformers model, outer or inner."""
    parameters = inspect.signature(type(module).forward).parameters
    return type(module).__module__.startswith(_MODELS) and "input_ids" in parameters


def _slot(module: nn.Module) -> str:
    """Where this module's forward is looked up: its hooks for offloading put theirs before it."""
    return "_old_forward" if hasattr(module, "_hf_hook") else "forward"


def _unable(module: nn.Module) -> str:
    if "_scanl_before" in module.__dict__:
        return ""
    if not type(module).forward.__module__.startswith(_MODELS):
        return f"its forward is {type(module).__name__}'s own"
    if _slot(module) == "forward" and "forward" in module.__dict__:
        return "its forward was replaced by another library"
    if any(parameter.is_meta for parameter in module.parameters()):
        return "its weights are not loaded, or offloaded"
    return ""


def _install(module: nn.Module, mixer: type[Patch], name: str) -> None:
    slot = _slot(module)
    module.__dict__["_scanl_layer"] = next((int(part) for part in reversed(name.split(".")) if part.isdigit()), None)
    module.__dict__["_scanl_before"] = slot, module.__dict__.get(slot)
    original = getattr(module, slot)
    module.__dict__[slot] = functools.partial(_forward, mixer, module, original)


def _forward(mixer: type[Patch], module: nn.Module, original: Any, *args: Any, **kwargs: Any) -> Any:
    on_cuda = any(isinstance(value, Tensor) and value.is_cuda for value in (*args, *kwargs.values()))
    if on_cuda and _has_kernels(type(module), mixer):
        return original(*args, **kwargs)
    return mixer.forward(module, *args, **kwargs)


@functools.cache
def _has_kernels(cls: type[nn.Module], mixer: type[Patch]) -> bool:
    """Whether transformers found compiled packages for all that this mixer computes."""
    found = inspect.getmodule(cls)
    functions = [getattr(found, name, None) for name in mixer.kernels]
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
