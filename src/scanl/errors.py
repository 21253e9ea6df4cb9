"""What a caller can get wrong. The command line prints one line for each of these and exits with 2."""

import difflib
from collections.abc import Iterable


class ScanlError(Exception):
    """Base of every error that scanl raises about its input."""


class ShapeError(ScanlError, ValueError):
    """An argument has a wrong shape, dtype or device."""


class BackendError(ScanlError, RuntimeError):
    """A named backend cannot run these arguments."""


class ConfigError(ScanlError, ValueError):
    """An unknown name, or an option that does not fit."""


class DataError(ScanlError, ValueError):
    """Files or corpora that cannot be read or are too small."""


class CheckpointError(ScanlError, RuntimeError):
    """A run folder, checkpoint or state file that is missing, damaged or of another model."""


def unknown(kind: str, name: object, known: Iterable[str]) -> str:
    """What to say of an unknown name: the nearest known one, or else all there are."""
    known = list(known)
    close = difflib.get_close_matches(str(name), known, 1, 0.5)
    return f"unknown {kind} {name!r}; " + (f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}")


def nearest(kind: str, name: object, known: Iterable[str]) -> ConfigError:
    """The error for an unknown name, with the nearest known one."""
    return ConfigError(unknown(kind, name, known))
