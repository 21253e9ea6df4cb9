"""Designation of a layer: its registered name, `module:Class`, a class of the user's own, or an instance."""

import copy
import importlib
import os
import sys
from collections.abc import Mapping
from typing import Any, TypeAlias

from scanl.errors import ConfigError
from scanl.layers.base import Layer
from scanl.layers.registry import layers
from scanl.options import check_names
from scanl.registry import Registry

Designation: TypeAlias = str | type[Layer] | Layer


def layer_class(layer: Designation, table: Registry[Layer] = layers) -> type[Layer]:
    """Return the class that a designation stands for.

    table: where names are registered.   `my.module:MyRNN` imports `my.module` from Python's path or the working folder:
    name only code that you trust. Raises ConfigError for an unknown name, a module that cannot be imported, and a class
    that is no Layer.
    """
    if isinstance(layer, Layer):
        return type(layer)
    if isinstance(layer, str) and ":" not in layer:
        return table.get(layer)
    cls = import_class("layer", layer) if isinstance(layer, str) else layer
    if not (isinstance(cls, type) and issubclass(cls, Layer)):
        text = layer if isinstance(layer, str) else f"a {type(layer).__name__}, {layer!r}"
        raise ConfigError(f"layer is {text}, expected a registered name, a subclass of scanl.layers.Layer or a Layer")
    return cls


def make_layer(layer: Designation, dim: int, options: Mapping[str, Any], table: Registry[Layer] = layers) -> Layer:
    """Make the layer of width `dim`. An instance is copied, with its values; it takes no options."""
    cls = layer_class(layer, table)
    if isinstance(layer, Layer):
        if options:
            raise ConfigError(f"{label(layer)}: options are {dict(options)}, expected none because the layer is made")
        if layer.dim != dim:
            raise ConfigError(f"{label(layer)}: dim is {layer.dim}, expected {dim} of the stack")
        return copy.deepcopy(layer)
    check_names(label(layer, table), cls, options)
    return cls(dim, **options)


def label(layer: Designation, table: Registry[Layer] = layers) -> str:
    """Return the registered name, or the class's own name: the key in `layer_options`, and the name in messages."""
    if isinstance(layer, str) and ":" not in layer:
        return table.find(layer) or layer
    cls = layer_class(layer, table)
    return vars(cls).get("name") or cls.__name__


def recorded(layer: type[Layer]) -> str:
    """Return the text that a saved model holds for the class of a layer; `layer_class` reads it.

    Raises ConfigError for a class that cannot be imported by name.
    """
    text = vars(layer).get("name") or f"{layer.__module__}:{layer.__qualname__}"
    module = sys.modules.get(layer.__module__)
    if ":" in text and (layer.__module__ == "__main__" or getattr(module, layer.__qualname__, None) is not layer):
        raise ConfigError(
            f"save: layer is the class {layer.__qualname__} of {layer.__module__}, expected one that another program "
            "can import; move it to the top of a module of its own"
        )
    return text


def import_class(what: str, text: str) -> Any:
    """Return the class `module:Class`. Raises ConfigError if it cannot be imported. what: its name in the message."""
    module, _, name = text.partition(":")
    folder = os.getcwd()
    try:
        if folder not in sys.path:
            sys.path.append(folder)
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{what} is {text!r}, expected module:Class that Python can import: {error}") from error
