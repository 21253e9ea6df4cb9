"""One training run: its configuration, Lightning's module and callbacks, and the folder that it leaves."""

from scanl.learning.run.folder import RunFolder as RunFolder
