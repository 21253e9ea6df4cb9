"""What a kernel of a recorded function computes with: memory, and views of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple


@dataclass(eq=False)
class Memory:
    """Memory for real numbers; a complex number is two of them, a truth value is 0 or 1.

    name: the pointer to it in the kernel; "" until it has an offset in the scratch memory.   size: real numbers.
    kind: "float32" or "float64".
    fill: all of it has this value, and it has no memory yet.   first, last: the loops that use it, by number.
    """

    name: str
    size: int
    kind: str
    fill: float | None = None
    offset: int = 0
    last: int = -1
    first: int = 1 << 62


class View(NamedTuple):
    """A view of memory. offset, strides: in real numbers.   form: "real", "complex" or "truth"."""

    memory: Memory
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    form: str

    def part(self, number: int) -> "View":
        """Return the real part, 0, or the imaginary part, 1."""
        return self._replace(offset=self.offset + number, form="real")

    def expanded(self, shape: Sequence[int]) -> "View":
        """Return the value broadcast to a shape."""
        front = len(shape) - len(self.shape)
        strides = [
            0 if size == 1 and wide != 1 else stride
            for size, stride, wide in zip(self.shape, self.strides, shape[front:], strict=True)
        ]
        return self._replace(shape=tuple(shape), strides=(*[0] * front, *strides))

    def at(self, axis: int, start: int, size: int, step: int = 1) -> "View":
        """Return `size` of the indices of an axis, from `start` on."""
        shape, strides = list(self.shape), list(self.strides)
        offset = self.offset + start * strides[axis]
        shape[axis], strides[axis] = size, strides[axis] * step
        return self._replace(offset=offset, shape=tuple(shape), strides=tuple(strides))

    def without(self, axis: int) -> "View":
        """Return the value without an axis of size 1."""
        return self._replace(
            shape=self.shape[:axis] + self.shape[axis + 1 :], strides=self.strides[:axis] + self.strides[axis + 1 :]
        )

    def divided(self, shape: Sequence[int]) -> "View":
        """Return the value with axes divided into those of a shape; the value as it is if they do not make it up."""
        left, sizes, strides = [size for size in shape if size != 1], list[int](), list[int]()
        for size, stride in zip(self.shape, self.strides, strict=True):
            parts = list[int]()
            while left and prod(parts) < size:
                parts.append(left.pop(0))
            if prod(parts) != size:
                return self
            sizes += parts
            strides += [stride * prod(parts[at + 1 :]) for at in range(len(parts))]
        return self if left else self._replace(shape=tuple(sizes), strides=tuple(strides))

    @property
    def whole(self) -> bool:
        """Whether it is all of its memory, in order."""
        width = 2 if self.form == "complex" else 1
        return self.offset == 0 and self.ordered and prod(self.shape) * width == self.memory.size

    @property
    def ordered(self) -> bool:
        """Whether the numbers follow one another."""
        _, (steps,) = merged(self.shape, self.strides)
        return steps in ([], [2 if self.form == "complex" else 1])


Operand = View | complex | float | int


def merged(shape: Sequence[int], *strides: Sequence[int]) -> tuple[list[int], list[list[int]]]:
    """Return a shape without axes of size 1, and with neighbors merged where all strides allow it, and the strides."""
    sizes: list[int] = []
    steps: list[list[int]] = [[] for _ in strides]
    for axis, size in enumerate(shape):
        if size == 1:
            continue
        by = [one[axis] for one in strides]
        if sizes and all(step[-1] == one * size for step, one in zip(steps, by, strict=True)):
            sizes[-1] *= size
            for step, one in zip(steps, by, strict=True):
                step[-1] = one
        else:
            sizes.append(size)
            for step, one in zip(steps, by, strict=True):
                step.append(one)
    return sizes, steps
