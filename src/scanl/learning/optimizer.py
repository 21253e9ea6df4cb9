"""AdamW as language models use it, and its learning rate over the steps."""

import math

import torch
from torch import nn

from scanl.learning.config import TrainConfig


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW with betas (0.9, 0.95); weight decay on the weights of linear maps, not on embeddings, norms or decays."""
    linear = {module.weight for module in model.modules() if isinstance(module, nn.Linear)}
    groups = [
        {"params": [p for p in model.parameters() if p in linear], "weight_decay": config.weight_decay},
        {"params": [p for p in model.parameters() if p not in linear], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.95), fused=True)


def rate(config: TrainConfig, step: int) -> float:
    """The learning rate of a step (from 0) as a fraction of the peak: linear warm-up, then half a cosine to zero."""
    assert config.steps is not None
    warmup = min(config.warmup, config.steps // 10)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warmup) / max(1, config.steps - warmup))))
