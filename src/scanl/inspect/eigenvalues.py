"""Eigenvalues of one step of a layer: how fast each direction of its state decays, and how it turns."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scanl.errors import ConfigError
from scanl.inspect.base import BLUE, GRAY, LIGHT, Drawing, Inspection, inspector, prepared, state_size
from scanl.layers.base import Layer
from scanl.layers.state import State, flatten, index, leaves, unflatten

MAX_NUMBERS = 2**13  # numbers of a state
MAX_BLOCK_NUMBERS = 2**11  # numbers of a block
BUDGET = 2**21  # numbers of all copies of the state that are in memory at once
STEPS = 64  # steps after which the eigenvalues are taken


@dataclass(frozen=True)
class Eigenvalues(Inspection):
    """values: λ (B, e), complex, of the step that each of B sequences takes last.

    A complex number of the state stands for two real ones, so it has λ and its conjugate.
    """

    values: Tensor
    shared = False

    def half_life(self) -> Tensor:
        """Return (B, e): the steps in which a direction decays to half, ln 2 / -ln |λ|; infinity where it does not."""
        rate = -self.values.abs().log()
        return torch.where(rate > 0, math.log(2) / rate, math.inf)

    def figures(self) -> dict[str, float]:
        size = self.values.abs()
        return {
            "numbers": size.shape[1],
            "largest |λ|": size.max().item(),
            "median |λ|": size.median().item(),
            "longest half-life, steps": self.half_life().max().item(),
        }

    def columns(self) -> dict[str, Any]:
        rows, numbers = self.values.shape
        return {
            "row": torch.arange(rows).repeat_interleave(numbers).tolist(),
            "real": self.values.real.flatten().tolist(),
            "imaginary": self.values.imag.flatten().tolist(),
            "half_life": self.half_life().flatten().tolist(),
        }

    def panels(self) -> dict[str, Drawing]:
        real = not (self.values.imag.abs() > 1e-6).any()
        return {"": self._draw_sorted if real else self._draw_plane}

    def _draw_plane(self, axes: Any) -> None:
        angle = torch.linspace(0, 2 * math.pi, 200)
        axes.plot(angle.cos(), angle.sin(), lw=1, color=GRAY)
        axes.plot(self.values.real.flatten(), self.values.imag.flatten(), "o", ms=3, alpha=0.5, mew=0, color=BLUE)
        axes.set(xlabel="Re λ, per step", ylabel="Im λ, per step", aspect="equal")
        axes.grid(alpha=0.3)

    def _draw_sorted(self, axes: Any) -> None:
        values = self.values.real.sort(dim=1, descending=True).values
        for row in values:
            axes.plot(torch.arange(1, len(row) + 1), row, lw=1, color=LIGHT)
        axes.plot(torch.arange(1, values.shape[1] + 1), values.mean(0), lw=1.6, color=BLUE)
        low, high = values.min().item(), values.max().item()
        axes.set_ylim(min(0.0, low) - 0.03, max(1.0, high) + 0.03)
        axes.set(xlabel="eigenvalue, largest first", ylabel="λ, per step")
        axes.grid(alpha=0.3)


@inspector(
    title="Eigenvalues of a step",
    equation="J_t = ds_t/ds_{t-1},  J_t v = λ v",
    source='Orvieto et al., "Resurrecting Recurrent Neural Networks for Long Sequences", arXiv:2303.06349, sec. 3',
    takes="layers with a state of constant size",
)
def eigenvalues(layer: Layer, x: Tensor | None = None) -> Eigenvalues:
    """Return the eigenvalues of the Jacobian of the state by the state before it, at the last step of x.

    x: (B, T, dim), what the layer reads; None for 4 sequences of 64 steps of white noise. Of a linear time-invariant
    layer λ does not depend on x; of a gated one its modulus is the decay that the gates chose. Computed in float64, by
    backward passes. Where no number of the state acts on another, or only a few do, the eigenvalues are the ones of the
    blocks on the diagonal, so a state may have up to 2^13 numbers, and a block 2^11.

    Raises ConfigError for a layer without a state of constant size, and for a larger one.

    >>> from scanl.layers import LRU
    >>> layer = LRU(4)
    >>> largest = eigenvalues(layer).values.abs().max()
    >>> torch.testing.assert_close(largest, (-layer.nu_log.double().exp().min()).exp().detach())
    """
    layer, x = prepared("eigenvalues", layer, x, STEPS)
    state_size("eigenvalues", layer, MAX_NUMBERS)
    state = None
    if x.shape[1] > 1:
        with torch.no_grad():
            state = layer(x[:, :-1])[1]
    state = layer.init_state(len(x)) if state is None else state
    return Eigenvalues(torch.stack([_of_row(layer, x[b, -1], index(state, slice(b, b + 1))) for b in range(len(x))]))


class _Entries(NamedTuple):
    """The entries of a matrix that are not 0."""

    rows: Tensor
    columns: Tensor
    values: Tensor


def _of_row(layer: Layer, x: Tensor, state: State) -> Tensor:
    """Return the eigenvalues (e,) of a step that reads x (D,) in a state of one row."""
    entries = _jacobian(layer, x, state)
    blocks = _blocks(entries, _leaf(state))
    size, within = blocks.bincount(minlength=len(blocks)), blocks[entries.rows] == blocks[entries.columns]
    order = blocks.argsort(stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order)) - (size.cumsum(0) - size)[blocks[order]]
    if size.max() > MAX_BLOCK_NUMBERS:
        raise ConfigError(
            f"eigenvalues: {int(size.max())} numbers of the state act on each other, expected at most "
            f"{MAX_BLOCK_NUMBERS}; build the layer with a smaller dim"
        )
    out = torch.zeros(len(blocks), dtype=torch.complex128)
    for width in size[size > 0].unique().tolist():
        chosen = (size == width).nonzero()[:, 0]
        number = torch.full_like(size, -1)
        number[chosen] = torch.arange(len(chosen))
        matrix = torch.zeros(len(chosen), width, width, dtype=torch.float64)
        inside = within & (number[blocks[entries.rows]] >= 0)
        at, to, value = (column[inside] for column in entries)
        matrix[number[blocks[at]], place[at], place[to]] = value
        members = number[blocks] >= 0
        out[members] = torch.linalg.eigvals(matrix)[number[blocks[members]], place[members]]
    return out


def _jacobian(layer: Layer, x: Tensor, state: State) -> _Entries:
    """Return the derivative of the next state by the state. Each row of a batch gives a row of it."""
    flat = flatten(state)
    numbers, parts = flat.shape[1], []
    for first in range(0, numbers, count := max(1, BUDGET // numbers)):
        some = min(count, numbers - first)
        start = flat.expand(some, -1).clone().requires_grad_()
        with torch.enable_grad():
            after = layer.step(x.expand(some, -1), unflatten(start, index(state, [0] * some)))[1]
            (rows,) = torch.autograd.grad(flatten(after)[:, first : first + some].diagonal().sum(), start)
        at, to = rows.nonzero(as_tuple=True)
        parts.append(_Entries(at + first, to, rows[at, to]))
    return _Entries(*(torch.cat(column) for column in zip(*parts, strict=True)))


def _leaf(state: State) -> Tensor:
    """Return (e,), for each number of the state which tensor it is in."""
    sizes = [flatten(leaf).shape[1] for _, leaf in leaves(state) if leaf.is_floating_point() or leaf.is_complex()]
    return torch.repeat_interleave(torch.tensor(sizes))


def _blocks(entries: _Entries, leaf: Tensor) -> Tensor:
    """Return (e,), a block for each number: the matrix has the eigenvalues of its blocks on the diagonal.

    Tensors of the state that act on each other only in one direction have blocks of their own. In them, and in groups
    of tensors that act on each other both ways, numbers that no chain of entries connects have blocks of their own.
    """
    reach = torch.eye(int(leaf.max()) + 1, dtype=torch.bool)
    reach[leaf[entries.rows], leaf[entries.columns]] = True
    for _ in range(len(reach)):
        reach = reach | ((reach.float() @ reach.float()) > 0)
    group = (reach & reach.T).float().argmax(1)[leaf]
    inside = group[entries.rows] == group[entries.columns]
    at, to = entries.rows[inside], entries.columns[inside]
    labels = torch.arange(len(leaf))
    while True:
        lower = labels.scatter_reduce(0, at, labels[to], "amin").scatter_reduce(0, to, labels[at], "amin")
        lower = lower[lower]
        if torch.equal(lower, labels):
            return labels
        labels = lower
