"""Sample the next token from logits."""

import torch
from torch import Tensor

from scanl.errors import ConfigError


def distribution(
    logits: Tensor, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None
) -> Tensor:
    """Return probabilities (..., V) after temperature, top-k and top-p filtering, in this order, renormalised.

    temperature: divides the logits.   top_k: keep the k most likely tokens, and ties with the k-th.
    top_p: keep the smallest set of most likely tokens whose total probability reaches p, at least one token
    (Holtzman et al., arXiv:1904.09751).
    """
    logits = logits.float() / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        kth = logits.topk(top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    probabilities = logits.softmax(-1)
    if top_p is not None and top_p < 1:
        ordered, order = probabilities.sort(-1, descending=True)
        before = ordered.cumsum(-1) - ordered  # total probability of all likelier tokens
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
    """Draw one token (B,) int64 for each row of logits (B, V). Temperature 0 takes the most likely token."""
    if temperature == 0:
        return logits.argmax(-1)
    return torch.multinomial(distribution(logits, temperature, top_k, top_p), 1, generator=generator)[:, 0]


def check_options(who: str, temperature: float, top_k: int | None = None, top_p: float | None = None) -> None:
    """Raise ConfigError for sampling options out of range. who: the function, for the message."""
    if not temperature >= 0:
        raise ConfigError(f"{who}: temperature is {temperature}, expected at least 0")
    if top_k is not None and top_k < 1:
        raise ConfigError(f"{who}: top_k is {top_k}, expected at least 1")
    if top_p is not None and not 0 < top_p <= 1:
        raise ConfigError(f"{who}: top_p is {top_p}, expected in (0, 1]")
