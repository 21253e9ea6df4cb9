"""One training run: its configuration, the Lightning module and callbacks, and the folder of its results."""

from typing import TYPE_CHECKING

from scanl.faces import touched

if TYPE_CHECKING:
    from scanl.learning.run.folder import RunFolder as RunFolder

__getattr__, __dir__ = touched(__name__)
