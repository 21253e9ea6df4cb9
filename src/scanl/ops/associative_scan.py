r"""Scan by any associative operator.

.. math:: y_t = e_1 \circ e_2 \circ \dots \circ e_t

The algorithm is recursive. It joins neighbouring elements and scans the result, which has half the length. That scan
gives every second output; one more join gives the outputs between them. Up to 8 elements are scanned in the fewest
rounds instead, in blocks that double. T elements take log₂T calls of the operator up to 8, and 2 log₂T - 3 beyond,
rounded up, for O(T) work in all.
"""

from collections.abc import Callable, Iterator
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from scanl.errors import ShapeError
from scanl.ops._frame.declaration import COMPLEX, FLOATING, HALF_DTYPES, Call, OpSample
from scanl.ops._frame.draws import Draws
from scanl.ops._frame.higher import higher_order

# Elements that are scanned in the fewest rounds; with more, the joins would be more than twice as many.
MAX_FEWEST_ROUNDS = 8


@higher_order(
    id=None,
    equation="y_1 = e_1,  y_t = combine(y_{t-1}, e_t)",
    source=(
        'Ladner and Fischer, "Parallel Prefix Computation", J. ACM 27, 1980; Blelloch, "Prefix Sums and Their '
        'Applications", CMU-CS-90-190, 1990; up to 8 elements: Sklansky, "Conditional-Sum Addition Logic", IRE '
        "Trans. Electronic Computers, 1960"
    ),
    dtypes=HALF_DTYPES + FLOATING + COMPLEX,
)
def associative_scan(combine: Callable[[Any, Any], Any], elements: Any, axis: int = 1, *, reverse: bool = False) -> Any:
    """Combine every element with all before it: y_t = combine(y_{t-1}, e_t), in O(log T) calls on long slices.

    combine: takes two structures of tensors, each a slice of the elements along `axis`. The left one comes first. It
    returns a structure with the same shapes and dtypes. It must be associative; it need not commute. One call handles
    many positions, so it must treat each index of `axis` independently. It may mix the other axes, e.g. multiply
    matrices.
    elements: a tensor, or a tuple, NamedTuple, list or dict of tensors. Shapes and dtypes may differ; the size of
    `axis` may not.   axis: the axis to scan. A negative axis is counted from the end of each tensor.
    reverse: scan from the last element to the first, y_t = combine(y_{t+1}, e_t).

    Returns y in the structure of `elements`. Autograd computes the derivatives, of every order. Raises ShapeError when
    sizes disagree, when there is no tensor, or when combine changes the structure, a shape or a dtype.

    >>> associative_scan(torch.add, torch.tensor([[1, 2, 3, 4]])).tolist()  # 1; 1+2; 1+2+3; 1+2+3+4
    [[1, 3, 6, 10]]

    A dense state space model, h_t = A_t h_{t-1} + x_t, composes affine maps (A, x):

    >>> def compose(first, second):
    ...     (a, x), (b, y) = first, second
    ...     return b @ a, (b @ x[..., None])[..., 0] + y
    >>> a = torch.tensor([[1.0, 1.0], [0.0, 2.0]]).expand(1, 3, 2, 2)
    >>> x = torch.tensor([[[1.0, 1.0], [0.0, 0.0], [1.0, 0.0]]])
    >>> associative_scan(compose, (a, x))[1].tolist()  # (1, 1); (1+1, 2) = (2, 2); (2+2+1, 4) = (5, 4)
    [[[1.0, 1.0], [2.0, 2.0], [5.0, 4.0]]]
    """
    leaves, structure = pytree.tree_flatten(elements)
    axes = _axes(elements, leaves, axis)
    if leaves[0].shape[axes[0]] < 2:
        return pytree.tree_unflatten([leaf.clone() for leaf in leaves], structure)

    def join(first: list[Tensor], second: list[Tensor]) -> list[Tensor]:
        result = combine(pytree.tree_unflatten(first, structure), pytree.tree_unflatten(second, structure))
        try:
            joined = structure.flatten_up_to(result)  # a dict with its keys in another order has the same structure
        except ValueError:
            joined = []
        if len(joined) == len(first) and all(map(_alike, joined, first)):
            return joined
        raise ShapeError(
            f"associative_scan: combine returns {_outline(result)}, expected what it was given, "
            f"{_outline(pytree.tree_unflatten(first, structure))}"
        )

    if reverse:
        leaves = [leaf.flip(i) for leaf, i in zip(leaves, axes, strict=True)]
    scanned = _scan(join, leaves, axes)
    if reverse:
        scanned = [leaf.flip(i) for leaf, i in zip(scanned, axes, strict=True)]
    return pytree.tree_unflatten(scanned, structure)


def _scan(
    join: Callable[[list[Tensor], list[Tensor]], list[Tensor]], leaves: list[Tensor], axes: list[int]
) -> list[Tensor]:
    steps = leaves[0].shape[axes[0]]
    if steps <= MAX_FEWEST_ROUNDS:
        return _in_fewest_rounds(join, leaves, axes, steps)

    def every_second(tensors: list[Tensor], start: int, stop: int) -> list[Tensor]:
        return [tensor[(slice(None),) * i + (slice(start, stop, 2),)] for tensor, i in zip(tensors, axes, strict=True)]

    pairs = _scan(join, join(every_second(leaves, 0, steps - 1), every_second(leaves, 1, steps)), axes)
    between = (steps - 1) // 2
    evens = [leaf.narrow(i, 0, 1) for leaf, i in zip(leaves, axes, strict=True)]
    if between:
        previous = [pair.narrow(i, 0, between) for pair, i in zip(pairs, axes, strict=True)]
        after = join(previous, every_second(leaves, 2, steps))
        evens = [torch.cat(both, i) for both, i in zip(zip(evens, after, strict=True), axes, strict=True)]
    return [_interleave(even, odd, i) for even, odd, i in zip(evens, pairs, axes, strict=True)]


def _in_fewest_rounds(
    join: Callable[[list[Tensor], list[Tensor]], list[Tensor]], leaves: list[Tensor], axes: list[int], steps: int
) -> list[Tensor]:
    for half in (1, 2, 4):  # blocks of this size are done; each second one gets the last element of the first
        places = [place for place in range(steps) if place & half]
        if not places:
            break
        second = torch.tensor(places, device=leaves[0].device)
        lhs = [leaf.index_select(i, (second & -half) - 1) for leaf, i in zip(leaves, axes, strict=True)]
        rhs = [leaf.index_select(i, second) for leaf, i in zip(leaves, axes, strict=True)]
        joined = join(lhs, rhs)
        leaves = [leaf.index_copy(i, second, new) for leaf, i, new in zip(leaves, axes, joined, strict=True)]
    return leaves


def _alike(got: Any, expected: Tensor) -> bool:
    return isinstance(got, Tensor) and got.shape == expected.shape and got.dtype == expected.dtype


def _interleave(even: Tensor, odd: Tensor, axis: int) -> Tensor:
    both = odd.shape[axis]
    joined = torch.stack([even.narrow(axis, 0, both), odd], axis + 1).flatten(axis, axis + 1)
    return torch.cat([joined, even.narrow(axis, both, 1)], axis) if even.shape[axis] > both else joined


def _axes(elements: Any, leaves: list[Any], axis: int) -> list[int]:
    """Return each tensor's scan axis, counted from the left. Check that all these axes have the same size."""
    if not leaves:
        raise ShapeError("associative_scan: elements holds no tensors, expected at least one")
    axes: list[int] = []
    for number, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor):
            raise ShapeError(
                f"associative_scan: {_name(elements, number)} is a {type(leaf).__name__}, expected a tensor"
            )
        if not -leaf.ndim <= axis < leaf.ndim:
            raise ShapeError(
                f"associative_scan: {_name(elements, number)} has shape {tuple(leaf.shape)}, expected an axis {axis}"
            )
        axes.append(axis % leaf.ndim)
        size, expected = leaf.shape[axes[-1]], leaves[0].shape[axes[0]]
        if size != expected:
            raise ShapeError(
                f"associative_scan: {_name(elements, number)} has shape {tuple(leaf.shape)}, expected {expected} on "
                f"axis {axis} because of {_name(elements, 0)}"
            )
    return axes


def _name(elements: Any, number: int) -> str:
    path, _ = pytree.tree_flatten_with_path(elements)[0][number]
    return "elements" + pytree.keystr(path)


def _outline(structure: Any) -> str:
    """Describe the structure, with each tensor replaced by its dtype and shape."""

    def outline(leaf: Any) -> str:
        return f"{leaf.dtype}{tuple(leaf.shape)}".removeprefix("torch.") if isinstance(leaf, Tensor) else repr(leaf)

    return str(pytree.tree_map(outline, structure)).replace("'", "")


@associative_scan.instance("x: B T D, A: B T D D, state: B D -> B T D")
def _affine(x: Tensor, A: Tensor, state: Tensor | None = None, **call: Unpack[Call]) -> tuple[Tensor, Tensor]:
    """Compose affine maps: h_t = A_t h_{t-1} + x_t, the recurrence of a dense state-space model."""
    assert state is not None  # zeros where the caller gave None
    h, hs = state, []
    for t in range(x.shape[1]):
        h = torch.einsum("bij,bj->bi", A[:, t], h) + x[:, t]
        hs.append(h)
    return torch.stack(hs, 1) if hs else x.clone(), h


@_affine.backend("parallel")
def _composed(x: Tensor, A: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Prepend the initial state as the constant map (A, x) = (0, state), then scan."""

    def compose(first: tuple[Tensor, Tensor], then: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        (a, x), (b, y) = first, then
        return b @ a, (b @ x[..., None])[..., 0] + y

    x = torch.cat([state[:, None], x], 1)
    A = torch.cat([torch.zeros_like(x[:, :1, :, None] * x[:, :1, None]), A], 1)
    _, h = associative_scan(compose, (A, x))
    return h[:, 1:], h[:, -1]


@_affine.samples
def _samples() -> Iterator[OpSample]:
    draw = Draws()

    yield OpSample({"x": draw(2, 7, 3), "A": draw(2, 7, 3, 3) / 2, "state": draw(2, 3)})
    packed = {"x": draw(1, 9, 2), "A": draw(1, 9, 2, 2) / 2, "state": draw(3, 2)}
    yield OpSample(packed, {"cu_seqlens": torch.tensor([0, 2, 2, 9])})


@_affine.errors
def _errors() -> Iterator[tuple[OpSample, str]]:
    x = torch.zeros(2, 4, 3)
    yield OpSample({"x": x, "A": torch.zeros(2, 4, 3, 2)}), "A has shape (2, 4, 3, 2), expected (B, T, D, D)"
