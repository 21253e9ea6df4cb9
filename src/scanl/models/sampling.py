"""From logits to the next token."""

import torch
from torch import Tensor

from scanl.errors import ConfigError


def distribution(
    logits: Tensor, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None
) -> Tensor:
    """Probabilities (..., V) after temperature, then the k likeliest, then the nucleus, renormalised.

    temperature: divides the logits.   top_k: keep the k likeliest; ties with the k-th stay.   top_p: keep
    the smallest set of likeliest tokens whose probability reaches p (Holtzman et al., arXiv:1904.09751), at
    least one.
    """
    logits = logits.float() / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        kth = logits.topk(top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    probabilities = logits.softmax(-1)
    if top_p is not None and top_p < 1:
        ordered, order = probabilities.sort(-1, descending=True)
        before = ordered.cumsum(-1) - ordered  # mass of all that are likelier
        ordered = ordered.masked_fill(before >= top_p, 0)
        probabilities = torch.zeros_like(probabilities).scatter(-1, order, ordered)
        probabilities = probabilities / probabilities.sum(-1, keepdim=True)
    return probabilities


def sample(
    logits: Tensor,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """One token for each row of logits (B, V): (B,) int64. Temperature 0 takes the likeliest."""
    if temperature == 0:
        return logits.argmax(-1)
    return torch.multinomial(distribution(logits, temperature, top_k, top_p), 1, generator=generator)[:, 0]


def check_options(temperature: float, top_k: int | None, top_p: float | None) -> None:
    """Refuse what no distribution answers to."""
    if not temperature >= 0:
        raise ConfigError(f"generate: temperature is {temperature}, expected at least 0")
    if top_k is not None and top_k < 1:
        raise ConfigError(f"generate: top_k is {top_k}, expected at least 1")
    if top_p is not None and not 0 < top_p <= 1:
        raise ConfigError(f"generate: top_p is {top_p}, expected in (0, 1]")
