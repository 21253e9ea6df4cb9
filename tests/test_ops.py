"""Every law over every op, backend, dtype and direction that is registered. A new op is tested by being registered."""

import doctest
import importlib
import multiprocessing
import os
import pkgutil
import re
import shutil
import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

import laws
import scanl.ops
from scanl.cli.ops import table
from scanl.errors import BackendError, ConfigError, ShapeError
from scanl.ops import registry
from scanl.ops.registry import ORDER, Cell, HigherOrder, Op, Operand, OpSample

COVERS = ["ops/delta_rule", "ops/dplr_scan", "ops/linear_attention", "ops/linear_scan", "ops/offsets", "ops/registry"]

pytestmark = pytest.mark.early(0)

REAL = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
COMPLEX = (torch.complex64, torch.complex128)


OPS = [*laws.OPS, *registry.instances()]
CASES = [pytest.param(op, backend, id=f"{op.name}-{backend}") for op in OPS for backend in laws.backends(op)]
FUSED = [case for case in CASES if case.values[1] in ("cpu", "triton")]
each = pytest.mark.parametrize(("op", "backend"), CASES)
IN_THE_FRAME = [case for case in CASES if laws.of_the_frame(*case.values)]
directions = pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
# What turns time is tested by the other laws.
forward = pytest.mark.parametrize(
    "reverse", [False, pytest.param(True, marks=pytest.mark.long)], ids=["forward", "reverse"]
)
# Kernels are made for every dtype, and turn time alike in all: float32 runs both ways, the other dtypes one way each.
ONE_WAY = {
    torch.float64: True, torch.bfloat16: False, torch.float16: True, torch.complex64: False, torch.complex128: True,
}  # fmt: skip


def _unless_excused(op: Op, backend: str, law: str) -> None:
    """Skip a law that an op or a backend declares not to hold, with the reason that it gives."""
    reason = {**op.excused, **op.backends[backend].excused}.get(law)
    if reason is not None:
        pytest.skip(f"{op.name} on {backend} is excused from {law}: {reason}")


def _takes(op: Op, backend: str, dtype: torch.dtype) -> bool:
    chosen = op.backends[backend]
    return chosen.compute_dtype(dtype) in chosen.dtypes


def _able(op: Op, backend: str) -> list[OpSample]:
    """The samples that a backend declares itself able to run; of the others it has to say why not, and refuse them."""
    able = []
    for sample in op.samples:
        reasons = laws.refusal(op, sample, backend)
        if reasons:
            with pytest.raises(BackendError, match=re.escape(reasons[0])):
                op(**laws.at(op, sample, torch.float32, backend), **laws.options(sample, backend), backend=backend)
        else:
            able.append(sample)
    assert len(able) > len(list(op.samples)) / 2
    return able


def _plain(op: Op, backend: str = "reference") -> list[OpSample]:
    return [sample for sample in _able(op, backend) if "cu_seqlens" not in sample.options]


def _few(samples: list[OpSample], backend: str, each: int) -> list[OpSample]:
    """Every so many of them where Triton's interpreter runs the kernels, thousands of times slower than a GPU."""
    return samples[::each] if backend == "triton" and not torch.cuda.is_available() else samples


def _one_way(samples: list[OpSample], op: Op, backend: str, reverse: bool) -> Sequence[OpSample]:
    """Two of the samples in reverse where the frame turns time, which does so for all backends alike; one if emulated.

    A backend that turns time itself, on a CPU or in parallel, runs them all both ways.
    """
    if not reverse or (op.backends[backend].whole and backend != "triton"):
        return samples
    return laws.some(samples, 1 if backend == "triton" and not torch.cuda.is_available() else 2)


def _packed(op: Op, backend: str = "reference") -> list[OpSample]:
    return [sample for sample in _able(op, backend) if "cu_seqlens" in sample.options]


BEYOND = [op for op in laws.OPS if {"cpu", "parallel"} & op.backends.keys() and op.samples and not isinstance(op, Cell)]


@pytest.mark.parametrize("op", BEYOND, ids=lambda op: op.name)
def test_truth_over_more_steps_than_two_blocks(op):
    """A chunk of any backend has at most 64 steps. A sum of 130 terms rounds at most 130 times."""
    sample, draw = next(iter(op.samples)), torch.Generator().manual_seed(0)
    operands = laws.mapped(lambda v: laws.moved(v.double(), 0.1, draw), laws.rows_of(op, sample, 130, 2))
    exact = laws.evaluate(op, operands, sample.options, "reference")
    for backend in {"cpu", "parallel"} & op.backends.keys():
        assert not laws.refusal(op, sample, backend)
        for name, value in laws.evaluate(op, operands, sample.options, backend).items():
            laws.close(value, exact[name], 130, f"{op.name} {backend} {name}")


@each
@directions
@pytest.mark.parametrize("dtype", REAL + COMPLEX, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_truth(op, backend, reverse, dtype):
    if dtype not in op.dtypes or not _takes(op, backend, dtype):
        pytest.skip(f"{op.name} on {backend} does not take {dtype}")
    if backend == "triton" and dtype == torch.bfloat16 and not torch.cuda.is_available():
        pytest.skip("triton's interpreter multiplies the bit patterns of bfloat16")
    if backend == "reference" and dtype not in (torch.float32, torch.bfloat16, torch.complex64):
        pytest.skip("it is what the others are compared with")
    if not laws.ALL and ONE_WAY.get(dtype, reverse) != reverse:
        pytest.skip("this dtype the other way runs with --all")
    laws.skip_if_long_to_compile(op, backend, dtype)
    samples = _able(op, backend)
    if dtype == torch.float64 and isinstance(op, Cell) and backend == "cpu" and not laws.ALL:
        samples = list(laws.kinds(op)[0].values())  # the same code makes the kernels of other options
    elif dtype != torch.float32:
        samples = laws.some(_few(samples, backend, 4), 4)
    elif reverse:
        samples = laws.some(samples, 3 if backend == "triton" else 6)
    for sample in samples:
        laws.truth(op, sample, {"reverse": reverse}, backend, dtype)


@each
def test_operands_in_float32_beside_half_precision(op, backend):
    """Decays and weights may stay in float32: they do not widen the rest, and keep their own dtype in the gradient."""
    interpreted = backend == "triton" and not torch.cuda.is_available()
    dtype = torch.float16 if interpreted else torch.bfloat16
    if not op.wide or dtype not in op.dtypes:
        pytest.skip(f"{op.name} has no such operands")
    for sample in _few(_able(op, backend), backend, 3):
        wider = dict.fromkeys(op.wide, torch.float32)
        laws.truth(op, sample, {}, backend, dtype, wider)
        operands = laws.at(op, sample, dtype, backend)
        given = [name for name in op.wide if name in operands]
        for kind, expected in ((torch.float32, dtype), (torch.float64, torch.float64)):
            some = {**operands, **{name: operands[name].to(kind) for name in given}}
            assert op.kinds(some)[2] is (expected if given else dtype)


@each
@forward
def test_splitting_duality_and_chunked_prefill(op, backend, reverse):
    interpreted = backend == "triton" and not torch.cuda.is_available()
    for sample in _one_way(_few(_plain(op, backend), backend, 4), op, backend, reverse):
        steps = sample.operands[op.names[0]].shape[1]
        # All cuts are alike for a loop. In reverse every other cut; the interpreter is slow: half of the cuts each way.
        stride = 3 if backend == "reference" else 1 + (interpreted or (reverse and not laws.ALL))
        for cut in range(interpreted and reverse, steps + 1, stride):
            laws.pieces(op, sample, reverse, backend, [cut, steps - cut], torch.float32)
        laws.pieces(op, sample, reverse, backend, [1] * steps, torch.float32)
        laws.pieces(op, sample, reverse, backend, [2, 1, 1, steps - 4], torch.float32)


@each
@directions
def test_causality(op, backend, reverse):
    for sample in _one_way(_few(_plain(op, backend), backend, 4), op, backend, reverse):
        laws.causal(op, sample, reverse, backend)


@each
@directions
def test_packing(op, backend, reverse):
    assert _packed(op, backend)
    for sample in _one_way(_packed(op, backend), op, backend, reverse):
        laws.packing(op, sample, reverse, backend)


@each
def test_starts(op, backend):
    laws.starting(op, _plain(op, backend)[0], False, backend)
    if backend != "triton":
        laws.starting(op, _packed(op, backend)[0], True, backend)


def test_offsets_that_changed_are_checked_again():
    """They are read once for each tensor, not once for each call: a write to it counts as another tensor."""
    x, cu_seqlens = torch.randn(1, 4, 2), torch.tensor([0, 1, 4])
    for _ in range(2):
        scanl.ops.linear_scan(x, torch.ones(2), cu_seqlens=cu_seqlens, backend="parallel")
    with pytest.raises(ShapeError, match="expected offsets that rise from 0 to T=3"):
        scanl.ops.linear_scan(x[:, :3], torch.ones(2), cu_seqlens=cu_seqlens, backend="parallel")
    cu_seqlens[2] = 3
    with pytest.raises(ShapeError, match="expected offsets that rise from 0 to T=4"):
        scanl.ops.linear_scan(x, torch.ones(2), cu_seqlens=cu_seqlens, backend="parallel")


@each
@directions
def test_padding(op, backend, reverse):
    if not op.neutral:
        pytest.skip(f"no step of {op.name} leaves every state as it is")
    for sample in _one_way(_few(_plain(op, backend), backend, 3), op, backend, reverse):
        laws.padding(op, sample, reverse, backend)


@each
def test_beams(op, backend):
    for sample in _few(_plain(op, backend), backend, 3):
        laws.beams(op, sample, backend)


@each
def test_constant_state(op, backend):
    sample = _plain(op, backend)[0]
    operands = laws.at(op, sample, torch.float32, backend)
    steps = operands[op.names[0]].shape[1]
    entering = {op.state: operands[op.state]}
    sizes = set()
    for t in range(steps + 1):
        _, last = op(**laws.timed(op, operands, 0, t), **sample.options, **entering, backend=backend)
        sizes.add(tuple((path, leaf.shape) for path, leaf in laws.leaves({op.state: last}).items()))
    assert sizes == {tuple((path, leaf.shape) for path, leaf in laws.leaves(entering).items())}


@each
@directions
def test_every_order_of_derivative(op, backend, reverse):
    interpreted = backend == "triton" and not torch.cuda.is_available()
    if reverse and (interpreted or not op.backends[backend].whole):
        pytest.skip("that time is turned, by the frame or by the kernel, the law of truth has seen")
    # The law of truth compares the first derivatives of all others with the reference's.
    first = backend == "reference" or laws.ALL
    # The reference's are torch's own; those of Triton's kernels are tested in tests/ops/_triton.
    second = backend != "reference" and not interpreted
    second = second and "second derivatives" not in {**op.excused, **op.backends[backend].excused}
    if not (first or second):
        pytest.skip("there is no second derivative, or another test has it")
    dtypes = [torch.float64] if interpreted else [torch.float64, torch.complex128]
    dtypes = [dtype for dtype in dtypes if dtype in op.dtypes and _takes(op, backend, dtype)]
    if op.backends[backend].whole and not laws.ALL:  # forward in real numbers, in reverse in complex ones
        dtypes = dtypes[-1:] if reverse else dtypes[:1]
    for dtype in dtypes:
        for sample in laws.some(_few(_able(op, backend), backend, 8), 2 if reverse or dtype.is_complex else 3):
            operands = laws.differentiable(laws.at(op, sample, dtype, backend))
            leaves = list(laws.leaves(operands).values())

            def run(*values, given=operands, more=laws.options(sample, backend)):  # noqa: B008
                given = laws.rebuilt(given, dict(zip(laws.leaves(given), values, strict=True)))
                y, last = op(**given, **more, reverse=reverse, backend=backend)
                return y, *(v for v in laws.leaves({op.state: last}).values() if v.dtype == y.dtype)

            if first:
                assert torch.autograd.gradcheck(run, leaves, fast_mode=True)
            if second:
                assert torch.autograd.gradgradcheck(run, leaves, fast_mode=True)


@pytest.mark.parametrize(("op", "backend"), FUSED)
def test_second_derivatives_leave_the_operands_as_they_are(op, backend):
    """An operand that wants no gradient wants none afterwards."""
    operands = laws.at(op, _plain(op, backend)[0], torch.float64, backend)
    wanted = op.names[1]
    operands[wanted].requires_grad_()
    y, _ = op(**operands, **laws.options(_plain(op, backend)[0], backend), backend=backend)
    (grad,) = torch.autograd.grad(y.square().sum(), operands[wanted], create_graph=True)
    grad.sum().backward()
    assert [name for name, value in operands.items() if value.requires_grad] == [wanted]


@pytest.mark.parametrize(("op", "backend"), FUSED)
def test_second_derivatives_in_half_precision(op, backend):
    interpreted = backend == "triton" and not torch.cuda.is_available()
    dtype = torch.float16 if interpreted else torch.bfloat16
    sample = _plain(op, backend)[0]
    more, operands = laws.options(sample, backend), laws.at(op, sample, dtype, backend)

    def second(operands, backend):
        leaves = {name: value.detach().clone().requires_grad_() for name, value in operands.items()}
        y, last = op(**leaves, **more, backend=backend)
        loss = 2.0**-12 * (y.double().square().sum() + last.sum())  # what float16 holds
        first = torch.autograd.grad(loss, list(leaves.values()), create_graph=True)
        found = torch.autograd.grad(sum(g.double().square().sum() for g in first), list(leaves.values()))
        return dict(zip(leaves, found, strict=True))

    exact = second(laws.wide(operands), "reference")
    rounding = laws.worst(second(operands, "reference"), exact)
    for name, value in second(operands, backend).items():
        assert value.dtype == operands[name].dtype
        laws.close(value, exact[name], rounding, f"{op.name} {backend} {name}", dtype)


@pytest.mark.parametrize(("op", "backend"), [case for case in IN_THE_FRAME if case in FUSED])
@forward
def test_opcheck(op, backend, reverse):
    if reverse and backend == "triton" and not laws.ALL:
        pytest.skip("time turned is one more argument: the check of the backend for a CPU has seen it")
    for sample in laws.some(_few(_able(op, backend), backend, 8), 1 if reverse else 2):
        operands = laws.at(op, sample, torch.float32, backend)
        options = {name: option.default for name, option in op.options.items()} | laws.options(sample, backend)
        rest = (reverse, options.pop("cu_seqlens", None), *options.values())
        arguments = [operands[name].requires_grad_() if name in operands else None for name in op.names]
        operator = getattr(torch.ops.scanl, f"{op.name}_{backend}").default
        keep = (True,) if isinstance(op, Cell) else ()
        torch.library.opcheck(operator, (*arguments, *rest, *keep))
        backward = getattr(torch.ops.scanl, f"{op.name}_{backend}_backward").default
        y, last, *kept = operator(*arguments, *rest, *keep)
        values = dict(zip(op.names, arguments, strict=True)) | dict(zip(("kept",), kept, strict=False))
        values |= {"y": y, "dy": torch.ones_like(y), "dlast": last}
        saved = [values[argument.name] for argument in backward._schema.arguments[: -len(rest)]]
        leaves = [None if v is None else v.detach().clone().requires_grad_() for v in saved]
        registered = (
            "test_schema",
            "test_autograd_registration",
            "test_faketensor",
        )  # tracing is not for second orders
        torch.library.opcheck(backward, (*leaves, *rest), test_utils=registered)


@pytest.mark.parametrize(("op", "backend"), IN_THE_FRAME)
@forward
def test_compiled_gives_the_same_numbers(op, backend, reverse):
    if reverse and not op.backends[backend].whole:
        pytest.skip("for a plain backend the frame turns time, and the law of truth has seen it do so")
    _unless_excused(op, backend, "compilation")
    if backend == "reference" and not laws.ALL:
        pytest.skip("a loop that is long to trace runs with --all")
    if backend in ("cpu", "triton") and reverse != (backend == "cpu") and not laws.ALL:
        pytest.skip("one opaque operator is traced one way: for a CPU in reverse, for a GPU forward")
    if backend in ("cpu", "triton"):  # half of the samples each way
        samples = laws.some(_few(_able(op, backend)[reverse::2], backend, 2), 1)
    else:  # long to trace
        samples = _plain(op, backend)[:2][-1:]
    assert samples
    for sample in samples:
        torch.compiler.reset()
        operands = laws.at(op, sample, torch.float32, backend)
        if "tracing from a state" in op.excused:
            del operands[op.state]

        def run(given, more=laws.options(sample, backend)):  # noqa: B008
            return op(**given, **more, reverse=reverse, backend=backend)

        compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
        results = []
        for function in (run, compiled):
            given = laws.differentiable(operands)
            y, last = function(given)
            outputs = [y, *(v for v in laws.leaves({op.state: last}).values() if v.is_floating_point())]
            leaves = list(laws.wanted(given).values())
            grads = torch.autograd.grad([o.sum() for o in outputs], leaves, materialize_grads=True)
            results.append((*outputs, *grads))
        for eager, traced in zip(*results, strict=True):
            torch.testing.assert_close(traced, eager)


@pytest.mark.skipif(shutil.which("c++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # inductor's own use of it
def test_inductor_gives_the_same_numbers():
    from torch._inductor import config

    x, a = torch.randn(2, 9, 4, requires_grad=True), torch.rand(2, 9, 4)
    # To try which vectors the processor has, and to compile all headers beforehand, takes seconds.
    with config.patch({} if laws.ALL else {"cpp.vec_isa_ok": False, "cpp_cache_precompile_headers": False}):
        y, last = torch.compile(lambda x, a: scanl.ops.linear_scan(x * 2, a), fullgraph=True)(x, a)
        (grad,) = torch.autograd.grad(y.sum() + last.sum(), x)
    z, end = scanl.ops.linear_scan(x * 2, a)
    torch.testing.assert_close((y, last, grad), (z, end, *torch.autograd.grad(z.sum() + end.sum(), x)))


@each
@directions
def test_edges(op, backend, reverse):
    for sample in _one_way(_few(_plain(op, backend), backend, 3), op, backend, reverse):
        operands = laws.at(op, sample, torch.float32, backend)
        more = {**sample.options, "reverse": reverse}

        def call(given, more=more):
            y, last = op(**given, **more, backend=backend)
            return y, laws.seen(op, last, given, more, backend)

        y, last = op(**laws.timed(op, operands, 0, 0), **{op.state: operands[op.state]}, **more, backend=backend)
        assert y.numel() == 0
        assert y.shape[1] == 0
        entered = laws.seen(op, operands[op.state], operands, more, backend)
        torch.testing.assert_close(laws.seen(op, last, operands, more, backend), entered)
        gone = {k: laws.rows(v, slice(0, 0)) if laws.batched(op, operands, k) else v for k, v in operands.items()}
        assert call(gone)[0].numel() == 0
        expected = call(operands)
        torch.testing.assert_close(call(laws.mapped(_strided, operands)), expected)
        expanded = {k: laws.per_step(op, operands, k) if k in op.neutral else v for k, v in operands.items()}
        torch.testing.assert_close(call(expanded), expected)
        shared = {k: v for k, v in operands.items() if k in (op.names[0], op.state)}
        row = operands | laws.mapped(lambda v: v.mean(0, keepdim=True).expand_as(v), shared)
        torch.testing.assert_close(call(row), call(laws.mapped(torch.Tensor.contiguous, row)))
        zeros = call({k: v for k, v in operands.items() if k != op.state})
        torch.testing.assert_close(call({**operands, op.state: _nothing(op, operands, more)}), zeros)


def _nothing(op, operands, more):
    """The state of an empty past."""
    if op.form is None:
        return op.initial(torch.zeros_like(operands[op.state]))
    state = op.form(op.sizes({name: operands.get(name) for name in op.names}, None), more, torch.float32, "cpu")
    assert laws.leaves({op.state: state}).keys() == laws.leaves({op.state: operands[op.state]}).keys()
    return state


def _strided(value: torch.Tensor) -> torch.Tensor:
    """The same values, two apart and time outermost in memory."""
    if value.ndim < 2:
        return value
    wide = torch.zeros(value.shape[1], value.shape[0], *value.shape[2:], 2, device=value.device)
    view = wide.transpose(0, 1)[..., 0]
    view.copy_(value)
    return view


@each
def test_half_precision_state_is_wide(op, backend):
    _unless_excused(op, backend, "a wide state")
    for dtype, wide in ((torch.bfloat16, torch.float32), (torch.float16, torch.float32)):
        if dtype not in op.dtypes:
            pytest.skip(f"{op.name} does not take {dtype}")
        sample = _plain(op, backend)[0]
        y, last = op(**laws.at(op, sample, dtype, backend), **sample.options, backend=backend)
        found = {leaf.dtype for leaf in laws.leaves({op.state: last}).values() if leaf.is_floating_point()}
        assert (y.dtype, found) == (dtype, {wide})


@each
def test_decay_of_zero_forgets_exactly(op, backend):
    if op.name != "linear_scan":
        pytest.skip("has no factor a: see the law of log decays")
    device = laws.place(backend)
    steps = 150 if backend == "triton" and not torch.cuda.is_available() else 600  # pieces have 32 steps there
    x, state = torch.randn(2, steps, 3, device=device), torch.full((2, 3), 1e30, device=device)
    a = torch.full((2, steps, 3), -torch.inf, device=device).exp().requires_grad_()
    y, _ = op(x, a, state, backend=backend)
    torch.testing.assert_close(y, x, rtol=0, atol=0)
    assert torch.isfinite(torch.autograd.grad(y.sum(), a)[0]).all()


@each
@directions
def test_a_log_decay_of_minus_infinity_forgets(op, backend, reverse):
    """After it the past is as if it had not been, and every gradient is finite."""
    if "g" not in op.names:
        pytest.skip("has no log decay g")
    for sample in _one_way(_few(_plain(op, backend), backend, 2), op, backend, reverse):
        operands = laws.at(op, sample, torch.float64, backend)
        if "g" not in operands or operands["g"].ndim < 3:
            continue
        steps = operands["g"].shape[1]
        t = steps // 2
        g = operands["g"].clone()
        g[:, t] = -torch.inf
        leaves = {**operands, "g": g}
        if "b" in operands:  # reads before the decay
            leaves["b"] = operands["b"].clone()
            leaves["b"][:, t] = 0
        leaves = {name: value.requires_grad_() for name, value in leaves.items()}
        y, last = op(**leaves, **sample.options, reverse=reverse, backend=backend)
        rest = laws.timed(op, leaves, *((0, t + 1) if reverse else (t, steps)))
        z, end = op(**rest, **sample.options, reverse=reverse, backend=backend)
        after = (y[:, :t], z[:, :t]) if reverse else (y[:, t + 1 :], z[:, 1:])
        torch.testing.assert_close((last, after[0]), (end, after[1]))
        assert all(torch.isfinite(grad).all() for grad in torch.autograd.grad(y.sum() + last.sum(), leaves.values()))


@pytest.mark.parametrize(
    ("op", "backend"),
    [
        pytest.param(*case.values, id=case.id, marks=[pytest.mark.long] * (case.values[1] == "reference"))
        for case in CASES
    ],
)
def test_a_million_steps_without_drift(op, backend):
    """|a| = 0.9999 and random a in (0, 1), float32 against float64, values and gradients."""
    if op.name != "linear_scan":
        pytest.skip("has its own long run")
    if backend == "triton" and not torch.cuda.is_available():
        pytest.skip("triton's interpreter takes minutes for it")
    steps = 2**20
    x = torch.randn(1, steps, 2, device=laws.place(backend))
    a = torch.stack([torch.full((steps,), 0.9999), torch.rand(steps)], 1)[None].to(x)
    with torch.no_grad():
        y, last = op(x, a, backend=backend)
        z, end = op(x.double(), a.double(), backend="parallel")
    for channel in range(2):
        error = (y[..., channel] - z[..., channel]).norm() / z[..., channel].norm()
        assert error < 1e-5
    torch.testing.assert_close(last.double(), end, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("op", OPS, ids=[op.name for op in OPS])
def test_error_inputs(op):
    cases = list(op.errors)
    assert cases
    for sample, message in cases:
        with pytest.raises((ShapeError, BackendError)) as caught:
            op(**sample.operands, **sample.options)
        assert str(caught.value).startswith(f"{op.name}: ")
        assert message in str(caught.value)


@pytest.mark.parametrize("op", OPS, ids=[op.name for op in OPS])
def test_every_wrong_axis_is_refused_by_name(op):
    for sample in op.samples:
        leaves = laws.leaves(sample.operands)
        for name, value in leaves.items():
            for axis in range(value.ndim):
                if value.ndim < 2 or (name == op.names[0] and axis < 2) or value.shape[axis] == 0:
                    continue  # the first operand says what B and T are
                wrong = torch.cat([value] * 5 + [value.narrow(axis, 0, 1)], axis)
                arguments = laws.rebuilt(sample.operands, {**leaves, name: wrong})
                with pytest.raises(ShapeError, match=rf"{op.name}: [\w.\[\]]+ (has|holds) .*, expected "):
                    op(**arguments, **sample.options)
            if name != op.names[0]:
                arguments = laws.rebuilt(sample.operands, {**leaves, name: torch.zeros(2, *value.shape)[None, None]})
                with pytest.raises(ShapeError, match=re.escape(f"{op.name}: {name} has shape")):
                    op(**arguments, **sample.options)


@pytest.mark.parametrize("op", OPS, ids=[op.name for op in OPS])
def test_named_backends_run_or_say_why_not(op):
    sample = _plain(op)[0]
    operands = laws.at(op, sample, torch.float32, "cpu")
    meta = pytree.tree_map(lambda v: v.to("meta"), operands)
    lines = op.explain(**meta, **sample.options).splitlines()
    assert [line.split(":")[0] for line in lines] == [name for name in ORDER if name in op.backends]
    assert "reference: can run" in lines
    if "cpu" in op.backends:
        with pytest.raises(BackendError, match=f"{op.name}: backend 'cpu' cannot run these arguments: device meta"):
            op(**meta, **sample.options, backend="cpu")
        assert "cpu: device meta (runs on cpu)" in lines
    missing = replace(op.backends["reference"], package="nothing")
    sizes = {**op.sizes({name: operands.get(name) for name in op.names}, None), **sample.options}
    assert missing.reasons(torch.device("cpu"), torch.float32, sizes, named=True) == [
        "package nothing is not installed"
    ]
    first = op.names[0]
    with pytest.raises(TypeError, match="twice"):
        op(operands[first], **{first: operands[first]}, **sample.options)
    with pytest.raises(TypeError, match="positional"):
        op(*[operands[first]] * 19)
    with pytest.raises(TypeError, match="unknown argument 'revers'; did you mean 'reverse'"):
        op(**operands, **sample.options, revers=True)
    for name in op.required:
        with pytest.raises(TypeError, match=f"{op.name}: {name} is missing"):
            op(**operands)


def _hash(x, a):
    y, last = scanl.ops.linear_scan(x, a)
    return float(y.numpy().sum(dtype="f8")), float(last.numpy().sum(dtype="f8"))


def _child(queue, x, a):
    queue.put(_hash(x, a))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_concurrency_of_forked_workers():
    x, a = torch.randn(1, 2**15, 16), torch.rand(1, 2**15, 16)
    expected = _hash(x, a)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    workers = [context.Process(target=_child, args=(queue, x, a)) for _ in range(2)]
    for worker in workers:
        worker.start()
    try:
        got = [queue.get(timeout=60) for _ in workers]
        for worker in workers:
            worker.join(60)
        assert [worker.exitcode for worker in workers] == [0, 0]
    finally:
        for worker in workers:
            worker.kill()
    assert got == [expected, expected]


def test_concurrency_of_threads():
    x, a = torch.randn(4, 4096, 64), torch.rand(4, 4096, 64)
    expected, got = _hash(x, a), []
    threads = [threading.Thread(target=lambda: got.extend(_hash(x, a) for _ in range(5))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == [expected] * 20


@directions
@pytest.mark.parametrize(
    ("width", "a_shape"),
    [(3, (1, 29, 3)), (3, (3,)), (3, (29, 1)), (3, ()), (100, (1, 29, 100)), (100, (100,))],
    ids=str,
)
def test_pieces_of_time_repair_their_carries(monkeypatch, reverse, width, a_shape):
    """One long sequence is cut in time on a CPU; here into four pieces, values and every gradient.

    Cores share the repair by channels: two blocks of them at width 100.
    """
    kernels = importlib.import_module("scanl.ops._cpu.linear_scan")
    monkeypatch.setattr(kernels, "MIN_CUT_STEPS", 8)
    monkeypatch.setattr(kernels, "CORES", 3)
    kernels._layout.cache_clear()
    operands = {"x": torch.randn(1, 29, width), "a": torch.rand(a_shape), "state": torch.randn(1, width)}
    sample = OpSample({name: value.double() for name, value in operands.items()})
    try:
        layout = kernels._layout((1, 29, width), a_shape, None, True)
        assert layout.cut
        assert layout.repair_units == (2 if width == 100 else 1)
        for dtype in (torch.float64, torch.complex128):
            laws.truth(scanl.ops.linear_scan, sample, {"reverse": reverse}, "cpu", dtype)
    finally:
        kernels._layout.cache_clear()


@directions
def test_a_carry_turned_by_quarters_is_carried_on(reverse):
    """Where time is cut, a product of decays of which one part is zero is not one that has died out."""
    steps = 4100
    x, a = torch.zeros(1, steps, 1, dtype=torch.complex64), torch.full((1,), 1j, dtype=torch.complex64)
    first, last = (-1, 0) if reverse else (0, -1)
    x[:, first] = 1
    x.requires_grad_()
    y, _ = scanl.ops.linear_scan(x, a, reverse=reverse, backend="cpu")
    turns = torch.arange(steps) % 4
    expected = torch.tensor([1, 1j, -1, -1j])[turns.flip(0) if reverse else turns]
    assert torch.equal(y[0, :, 0], expected)
    dy = torch.zeros_like(y)
    dy[:, last] = 1
    (dx,) = torch.autograd.grad(y, x, dy)
    assert torch.equal(dx[0, :, 0], expected.flip(0).conj())


def test_results_live_in_memory_of_their_own():
    """Large results use memory again only once nobody holds them."""
    x, a = torch.randn(1, 2**14, 64), torch.rand(1, 2**14, 64)
    kept = [scanl.ops.linear_scan(x * i, a)[0] for i in range(4)]
    view = scanl.ops.linear_scan(x * 9, a)[0][:, 5:]
    for _ in range(4):
        scanl.ops.linear_scan(x, a)
    for i, y in enumerate(kept):
        torch.testing.assert_close(y, scanl.ops.linear_scan(x * i, a, backend="parallel")[0], rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(
        view, scanl.ops.linear_scan(x * 9, a, backend="parallel")[0][:, 5:], rtol=1e-4, atol=1e-3
    )


@st.composite
def _arguments(draw, op):
    """Operands of any shape that the declaration allows, their values out of the op's samples; and options."""
    packed, sizes = draw(st.booleans()), {}
    steps = sizes["T"] = draw(st.integers(1, 20))
    offsets = [0, *sorted(draw(st.lists(st.integers(0, steps), max_size=4))), steps] if packed else None
    sizes["B"] = 1 if packed else draw(st.integers(1, 3))
    for axis, other in op.divides.items():
        sizes[axis] = draw(st.integers(1, 2))
        sizes[other] = sizes[axis] * draw(st.integers(1, 3))

    def size(axis):
        if axis.isdigit():
            return [int(axis)]
        if axis[0] == "*":
            return sizes.setdefault(axis, draw(st.lists(st.integers(1, 5), max_size=3)))
        return [sizes.setdefault(axis, draw(st.integers(1, 9)))]

    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    values, operands = {}, {}
    for sample in op.samples:
        for name, value in laws.leaves(sample.operands).items():
            values.setdefault(name, []).append(value.flatten())
    # A cell compiles kernels for every set of operands; here it gets a set for which the laws compile them anyway.
    sets = [set(sample.operands) for sample in op.samples] if isinstance(op, Cell) else [set(values)]
    known = draw(st.sampled_from(sets))
    for operand in op.operands:
        is_state = operand.name == op.state
        if operand.tree:
            continue  # the past is empty; of structured states the other laws have samples
        if is_state:
            sizes.update({axis: derive(sizes) for axis, derive in op.derived.items()})
        chosen = is_state or not isinstance(op, Cell)
        if (operand.optional or is_state) and (operand.name not in known or (chosen and draw(st.booleans()))):
            continue
        axes = draw(st.sampled_from(operand.choices))
        shape = [length for axis in axes for length in size(axis)]
        if is_state and packed:
            shape[0] = len(offsets) - 1
        if operand.broadcast:
            shape = [draw(st.sampled_from([1, length])) for length in shape][draw(st.integers(0, len(shape))) :]
        numbers = torch.cat(values[operand.name])
        value = numbers[torch.randint(len(numbers), shape, generator=generator)]
        if len(shape) > 1 and draw(st.booleans()):
            value = value.transpose(0, 1).contiguous().transpose(0, 1)
        operands[operand.name] = value
    kind = draw(st.sampled_from([dtype for dtype in (torch.float64, torch.complex128) if dtype in op.dtypes]))
    options = {name: next(iter(op.samples)).options[name] for name in op.required}
    options |= {"reverse": draw(st.booleans()), "cu_seqlens": None if offsets is None else torch.tensor(offsets)}
    return laws.at(op, OpSample(operands), kind, "cpu"), options, kind


@pytest.mark.parametrize(  # an instance calls its op step by step: long, and tested in the op's own file
    "op", [pytest.param(op, id=op.name, marks=[pytest.mark.long] * (op in registry.instances())) for op in OPS]
)
@settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(data=st.data())
def test_any_shape_stride_and_packing(op, data):
    """`pytest --hypothesis-profile=long -k any_shape` tries a thousand of each."""
    operands, options, kind = data.draw(_arguments(op))
    expected = laws.evaluate(op, operands, options, "reference")
    bounds = laws.attainable(op, operands, options, expected)
    for backend in ("parallel", "cpu"):
        if backend in op.backends and _takes(op, backend, kind):
            for name, value in laws.evaluate(op, operands, options, backend).items():
                infinite, what = expected[name].isinf(), f"{op.name} on {backend}, {name}"
                assert torch.equal(value[infinite], expected[name][infinite]), what
                error = (value - expected[name])[~infinite].abs()
                assert not error.numel() or error.max() <= bounds[name], f"{what}: {error.max()} over {bounds[name]}"


PUBLIC = {name for name in scanl.ops.__all__ if isinstance(getattr(scanl.ops, name), Op | HigherOrder)}


def test_worked_examples():
    for module in pkgutil.iter_modules(scanl.ops.__path__, "scanl.ops."):
        if not module.ispkg:
            loaded = importlib.import_module(module.name)
            result = doctest.testmod(loaded, extraglobs={"torch": torch})
            assert result.failed == 0, module.name
    for name in PUBLIC:
        assert ">>>" in registry.get(name).__doc__, f"{name} has no worked example"


def test_nothing_escapes():
    """Every public name of scanl.ops is an op under the laws; every op states its equation and its source."""
    of_layers = {cell.name for cell in registry.cells() if cell.step.__module__.startswith("scanl.layers.")}
    assert set(registry.names()) - of_layers == PUBLIC
    for op in registry.every():
        assert op.equation
        assert op.source
        assert op.id is None or op.id.startswith("P-")
        assert op.explain is not None
        if isinstance(op, HigherOrder):
            assert op.instances, f"no law runs over {op.name}"
            assert op.explain(torch.zeros(1)) == "parallel: can run"
            assert f"`{op.name}`" in table()
    for op in registry.declared():
        assert op.equation
        assert "arXiv" in op.source
        assert op.id.startswith("P-")
        assert "reference" in op.backends
        assert len(op.backends) > 1
        assert all(op.excused.values()), "an excuse has a reason"
        assert set(op.neutral) <= set(op.names)


def test_the_registry_knows_every_op_by_name():
    assert [registry.get(name).name for name in registry.names()] == [op.name for op in registry.every()]
    with pytest.raises(ConfigError, match="unknown op 'delta_rul'; did you mean 'delta_rule'"):
        registry.get("delta_rul")


def test_declarations_of_other_shapes():
    """The frame holds for ops with heads, alternatives and optional operands."""

    def toy(q, k, v, g, state):
        return v, state

    op = Op(
        toy, "q: B T H K, k: B T H K, v: B T H V, g?: H | B T H, state: B H K V -> B T H V",
        id="P-toy", equation="", source="", neutral={}, dtypes=(torch.float32,),
    )  # fmt: skip
    assert "toy" not in registry.names()
    q, v = torch.zeros(2, 8, 2, 4), torch.zeros(2, 8, 2, 3)
    assert op(q, q, v)[1].shape == (2, 2, 4, 3)
    assert op(q, q, v, torch.zeros(2))[0].shape == v.shape
    with pytest.raises(ShapeError) as caught:
        op(q, q, v[:, 1:])
    assert str(caught.value) == (
        "toy: v has shape (2, 7, 2, 3), expected (B, T, H, V) with B=2 from q, T=8 from q, H=2 from q"
    )
    with pytest.raises(ShapeError, match=r"toy: g has shape \(3,\), expected \(H,\) or \(B, T, H\)"):
        op(q, q, v, torch.zeros(3))


def _broken(monkeypatch, change):
    """linear_scan's cpu backend with its backward pass changed."""
    op = scanl.ops.linear_scan
    right = op.backends["cpu"].run

    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, a, state, reverse, cu_seqlens):
            ctx.save_for_backward(x, a, state)
            ctx.options = {"reverse": reverse, "cu_seqlens": cu_seqlens}
            return right(x, a, state, **ctx.options)

        @staticmethod
        def backward(ctx, dy, dlast):
            leaves = [value.detach().requires_grad_() for value in ctx.saved_tensors]
            with torch.enable_grad():
                outputs = right(*change(*leaves), **ctx.options)
            return (*torch.autograd.grad(outputs, leaves, (dy, dlast), materialize_grads=True), None, None)

    def run(x, a, state, *, reverse=False, cu_seqlens=None):
        return Wrong.apply(x, a, state, reverse, cu_seqlens)

    monkeypatch.setitem(op.backends, "cpu", replace(op.backends["cpu"], run=run))
    return op


@pytest.mark.parametrize(
    "change",
    [
        lambda x, a, state: (x, torch.ones_like(a) + 0 * a, state),
        lambda x, a, state: (x, a, state.detach()),
        lambda x, a, state: (x, a.detach(), state),
        lambda x, a, state: (x.detach(), a, state),
    ],
    ids=["decay forgotten", "state's gradient lost", "decay's gradient lost", "input's gradient lost"],
)
def test_truth_kills_broken_backward_passes(monkeypatch, change):
    op = _broken(monkeypatch, change)
    with pytest.raises(AssertionError, match="error"):
        laws.truth(op, next(iter(op.samples)), {}, "cpu", torch.float32)


@pytest.mark.parametrize("mutant", ["no state", "no reset", "looks ahead", "forgets the order"])
def test_laws_kill_broken_forward_passes(monkeypatch, mutant):
    op = scanl.ops.linear_scan
    right = op.backends["parallel"].run

    def run(x, a, state, *, reverse=False, cu_seqlens=None):
        if mutant == "no state":
            return right(x, a, torch.zeros_like(state), reverse=reverse, cu_seqlens=cu_seqlens)
        if mutant == "no reset" and cu_seqlens is not None:
            y, last = right(x, a, state[:1], reverse=reverse)
            return y, last.expand_as(state)
        if mutant == "looks ahead":
            y, last = right(x, a, state, reverse=reverse, cu_seqlens=cu_seqlens)
            return y + x.mean(1, keepdim=True), last
        return right(x, a, state, reverse=reverse != (mutant == "forgets the order"), cu_seqlens=cu_seqlens)

    monkeypatch.setitem(op.backends, "parallel", replace(op.backends["parallel"], run=run))

    def law():
        laws.pieces(op, _plain(op)[0], False, "parallel", [3, 4], torch.float64)
        laws.causal(op, _plain(op)[0], False, "parallel")
        laws.packing(op, _packed(op)[0], False, "parallel")

    with pytest.raises(AssertionError):
        law()


def test_an_operand_prints_as_it_is_declared():
    assert str(Operand("g", (("H",), ("B", "T", "H")))) == "(H,) or (B, T, H)"


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own, when its tracer is imported
def test_transformations_see_every_call():
    """A call that nothing watches skips torch's dispatcher; whatever watches must not be skipped."""
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.utils._python_dispatch import TorchDispatchMode

    x, a = torch.randn(2, 5, 3), torch.rand(3)
    wanted, _ = scanl.ops.linear_scan(x, a)
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    with Watch():
        found, _ = scanl.ops.linear_scan(x, a, backend="cpu")
    assert "scanl.linear_scan_cpu.default" in seen
    assert torch.equal(found, wanted)
    with FakeTensorMode() as mode:
        fake, _ = scanl.ops.linear_scan(mode.from_tensor(x), mode.from_tensor(a))
    assert type(fake) is not torch.Tensor
    graph = make_fx(lambda x: scanl.ops.linear_scan(x, a, backend="cpu")[0])(x)
    assert "scanl.linear_scan_cpu" in graph.code
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(NotImplementedError, match="linear_scan_cpu has no forward-mode derivative; backend='paral"):
            scanl.ops.linear_scan(dual, a, backend="cpu")
    with pytest.raises(NotImplementedError, match="has no forward-mode derivative"):
        torch.func.jvp(lambda x: scanl.ops.linear_scan(x, a, backend="cpu")[0], (x,), (x,))
    slope = torch.func.jvp(lambda x: scanl.ops.linear_scan(x, a, backend="parallel")[0], (x,), (x,))[1]
    torch.testing.assert_close(slope, wanted)
    mapped = torch.vmap(lambda x: scanl.ops.linear_scan(x, a, backend="cpu")[0])(x[None])
    torch.testing.assert_close(mapped[0], wanted)
