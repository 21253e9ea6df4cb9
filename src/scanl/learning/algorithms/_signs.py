"""Random signs that are a function of numbers in the learner, so that a restored learner draws the same ones.

Source: the finalizer of SplitMix64, Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", 2014.
"""

import torch
from torch import Tensor


def new_seeds(rows: int, device: torch.device) -> Tensor:
    """Return random numbers (rows, 2), of torch's generator: a seed of each row, and 0 draws so far."""
    seeds = torch.randint(2**62, (rows,), device=device)
    return torch.stack([seeds, torch.zeros_like(seeds)], 1)


def signs(seeds: Tensor, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return random signs (rows, count), +1 or -1 with equal probability, and the seeds of the next draw."""
    seed, draw = seeds.unbind(1)
    places = torch.arange(count, device=seeds.device)
    bits = seed[:, None] + _mixed(draw[:, None] + _mixed(places + 1))
    signs = 1 - 2 * (_mixed(bits) & 1)
    return signs.to(dtype), torch.stack([seed, draw + 1], 1)


def _mixed(bits: Tensor) -> Tensor:
    """Return well mixed bits; products are modulo 2^64."""
    bits = bits * _signed(0x9E3779B97F4A7C15)
    bits = (bits ^ _shifted(bits, 30)) * _signed(0xBF58476D1CE4E5B9)
    bits = (bits ^ _shifted(bits, 27)) * _signed(0x94D049BB133111EB)
    return bits ^ _shifted(bits, 31)


def _shifted(bits: Tensor, by: int) -> Tensor:
    """Return the bits shifted to the right, with zeros from the left."""
    return (bits >> by) & (2 ** (64 - by) - 1)


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number
