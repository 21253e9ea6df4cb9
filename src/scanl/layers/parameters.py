"""Parameter groups for an optimiser, from the layers' hints."""

from typing import Any

from torch import nn

from scanl.errors import ConfigError
from scanl.layers.module import Module


def param_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return the parameters of a model in groups for any torch optimiser.

    The first group has the weights of linear maps, with the optimiser's own weight decay. All other parameters have
    `weight_decay` 0: biases, norms, embeddings, decays, and those whose hint in a layer's `hints` says so. Parameters
    whose hint names a learning rate have it as `lr`, in one group for each rate. A parameter that several modules use
    appears once. If a layer contains others, its own hints take precedence.

    >>> model = nn.Linear(2, 2)
    >>> [(len(group["params"]), group.get("weight_decay")) for group in param_groups(model)]
    [(1, None), (1, 0.0)]
    """
    linear = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)}
    hinted: dict[int, tuple[bool, float | None]] = {}
    for module in model.modules():
        if isinstance(module, Module):
            hinted = _hinted(module) | hinted
    groups: dict[tuple[bool, float | None], list[nn.Parameter]] = {(True, None): [], (False, None): []}
    for parameter in model.parameters():
        decayed, lr = hinted.get(id(parameter), (True, None))
        groups.setdefault((decayed and id(parameter) in linear, lr), []).append(parameter)
    return [
        {"params": params, **({} if decayed else {"weight_decay": 0.0}), **({} if lr is None else {"lr": lr})}
        for (decayed, lr), params in groups.items()
        if params
    ]


def _hinted(layer: Module) -> dict[int, tuple[bool, float | None]]:
    """Return, by a parameter's id, whether it has weight decay, and its own learning rate or None."""
    settings: dict[int, tuple[bool, float | None]] = {}
    absent = {name for name, parameter in layer._parameters.items() if parameter is None}  # left out by an option
    for path, hint in layer.hints.items():
        named = layer.named_parameters(remove_duplicate=False)
        here = [id(parameter) for name, parameter in named if f"{name}.".startswith(f"{path}.")]
        if not here and path not in absent:
            raise ConfigError(
                f"{type(layer).__name__}: hints name {path!r}, expected a parameter or a module of the layer"
            )
        lr = getattr(layer, hint.lr) if isinstance(hint.lr, str) else hint.lr
        settings |= dict.fromkeys(here, (hint.weight_decay, lr))
    return settings
