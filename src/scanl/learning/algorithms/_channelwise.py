"""The influence of parameters on the states of channelwise layers, carried from block to block.

A layer of `layers.channelwise` says how parameters enter its channels. The influence of a parameter on the state is one
number for each number of its channel's state, so it has the shape of the parameter. Over a block of steps it becomes
the Jacobian of the block, elementwise, times what it was, plus the derivative within the block.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from operator import add
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from scanl.data.batch import Batch
from scanl.errors import ConfigError
from scanl.layers.channelwise import ChannelwiseLayer, Drive
from scanl.layers.designation import label
from scanl.layers.registry import classes
from scanl.layers.state import State
from scanl.learning.algorithms.base import Algorithm
from scanl.learning.questions import Model
from scanl.options import who

Influence = tuple[Tensor, ...]  # (B, M, *target) for each target; M numbers in the state of a channel
Kinds = frozenset[str]
EVERY_KIND: Kinds = frozenset({"weight", "bias", "vector"})


class ChannelwiseLearner(NamedTuple):
    """The model's state, and the influences of the parameters on it, for each layer."""

    state: State
    influences: tuple[Influence, ...]


class Target(NamedTuple):
    """Parameters that act on the states, and the numbers at which their influence is measured.

    role: one of `EVERY_KIND`.   value: (d, *P, *K), (*P, *K) or (*K).   entering: (B, T, *P, *K); (B, *K) of a vector.
    source: what the weight of a map reads, (B, T, d) or (B, T, H, d).
    """

    role: str
    value: Tensor
    entering: Tensor
    source: Tensor | None = None


def channelwise(model: Model, algorithm: type) -> list[ChannelwiseLayer]:
    """Return the channelwise layers of a model, the lowest first. Raises ConfigError where a mixer has none."""
    for mixer in model.stack.mixers():
        if mixer.bidirectional or mixer.left_out is None:
            able = ", ".join(cls.name for cls in classes() if cls.left_out is not None and cls.preset_of is None)
            raise ConfigError(
                f"{who(algorithm)}: the model has the layer {label(mixer)!r}, expected layers whose channels have "
                f"recurrences of their own: {able}"
            )
    return [layer for layer in model.stack.modules() if isinstance(layer, ChannelwiseLayer)]


class ByChannel(Algorithm):
    """An algorithm that follows the recurrences of channelwise layers from update to update. Abstract."""

    update_steps: ClassVar = 1
    masks: ClassVar = False

    def check(self, model: Model, batch: Batch) -> None:
        super().check(model, batch)
        partial = batch.weights is not None and bool((batch.weights < 1).any())
        if partial and getattr(model, "pool", None) == "mean":
            raise ConfigError(
                f"{who(type(self))}: the answer is read from the mean over all steps, whose past is not followed, "
                "expected whole sequences in an update, or a model with pool 'last'; rtrl follows it"
            )


class FollowedModel:
    """Runs the recurrences of channelwise layers, carries influences, and counts them in the gradient.

    layers: the layers.   influences: of their parameters on the states before the block; None at the start.
    kinds: which parameters' influence is carried.   by_step: every step is a block, so no gradient goes from a step to
    earlier ones but by an influence.   constant: vectors are constants, whose gradient is zero.
    """

    def __init__(
        self,
        layers: Sequence[ChannelwiseLayer],
        influences: Sequence[Influence] | None = None,
        kinds: Kinds = EVERY_KIND,
        by_step: bool = False,
        constant: bool = False,
    ) -> None:
        self.layers, self.kinds, self.by_step, self.constant = layers, kinds, by_step, constant
        self.at_start = influences is None
        self.carried = {} if influences is None else dict(zip(layers, influences, strict=True))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Stand between the layers and their recurrences."""
        for layer in self.layers:
            layer.watcher = self._run
        try:
            yield
        finally:
            for layer in self.layers:
                del layer.watcher

    def influences(self) -> tuple[Influence, ...]:
        """Return the influences on the states after the block."""
        return tuple(self.carried[layer] for layer in self.layers)

    def _run(
        self,
        layer: ChannelwiseLayer,
        drives: Sequence[Drive | Tensor],
        vectors: Sequence[Tensor],
        states: Sequence[Tensor],
    ) -> tuple[Tensor, Sequence[Tensor]]:
        if self.constant:
            vectors = [vector.detach() for vector in vectors]
        if not self.by_step:
            return self._block(layer, drives, vectors, states)
        every = []
        for t in range(len(_value(drives[0])[0])):
            read, states = self._block(layer, [_at(drive, t) for drive in drives], vectors, states)
            states = [state.detach() for state in states]
            every.append(read)
        return torch.cat(every, 1), states

    def _block(
        self,
        layer: ChannelwiseLayer,
        drives: Sequence[Drive | Tensor],
        vectors: Sequence[Tensor],
        states: Sequence[Tensor],
    ) -> tuple[Tensor, Sequence[Tensor]]:
        rows = len(states[0])
        by_row = [vector.expand(rows, *vector.shape) for vector in vectors]
        targets = [target for target in _targets(drives, vectors, by_row) if target.role in self.kinds]
        if self.at_start:
            self.carried[layer] = tuple(_zeros(states, target) for target in targets)
        before = self.carried[layer]
        entering = _carried(states, before, [target.value for target in targets])
        read, last = _run_rows(layer, [_value(drive) for drive in drives], by_row, entering)
        if not self.at_start:
            self.carried[layer] = _after(before, targets, entering, last)
        return read, last


def start(
    model: Model, layers: Sequence[ChannelwiseLayer], batch_size: int, kinds: Kinds = EVERY_KIND
) -> tuple[Influence, ...]:
    """Return influences of zero on the states before the first step."""
    followed = FollowedModel(layers, kinds=kinds)
    with torch.no_grad(), followed.watching():
        for mixer in model.stack.mixers():
            weight = next(mixer.parameters())
            mixer(weight.new_zeros(batch_size, 1, mixer.dim), mixer.init_state(batch_size))
    return followed.influences()


def _value(drive: Drive | Tensor) -> Tensor:
    return drive.value if isinstance(drive, Drive) else drive


def _at(drive: Drive | Tensor, t: int) -> Drive | Tensor:
    """Return step t of a drive, as a block of one step."""
    if isinstance(drive, Drive):
        return drive._replace(value=drive.value[:, t : t + 1], source=drive.source[:, t : t + 1])
    return drive[:, t : t + 1]


def _targets(drives: Sequence[Drive | Tensor], vectors: Sequence[Tensor], by_row: Sequence[Tensor]) -> Iterator[Target]:
    for drive in drives:
        if isinstance(drive, Drive):
            if drive.weight is not None:
                yield Target("weight", drive.weight(), drive.value, drive.source)
            if drive.bias is not None and (bias := drive.bias()) is not None:
                yield Target("bias", bias, drive.value)
    for vector, entering in zip(vectors, by_row, strict=True):
        yield Target("vector", vector, entering)


def _zeros(states: Sequence[Tensor], target: Target) -> Tensor:
    return states[0].new_zeros(len(states[0]), len(states), *target.value.shape)


def _run_rows(
    layer: ChannelwiseLayer, values: Sequence[Tensor], vectors: Sequence[Tensor], states: Sequence[Tensor]
) -> tuple[Tensor, Sequence[Tensor]]:
    """Run `recur` with vectors (B, *K) that each row of the batch has for itself.

    Channels do not act on each other, so the channels of all rows stand side by side in one row.
    """
    rows, *channels = states[0].shape
    if rows == 1 or not vectors:
        return layer.recur(values, [vector[0] for vector in vectors], states, None)
    axes = len(channels)

    def joined(value: Tensor) -> Tensor:  # (B, T, *P, *K) to (1, T, *P, B * K0, ...)
        at = value.ndim - axes
        value = value.expand(*value.shape[:at], channels[0], *value.shape[at + 1 :])
        return value.movedim(0, at - 1).flatten(at - 1, at)[None]

    flat = [state.flatten(0, 1)[None] for state in states]
    read, last = layer.recur(list(map(joined, values)), [vector.flatten(0, 1) for vector in vectors], flat, None)
    return read[0].unflatten(1, (rows, -1)).movedim(1, 0), [each[0].unflatten(0, (rows, -1)) for each in last]


def _after(
    before: Influence, targets: Sequence[Target], entering: Sequence[Tensor], last: Sequence[Tensor]
) -> Influence:
    """Return the influences after a block: (∏ J) M_0, and the derivative of the last states within the block."""
    at = [target.entering for target in targets]
    probes = [each for each in (*entering, *at) if each.requires_grad]
    if not entering[0].requires_grad:
        return before
    holomorphic = all(each.is_complex() for each in at)
    states, after = len(last), []
    for number in last:
        by_probe = _derivatives(number, probes, holomorphic)
        jacobian = [by_probe[id(each)] for each in entering]
        inner = [None if not each.requires_grad else by_probe[id(each)] for each in at]
        row = []
        for influence, target, entry in zip(before, targets, inner, strict=True):
            axes = (1,) * (target.value.ndim - jacobian[0].ndim + 1)
            terms = [jacobian[k].reshape(-1, *axes, *jacobian[k].shape[1:]) * influence[:, k] for k in range(states)]
            row.append(reduce(add, terms if entry is None else [*terms, _within(target, entry)]))
        after.append(row)
    return tuple(torch.stack(parts, 1) if states > 1 else parts[0][:, None] for parts in zip(*after, strict=True))


def _derivatives(number: Tensor, probes: Sequence[Tensor], holomorphic: bool) -> dict[int, Tensor]:
    """Return the derivative of a state (B, *K) by each probe, by its id. Channels are apart, so a sum has them all."""

    def by(total: Tensor) -> Sequence[Tensor]:
        return torch.autograd.grad(total.sum(), probes, retain_graph=True, materialize_grads=True)

    if not number.is_complex():
        return {id(probe): _without_denormals(each) for probe, each in zip(probes, by(number), strict=True)}
    # torch's gradient of Re f by a complex z is conj(df/dz); of a real p, df/dp is that of Re f plus i that of Im f.
    real = by(number.real)
    imaginary = real if holomorphic else by(number.imag)
    return {
        id(probe): _without_denormals(re.conj().resolve_conj() if probe.is_complex() else torch.complex(re, im))
        for probe, re, im in zip(probes, real, imaginary, strict=True)
    }


def _without_denormals(x: Tensor) -> Tensor:
    """Return x with zeros for numbers so small that products with them are denormal: these take 200 times as long.

    Products of many decays are as small as that.
    """
    if x.is_complex():
        return torch.view_as_complex(_without_denormals(torch.view_as_real(x)))
    kind = torch.finfo(x.dtype)
    return F.hardshrink(x, kind.tiny / kind.eps)


def _within(target: Target, by_entry: Tensor) -> Tensor:
    """Return the derivative by a target from that by what enters at every step."""
    if target.role == "vector":
        return by_entry
    if target.role == "bias":
        return by_entry.sum(1)
    source = target.source
    assert source is not None
    rows = by_entry.flatten(2)
    parts = torch.view_as_real(rows).flatten(2) if rows.is_complex() else rows
    source = source.detach().to(parts.dtype)
    if source.ndim == 3:
        sums = source.mT @ parts
    else:  # a group of channels reads inputs of its own
        sums = torch.einsum("bthd,bthr->bdhr", source, parts.unflatten(2, (source.shape[2], -1))).flatten(2)
    if rows.is_complex():
        sums = torch.view_as_complex(sums.unflatten(-1, (-1, 2)))
    return sums.reshape(len(sums), *target.value.shape)


def _carried(states: Sequence[Tensor], influence: Influence, targets: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the states as functions of the targets: s_0 + M_0 (θ - θ now)."""
    return _CarriedInfluence.apply(len(states), *states, *influence, *targets)


class _CarriedInfluence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        states, rest = tensors[:count], tensors[count:]
        half = len(rest) // 2
        ctx.count, ctx.influence, ctx.real = count, rest[:half], [not each.is_complex() for each in rest[half:]]
        return tuple(state.clone() for state in states)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *cotangents: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        wanted = ctx.needs_input_grad[1 + ctx.count + len(ctx.influence) :]
        gradients = [
            _gradient(influence, cotangents, real) if each else None
            for influence, real, each in zip(ctx.influence, ctx.real, wanted, strict=True)
        ]
        return None, *[None] * (ctx.count + len(ctx.influence)), *gradients


def _gradient(influence: Tensor, cotangents: Sequence[Tensor], real: bool) -> Tensor:
    """Return Σ over rows and numbers of δ conj(M)."""
    axes = (1,) * (influence.ndim - 1 - cotangents[0].ndim)
    terms = []
    for k, delta in enumerate(cotangents):
        delta = _without_denormals(delta).reshape(len(delta), *axes, *delta.shape[1:])
        terms.append((delta * influence[:, k].conj()).sum(0))
    total = reduce(add, terms)
    return total.real if real and total.is_complex() else total
