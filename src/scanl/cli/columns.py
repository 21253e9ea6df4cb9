"""The kind of a layer's recurrence: how its state depends on the state before, measured on a small layer."""

import re
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scanl.layers import Layer
from scanl.layers.state import leaves, map_leaves
from scanl.ops import backend

WIDTH = 12  # of the layer that is measured
STEPS = 15  # before the state that is measured, so that it is no special one
UNITS = 64  # numbers of a tensor that are changed one by one
ATTENTION = "scanl.layers.attention."  # keeps inputs, or a summary of a segment
STABLE_OPS = ("linear_attention", "weighted_average")  # a running maximum stands in the state beside what is linear
GATE = re.compile(r"[a-z]'?_t\)? \* [a-z]+_\{t-1\}|sigmoid\([^()]*(?:x|_t|h_\{t-1\})|\(1 - [a-z]\)")


class SurveyColumns(NamedTuple):
    """The columns of `scanl list --long` and of the gallery, which are those of the survey.

    linear: the next state is an affine function of the state.   elementwise: a number of the state acts on itself
    alone, or on one more.   gated: what is kept of the state depends on the input; where the recurrence is not linear,
    its equation has a gate.   online: each channel has a recurrence of its own, so real-time recurrent learning is
    cheap.
    """

    linear: bool
    elementwise: bool
    gated: bool
    online: bool


@torch.no_grad()
def columns(cls: type[Layer], dim: int) -> SurveyColumns | None:
    """Return the columns of a layer; None if it has no recurrence: it sees the future, or only keeps inputs."""
    if cls.kind.keys() == set(SurveyColumns._fields):  # MesaNet's, whose constructor imports torch's compiler
        return SurveyColumns(**cls.kind)
    with torch.random.fork_rng(devices=[]), backend("reference"):
        torch.manual_seed(0)
        layer = cls(dim, **cls.sample).to(torch.float64).eval()
        if layer.bidirectional or layer.op == "fixed_point" or cls.__module__.startswith(ATTENTION):
            return None
        for inner in layer.modules():  # their forms would be made on the meta device, which imports torch's compiler
            if isinstance(inner, Layer) and not inner.bidirectional:
                vars(inner).update(_form=inner.init_state(1))
        for parameter in layer.parameters():  # some start at 0, and would show nothing
            parameter += 0.1 * torch.randn_like(parameter)
        x = torch.randn(1, STEPS, dim, dtype=torch.float64)
        state = layer(x)[1]
        measured = [_measure(layer, state, path) for path, leaf in leaves(state) if _is_number(leaf)]
    recurrent = [part for part in measured if part is not None]
    if not recurrent:
        return None
    linear, elementwise, gated = zip(*recurrent, strict=True)
    op = cls.op or (cls.preset_of and cls.preset_of.op)
    is_linear = all(linear) or op in STABLE_OPS
    is_gated = any(gated) if is_linear else bool(GATE.search(cls.equation))
    measured = SurveyColumns(is_linear, all(elementwise) or op in STABLE_OPS, is_gated, cls.left_out is not None)
    return measured._replace(**cls.kind)


def row(cls: type[Layer]) -> str:
    """Return the columns of a layer in a line: "linear, elementwise, gated; time O(T), state O(1)"."""
    kind = columns(cls, WIDTH)
    words = "no recurrence" if kind is None else ", ".join(word for word, holds in kind._asdict().items() if holds)
    time, state = cls.cost
    return f"{words or 'nonlinear, dense'}; time O({time}), state O({state})"


def _is_number(leaf: Tensor) -> bool:
    return (leaf.is_floating_point() or leaf.is_complex()) and leaf.numel() > 0 and leaf.ndim > 1


def _measure(layer: Layer, state: Any, path: str) -> tuple[bool, bool, bool] | None:
    """Measure the dependence of one tensor of the state on itself. None: there is none, the tensor keeps inputs."""
    leaf = dict(leaves(state))[path]

    def after(x: Tensor, changes: Tensor) -> Tensor:
        """Return the tensor after inputs (T, dim), for each of the changes (N, ...) added to it before them."""
        paths = iter([at for at, _ in leaves(state)])

        def changed(other: Tensor) -> Tensor:
            rows = other.expand(len(changes), *other.shape[1:]).clone()
            return rows + changes if next(paths) == path else rows

        return dict(leaves(layer(x.expand(len(changes), -1, -1), map_leaves(changed, state))[1]))[path]

    change = torch.randn_like(leaf)
    changes = torch.cat([0 * change, change, 2 * change])
    x, other = torch.randn(2, 1, layer.dim, dtype=torch.float64)
    zero, one, two = after(x, changes)
    limit = 1e-9 * (1 + zero.abs().max().item())
    linear = (two - 2 * one + zero).abs().max().item() <= limit
    with_other = after(other, changes)
    gated = ((one - zero) - (with_other[1] - with_other[0])).abs().max().item() > limit
    units = torch.eye(leaf.numel(), dtype=leaf.dtype)[:UNITS].view(-1, *leaf.shape[1:])
    moved = (after(x, units) - zero).flatten(1).abs() > limit
    if not moved.diagonal().any():
        return None
    return linear, int(moved.sum(1).max()) <= 2, gated
