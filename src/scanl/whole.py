"""Check of whole numbers: seeds and counts."""

import operator
from typing import Any

from scanl.errors import ConfigError

SEEDS = 2**64  # torch takes a seed below this


def is_whole(value: Any) -> bool:
    """Return whether a value stands for a whole number: an int, one of NumPy, or a tensor of one whole number."""
    try:
        operator.index(value)
    except (TypeError, ValueError, RuntimeError):  # torch raises any of these, by what the tensor is
        return False
    return True


def whole_number(who: str, name: str, value: Any, least: int = 0, below: int = SEEDS) -> int:
    """Return a whole number as an int: an int, one of NumPy, or a tensor of one whole number.

    Raises ConfigError for anything else, and for a number out of range.
    """
    if not is_whole(value):
        raise ConfigError(f"{who}: {name} is {value!r}, expected a whole number of at least {least}")
    number = operator.index(value)
    if number < least:
        raise ConfigError(f"{who}: {name} is {number}, expected at least {least}")
    if number >= below:
        raise ConfigError(f"{who}: {name} is {number}, expected below {below}")
    return number


def check_sizes(who: str, **sizes: Any) -> None:
    """Raise ConfigError for a size that is no whole number of at least 1."""
    for name, size in sizes.items():
        if not is_whole(size) or operator.index(size) < 1:
            raise ConfigError(f"{who}: {name} is {size!r}, expected a whole number of at least 1")
