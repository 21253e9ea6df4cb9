"""Derivatives that a multilayer perceptron computes, and steps of fixed length along a derivative."""

from collections.abc import Callable
from typing import Annotated

import torch
from torch import Tensor, nn

from scanl.layers import options
from scanl.layers.module import Module
from scanl.options import at_least

Flow = Callable[[Tensor], Tensor]


def _euler(flow: Flow, h: Tensor, dt: Tensor) -> Tensor:
    return h + dt * flow(h)


def _midpoint(flow: Flow, h: Tensor, dt: Tensor) -> Tensor:
    return h + dt * flow(h + dt / 2 * flow(h))


def _rk4(flow: Flow, h: Tensor, dt: Tensor) -> Tensor:
    a = flow(h)
    b = flow(h + dt / 2 * a)
    c = flow(h + dt / 2 * b)
    return h + dt / 6 * (a + 2 * (b + c) + flow(h + dt * c))


METHODS = {"euler": _euler, "midpoint": _midpoint, "rk4": _rk4}  # rk4: the classical one

FieldWidth = Annotated[options.HiddenDim, "U, width of the perceptron f"]
FieldDepth = Annotated[int, at_least(0), "layers of f from U to U"]


def evolve(flow: Flow, h: Tensor, span: Tensor, method: str, substeps: int) -> Tensor:
    """Return the state after `span`, in `steps` equal steps of the method."""
    for _ in range(substeps):
        h = METHODS[method](flow, h, span / substeps)
    return h


def derivative(
    h: Tensor,
    drive: Tensor,
    first: Tensor,
    deep: Tensor | None,
    deep_bias: Tensor | None,
    last: Tensor,
    last_bias: Tensor,
) -> Tensor:
    """Return dh/dt. drive: what the first layer gets beside h, with its bias."""
    z = torch.tanh(drive + h @ first.T)
    if deep is not None and deep_bias is not None:
        for weight, bias in zip(deep.unbind(0), deep_bias.unbind(0), strict=True):
            z = torch.tanh(z @ weight.T + bias)
    return z @ last.T + last_bias


class Field(Module):
    """A multilayer perceptron with tanh from h (D), and from more inputs, to dh/dt (D)."""

    def __init__(self, dim: int, more: int, hidden_dim: int, depth: int) -> None:
        super().__init__()
        self.dim = dim
        self.first = nn.Linear(dim + more, hidden_dim)
        self.deep = nn.ModuleList(nn.Linear(hidden_dim, hidden_dim) for _ in range(depth))
        self.last = nn.Linear(hidden_dim, dim)
        for module in (self.first, *self.deep, self.last):
            assert isinstance(module, nn.Linear)
            nn.init.normal_(module.weight, 0, 0.1)
            nn.init.zeros_(module.bias)

    def operands(self) -> list[Tensor | None]:
        """Return the operands of `derivative` after `drive`."""
        deep = [module for module in self.deep if isinstance(module, nn.Linear)]
        between: list[Tensor | None] = [None, None]
        if deep:
            between = [torch.stack([layer.weight for layer in deep]), torch.stack([layer.bias for layer in deep])]
        return [self.first.weight[:, : self.dim], *between, self.last.weight, self.last.bias]
