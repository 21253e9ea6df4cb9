"""Fill and copy arrays.

numba takes longer to compile an assignment to a slice: it checks the shapes, and whether the two arrays overlap.
"""

from scanl.ops._cpu._helper import helper


@helper(forceinline=True)
def fill(x, first, count, value):
    """Set `count` elements of x, from `first` on."""
    for i in range(first, first + count):
        x[i] = value


@helper(forceinline=True)
def move(source, first, count, target, to):
    """Copy `count` elements of `source`, from `first` on, to `target`, from `to` on."""
    for i in range(count):
        target[to + i] = source[first + i]
