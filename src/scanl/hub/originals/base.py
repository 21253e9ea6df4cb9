"""Base classes of the layouts of original checkpoints: how each is recognized."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from scanl.hub.formats.base import CheckpointLayout
from scanl.hub.weights import Weights
from scanl.registry import Registry


class Original(CheckpointLayout):
    """Layout of a folder with options and weights."""

    program: ClassVar[str] = ""  # whose program writes it

    @classmethod
    def recognizes(cls, config: Mapping[str, Any]) -> bool:
        """Whether this layout has these options. By default they have its name as model_type."""
        return config.get("model_type") == cls.name


class ShapedFile(Original):
    """Layout of one file with weights alone. Their shapes give the options."""

    mark: ClassVar[str]  # a weight that no layout of an earlier version has

    @staticmethod
    @abstractmethod
    def described(weights: Weights) -> dict[str, Any]:
        """Return the keys of `defaults`, from the shapes of the weights."""

    @classmethod
    def recognizes(cls, config: Mapping[str, Any]) -> bool:
        return False


registry: Registry[Original] = Registry("original layout")
register, names, get = registry.add, registry.names, registry.get
