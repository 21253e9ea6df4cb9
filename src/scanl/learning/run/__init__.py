"""One training run: its configuration, the Lightning module and callbacks, and the folder of its results."""

from scanl.learning.run.folder import RunFolder as RunFolder
