"""Give one module another forward. A copy of the module, deep or shallow, then computes with its own weights.

An attribute `forward` of the module would hold the module that it was made for, and a shallow copy, or a replica of
`DataParallel`, would compute with the weights of the original. So the module gets a class of its own, a subclass whose
`forward` finds the module as any method does. The attribute `_scanl_forward` holds what this forward runs. Without it
the forward is that of the original class, so whatever else has kept the method or the class then runs the original.
"""

import functools
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.utils import parametrize

Run = Callable[..., Any]  # run(module, original, *args, **kwargs); original(*args, **kwargs) is the forward before

_SLOTS = "forward", "_old_forward"  # the latter is where hooks for offloading keep the forward that they replace


def slot(module: nn.Module) -> str:
    """Return the name of the attribute or method that is this module's own forward."""
    return _SLOTS[hasattr(module, "_hf_hook")]


def replaced(module: nn.Module) -> bool:
    """Whether the module runs another forward now."""
    return "_scanl_forward" in module.__dict__


def replace(module: nn.Module, run: Run) -> None:
    """Let `run` compute the forward of the module."""
    module.__dict__["_scanl_forward"] = run
    kind, name = type(module), slot(module)
    # A class of torch.nn.utils.parametrize must stay on top: torch removes it as the class of the module.
    if parametrize.is_parametrized(module):
        module.__class__ = _on(kind, _subclass(kind.__bases__[0]))
    else:
        module.__class__ = _subclass(kind)
    if name in module.__dict__:
        module.__dict__[name] = functools.partial(_instead, module, module.__dict__[name])


def restore(module: nn.Module) -> None:
    """Undo `replace`."""
    module.__dict__.pop("_scanl_forward", None)
    for name in _SLOTS:
        forward = module.__dict__.get(name)
        if isinstance(forward, functools.partial) and forward.func is _instead:
            module.__dict__[name] = forward.args[1]
    kind = type(module)
    if _is_ours(kind):
        module.__class__ = kind.__bases__[0]
    elif parametrize.is_parametrized(module) and _is_ours(kind.__bases__[0]):
        module.__class__ = _on(kind, kind.__bases__[0].__bases__[0])


def _instead(module: nn.Module, before: Run, /, *args: Any, **kwargs: Any) -> Any:
    run = module.__dict__.get("_scanl_forward")
    return before(*args, **kwargs) if run is None else run(module, before, *args, **kwargs)


def _is_ours(kind: type) -> bool:
    return "_scanl_is_made" in kind.__dict__


def _subclass(kind: Any) -> type:
    """Return the subclass of the same name whose forward runs `_scanl_forward`; `kind` itself if it is one."""
    if _is_ours(kind):
        return kind
    known = next(filter(_is_ours, kind.__subclasses__()), None)
    if known is not None:
        return known

    @functools.wraps(kind.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return _instead(self, functools.partial(kind.forward, self), *args, **kwargs)

    def reduce(self: nn.Module, protocol: Any) -> Any:
        reduced = kind.__reduce_ex__(self, max(protocol, 2))
        if type(self) is not made:
            return reduced
        make, args, *rest = reduced
        return _remade, (kind, make, *(kind if each is made else each for each in args)), *rest

    names = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    made = type(kind.__name__, (kind,), {**names, "forward": forward, "__reduce_ex__": reduce, "_scanl_is_made": True})
    return made


def _remade(kind: type, make: Callable[..., nn.Module], *args: Any) -> nn.Module:
    """Return the module of a copy or a pickle, which names classes by where they are defined."""
    module = make(*args)
    module.__class__ = _subclass(kind)
    return module


def _on(kind: type, base: type) -> type:
    """Return a class of torch.nn.utils.parametrize with another base; each belongs to one module."""
    if kind.__bases__[0] is base:
        return kind
    own = {name: value for name, value in kind.__dict__.items() if name not in ("__dict__", "__weakref__")}
    return type(kind.__name__, (base,), own)
