"""Parts of closed-form continuous-time networks: the closed form, the maps that feed it, and the mixed memory."""

from typing import Annotated, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.layers.module import Module
from scanl.ops._frame.context import late

EQUATION = "h_t = g (1 - s) + s k,  s = sigmoid(a dt + b),  g, k, a, b from phi(W x_t + U h_{t-1})"
SOURCE = 'Hasani et al., "Closed-form continuous-time neural networks", Nature Machine Intelligence 4, arXiv:2106.13898'

Variant = Annotated[
    Literal["default", "no_gate", "pure"],
    '"default"; "no_gate", g + s k; or "pure", A - A exp(-Δ (|w_tau| + |f|)) f, the solution of an LTC',
]
Memory = Annotated[bool, "an LSTM between the state and the network"]


def lecun_tanh(x: Tensor) -> Tensor:
    """Return tanh, scaled in x and y."""
    return 1.7159 * torch.tanh(0.666 * x)


ACTIVATIONS = {
    "lecun_tanh": lecun_tanh,
    "silu": late(F, "silu"),
    "relu": torch.relu,
    "tanh": late(torch, "tanh"),
    "gelu": late(F, "gelu"),
}


def closed_form(raw: Tensor, dt: Tensor, time: Tensor | None, variant: str) -> Tensor:
    """Return the next state. raw: g, k, a and b, (B, 4, E), or f, (B, 1, E).   time: w_tau and A, of "pure"."""
    if time is not None:
        f, (rate, end) = raw[:, 0], time.unbind(0)
        return end - end * torch.exp(-dt * (rate.abs() + f.abs())) * f
    g, k, a, b = raw.unbind(1)
    share = torch.sigmoid(a * dt + b)
    base = torch.tanh(g) if variant == "no_gate" else torch.tanh(g) * (1 - share)
    return base + share * torch.tanh(k)


def remember(gates: Tensor, r: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """Step the LSTM of a mixed memory, from the input's part of its gates z, i, f and o (B, 4, E); return h and c."""
    z, i, f, o = (gates + torch.einsum("be,gfe->bgf", h, r)).unbind(1)
    c = c * torch.sigmoid(f + 1) + torch.tanh(z) * torch.sigmoid(i)
    return torch.tanh(c) * torch.sigmoid(o), c


class ClosedFormMaps(Module):
    """The linear maps of a cell, with or without a backbone, and their masks. Rows of a mask: outputs."""

    ff1: nn.Linear
    ff2: nn.Linear
    time_a: nn.Linear
    time_b: nn.Linear
    sparsity_mask: Tensor | None

    def __init__(
        self,
        inputs: int,
        width: int,
        variant: str,
        hidden_dim: int = 0,
        depth: int = 0,
        mask: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.backbone, below = nn.ModuleDict(), inputs + width
        for layer in range(depth):
            self.backbone[str(2 * layer)] = nn.Linear(below, hidden_dim)  # ncps counts the activations, too
            below = hidden_dim
        self.pure = variant == "pure"
        for name in ("ff1",) if self.pure else ("ff1", "ff2", "time_a", "time_b"):
            setattr(self, name, nn.Linear(below, width))
        self.register_buffer("sparsity_mask", mask)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
        if self.pure:
            # not 0, as in ncps' TensorFlow cell: |w_tau| has no slope there, so it would stay 0
            self.w_tau = nn.Parameter(nn.init.xavier_uniform_(torch.empty(1, width)))
            self.A = nn.Parameter(torch.ones(1, width))

    def backbone_layers(self) -> list[nn.Linear]:
        """Return the layers of the backbone, from the lowest up."""
        return [layer for layer in self.backbone.values() if isinstance(layer, nn.Linear)]

    def stacked(self) -> tuple[Tensor, Tensor]:
        """Return the weights (G, E, inputs) and the biases (G, E) of the maps that give g, k, a and b, or f."""
        maps = [self.ff1] if self.pure else [self.ff1, self.ff2, self.time_a, self.time_b]
        weights = [head.weight for head in maps]
        if self.sparsity_mask is not None:
            weights[:2] = [weight * self.sparsity_mask for weight in weights[:2]]
        return torch.stack(weights), torch.stack([head.bias for head in maps])

    def time(self) -> Tensor:
        """Return w_tau and A, (2, E), of "pure"."""
        return torch.cat([self.w_tau, self.A])


class MixedMemory(Module):
    """Maps of the LSTM of a mixed memory: of the input, and of its state."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.input_map = nn.Linear(inputs, 4 * width)
        self.recurrent_map = nn.Linear(width, 4 * width, bias=False)
        nn.init.xavier_uniform_(self.input_map.weight)
        nn.init.uniform_(self.input_map.bias, -0.1, 0.1)
        nn.init.orthogonal_(self.recurrent_map.weight)

    def operands(self, x: Tensor) -> list[Tensor]:
        """Return the input's part of the gates (B, T, 4, E), and the recurrent weights (4, E, E)."""
        return [self.input_map(x).unflatten(-1, (4, -1)), self.recurrent_map.weight.unflatten(0, (4, -1))]
