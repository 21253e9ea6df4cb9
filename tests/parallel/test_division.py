"""Ops over a sequence that ranks divide: the results and all gradients are those of the whole sequence."""

import itertools
from functools import partial

import pytest
import torch

import laws
import scanl.layers
from scanl import ops
from scanl.errors import ConfigError
from scanl.layers.state import leaves
from scanl.ops._frame.context import divided_by
from scanl.ops.registry import Cell
from scanl.parallel import division, stretch_offsets
from threads_as_ranks import on_ranks

COVERS = ["parallel/exchanges", "parallel/halo"]

scanl.layers.names()  # imports all layers, which registers their cells
OPS = [op for op in ops.registry.every() if isinstance(op, ops.registry.Op)]
LENGTHS = {2: (1,), 3: (2, 0), 5: (1, 1, 1, 1)}  # the first stretches of so many ranks; the last has the rest


def of_numbers(leaf):
    return leaf.is_floating_point() or leaf.is_complex()


def learned(tree):
    """Copies of the tensors of a state or an operand that need gradients."""
    return laws.pytree.tree_map(
        lambda leaf: leaf.clone().requires_grad_() if torch.is_tensor(leaf) and of_numbers(leaf) else leaf, tree
    )


def total(y, last, draws):
    """A number that depends on all outputs and, where it is given, on the last state."""
    numbers = itertools.chain([y], (leaf for _, leaf in leaves(last) if of_numbers(leaf)))
    return sum((number * draw.conj()).sum().real for number, draw in zip(numbers, draws, strict=False))


def gradients(operands):
    return {name: [leaf.grad for _, leaf in leaves(value)] for name, value in operands.items()}


# What is done in turn is alike for any number of ranks.
CASES = [(op, size, reverse) for op in OPS for size in LENGTHS for reverse in (False, True) if op.effect or size == 3]


@pytest.mark.parametrize(("op", "size", "reverse"), CASES, ids=lambda value: getattr(value, "name", str(value)))
def test_stretches_equal_the_whole(op, size, reverse):
    samples = [sample for sample in op.samples if not (reverse and "cu_seqlens" in sample.options)]
    for sample in laws.some(samples, 6 if op.effect else 3):
        operands = laws.at(op, sample, torch.float64, "reference")
        steps = operands[op.names[0]].shape[1]
        ends = [min(end, steps) for end in itertools.accumulate(LENGTHS[size])]
        lengths = [end - start for start, end in itertools.pairwise([0, *ends, steps])]
        with ops.backend("reference" if isinstance(op, Cell) else "auto"):  # kernels take seconds to compile
            divided(op, operands, dict(sample.options), lengths, reverse)


@pytest.mark.parametrize("op", [op for op in OPS if op.effect], ids=lambda op: op.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex128])
def test_stretches_in_other_dtypes(op, dtype):
    if dtype.is_complex and dtype not in op.dtypes:
        pytest.skip(f"{op.name} takes no {dtype}")
    for sample in laws.some([sample for sample in op.samples if "cu_seqlens" not in sample.options], 2):
        operands, options = laws.at(op, sample, dtype, "reference"), dict(sample.options)
        steps = operands[op.names[0]].shape[1]
        lengths = [2, 1, steps - 3]
        if dtype.is_complex:
            divided(op, operands, options, lengths, False)
            continue
        starts = [0, *itertools.accumulate(lengths)]

        def work(ranks, operands=operands, options=options, starts=starts):
            own = {**operands, **laws.timed(op, operands, *starts[ranks.rank : ranks.rank + 2])}
            own[op.state] = None if ranks.rank else own[op.state]
            with divided_by(partial(division.run, ranks, torch.zeros(()))):
                return op(**own, **options)

        results, (y, last) = on_ranks(3, work), op(**operands, **options)
        rounding = laws.own_rounding(op, operands, options)
        exact, exact_last = op(**laws.wide(operands), **options)
        assert (results[0][0].dtype, results[-1][1].dtype) == (y.dtype, last.dtype)
        laws.close(torch.cat([part for part, _ in results], 1), exact, rounding, op.name)
        laws.close(results[-1][1], exact_last, rounding, f"{op.name} last state")


def test_packed_sequences_in_reverse_are_refused():
    def work(ranks):
        with divided_by(partial(division.run, ranks, torch.zeros(()))):
            ops.linear_scan(torch.zeros(1, 3, 2), torch.zeros(2), reverse=True, cu_seqlens=torch.tensor([0, 3]))

    with pytest.raises(ConfigError, match="linear_scan: reverse and cu_seqlens are both given, expected one of them"):
        on_ranks(2, work)


def rows_of(cu_seqlens, lengths):
    """The sequences whose rows each rank has, in their order."""
    starts, begins = [0, *itertools.accumulate(lengths)], cu_seqlens.tolist()[:-1]
    rows = []
    for start, end in itertools.pairwise(starts):
        here = [n for n, at in enumerate(begins) if start <= at and (at < end or end == starts[-1])]
        rows.append(here if start == 0 else [sum(at < start for at in begins) - 1, *here])
    return rows


def divided(op, operands, options, lengths, reverse):
    cu_seqlens, size = options.pop("cu_seqlens", None), len(lengths)
    whole = learned(operands)
    y, last = op(**whole, **options, cu_seqlens=cu_seqlens, reverse=reverse)
    draws = [torch.randn_like(y)]
    if op.form is None:  # a state of several tensors may say the same with other numbers
        draws += [torch.randn_like(leaf) for _, leaf in leaves(last) if of_numbers(leaf)]
    total(y, last, draws).backward()
    starts = [0, *itertools.accumulate(lengths)]
    rows = [None] * size if cu_seqlens is None else rows_of(cu_seqlens, lengths)

    def last_draws(rank):
        """The part of the draws for the states that are the last of a sequence on this rank."""
        if cu_seqlens is None:
            return draws[1:] if rank == (0 if reverse else size - 1) else []
        ended = [n not in {m for later in rows[rank + 1 :] for m in later} for n in rows[rank]]
        return [draw[rows[rank]] * torch.tensor(ended).view(-1, *[1] * (draw.ndim - 1)) for draw in draws[1:]]

    def work(ranks):
        rank, (start, end) = ranks.rank, starts[ranks.rank : ranks.rank + 2]
        own = learned({**operands, **laws.timed(op, operands, start, end)})
        if cu_seqlens is not None and own[op.state] is not None:
            own[op.state] = learned(laws.rows(operands[op.state], rows[rank]))
        elif rank != (size - 1 if reverse else 0):
            own[op.state] = None
        offsets = None if cu_seqlens is None else stretch_offsets(cu_seqlens, start, end)
        with divided_by(partial(division.run, ranks, torch.zeros((), requires_grad=True))):
            part, after = op(**own, **options, cu_seqlens=offsets, reverse=reverse)
        total(part, after, [draws[0][:, start:end], *last_draws(rank)]).backward()
        return part.detach(), after, gradients(own)

    results = on_ranks(size, work)
    rounding = laws.own_rounding(op, operands, {**options, "reverse": reverse, "cu_seqlens": cu_seqlens})
    laws.close(torch.cat([part for part, *_ in results], 1), y.detach(), rounding, op.name)
    for n in range(1 if cu_seqlens is None else len(cu_seqlens) - 1):
        rank = (0 if reverse else -1) if cu_seqlens is None else max(r for r in range(size) if n in rows[r])
        row = slice(None) if cu_seqlens is None else slice(at := rows[rank].index(n), at + 1)
        of = slice(None) if cu_seqlens is None else slice(n, n + 1)
        cut, more = operands, {**options, "reverse": reverse}
        if cu_seqlens is not None:
            cut = {**operands, **laws.timed(op, operands, int(cu_seqlens[n]), int(cu_seqlens[n + 1]))}
        both = (laws.rows(results[rank][1], row), laws.rows(last, of))
        with torch.no_grad():
            found, expected = (laws.seen(op, state, cut, more, "auto") for state in both)
        laws.close(found, expected, rounding, f"{op.name} last state")
    timed = laws.timed(op, operands, 0, 0)
    for name, expected in gradients(whole).items():
        for at, whole_gradient in enumerate(expected):
            if whole_gradient is None:
                continue
            parts = [
                (r, g[name][at]) for r, (*_, g) in enumerate(results) if len(g[name]) > at and g[name][at] is not None
            ]
            axis = None
            if name in timed:
                axis = laws.declared(op, name).time_axis(operands[name], operands[op.names[0]].ndim)
            if axis is not None:
                found = torch.cat([part for _, part in parts], axis)
            elif name == op.state and cu_seqlens is not None:
                found = torch.zeros_like(whole_gradient)
                for rank, part in parts:
                    found.index_add_(0, torch.tensor(rows[rank]), part)
            else:
                found = sum(part for _, part in parts)
            torch.testing.assert_close(found, whole_gradient, rtol=1e-10, atol=1e-10)
