r"""One op over a sequence that is divided among processes: each has a stretch of time, and computes its own outputs.

For an op that is linear in its state, rank r computes the effect of its stretch, s_{r+1} = A_r s_r + b_r, the ranks
exchange these pairs, and each runs the op once more from the state that enters. The gradient goes the same way back,
:math:`\lambda_r = D_r + A_r^T \lambda_{r+1}`, where D_r is what the stretch itself says of s_r. Each way takes one
exchange with the neighbour and log_2(R - 1) further ones. For any other op the ranks work in turn: each waits for the
state of the one before.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree

from scanl.errors import ConfigError, ShapeError
from scanl.ops._frame.context import divided_by
from scanl.ops._frame.op import Op
from scanl.ops._frame.summary import Effect, Summary
from scanl.parallel import halo
from scanl.parallel.exchanges import gradient_after, state_before, tied
from scanl.parallel.ranks import Ranks

AXES = 8  # that a state may have
Call = Mapping[str, Any]  # options of an op, and the keywords that every op takes


def affine(op: Op[..., Any], operands: Mapping[str, Any]) -> bool:
    """Return whether the op is linear in its state with these operands."""
    return op.effect is not None and all(operands[name] is None for name in op.effect.unless)


def at_once(op: Op[..., Any], operands: Mapping[str, Any], call: Mapping[str, Any]) -> bool:
    """Return whether all ranks run a call of the op at once, and none waits for the work of another."""
    return halo.able(op, operands, call) or affine(op, operands)


def run(
    ranks: Ranks, anchor: Tensor, op: Op[..., Any], operands: Mapping[str, Any], options: Call, **call: Any
) -> tuple[Tensor, Any]:
    """Return the outputs of this rank's stretch, and the state after it.

    anchor: a number that requires a gradient if anything of any rank does, so that all take part in the backward pass.
    """
    cu_seqlens: Tensor | None = call["cu_seqlens"]
    if call["reverse"] and cu_seqlens is not None:
        raise ConfigError(
            f"{op.name}: reverse and cu_seqlens are both given, expected one of them where ranks divide the sequence"
        )
    ranks = ranks.reversed() if call["reverse"] else ranks
    with divided_by(None):
        others, packed = dict(operands), cu_seqlens is not None
        if others[op.state] is None:
            others[op.state] = op.empty(operands, options, cu_seqlens)
        state, more = others.pop(op.state), {**options, **call}
        if cu_seqlens is not None and len(cu_seqlens) < 2:
            raise ShapeError(
                f"{op.name}: cu_seqlens has no sequence on rank {ranks.rank}, expected at least one: the first stretch "
                "begins with a sequence, and each other with the one that goes on, which may be empty"
            )
        if halo.able(op, operands, call):
            return halo.attend(ranks, anchor, operands, options, **call)
        if affine(op, operands):
            return DividedOutputs.apply(op, ranks, tuple(others), more, anchor, state, *others.values())
        return in_turn(ranks, anchor, lambda s: Op._call(op, **others, **{op.state: s}, **more), state, packed)


class DividedOutputs(torch.autograd.Function):
    """The outputs of a stretch and the state after it. The ranks find the state that enters from their summaries.

    In the rows of `state`, a rank behind rank 0 fills in the first, or without cu_seqlens all of them.
    """

    @staticmethod
    def forward(
        ctx: Any, op: Op[..., Any], ranks: Ranks, names: Sequence[str], more: Call, anchor: Tensor, state: Tensor,
        *values: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        effect = op.effect
        assert effect is not None
        rows = 1 if more["cu_seqlens"] is not None else len(state)
        summary = op.summary(**dict(zip(names, values, strict=True)), **more)
        carry, last = _through(effect, summary, state, rows, ranks.rank)
        first, entering = state_before(effect, ranks, carry, last), state.to(last.dtype, copy=True)
        if first is not None:
            entering = torch.cat([first, entering[rows:]])
        ctx.effect, ctx.ranks, ctx.carry, ctx.rows, ctx.kind = effect, ranks, carry, rows, state.dtype
        needed = [v is not None and need for v, need in zip(values, ctx.needs_input_grad[6:], strict=True)]
        leaves = [v.detach() if v is not None else None for v in values]
        # The backward pass goes through this graph twice. Activation checkpointing would run the block again each time,
        # so its hooks get nothing of this graph.
        no_hooks = saved_tensors_hooks(_itself, _itself)
        with no_hooks, torch.set_grad_enabled(any(ctx.needs_input_grad)):
            learned = [entering.requires_grad_(torch.is_grad_enabled())]
            learned += [v.requires_grad_() for v, need in zip(leaves, needed, strict=True) if v is not None and need]
            y, last = Op._call(op, **dict(zip(names, leaves, strict=True)), **{op.state: entering}, **more)
            y, last = tied(y, entering), tied(last, entering)  # of no steps they may depend on nothing
        ctx.needed, ctx.inside = needed, (y, last, learned)
        return y.detach(), last.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor, d_last: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (y, last, leaves), ranks, rows, ctx.inside = ctx.inside, ctx.ranks, ctx.rows, None
        if ctx.effect.scaled:  # what a gradient becomes on its way depends on the states
            ranks = ranks.in_turn()
            later = ranks.exchange(None, -1, ranks.rank + 1, last[-rows:])
        else:
            (d_entering,) = torch.autograd.grad(
                (y, last), leaves[:1], (d_y, d_last), retain_graph=True, materialize_grads=True
            )
            later = gradient_after(ctx.effect, ranks, ctx.carry, d_entering[:rows])
        if later is not None:
            d_last = torch.cat([d_last[:-rows], d_last[-rows:] + later])
        d_state, *d_leaves = torch.autograd.grad(
            (y, last), leaves, (d_y, d_last), allow_unused=True, materialize_grads=True
        )
        if ctx.effect.scaled:
            ranks.exchange(d_state[:rows], ranks.rank - 1, -1, None)
        if ranks.rank > 0:  # these rows came from the rank before
            d_state = torch.cat([torch.zeros_like(d_state[:rows]), d_state[rows:]])
        further = iter(d_leaves)
        d_values = [next(further) if need else None for need in ctx.needed]
        return None, None, None, None, None, d_state.to(ctx.kind), *d_values


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _through(effect: Effect, summary: Summary, state: Tensor, rows: int, rank: int) -> tuple[Tensor, Tensor]:
    """Return the pair (A, b) from the rows that enter the stretch to those that leave it."""
    one = len(summary.last) == rows  # the sequences that enter are those that leave
    last = summary.last if one and rank > 0 else summary.after(state)
    carry = summary.carry if one else effect.forget(summary.carry, summary.last)
    return carry[-rows:], last[-rows:]


def in_turn(
    ranks: Ranks, anchor: Tensor, stretch: Callable[[Any], tuple[Tensor, Any]], state: Any, packed: bool
) -> tuple[Tensor, Any]:
    """Return what `stretch(state)` returns, where the state is that of the rank before."""
    ranks = ranks.in_turn()
    entering = received(ranks, anchor, state, packed)
    y, last = stretch(entering)
    return sent(ranks, tied(y, (entering, anchor)), last, packed), last


def received(ranks: Ranks, anchor: Tensor, state: Any, packed: bool) -> Any:
    """Return the state that enters: `state`, of which the first row, or without packing all, are of the rank before."""
    if ranks.rank == 0:
        return state
    leaves, form = pytree.tree_flatten(state)
    return pytree.tree_unflatten(list(ReceivedState.apply(ranks, packed, anchor, *leaves)), form)


def sent(ranks: Ranks, y: Tensor, state: Any, packed: bool) -> Tensor:
    """Send the state after the stretch to the next rank, and return y."""
    return y if ranks.rank == ranks.size - 1 else SentState.apply(ranks, packed, y, *pytree.tree_leaves(state))


class ReceivedState(torch.autograd.Function):
    """The state from the rank before; its gradient goes back there."""

    @staticmethod
    def forward(ctx: Any, ranks: Ranks, packed: bool, anchor: Tensor, *leaves: Tensor | None) -> tuple[Any, ...]:
        ctx.ranks, ctx.packed = ranks, packed
        entering: list[Tensor | None] = []
        for leaf in leaves:
            first = None if leaf is None else _received(ranks, leaf)
            entering.append(
                torch.cat([first, leaf[1:]]) if packed and first is not None and leaf is not None else first
            )
        ctx.mark_non_differentiable(*(e for e in entering if e is not None and not _differentiable(e)))
        return tuple(entering)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ranks, returned = ctx.ranks, []
        for gradient in gradients:
            if gradient is not None and _differentiable(gradient):
                ranks.exchange(gradient[:1] if ctx.packed else gradient, ranks.rank - 1, -1, None)
                returned.append(torch.cat([torch.zeros_like(gradient[:1]), gradient[1:]]) if ctx.packed else None)
            else:
                returned.append(None)
        return None, None, None, *returned


def _received(ranks: Ranks, like: Tensor) -> Tensor:
    """Return a tensor of the dtype of `like` from the rank before, which says its shape first."""
    header = ranks.exchange(None, -1, ranks.rank - 1, torch.empty(AXES, dtype=torch.int64, device=like.device))
    assert header is not None
    shape = [size for size in header.tolist() if size >= 0]
    leaf = ranks.exchange(None, -1, ranks.rank - 1, like.new_empty(shape))
    assert leaf is not None
    return leaf


class SentState(torch.autograd.Function):
    """y. The state goes to the rank after this one; its gradient comes back from there."""

    @staticmethod
    def forward(ctx: Any, ranks: Ranks, packed: bool, y: Tensor, *leaves: Tensor | None) -> Tensor:
        ctx.ranks, ctx.packed, sent = ranks, packed, []
        for leaf in leaves:
            if leaf is not None:
                rows = leaf[-1:] if packed else leaf
                header = torch.full((AXES,), -1, dtype=torch.int64, device=leaf.device)
                header[: rows.ndim] = torch.tensor(rows.shape)
                ranks.exchange(header, ranks.rank + 1, -1, None)
                ranks.exchange(rows, ranks.rank + 1, -1, None)
            sent.append(leaf if leaf is not None and _differentiable(leaf) else None)
        ctx.save_for_backward(*sent)
        return y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ranks, gradients = ctx.ranks, []
        for leaf in ctx.saved_tensors:
            if leaf is None:
                gradients.append(None)
                continue
            gradient = ranks.exchange(None, -1, ranks.rank + 1, leaf[-1:] if ctx.packed else leaf)
            assert gradient is not None
            if ctx.packed:
                gradient = torch.cat([torch.zeros_like(leaf[:-1]), gradient])
            gradients.append(gradient)
        return None, None, d_y, *gradients


def _differentiable(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
