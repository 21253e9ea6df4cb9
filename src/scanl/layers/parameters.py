"""What a layer knows of how its parameters want to be trained, and the groups that an optimiser takes."""

from typing import Any

from torch import nn


def tag(parameter: nn.Parameter, *, weight_decay: bool = True, lr: float | None = None) -> nn.Parameter:
    """Say that a parameter is not decayed towards zero, or has a learning rate of its own; gives it back."""
    parameter.scanl_tag = (weight_decay, lr)  # type: ignore[attr-defined]
    return parameter


def param_groups(model: nn.Module) -> list[dict[str, Any]]:
    """The parameters of a model in groups, as every optimiser of torch takes them.

    Weights of linear maps come first and follow the optimiser's own weight decay; everything else (biases, norms,
    embeddings, decays, and what a layer has tagged) has `weight_decay` 0. What a layer has given a learning rate has
    it as `lr`, one group for each rate. Shared parameters appear once.

    >>> model = nn.Linear(2, 2)
    >>> [(len(group["params"]), group.get("weight_decay")) for group in param_groups(model)]
    [(1, None), (1, 0.0)]
    """
    linear = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)}
    groups: dict[tuple[bool, float | None], list[nn.Parameter]] = {(True, None): [], (False, None): []}
    for parameter in model.parameters():
        decayed, lr = getattr(parameter, "scanl_tag", (True, None))
        groups.setdefault((decayed and id(parameter) in linear, lr), []).append(parameter)
    return [
        {"params": params, **({} if decayed else {"weight_decay": 0.0}), **({} if lr is None else {"lr": lr})}
        for (decayed, lr), params in groups.items()
        if params
    ]
