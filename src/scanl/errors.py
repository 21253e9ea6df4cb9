"""Errors that scanl raises about its input. The command line prints them as one line and exits with code 2."""

import difflib
from collections.abc import Iterable


class ScanlError(Exception):
    """Base class of all errors below."""


class ShapeError(ScanlError, ValueError):
    """An argument has a wrong shape, dtype or device."""


class BackendError(ScanlError, RuntimeError):
    """A named backend cannot run these arguments."""


class ConfigError(ScanlError, ValueError):
    """A name is unknown, or an option has an invalid value."""


class DataError(ScanlError, ValueError):
    """A file or a corpus cannot be read, or is too small."""


class DivergenceError(ScanlError, ArithmeticError):
    """A number is not finite: the loss of a training step, or the logits of a token that is drawn."""


class CheckpointError(ScanlError, RuntimeError):
    """A run folder, checkpoint or state file is missing or damaged, or belongs to another model."""


class ProcessError(ScanlError, RuntimeError):
    """A process that works with others has ended, or does not answer."""


def unknown(kind: str, name: object, known: Iterable[str]) -> str:
    """Return the message for an unknown name. It suggests the nearest known name, or lists all when none is near."""
    known = list(known)
    close = difflib.get_close_matches(str(name), known, 1, 0.5)
    return f"unknown {kind} {name!r}; " + (f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}")


def nearest(kind: str, name: object, known: Iterable[str]) -> ConfigError:
    """Return the error for an unknown name, with the message of `unknown`."""
    return ConfigError(unknown(kind, name, known))


def counted(count: int, noun: str) -> str:
    """Return a count with its noun: "1 row", "1,200 rows".

    >>> counted(1, "row"), counted(1200, "row")
    ('1 row', '1,200 rows')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
