"""Replace the forward of one module. A copy of the module, deep or shallow, then computes with its own weights.

An attribute `forward` of the module would hold the module that it was made for, and a shallow copy, or a replica of
`DataParallel`, would compute with the weights of the original. So the module gets a class of its own, a subclass whose
`forward` finds the module as any method does. The attribute `_scanl_forward` holds what this forward runs. Without it
the original class's forward runs, also where the method or the class was stored elsewhere.
"""

import functools
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.utils import parametrize

Run = Callable[..., Any]  # run(module, original, *args, **kwargs); original(*args, **kwargs) is the forward before

_SLOTS = "forward", "_old_forward"  # the latter is where hooks for offloading keep the forward that they replace


def is_own(module: nn.Module) -> bool:
    """Whether the module's forward, beneath hooks for offloading, is the one of its class."""
    forward = module.__dict__.get(_slot(module))
    return forward is None or getattr(forward, "__func__", None) is type(module).forward or _is_ours(forward)


def replaced(module: nn.Module) -> bool:
    """Whether the module runs another forward now."""
    return "_scanl_forward" in module.__dict__


def replace(module: nn.Module, run: Run) -> None:
    """Let `run` compute the forward of the module, in place of another one that `replace` gave it."""
    known = replaced(module)
    module.__dict__["_scanl_forward"] = run
    if known:
        return
    kind, name = type(module), _slot(module)
    # A class of torch.nn.utils.parametrize must stay on top: torch removes it as the class of the module.
    if parametrize.is_parametrized(module):
        module.__class__ = _on(kind, _subclass(kind.__bases__[0]))
    else:
        module.__class__ = _subclass(kind)
    forward = module.__dict__.get(name)
    if forward is not None and not _is_ours(forward):
        module.__dict__[name] = functools.update_wrapper(functools.partial(_dispatch, module, forward), forward)


def restore(module: nn.Module) -> None:
    """Undo `replace`."""
    module.__dict__.pop("_scanl_forward", None)
    for name in _SLOTS:
        forward = module.__dict__.get(name)
        if isinstance(forward, functools.partial) and forward.func is _dispatch:
            module.__dict__[name] = forward.args[1]
    kind = type(module)
    if _is_made(kind):
        module.__class__ = kind.__bases__[0]
    elif parametrize.is_parametrized(module) and _is_made(kind.__bases__[0]):
        module.__class__ = _on(kind, kind.__bases__[0].__bases__[0])


def _dispatch(module: nn.Module, original: Run, /, *args: Any, **kwargs: Any) -> Any:
    run = module.__dict__.get("_scanl_forward")
    return original(*args, **kwargs) if run is None else run(module, original, *args, **kwargs)


def _slot(module: nn.Module) -> str:
    return _SLOTS[hasattr(module, "_hf_hook")]


def _is_made(kind: type) -> bool:
    """Whether `_subclass` made this class."""
    return "_scanl_forward" in kind.__dict__


def _is_ours(method: Any) -> bool:
    """Whether this is a method of a class that `_subclass` made."""
    return hasattr(getattr(method, "__func__", None), "_scanl_forward")


def _subclass(kind: Any) -> type:
    """Return the subclass of the same name whose forward runs `_scanl_forward`; `kind` itself if it is one."""
    if _is_made(kind):
        return kind
    known = next(filter(_is_made, kind.__subclasses__()), None)
    if known is not None:
        return known

    @functools.wraps(kind.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return _dispatch(self, functools.partial(kind.forward, self), *args, **kwargs)

    vars(forward)["_scanl_forward"] = None

    def reduce(self: nn.Module, protocol: Any) -> Any:
        reduced = kind.__reduce_ex__(self, max(protocol, 2))
        if type(self) is not subclass:
            return reduced
        make, args, *state = reduced
        return _remade, (kind, make, *(kind if arg is subclass else arg for arg in args)), *state

    names = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    subclass = type(
        kind.__name__, (kind,), {**names, "forward": forward, "__reduce_ex__": reduce, "_scanl_forward": None}
    )
    return subclass


def _remade(kind: type, make: Callable[..., nn.Module], *args: Any) -> nn.Module:
    """Return the module of a copy or a pickle, which names classes by where they are defined."""
    module = make(*args)
    module.__class__ = _subclass(kind)
    return module


def _on(kind: type, base: type) -> type:
    """Return a class of torch.nn.utils.parametrize with another base; each belongs to one module."""
    if kind.__bases__[0] is base:
        return kind
    attributes = {name: value for name, value in kind.__dict__.items() if name not in ("__dict__", "__weakref__")}
    return type(kind.__name__, (base,), attributes)
