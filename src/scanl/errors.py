"""What a caller can get wrong. The command line prints one line for each of these and exits with 2."""


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
