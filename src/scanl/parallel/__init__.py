"""One sequence over many processes: ops, layers and models that each read a stretch of it."""

from scanl.parallel.context import ContextParallel, by_ops, scan
from scanl.parallel.stretches import stretch, stretch_offsets

__all__ = ["ContextParallel", "by_ops", "scan", "stretch", "stretch_offsets"]
