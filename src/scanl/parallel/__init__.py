"""One sequence over many processes: ops, layers and models that each read a stretch of it."""

from scanl.faces import public
from scanl.parallel.context import ContextParallel as ContextParallel
from scanl.parallel.context import by_ops as by_ops
from scanl.parallel.context import scan as scan
from scanl.parallel.stretches import stretch as stretch
from scanl.parallel.stretches import stretch_offsets as stretch_offsets

__dir__ = public(__name__)
