"""Run a function of tensors of constant shapes as one kernel of the CPU.

A call of torch takes microseconds, however few numbers it computes; a step of a small model, and of its gradient, is
hundreds of calls. Here the function runs once without numbers. What it computes is recorded, views become offsets and
strides, and the rest becomes the source of one kernel.
"""

from scanl.ops._recorded.bound import Bound as Bound
from scanl.ops._recorded.recorded import Recorded as Recorded
from scanl.ops._recorded.recorded import Unsupported as Unsupported
