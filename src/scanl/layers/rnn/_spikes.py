"""A spike, and the derivative that stands for its own."""

from typing import Annotated

import torch
from torch import Tensor, nn

from scanl.options import above, at_least

# Laws that no function with a pseudo-derivative obeys: of cells, and of layers.
SURROGATE = {"the gradients of the output": "a pseudo-derivative stands for the derivative of a spike"}
SPIKE_EXCUSES: dict[str, str] = {
    "gradients_are_the_derivatives_and_reach_every_parameter": "a pseudo-derivative stands for that of a spike",
    "the_derivative_of_a_gradient_is_right": "the pseudo-derivative is a constant for the second derivative",
}

Tau = Annotated[float, above(0), "τ, time constant of the membrane in steps: v decays by exp(-1/τ) in a step"]
Gamma = Annotated[float, at_least(0), "γ, height of the pseudo-derivative of a spike"]


def spike(u: Tensor, gamma: float) -> Tensor:
    """Return 1 where u > 0, and 0 elsewhere, with the derivative ψ = γ max(0, 1 - |u|).

    u: membrane potential less the threshold, in units of the threshold. Source: Bellec et al., Nature Communications
    11:3625, 2020, Methods, the pseudo-derivative.
    """
    psi = gamma * torch.relu(1 - u.detach().abs())
    return torch.sign(torch.relu(u)) + psi * (u - u.detach())  # the second term is 0, and NaN if u is infinite


def init_weights(input_weight: Tensor, recurrent: Tensor, leak: float) -> None:
    """Draw weights by which v has about the variance 1 for independent inputs of variance 1."""
    width = recurrent.shape[0]
    nn.init.normal_(input_weight, std=((1 - leak**2) / input_weight.shape[1]) ** 0.5)
    nn.init.normal_(recurrent, std=width**-0.5)


def without_diagonal(weight: Tensor) -> Tensor:
    """Return a weight (D, D) with zeros on the diagonal: no unit has a connection to itself."""
    return weight - torch.diag(weight.diagonal())
