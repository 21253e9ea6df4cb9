"""Modules whose weights are read: which hooks and adapters of them have an effect, and which are refused."""

from torch import nn
from torch.nn.modules import module as torch_module
from torch.nn.utils import prune
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from scanl.errors import ConfigError

# Attribute of a module that reads weights and is no layer: the classes of its modules, by path.
READS_ATTRIBUTE = "_scanl_reads"
WEIGHT_HOOKS = (prune.BasePruningMethod, WeightNorm, SpectralNorm)  # before a call they set the weight, and no more


def check_read(who: str, reader: nn.Module, path: str, kind: type[nn.Module]) -> None:
    """Raise ConfigError unless reading the weights at `path` of `reader` has the same effect as calling the modules.

    path: to a module of class `kind`, or to a container of some; nothing need be there.
    A parametrized weight is computed when it is read. Pruning and the older weight norm and spectral norm set the
    weight by a hook before a call; this function runs that hook.
    """
    module = reader  # this runs for every token
    for name in path.split("."):
        module = module._modules.get(name)
        if module is None:
            return
        if has_hooks(module):
            _run_hooks(who, path, module)
    _check_forward(who, path, module, kind)


def has_hooks(module: nn.Module) -> bool:
    """Return whether a call of the module runs hooks."""
    pre_hooks, hooks = module._forward_pre_hooks, module._forward_hooks
    return bool(pre_hooks or hooks or module._backward_pre_hooks or module._backward_hooks)


def is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Return whether reading the weights of a module of class `kind` has the same effect as calling it."""
    every = torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks
    own = "forward" in module.__dict__ or type(module).forward is not kind.forward
    return not (own or has_hooks(module) or any(every))


def _run_hooks(who: str, path: str, module: nn.Module) -> None:
    """Run the hooks that set a weight. Raise ConfigError for any other."""
    for hook in module._forward_pre_hooks.values():
        if not isinstance(hook, WEIGHT_HOOKS):
            raise _unread(who, path, "has a forward pre-hook", "none")
        hook(module, ())
    if module._forward_hooks:
        raise _unread(who, path, "has a forward hook", "none")
    if module._backward_hooks or module._backward_pre_hooks:
        raise _unread(who, path, "has a backward hook", "none")


def _check_forward(who: str, path: str, module: nn.Module, kind: type[nn.Module]) -> None:
    forward = type(module).forward
    if forward is nn.Module.forward:  # a container, which cannot be called
        for name, child in module._modules.items():
            if child is not None:
                inner = f"{path}.{name}"
                if has_hooks(child):
                    _run_hooks(who, inner, child)
                _check_forward(who, inner, child, kind)
    elif forward is not kind.forward:
        fact = f"is a {type(module).__module__}.{type(module).__qualname__}"
        raise _unread(who, path, fact, f"a plain {_name(kind)}")
    elif "forward" in module.__dict__ and getattr(module.__dict__["forward"], "__func__", None) is not forward:
        raise _unread(who, path, "has a forward of its own", f"that of {_name(kind)}")


def _name(kind: type[nn.Module]) -> str:
    return f"nn.{kind.__name__}" if kind.__module__.startswith("torch.nn.") else kind.__name__


def _unread(who: str, path: str, fact: str, expected: str) -> ConfigError:
    return ConfigError(
        f"{who}: {path} {fact}, expected {expected} because the layer reads its weights and does not call it; leave "
        "it as it is, or change its weight by torch.nn.utils.parametrize"
    )
