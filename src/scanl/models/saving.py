"""Save models to folders: weights as safetensors, with the class and its configuration in the file's header.

A configuration is nested: {"class": "LanguageModel", "config": {"vocab_size": 256, "stack": {"class": "Stack", ...}}}.
"""

import numbers
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor, nn

from scanl.digests import load_tensors, save_tensors
from scanl.errors import CheckpointError, ConfigError, ScanlError
from scanl.layers.base import Layer
from scanl.layers.designation import import_class, layer_class
from scanl.layers.designation import recorded as layer_name
from scanl.layers.module import Module
from scanl.layers.parts.quantized import prepare, quantized_paths
from scanl.options import ConfiguredMeta, who

M = TypeVar("M", bound=nn.Module)
# In the header: the bits of the weights that are whole numbers, by the paths of their modules.
QUANTIZED_KEY = "quantized"
WEIGHTS = "model.safetensors"


def class_name(cls: type) -> str:
    """Return the name of a class in files: its own name for a class of scanl, `module:Class` for others."""
    is_ours = cls.__module__.partition(".")[0] == "scanl"
    return cls.__name__ if is_ours else f"{cls.__module__}:{cls.__qualname__}"


class ModelPart:
    """A part of a model's configuration: `type(part)(**part.config)` makes another of the same shape.

    Models, stacks and groups of options are parts. A file holds the name of the class and the `config`.
    """

    config: Mapping[str, Any]  # the arguments of the constructor, by name
    classes: ClassVar[dict[str, type["ModelPart"]]] = {}  # by the name in files

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        ModelPart.classes[class_name(cls)] = cls


class Saved(ModelPart, Module, metaclass=ConfiguredMeta):
    """A model that can be saved and loaded: `save` and `load`. `config` holds the arguments of its constructor."""

    name: ClassVar[str] = "model"  # in messages; a subclass without one has the name of its class

    def _who(self) -> str:
        return who(type(self))

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

        The file names classes as `module:Class` that are not of scanl. They are imported: load only files that you
        trust. Raises CheckpointError when the model is missing, damaged or of another class.
        """
        file = Path(path, WEIGHTS)
        if not file.is_file():
            raise CheckpointError(f"load: {path} has no {WEIGHTS}; name a folder of `save`, or a run that has ended")
        tensors, about = load_tensors(file, "load")
        name = about.get("class")
        try:
            kind = _part_class(name)
        except ConfigError as error:
            raise CheckpointError(f"load: {file} holds a class that is not here: {error}") from error
        if kind is None or not issubclass(kind, cls):
            hint = "name a folder that `save` has written"
            if kind is not None and issubclass(kind, Saved):
                hint = f"load it with {kind.__name__}.load"
            raise CheckpointError(f"load: {file} holds {name or 'no model of scanl'}, expected {cls.__name__}; {hint}")
        if not isinstance(about.get("config"), Mapping):
            raise CheckpointError(f"load: {file} has config {shortened(repr(about.get('config')))}, expected a mapping")

        def make() -> Any:
            model = kind(**restored(about["config"]))
            prepare(model, about.get(QUANTIZED_KEY))
            return model

        try:
            if (form := blank(make, about["config"], tensors)) is not None:
                _check_shapes(form, tensors)
            model = make()
            model.load_state_dict(tensors)
        except CheckpointError as error:
            raise CheckpointError(f"load: {file} does not fit its own header: {error}; save it again") from error
        except Exception as error:  # the header may hold anything, and so raise anything
            kind_of = "" if isinstance(error, ScanlError | TypeError) else f"{type(error).__name__}: "
            reason = shortened(f"{kind_of}{error}")
            raise CheckpointError(f"load: {file} has a configuration that cannot be made: {reason}") from error
        return model.eval()


def blank(make: Callable[[], M], config: Any, tensors: Mapping[str, Tensor]) -> M | None:
    """Return the model that `make` returns, without memory; None for one that cannot be made without numbers.

    So a size in a file asks for no more memory than the file has, once the shapes are compared. config: nested, of the
    file. Raises CheckpointError for more blocks than there are tensors.
    """
    deepest = max(_depths(config), default=0)
    if deepest > len(tensors):
        raise CheckpointError(f"depth is {deepest}, expected at most {len(tensors)}, the number of tensors in the file")
    try:
        with torch.device("meta"):
            return make()
    except ScanlError:
        raise
    except (NotImplementedError, RuntimeError, TypeError):
        return None


def _check_shapes(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    shapes = {name: tuple(value.shape) for name, value in tensors.items()}
    expected = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    for name in sorted(shapes.keys() | expected.keys()):
        if shapes.get(name) != expected.get(name):
            wanted = expected.get(name, "nothing")
            raise CheckpointError(f"{name} is {shapes.get(name, 'missing')}, expected {wanted}")


def _depths(config: Any) -> Iterator[int]:
    """Yield every depth of a nested configuration."""
    for name, value in config.items() if isinstance(config, Mapping) else ():
        if name == "depth" and isinstance(value, int):
            yield value
        yield from _depths(value)


def shortened(text: str) -> str:
    """Return a text as one line of at most 300 letters."""
    line = " ".join(text.split())
    return line if len(line) <= 300 else f"{line[:297]}..."


def save_model(model: Saved, path: Path, more: Mapping[str, Any] | None = None) -> None:
    """Write one file with the weights, the class, its configuration and the metadata in `more`."""
    about = recorded(model)
    if paths := quantized_paths(model):
        about[QUANTIZED_KEY] = paths
    tensors = {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}
    try:
        save_tensors(tensors, path, {**about, **(more or {})})
    except TypeError as error:
        raise ConfigError(f"save: config is {about['config']}, expected what JSON can hold: {error}") from error


def recorded(value: Any) -> Any:
    """Return the form in which a file stores a value of a configuration. `restored` is the inverse.

    A part or a layer becomes its class and its configuration, and the class of a layer its name.
    """
    if isinstance(value, ModelPart | Layer):
        name = class_name(type(value)) if isinstance(value, ModelPart) else layer_name(type(value))
        return {"class": name, "config": recorded(value.config)}
    if isinstance(value, type):
        return layer_name(value)
    if isinstance(value, Mapping):
        return {name: recorded(entry) for name, entry in value.items()}
    if isinstance(value, numbers.Real) and not isinstance(value, int | float):  # a number of NumPy
        return int(value) if isinstance(value, numbers.Integral) else float(value)
    return [recorded(entry) for entry in value] if isinstance(value, list | tuple) else value


def restored(value: Any) -> Any:
    """Return the value of a configuration from its form in a file. Raises ConfigError for an unknown class."""
    if isinstance(value, Mapping):
        entries = {name: restored(entry) for name, entry in value.items()}
        if entries.keys() != {"class", "config"}:
            return entries
        cls = _part_class(entries["class"]) or layer_class(entries["class"])
        return cls(**entries["config"])
    return [restored(entry) for entry in value] if isinstance(value, list) else value


def _part_class(name: Any) -> type[ModelPart] | None:
    """Return the class of a part from its name in a file. None for the name of no part."""
    if not isinstance(name, str):
        return None
    if name not in ModelPart.classes and ":" in name:
        import_class("class", name)
    return ModelPart.classes.get(name)
