"""Recurrent sequence models: a state, a transition and a readout.

A model trains on whole sequences in parallel, and runs one token at a time in constant memory with the same results.

`import scanl` alone loads no submodule. `scanl.ops`, `scanl.layers` and the others are imported on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from scanl.errors import ScanlError as ScanlError

if TYPE_CHECKING:
    from scanl import compat as compat
    from scanl import data as data
    from scanl import export as export
    from scanl import hub as hub
    from scanl import inspect as inspect
    from scanl import layers as layers
    from scanl import learning as learning
    from scanl import models as models
    from scanl import ops as ops
    from scanl import packing as packing
    from scanl import parallel as parallel
    from scanl import serve as serve
    from scanl import tasks as tasks
    from scanl.ops import exact as exact

__version__ = "0.1.0"

_PACKAGES = (
    "compat",
    "data",
    "export",
    "hub",
    "inspect",
    "layers",
    "learning",
    "models",
    "ops",
    "packing",
    "parallel",
    "serve",
    "tasks",
)


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return import_module(f"scanl.{name}")
    if name == "exact":
        return import_module("scanl.ops").exact
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_PACKAGES, "exact"})
