"""The common parts of the modules of mamba-ssm: the states in `inference_params`, and the mark on undecayed weights."""

from typing import Any

from torch import Tensor, nn

from scanl.errors import ConfigError, ShapeError


def cached(module: Any, inference_params: Any, batch: int) -> tuple[Tensor, Tensor]:
    """Return the states of a module in the dict of inference_params; empty ones, written into it, at first."""
    if module.layer_idx is None:
        raise ConfigError(f"{type(module).__name__}: layer_idx is None, expected a number because of inference_params")
    memory = inference_params.key_value_memory_dict
    if module.layer_idx not in memory:
        memory[module.layer_idx] = module.allocate_inference_cache(batch, inference_params.max_seqlen)
    return memory[module.layer_idx]


def check_one_step(who: str, x: Tensor) -> None:
    if x.ndim != 3 or x.shape[1] != 1:
        raise ShapeError(f"{who}: hidden_states has shape {tuple(x.shape)}, expected (B, 1, D): one step at a time")


def undecayed(*parameters: nn.Parameter) -> None:
    """Mark parameters as mamba-ssm does, for optimizers that look for the mark."""
    for parameter in parameters:
        parameter._no_weight_decay = True  # pyright: ignore[reportAttributeAccessIssue]
