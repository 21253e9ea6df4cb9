"""AdamW with the usual settings for language models."""

import torch
from torch import nn

from scanl.layers import param_groups
from scanl.learning.optimizers.base import optimizer

BETAS = (0.9, 0.95)


@optimizer("adamw")
class AdamW(torch.optim.AdamW):
    """AdamW with betas (0.9, 0.95).

    Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", arXiv:1711.05101.
    """

    def __init__(self, model: nn.Module, lr: float, weight_decay: float) -> None:
        super().__init__(param_groups(model), lr=lr, weight_decay=weight_decay, betas=BETAS, fused=True)
