"""The state of a layer between two calls: a tensor, or nested tuples, NamedTuples and dicts of tensors, batch first.

`None` and `()` hold no tensors. Functions here that return a state keep its form.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from scanl.digests import load_tensors, save_tensors
from scanl.errors import CheckpointError, ShapeError

Device: TypeAlias = torch.device | str | None
DType: TypeAlias = torch.dtype | None
State: TypeAlias = Any  # Tensor | NamedTuple | tuple | list | dict with names as keys | None, nested
T = TypeVar("T", bound=tuple[Any, ...])


def loadable(form: type[T]) -> type[T]:
    """Let `torch.load` with weights_only=True and `torch.export.save` handle a NamedTuple of tensors. A decorator."""
    torch.serialization.add_safe_globals([form])
    if form not in pytree.SUPPORTED_NODES:
        pytree._register_namedtuple(form, serialized_type_name=f"{form.__module__}.{form.__qualname__}")
    return form


def map_leaves(f: Callable[..., Any], state: State, *others: State) -> State:
    """Apply `f` to each tensor of the state (and of `others`, which have the same form)."""
    if isinstance(state, Tensor):
        return f(state, *others)
    if state is None:
        return None
    if isinstance(state, dict):
        return {name: map_leaves(f, member, *(other[name] for other in others)) for name, member in state.items()}
    _refuse_other(state)
    parts = [map_leaves(f, *group) for group in zip(state, *others, strict=True)]
    return type(state)(*parts) if hasattr(state, "_fields") else type(state)(parts)


def leaves(state: State, path: str = "state") -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor with its path in the state, such as `state.recurrent` or `state.0.conv`."""
    if isinstance(state, Tensor):
        yield path, state
    elif isinstance(state, dict):
        for name, member in state.items():
            yield from leaves(member, f"{path}.{name}")
    elif state is not None:
        _refuse_other(state)
        for name, member in zip(getattr(state, "_fields", range(len(state))), state, strict=True):
            yield from leaves(member, f"{path}.{name}")


def _refuse_other(state: State) -> None:
    if not isinstance(state, tuple | list):
        raise ShapeError(
            f"state: it holds a {type(state).__name__}, expected tensors, or "
            "tuples, NamedTuples, lists and dicts of them"
        )


def detach(state: State) -> State:
    """Detach all tensors from the graph, for truncated backpropagation through time."""
    return map_leaves(Tensor.detach, state)


def to(state: State, device: Device = None, dtype: DType = None) -> State:
    """Move to a device and cast: real tensors to `dtype`, complex ones to the complex dtype of that width."""

    def move(leaf: Tensor) -> Tensor:
        if dtype is None or not (leaf.is_floating_point() or leaf.is_complex()):
            return leaf.to(device=device)
        kind = torch.promote_types(dtype, torch.complex32) if leaf.is_complex() else dtype
        return leaf.to(device=device, dtype=kind)

    return map_leaves(move, state)


def index(state: State, i: Tensor | Sequence[int] | slice) -> State:
    """Select, repeat or reorder rows of the batch, as beam search does."""
    if isinstance(i, slice):
        return map_leaves(lambda leaf: leaf[i], state)
    rows = torch.as_tensor(i)
    if rows.ndim != 1:
        raise ShapeError(f"index: i has shape {tuple(rows.shape)}, expected (n,) rows of the batch")
    return map_leaves(lambda leaf: leaf[rows.to(leaf.device)], state)


def repeat(state: State, n: int) -> State:
    """Repeat each row of the batch `n` times; copies are adjacent: (B, ...) becomes (B n, ...)."""
    return map_leaves(lambda leaf: leaf.repeat_interleave(n, 0), state)


def cat(states: Sequence[State]) -> State:
    """Concatenate states of the same form along the batch axis."""
    return map_leaves(lambda *group: torch.cat(group), *states)


def save(state: State, path: str | PathLike[str]) -> None:
    """Write the tensors to a safetensors file, each under its path in the state, complex numbers as pairs.

    The file contains a digest of its bytes. Raises CheckpointError when it cannot be written.
    """
    save_tensors(stored(state), Path(path))


def load(path: str | PathLike[str], like: State) -> State:
    """Read a file of `save`. like: a state of the same form, such as `layer.init_state(B)`.

    Raises CheckpointError when a path, a dtype, the digest, or an axis other than the batch differs.
    """
    tensors, _ = load_tensors(Path(path), "state")
    return restored(tensors, like, path)


def stored(state: State) -> dict[str, Tensor]:
    """Return copies of the tensors as a file holds them: each under its path in the state, complex numbers as pairs."""
    # Each tensor is copied, because safetensors refuses tensors that use the same memory.
    return {at: _as_stored(leaf.detach()).clone().contiguous() for at, leaf in leaves(state)}


def _as_stored(leaf: Tensor) -> Tensor:
    return torch.view_as_real(leaf) if leaf.is_complex() else leaf


def restored(tensors: Mapping[str, Tensor], like: State, path: str | PathLike[str]) -> State:
    """Return the state whose tensors `stored` gave. like: a state of the same form.   path: their file, for messages.

    Raises CheckpointError when a path, a dtype, or an axis other than the batch differs.
    """
    expected = dict(leaves(like))
    if tensors.keys() != expected.keys():
        odd = sorted(tensors.keys() ^ expected.keys())
        raise CheckpointError(
            f"state: {path} holds {sorted(tensors)}, expected {sorted(expected)}; they differ in {odd}"
        )
    paths = iter(expected)

    def take(leaf: Tensor) -> Tensor:
        at = next(paths)
        value, form = tensors[at], _as_stored(leaf)
        if value.dtype != form.dtype or value.shape[1:] != form.shape[1:]:
            raise CheckpointError(
                f"state: {at} in {path} is {value.dtype} {tuple(value.shape)}, "
                f"expected {form.dtype} {('B', *form.shape[1:])} of this layer"
            )
        # A copy has torch's alignment. Rounding of matrix products may depend on the alignment.
        value = value.to(leaf.device, copy=True)
        return torch.view_as_complex(value) if leaf.is_complex() else value

    return map_leaves(take, like)


def flatten(state: State) -> Tensor:
    """Return the numbers of a state, (B, e). A complex number is two; integers, such as positions, are left out."""
    parts = [_real(leaf).reshape(len(leaf), -1) for leaf in _floating(state)]
    return torch.cat(parts, 1) if parts else torch.zeros(0, 0)


def unflatten(flat: Tensor, like: State) -> State:
    """Return a state of the form of `like` with the numbers of `flatten`, and the integers of `like`."""
    sizes = iter(flat.split([prod(_real(leaf).shape[1:]) for leaf in _floating(like)], 1))

    def part(leaf: Tensor) -> Tensor:
        if not (leaf.is_floating_point() or leaf.is_complex()):
            return leaf
        real = _real(leaf)
        values = next(sizes).reshape(-1, *real.shape[1:]).to(real.dtype)
        return torch.view_as_complex(values) if leaf.is_complex() else values

    return map_leaves(part, like)


def complex_parts(state: State) -> Tensor:
    """Return (e, e), True where two numbers of `flatten` are one number or the parts of one complex number."""
    places: list[int] = []
    for leaf in _floating(state):
        width = 2 if leaf.is_complex() else 1
        first = places[-1] + 1 if places else 0
        places += [first + i // width for i in range(prod(_real(leaf).shape[1:]))]
    at = torch.tensor(places)
    return at[:, None] == at


def _floating(state: State) -> Iterator[Tensor]:
    yield from (leaf for _, leaf in leaves(state) if leaf.is_floating_point() or leaf.is_complex())


def _real(leaf: Tensor) -> Tensor:
    return torch.view_as_real(leaf) if leaf.is_complex() else leaf
