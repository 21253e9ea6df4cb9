"""Save models to folders: weights as safetensors, with the class and its configuration in the file's header."""

import inspect
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

from scanl.digests import load_tensors, save_tensors
from scanl.errors import CheckpointError, ConfigError
from scanl.layers.base import Layer
from scanl.layers.designation import recorded
from scanl.layers.module import Module

WEIGHTS = "model.safetensors"


class Saved(Module):
    """A model that keeps its constructor arguments: `type(model)(**model.config)` makes another of the same shape.

    The constructor of a subclass begins with `super().__init__(locals())`. At that point `locals` holds only the
    arguments.
    """

    config: dict[str, Any]  # the arguments of the constructor, by name
    kinds: ClassVar[dict[str, type["Saved"]]] = {}  # by class name, as in the header

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        super().__init__()
        self.config = {name: value for name, value in arguments.items() if name not in ("self", "__class__")}

    def options_of(self, part: Callable[..., Any]) -> dict[str, Any]:
        """Return those constructor arguments that `part` accepts by the same names."""
        return {name: self.config[name] for name in inspect.signature(part).parameters if name in self.config}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        Saved.kinds[cls.__name__] = cls

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write model.safetensors into the folder `path`, atomically. `load` reads it, without unpickling."""
        try:
            Path(path).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"save: {path} cannot be written: {error.strerror}") from error
        save_model(self, Path(path, WEIGHTS))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Load a model from a folder that `save` or `scanl train` wrote, in evaluation mode, on the CPU.

        Raises CheckpointError when the model is missing, damaged or of another class.
        """
        file = Path(path, WEIGHTS)
        if not file.is_file():
            raise CheckpointError(f"load: {path} has no {WEIGHTS}; name a folder of `save`, or a run that has ended")
        tensors, about = load_tensors(file, "load")
        found = about.get("class")
        kind = Saved.kinds.get(str(found))
        if kind is None or not issubclass(kind, cls):
            hint = "name a folder that `save` has written" if kind is None else f"load it with {found}.load"
            raise CheckpointError(f"load: {file} holds {found or 'no model of scanl'}, expected {cls.__name__}; {hint}")
        model = kind(**about["config"])
        try:
            model.load_state_dict(tensors)
        except RuntimeError as error:
            reason = " ".join(str(error).split())
            raise CheckpointError(f"load: {file} does not fit its own header: {reason}; save it again") from error
        return model.eval()


def save_model(model: Saved, path: Path, more: Mapping[str, Any] | None = None) -> None:
    """Write one file with the weights, the class, its configuration and the metadata in `more`."""
    config = dict(model.config)
    if "layer" in config:
        config["layer"] = _recorded(config["layer"])
    tensors = {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}
    try:
        save_tensors(tensors, path, {"class": type(model).__name__, "config": config, **(more or {})})
    except TypeError as error:
        raise ConfigError(f"save: config is {model.config}, expected what JSON can hold: {error}") from error


def _recorded(layer: Any) -> str | list[str]:
    return recorded(layer) if isinstance(layer, str | type | Layer) else [recorded(each) for each in layer]
