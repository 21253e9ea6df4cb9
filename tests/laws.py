"""Laws of ops: each function tests one property of any op and backend. test_ops.py runs them on all registered ops."""

import contextlib
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from scanl import ops
from scanl.ops import registry
from scanl.ops.registry import HALF_DTYPES, Cell, Op, Operand, OpSample

# Ops with declared operands. Of the cells those of scanl.ops: test_cell_laws.py has those in the files of layers.
OPS = [
    op for op in registry.every() if isinstance(op, Op) and not (isinstance(op, Cell) and op.name not in ops.__all__)
]

GENERATED = ("indrnn", "slstm")


def backends(op: Op) -> list[str]:
    """Return the backends of an op that the laws test.

    The Triton kernels of all cells come from one generator, and an interpreter is slow. Without a device one cell of
    each kind stands for all: channels alone, and matrices of heads. `cells/test_triton_kernels.py` has others.
    """
    alike = isinstance(op, Cell) and op.name not in GENERATED and not torch.cuda.is_available() and not ALL
    return [backend for backend in op.preference() if backend != "triton" or not alike]


def of_the_frame(op: Op, backend: str) -> bool:
    """Return whether a law of what the frame does around kernels runs over this backend of an op.

    The frame registers every compiled backend in the same way. Where Triton is emulated, two ops stand for all of its
    kernels; on a CPU two cells stand for all cells.
    """
    if ALL:
        return True
    if backend == "triton" and not torch.cuda.is_available():
        return op.name in ("linear_scan", "linear_attention")
    return not isinstance(op, Cell) or op.name in ("lstm", "indrnn")


def close(actual: Tensor, exact: Tensor, rounding: float, what: str, dtype: torch.dtype | None = None) -> None:
    """Assert that the error is at most 2 (rounding + 1) eps times the largest value.

    rounding: the reference's own error in units of the dtype's eps, see `own_rounding`.   dtype: the dtype of
    intermediate values, if it is coarser than that of the result.
    """
    assert actual.shape == exact.shape, f"{what}: shape {tuple(actual.shape)}, expected {tuple(exact.shape)}"
    if actual.numel() == 0:
        return
    infinite = exact.isinf()
    assert (actual[infinite] == exact[infinite]).all(), f"{what}: finite where {exact[infinite][:3]} is expected"
    error = (actual.to(exact.dtype) - exact).abs().masked_fill(infinite, 0).max()
    eps = max(torch.finfo(kind).eps for kind in (actual.dtype, dtype or actual.dtype))
    bound = 2 * (rounding + 1) * eps * exact.abs().masked_fill(infinite, 0).max()
    assert error <= bound, f"{what}: error {error:.3g}, at most {bound:.3g} allowed"


def leaves(operands: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return all tensors of the operands by name; for a structured state, by their path in it."""
    found = {}
    for name, value in operands.items():
        for path, leaf in pytree.tree_flatten_with_path(value)[0]:
            found[name + pytree.keystr(path)] = leaf
    return found


def rebuilt(operands: Mapping[str, Any], values: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the operands with their tensors replaced by `values`."""
    names = iter(leaves(operands))
    return {name: pytree.tree_map(lambda _: values[next(names)], value) for name, value in operands.items()}


def mapped(change: Any, operands: Mapping[str, Any]) -> dict[str, Any]:
    """Apply `change` to all real and complex tensors of the operands. Integer tensors, such as positions, stay."""
    return pytree.tree_map(lambda v: change(v) if v.is_floating_point() or v.is_complex() else v, dict(operands))


def rows(value: Any, which: Any) -> Any:
    """Select rows of a tensor or of a state."""
    return pytree.tree_map(lambda leaf: leaf[which], value)


def differentiable(operands: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same numbers as tensors that require a gradient."""
    return mapped(lambda v: v.detach().clone().requires_grad_(), operands)


def wanted(operands: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors that require a gradient."""
    return {name: leaf for name, leaf in leaves(operands).items() if leaf.requires_grad}


def seen(op: Op, last: Any, operands: Mapping[str, Any], more: Mapping[str, Any], backend: str) -> Tensor:
    """Return a last state in a form that can be compared.

    A plain tensor is returned itself. For a structured state, return the outputs of the same steps run from it, because
    two different structured states can be equivalent.
    """
    if op.form is None and isinstance(last, Tensor):
        return last
    again = {name: value for name, value in operands.items() if name != op.state}
    return op(**again, **more, **{op.state: last}, backend=backend)[0]


def called(op: Op, operands: Mapping[str, Any], more: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """Return the outputs and the last state (see `seen`); only the outputs if tracing cannot start from a state."""
    y, last = op(**operands, **more)
    if "tracing from a state" in op.excused:
        return (y,)
    options = {name: value for name, value in more.items() if name != "backend"}
    return y, seen(op, last, operands, options, more.get("backend", "auto"))


def unstructured(op: Op, sample: OpSample) -> OpSample:
    """Return the sample; without its initial state if the op's state is structured."""
    kept = {name: value for name, value in sample.operands.items() if name != op.state or op.form is None}
    return OpSample(kept, sample.options)


DRAWS = 4
ALL = os.environ.get("SCANL_TEST_ALL") == "1"


def some(samples: Sequence[OpSample], count: int) -> Sequence[OpSample]:
    """Select `count` samples at even distances from the first to the last; all of them with `--all`."""
    if ALL or len(samples) <= count:
        return samples
    return [samples[round(i * (len(samples) - 1) / max(count - 1, 1))] for i in range(count)]


def kinds(cell: Cell) -> list[dict[bool, OpSample]]:
    """Return samples for every set of options and operands, which has kernels of its own: one packed, one not."""
    found: dict[Any, dict[bool, OpSample]] = {}
    for sample in cell.samples:
        options = {name: value for name, value in sample.options.items() if name in cell.options}
        packed = "cu_seqlens" in sample.options
        found.setdefault((*sorted(options.items()), *sorted(sample.operands)), {})[packed] = sample
    return list(found.values())


def skip_if_long_to_compile(op: Op, backend: str, dtype: torch.dtype) -> None:
    """Skip complex64 where kernels take half a minute to compile for it, as long again as for complex128."""
    if (op.name, backend, dtype) == ("selective_scan", "cpu", torch.complex64) and not ALL:
        pytest.skip("these kernels are compiled for complex128; for complex64 too with --all")


_roundings: dict[Any, float] = {}
_by_the_loop: dict[Any, tuple[dict[str, Tensor], dict[str, Tensor]]] = {}
_references: dict[Any, dict[str, Tensor]] = {}


def own_rounding(op: Op, operands: Mapping[str, Tensor], options: Mapping[str, Any]) -> float:
    """Return the reference's largest error against float64, over outputs and gradients, in units of eps.

    For float64 the error of float32 is used, which is about the same in these units. A single evaluation can round to
    an unusually small error, differently on each CPU. So this is the maximum over a few evaluations, whose operands
    differ by about 0.1 %.
    """
    same_kind = {torch.float64: torch.float32, torch.complex128: torch.complex64}
    operands = pytree.tree_map(lambda v: v.detach().to("cpu", same_kind.get(v.dtype, v.dtype)), dict(operands))
    options = {k: v.cpu() if isinstance(v, Tensor) else v for k, v in options.items()}
    key = numbers(op, operands, options)
    if key not in _roundings:
        generator, errors = torch.Generator().manual_seed(0), [worst(*by_the_loop(op, operands, options))]
        for _ in range(DRAWS - 1):
            operands = mapped(lambda v: moved(v, 2.0**-10, generator), operands)
            exact = evaluate(op, wide(operands), options, "reference")
            errors.append(worst(evaluate(op, operands, options, "reference"), exact))
        _roundings[key] = max(errors)
    return _roundings[key]


def by_the_loop(
    op: Op, operands: Mapping[str, Any], options: Mapping[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the reference's results in the operands' dtype and in float64. Kept, because all backends ask for them."""
    devices = {leaf.device for leaf in leaves(operands).values()}
    key = op, *sorted(map(str, devices)), *numbers(op, operands, options)
    if key not in _by_the_loop:
        given = wide(operands)
        exact = evaluate(op, given, options, "reference")
        dtypes = [[leaf.dtype for leaf in leaves(each).values()] for each in (given, operands)]
        is_wide = dtypes[0] == dtypes[1]
        _by_the_loop[key] = exact if is_wide else evaluate(op, operands, options, "reference"), exact
    return _by_the_loop[key]


def numbers(op: Op, operands: Mapping[str, Any], options: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return a key of the operands' values and the options, for what is computed once for all backends."""

    def of(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return str(value.dtype), value.shape, value.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()

    return op.name, *((name, of(value)) for name, value in (*leaves(operands).items(), *options.items()))


def moved(value: Tensor, by: float, generator: torch.Generator) -> Tensor:
    """Change every number at random by a relative amount of at most `by`."""
    dtype = value.real.dtype if value.is_complex() else value.dtype
    uniform = torch.rand(value.shape, generator=generator, dtype=dtype, device="cpu").to(value.device)
    return (value * (1 + by * (2 * uniform - 1))).to(value.dtype)


def refusal(op: Op, sample: OpSample, backend: str) -> Sequence[str]:
    """Return the reasons that a backend declares for not accepting the shapes and options of a sample."""
    operands = {name: sample.operands.get(name) for name in op.names}
    sizes = op.sizes(operands, sample.options.get("cu_seqlens"))
    options = {name: sample.options.get(name, option.default) for name, option in op.options.items()}
    return op.backends[backend].needs(**sizes, **options, given=frozenset(sample.operands))


def coarsest(op: Op, backend: str, dtype: torch.dtype) -> torch.dtype | None:
    """Return the dtype to which a backend rounds the factors of its products; None if it is that of the results."""
    return dtype if dtype in HALF_DTYPES and op.backends[backend].half_products else None


def worst(own: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> float:
    """Return the largest error of all results, relative to each result's largest value, in units of its dtype's eps."""
    errors = [0.0]
    for name, value in exact.items():
        if value.numel():
            infinite = value.isinf()
            error = (own[name] - value).abs().masked_fill(infinite, 0).max()
            largest = value.abs().masked_fill(infinite, 0).max().clamp(min=1e-30)
            errors.append((error / largest).item() / torch.finfo(own[name].dtype).eps)
    return max(errors)


def attainable(
    op: Op, operands: Mapping[str, Tensor], options: Mapping[str, Any], exact: Mapping[str, Tensor]
) -> dict[str, float]:
    """Return the error that rounding each input number once may cause in each of the reference's results `exact`.

    The sensitivity is measured on the reference: the change of its results when its operands change by a millionth.
    Where terms cancel, it is larger than the size of the result suggests.
    """
    change, generator, largest = 2.0**-20, torch.Generator().manual_seed(0), {}
    for name, value in exact.items():
        finite = value[~value.isinf()].abs()
        largest[name] = finite.max().item() if finite.numel() else 0.0
    for _ in range(2):
        changed = mapped(lambda v: moved(v, change, generator), operands)
        for name, value in evaluate(op, changed, options, "reference").items():
            apart = (value - exact[name])[~exact[name].isinf()].abs()
            largest[name] += apart.max().item() / change if apart.numel() else 0.0
    entering = sum(value.numel() for value in leaves(operands).values())
    return {name: entering * torch.finfo(exact[name].dtype).eps * size for name, size in largest.items()}


@contextlib.contextmanager
def compiling_nothing() -> Iterator[None]:
    """Assert that Triton compiles no kernel inside this context."""
    import triton

    compiled = []
    triton.knobs.runtime.jit_post_compile_hook = lambda **found: compiled.append(found)
    try:
        yield
    finally:
        triton.knobs.runtime.jit_post_compile_hook = None
    assert not compiled


def place(backend: str) -> str:
    """Return the device on which a backend is tested."""
    return "cuda" if backend == "triton" and torch.cuda.is_available() else "cpu"


def at(op: Op, sample: OpSample, dtype: torch.dtype, backend: str) -> dict[str, Tensor]:
    """Return the operands in a dtype. For a complex dtype elements get different phases; log decays keep their size.

    A backend that declares faults of the dtype on this device is not tested, as it refuses the call.
    """
    if backend in op.backends and (faults := op.backends[backend].faults(torch.device(place(backend)), dtype)):
        pytest.skip(f"{op.name}: {'; '.join(faults)}")
    operands = {}
    for name, value in sample.operands.items():

        def made(value: Tensor, real: bool = name in op.real) -> Tensor:
            if dtype.is_complex and not real:
                phase = torch.linspace(0, 3, value.numel(), dtype=torch.float64, device=value.device).view(value.shape)
                value = torch.complex(value, phase) if (value <= 0).all() else torch.polar(value.abs(), phase)
            return value.to(dtype.to_real() if real else dtype)

        operands |= mapped(made, {name: value})
    return pytree.tree_map(lambda v: v.to(place(backend)), operands)


def options(sample: OpSample, backend: str) -> dict[str, Any]:
    return {k: v.to(place(backend)) if isinstance(v, Tensor) else v for k, v in sample.options.items()}


def wide(operands: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return mapped(lambda v: v.to(torch.complex128 if v.is_complex() else torch.float64), operands)


def _cotangent(value: Tensor) -> Tensor:
    """Return a fixed cotangent for every element. For complex values each has its own phase, so both parts count."""
    at = torch.linspace(-1, 1, value.numel(), dtype=torch.float64, device=value.device).view(value.shape)
    return (torch.complex(at.cos(), at.sin()) if value.is_complex() else at.cos()).to(value.dtype)


def evaluate(op: Op, operands: Mapping[str, Tensor], options: Mapping[str, Any], backend: str) -> dict[str, Tensor]:
    """Return the output, the last state, and the gradient of every operand for fixed cotangents."""
    given = differentiable(operands)
    y, last = op(**given, **options, backend=backend)
    last = seen(op, last, given, options, backend)
    inputs = wanted(given)
    grads = torch.autograd.grad((y, last), list(inputs.values()), [_cotangent(v) for v in (y, last)])
    return {"y": y, "last": last} | {f"d{name}": grad for name, grad in zip(inputs, grads, strict=True)}


def truth(
    op: Op,
    sample: OpSample,
    more: Mapping[str, Any],
    backend: str,
    dtype: torch.dtype,
    wider: Mapping[str, torch.dtype] | None = None,
) -> None:
    """A backend equals the reference in values and gradients. wider: dtypes of operands that differ from `dtype`."""
    more = {**options(sample, backend), **more}
    operands = at(op, sample, dtype, backend)
    operands |= {name: operands[name].to(kind) for name, kind in (wider or {}).items() if name in operands}
    rounding = own_rounding(op, operands, more)
    own, exact = by_the_loop(op, operands, more)
    actual = evaluate(op, operands, more, backend)
    for name in exact:
        assert actual[name].dtype == own[name].dtype, f"{op.name} {backend} {name} is {actual[name].dtype}"
        close(actual[name], exact[name], rounding, f"{op.name} {backend} {name}", coarsest(op, backend, dtype))


def timed(op: Op, operands: Mapping[str, Tensor], start: int, end: int) -> dict[str, Tensor]:
    """Return the operands of the steps from start to end, without the state."""
    first = operands[op.names[0]]
    cut = {}
    for operand in op.operands:
        if operand.name in operands and operand.name != op.state:
            value = operands[operand.name]
            axis = operand.time_axis(value, first.ndim)
            cut[operand.name] = value if axis is None else value.narrow(axis, start, end - start)
    return cut


def pieces(op: Op, sample: OpSample, reverse: bool, backend: str, lengths: Sequence[int], dtype: torch.dtype) -> None:
    """A sequence read in pieces with the state carried over equals the whole (splitting, duality, chunked prefill)."""
    operands = at(op, sample, dtype, backend)
    steps = operands[op.names[0]].shape[1]
    assert sum(lengths) == steps
    more = {**sample.options, "reverse": reverse}
    rounding = own_rounding(op, operands, more)
    exact, exact_last = op(**wide(operands), **more, backend="reference")
    bounds = list(itertools.pairwise([0, *itertools.accumulate(lengths)]))
    state, parts = operands[op.state], {}
    for start, end in reversed(bounds) if reverse else bounds:
        cut = timed(op, operands, start, end)
        parts[start, end], state = op(**cut, **more, **{op.state: state}, backend=backend)
    whole = torch.cat([parts[bound] for bound in bounds], 1)
    close(whole, exact, rounding, f"{op.name} {backend} in pieces {list(lengths)}")
    exact_last = seen(op, exact_last, wide(operands), more, "reference")
    close(seen(op, state, operands, more, backend), exact_last, rounding, f"{op.name} {backend} last state")


def causal(op: Op, sample: OpSample, reverse: bool, backend: str) -> None:
    """A change of the input at a step changes no earlier output."""
    operands, first = at(op, sample, torch.float64, backend), op.names[0]
    axes = {
        name: declared(op, name).time_axis(operands[name], operands[first].ndim) for name in timed(op, operands, 0, 0)
    }
    more = {**sample.options, "reverse": reverse}
    y, _ = op(**operands, **more, backend=backend)
    for t in range(y.shape[1]):
        changed = dict(operands)
        for name, axis in axes.items():
            if axis is not None:
                changed[name] = operands[name].clone()
                changed[name].select(axis, t).add_(1)
        z, _ = op(**changed, **more, backend=backend)
        untouched = slice(t + 1, None) if reverse else slice(None, t)
        if "causality to the bit" in {**op.excused, **op.backends[backend].excused}:
            close(z[:, untouched], y[:, untouched], own_rounding(op, operands, more), f"{op.name} {backend} before {t}")
        else:
            torch.testing.assert_close(z[:, untouched], y[:, untouched], rtol=0, atol=0)
        assert not torch.equal(z[:, t], y[:, t])


def packing(op: Op, sample: OpSample, reverse: bool, backend: str) -> None:
    """Each packed sequence equals the same sequence alone. An empty sequence keeps its state."""
    operands = at(op, sample, torch.float64, backend)
    bounds = sample.options["cu_seqlens"].tolist()
    rounding = own_rounding(op, operands, {**options(sample, backend), "reverse": reverse})
    y, last = op(**operands, **options(sample, backend), reverse=reverse, backend=backend)
    for n, (start, end) in enumerate(itertools.pairwise(bounds)):
        cut, state = timed(op, operands, start, end), {op.state: rows(operands[op.state], slice(n, n + 1))}
        more = {k: v for k, v in sample.options.items() if k != "cu_seqlens"} | {"reverse": reverse}
        alone, end_state = op(**cut, **more, **state, backend=backend)
        close(y[:, start:end], alone, rounding, f"{op.name} {backend} packed sequence {n}")
        both = (rows(last, slice(n, n + 1)), end_state)
        close(*(seen(op, one, cut, more, backend) for one in both), rounding, f"{op.name} {backend} packed state {n}")


def starting(op: Op, sample: OpSample, reverse: bool, backend: str) -> None:
    """Rows, or packed sequences, that `starts` cuts equal their pieces, each alone: in values, states and gradients."""
    operands, more = at(op, sample, torch.float64, backend), options(sample, backend) | {"reverse": reverse}
    first = operands[op.names[0]]
    count, steps = (torch.arange(size, device=first.device) for size in first.shape[:2])
    starts = (count[:, None] + steps) % 3 == 1  # the state enters row 0, and not row 1
    pick = more.pop("cu_seqlens", None)
    packed = {} if pick is None else {"cu_seqlens": pick}
    bounds = list(itertools.pairwise([0, first.shape[1]] if pick is None else pick.tolist()))

    def whole(given: Mapping[str, Any]) -> tuple[Tensor, Any]:
        return op(**given, **more, **packed, starts=starts, backend=backend)

    def in_pieces(given: Mapping[str, Any]) -> tuple[Tensor, Any]:
        ys, lasts = [], []
        for row in range(len(starts)):
            alone = {k: rows(v, slice(row, row + 1)) if batched(op, operands, k) else v for k, v in given.items()}
            parts = []
            for n, (low, high) in enumerate(bounds):
                inner = [t + reverse for t in range(low, high) if starts[row, t] and low < t + reverse < high]
                order = list(itertools.pairwise([low, *inner, high]))[:: -1 if reverse else 1]
                begins = low < high and bool(starts[row, high - 1 if reverse else low])
                row_of_state = n if packed else row
                state = None if begins else rows(given[op.state], slice(row_of_state, row_of_state + 1))
                done = {}
                for start, end in order:
                    y, state = op(**timed(op, alone, start, end), **more, **{op.state: state}, backend=backend)
                    done[start], last, state = y, state, None
                parts += [done[start] for start in sorted(done)]
                lasts.append(last)
            ys.append(torch.cat(parts, 1))
        return torch.cat(ys), pytree.tree_map(lambda *leaves: torch.cat(leaves), *lasts)

    found = []
    for run in (whole, in_pieces):
        given = differentiable(operands)
        y, last = run(given)
        last = seen(op, last, given, more | packed, backend)
        grads = torch.autograd.grad(
            (y, last), list(wanted(given).values()), [_cotangent(v) for v in (y, last)], materialize_grads=True
        )
        found.append({"y": y, "last": last} | {f"d{k}": grad for k, grad in zip(wanted(given), grads, strict=True)})
    rounding = own_rounding(op, operands, {**more, **packed})
    for name, value in found[1].items():
        close(found[0][name], value, rounding, f"{op.name} {backend} starts {name}")


def declared(op: Op, name: str) -> Operand:
    return op.operands[op.names.index(name)]


def batched(op: Op, operands: Mapping[str, Tensor], name: str) -> bool:
    """Whether the operand has a separate entry for each row of the batch."""
    operand, value, first = declared(op, name), operands[name], operands[op.names[0]]
    if operand.tree:
        return True
    if operand.broadcast:
        return value.ndim == first.ndim and value.shape[0] == first.shape[0]
    fits = [axes for axes in operand.choices if len(axes) == value.ndim or any(axis[0] == "*" for axis in axes)]
    return "B" in fits[0]


def per_step(op: Op, operands: Mapping[str, Tensor], name: str) -> Tensor:
    """Return the operand, expanded over the steps if it is constant over time."""
    value, operand, first = operands[name], declared(op, name), operands[op.names[0]]
    if operand.broadcast:
        return value.expand(first.shape)
    if operand.time_axis(value, first.ndim) is not None:
        return value
    return value.expand(*first.shape[:2], *value.shape)


def padding(op: Op, sample: OpSample, reverse: bool, backend: str) -> None:
    """In a batch padded with neutral steps, left or right, each row equals its sequence alone, with its last state."""
    operands = at(op, sample, torch.float64, backend)
    steps = operands[op.names[0]].shape[1]
    batch = operands[op.names[0]].shape[0]
    lengths = [max(1, steps - 2 * b - 1) for b in range(batch)]
    rounding = own_rounding(op, operands, {**sample.options, "reverse": reverse})
    for left in (False, True):
        spans = [(steps - n, steps) if left else (0, n) for n in lengths]
        padded = dict(operands)
        for name, neutral in op.neutral.items():
            if name in operands:
                padded[name] = full = per_step(op, operands, name).clone()
                for b, (start, end) in enumerate(spans):
                    full[b, :start] = full[b, end:] = neutral
        y, last = op(**padded, **sample.options, reverse=reverse, backend=backend)
        for b, (start, end) in enumerate(spans):
            alone = {k: v[b : b + 1] if batched(op, padded, k) else v for k, v in padded.items()}
            alone = {**timed(op, alone, start, end), "state": alone["state"]}
            z, state = op(**alone, **sample.options, reverse=reverse, backend=backend)
            close(y[b : b + 1, start:end], z, rounding, f"{op.name} {backend} padded row {b}")
            close(last[b : b + 1], state, rounding, f"{op.name} {backend} padded state {b}")


def beams(op: Op, sample: OpSample, backend: str) -> None:
    """The rows of a state can be reordered, repeated and selected in the middle of a sequence."""
    operands = at(op, sample, torch.float64, backend)
    steps, batch = operands[op.names[0]].shape[1], operands[op.names[0]].shape[0]
    half = steps // 2
    chosen = torch.tensor([batch - 1, 0, batch - 1], device=place(backend))
    entering = {op.state: operands[op.state]}
    _, state = op(**timed(op, operands, 0, half), **sample.options, **entering, backend=backend)
    rest = {}
    for name, value in timed(op, operands, half, steps).items():
        rest[name] = value[chosen] if batched(op, operands, name) else value
    y, last = op(**rest, **sample.options, **{op.state: rows(state, chosen)}, backend=backend)
    z, end = op(**operands, **sample.options, backend=backend)
    rounding = own_rounding(op, operands, sample.options)
    close(y, z[chosen][:, half:], rounding, f"{op.name} {backend} beams")
    both = (last, rows(end, chosen))
    close(*(seen(op, one, rest, sample.options, backend) for one in both), rounding, f"{op.name} {backend} beam states")


NOT_FINITE = (torch.nan, torch.inf, -torch.inf)
Place = tuple[str, int | None, float]  # an operand or a cotangent, a step of it, and the number to put there


def rows_of(op: Op, sample: OpSample, steps: int, count: int) -> dict[str, Tensor]:
    """Return the sample's operands in float32, repeated to `steps` steps and `count` rows."""
    sample = unstructured(op, sample)
    first, operands = sample.operands[op.names[0]], {}
    at = torch.arange(steps) % first.shape[1]
    for name, value in sample.operands.items():
        axis = None if name == op.state else declared(op, name).time_axis(value, first.ndim)
        if declared(op, name).broadcast and axis is not None:  # otherwise it would have no separate rows
            value = value.reshape((1,) * (first.ndim - value.ndim) + value.shape)
            value, axis = value.expand(len(first), *value.shape[1:]), 1
        own = batched(op, {**sample.operands, name: value}, name)
        value = value if axis is None else value.index_select(axis, at)
        value = value[torch.arange(count) % len(value)] if own else value
        operands[name] = value.to(torch.float32)
    return operands


def places(op: Op, operands: Mapping[str, Tensor], steps: Sequence[int]) -> list[Place | None]:
    """Return for each row the number that is not finite: in each operand and cotangent in turn, at each of `steps`.

    With a single step only NaN is used. None marks a row that is finite everywhere: the first, a middle one and the
    last. More of these make the number of rows a power of two, because an interpreter then handles more rows at once.
    """
    found: list[Place | None] = []
    for name in [*(name for name in operands if batched(op, operands, name)), "dy", "dlast"]:
        timed = name == "dy" or (name in operands and name != op.state and "T" in declared(op, name).choices[0])
        for step in steps if timed and (name == "dy" or operands[name].ndim > 1) else [None]:
            found.extend((name, step, number) for number in (NOT_FINITE if len(steps) > 1 else NOT_FINITE[:1]))
    half = len(found) // 2
    rows = [None, *found[:half], None, *found[half:], None]
    return rows + [None] * ((1 << (len(rows) - 1).bit_length()) - len(rows))


def spoil(value: Tensor, number: float) -> None:
    """Set the middle element of a tensor to `number`."""
    value.view(-1)[value.numel() // 2] = number


def by_rows(
    op: Op, operands: Mapping[str, Tensor], dy: Tensor, dlast: Tensor, more: Mapping[str, Any], *, packed: bool
) -> dict[str, Tensor]:
    """Return the output, the last state and the gradients, all (rows, ...), for a batch or for packed sequences."""
    count, steps = operands[op.names[0]].shape[:2]
    leaves = {name: value.clone().requires_grad_() for name, value in operands.items()}
    if packed:
        more = {**more, "cu_seqlens": torch.arange(count + 1, device=dy.device) * steps}
        timed = [name for name in operands if name != op.state and operands[name].shape[:2] == (count, steps)]
        given = {name: value.flatten(0, 1)[None] if name in timed else value for name, value in leaves.items()}
        y, last = op(**given, **more)
    else:
        given = leaves
        y, last = op(**given, **more)
    last = seen(op, last, given, {k: v for k, v in more.items() if k != "backend"}, more["backend"])
    if packed:
        y = y[0].unflatten(0, (count, steps))
        last = last if op.form is None else last[0].unflatten(0, (count, steps))
    grads = torch.autograd.grad((y, last), list(leaves.values()), (dy, dlast))
    return {"y": y, "last": last} | {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}


def stays(
    op: Op, sample: OpSample, reverse: bool, backend: str, steps: int, at: Sequence[int], *, packed: bool
) -> None:
    """A number that is not finite affects no earlier step, no other row and no other sequence, and it is not lost.

    Some rows of the batch (or packed sequences) have one number that is NaN, inf or -inf, in an operand or in the
    cotangent of the output or state. The other rows are finite. Then:

    - Outputs before that step equal those of finite operands, exactly.
    - A finite row equals its result in a finite batch, exactly, including its gradients.
    - Where an output or state of the reference is not finite, that of the backend is not finite either.
    - If all outputs and states of a row are finite in the reference (a log decay may be -inf), so they are in the
      backend.
    - If a row's gradient of an operand is not finite in the reference, neither is it in the backend.

    In the row itself, from that step on, a backend may have more numbers that are not finite than the reference.
    Nothing is required of the gradients of the row's other steps, because the products of a chunk are masked.
    """
    count = len(places(op, rows_of(op, sample, steps, 2), at))
    operands = rows_of(op, sample, steps, count)
    y, last = op(**operands, **sample.options, reverse=reverse, backend="reference")
    last = seen(op, last, operands, {**sample.options, "reverse": reverse}, "reference")
    finite = operands | {"dy": torch.ones_like(y), "dlast": torch.ones_like(last)}
    finite = {name: value.to(place(backend)) for name, value in finite.items()}
    spoilt = {name: value.clone() for name, value in finite.items()}
    for row, where in enumerate(places(op, operands, at)):
        if where is not None:
            name, step, number = where
            spoil(spoilt[name][row] if step is None else spoilt[name][row, step], number)

    def run(values: dict[str, Tensor], backend: str, packed: bool = packed) -> dict[str, Tensor]:
        given = {name: value for name, value in values.items() if name in operands}
        more = {**sample.options, "reverse": reverse, "backend": backend}
        return by_rows(op, given, values["dy"], values["dlast"], more, packed=packed)

    exact, actual = run(finite, backend), run(spoilt, backend)
    key = numbers(op, spoilt, {**sample.options, "reverse": reverse})
    if key not in _references:
        _references[key] = actual if backend == "reference" and not packed else run(spoilt, "reference", False)
    reference = _references[key]
    own = ["y", "last", *(f"d{name}" for name in operands if batched(op, operands, name))]
    for row, where in enumerate(places(op, operands, at)):
        what = f"{op.name} {backend} row {row} of {where}"
        for name in own:
            mine, clean, loop = actual[name][row], exact[name][row], reference[name][row].isfinite()
            if where is None or (where[0] in ("dy", "dlast") and name in ("y", "last")):
                assert torch.equal(mine, clean), f"{what}: {name} is not that of finite operands"
            elif name == "y" and where[1] is not None and "causality to the bit" not in op.excused:
                before = slice(where[1] + 1, None) if reverse else slice(0, where[1])
                assert torch.equal(mine[before], clean[before]), f"{what}: earlier outputs have changed"
            if name in ("y", "last"):
                assert not (mine.isfinite() & ~loop).any(), f"{what}: {name} is finite and should not be"
            else:
                assert loop.all() or not mine.isfinite().all(), f"{what}: {name} is finite and should not be"
        if all(reference[name][row].isfinite().all() for name in ("y", "last")):
            assert all(actual[name][row].isfinite().all() for name in ("y", "last")), f"{what}: more than the reference"


def is_not_lost(op: Op, sample: OpSample, backend: str, steps: int) -> None:
    """A number that is not finite, in an operand that all rows use, is not lost.

    Where the reference's output or state is not finite, that of the backend is not finite either.
    """
    operands = rows_of(op, sample, steps, 2)
    for name in [name for name in operands if not batched(op, operands, name)]:
        for number in NOT_FINITE:
            spoilt = {other: value.to(place(backend)).clone() for other, value in operands.items()}
            spoil(spoilt[name], number)
            actual = called(op, spoilt, {**sample.options, "backend": backend})
            reference = called(op, spoilt, {**sample.options, "backend": "reference"})
            for mine, loop in zip(actual, reference, strict=True):
                assert not (mine.isfinite() & ~loop.isfinite()).any(), f"{op.name} {backend} loses {number} of {name}"
