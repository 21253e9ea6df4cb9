"""What callers do to any op beside calling it: laws over every op and backend, as in test_ops.py."""

import _thread
import errno
import inspect
import linecache
import multiprocessing
import operator
import os
import pathlib
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import laws
import scanl.layers
import scanl.ops
from scanl.errors import BackendError, ShapeError
from scanl.ops import linear_scan, registry
from scanl.ops._cpu import _cache, _slots
from scanl.ops._cpu._kernel import kernel
from scanl.ops._cpu._slots import part, units
from scanl.ops._frame import cache as kernel_files
from scanl.ops.registry import Cell, Op, OpSample

pytestmark = pytest.mark.cells_by_loop("name")

OPS = laws.OPS
CASES = [pytest.param(op, backend, id=f"{op.name}-{backend}") for op in OPS for backend in laws.backends(op)]
FUSED = [case for case in CASES if case.values[1] in ("cpu", "triton")]
each = pytest.mark.parametrize(("op", "backend"), CASES)
each_in_the_frame = pytest.mark.parametrize(("op", "backend"), [c for c in CASES if laws.of_the_frame(*c.values)])
EMULATED = not torch.cuda.is_available()  # Triton's interpreter is thousands of times slower than a GPU


def _some(op: Op, backend: str) -> list[OpSample]:
    """Samples that a backend takes; one where Triton is emulated."""
    able = [laws.unstructured(op, sample) for sample in op.samples if not laws.refusal(op, sample, backend)]
    return able[:1] if backend == "triton" and EMULATED else able


def _lazy(value: Tensor) -> Tensor:
    """The same numbers, of which memory holds the conjugate or the negative, and a bit that says so."""
    lazy = value.conj().resolve_conj().conj() if value.is_complex() else torch._neg_view(-value)
    assert lazy.is_conj() or lazy.is_neg()
    return lazy


@each_in_the_frame
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex128], ids=["negative", "conjugate"])
def test_lazy_bits(op, backend, dtype):
    """A lazily negated or conjugated operand, state or incoming gradient is what it stands for."""
    chosen = op.backends[backend]
    if dtype not in op.dtypes or chosen.compute_dtype(dtype) not in chosen.dtypes:
        pytest.skip(f"{op.name} on {backend} does not take {dtype}")
    for sample in laws.some(_some(op, backend), 2):
        more = {**laws.options(sample, backend), "backend": backend}
        operands = laws.at(op, sample, dtype, backend)
        rounding = laws.own_rounding(op, operands, laws.options(sample, backend))
        expected = laws.called(op, operands, more)
        for name in operands:
            found = laws.called(op, {**operands, name: _lazy(operands[name])}, more)
            for value, plain in zip(found, expected, strict=True):
                laws.close(value, plain, rounding, f"{op.name} {backend}, {name} lazy")
        weights = [torch.linspace(-1, 1, v.numel()).view(v.shape).to(v) for v in expected]
        results = []
        for change in (lambda value: value, _lazy):
            leaves = {name: value.clone().requires_grad_() for name, value in operands.items()}
            outputs = laws.called(op, {name: change(value) for name, value in leaves.items()}, more)
            given = [change(weight) for weight in weights]
            results.append((*outputs, *torch.autograd.grad(outputs, list(leaves.values()), given)))
        names = (*("y", "last")[: len(expected)], *operands)
        for name, plain, value in zip(names, *results, strict=True):
            laws.close(value, plain, rounding, f"{op.name} {backend}, gradient of {name}, all lazy")


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_the_parts_of_a_conjugate(dtype):
    """Views as one gets them: `x.conj().imag` is a real tensor with the negative bit."""
    z, a = torch.randn(2, 5, 3, dtype=torch.complex64), torch.rand(3)
    x = z.conj().imag if dtype == torch.float32 else z.conj()
    found, _ = linear_scan(x, a.to(dtype), backend="cpu")
    torch.testing.assert_close(found, linear_scan(x.clone().resolve_conj().resolve_neg(), a, backend="reference")[0])


@pytest.mark.parametrize(("op", "backend"), FUSED)
def test_zeros_that_were_never_written(op, backend):
    """torch keeps some zeros, as those of a gradient that nothing reaches, without memory."""
    sample = _some(op, backend)[0]
    operands = laws.at(op, sample, torch.float32, backend)
    name = op.names[0]
    nothing = torch._efficientzerotensor(operands[name].shape, device=operands[name].device)
    more = {**laws.options(sample, backend), "backend": backend}
    expected = op(**{**operands, name: torch.zeros_like(operands[name])}, **more)
    torch.testing.assert_close(op(**{**operands, name: nothing}, **more), expected, rtol=0, atol=0)


def _axes(op: Op, operands: dict[str, Tensor]) -> dict[str, tuple[str, ...]]:
    """The axes of each operand by name, the features *F as F0, F1, ..."""
    features = tuple(f"F{n}" for n in range(operands[op.names[0]].ndim - 2))
    found = {}
    for operand in op.operands:
        if operand.name in operands:
            choices = [
                tuple(one for axis in axes for one in (features if axis == "*F" else (axis,)))
                for axes in operand.choices
            ]
            ndim = operands[operand.name].ndim
            axes = next((axes for axes in choices if len(axes) == ndim), choices[0])
            found[operand.name] = axes[len(axes) - ndim :]
    return found


@each
def test_an_empty_axis(op, backend):
    """With none of what an axis counts, outputs and gradients are the reference's: empty, or sums of nothing."""
    for sample in laws.some(_some(op, backend), 4):
        operands = laws.at(op, sample, torch.float64, backend)
        axes = _axes(op, operands)
        packed = "cu_seqlens" in sample.options
        names = {axis for some in axes.values() for axis in some if not axis.isdigit()}
        for axis in sorted(names - set(op.derived) - {"B" if packed else ""}):
            if (op.name, axis) in (("short_convolution", "W"), ("long_convolution", "L")):
                continue  # a window of no steps is refused
            gone = {axis, op.divides.get(axis), *(one for one, other in op.divides.items() if other == axis)}
            left = {}
            for name, value in operands.items():
                for n, one in enumerate(axes[name]):
                    shared = laws.declared(op, name).broadcast and value.shape[n] == 1
                    if one in gone and not shared:
                        value = value.narrow(n, 0, 0)
                left[name] = value
            more = laws.options(sample, backend)
            if packed and axis == "T":
                more["cu_seqlens"] = torch.zeros_like(more["cu_seqlens"])
            if laws.refusal(op, OpSample(left, more), backend):
                continue
            results = []
            for one in ("reference", backend):
                leaves = {name: value.clone().requires_grad_() for name, value in left.items()}
                outputs = laws.called(op, leaves, {**more, "backend": one})
                assert all(value.requires_grad for value in outputs), f"{one}, {axis}=0"
                grads = torch.autograd.grad([value.sum() for value in outputs], leaves.values(), materialize_grads=True)
                results.append({"outputs": outputs, **dict(zip(leaves, grads, strict=True))})
            for name, value in results[1].items():
                expected = results[0][name]
                torch.testing.assert_close(value, expected, msg=lambda m, s=f"{axis}=0, {name}": f"{s}: {m}")


def test_a_decay_shared_by_no_channels():
    """One a for a group of channels that is empty: its gradient is a sum of nothing."""
    for backend in linear_scan.preference():
        x, a = torch.zeros(0, 33, 0, requires_grad=True), torch.rand(1, 33, 0, requires_grad=True)
        y, last = linear_scan(x, a, backend=backend)
        grads = torch.autograd.grad((y.sum(), last.sum()), (x, a))
        assert [value.shape for value in (y, last, *grads)] == [(0, 33, 0), (0, 0), (0, 33, 0), (1, 33, 0)]


@pytest.mark.parametrize("op", OPS, ids=[op.name for op in OPS])
def test_offsets_that_are_no_tensor(op):
    sample = next(sample for sample in op.samples if "cu_seqlens" in sample.options)
    more = {**sample.options, "cu_seqlens": sample.options["cu_seqlens"].tolist()}
    expected = rf"{op.name}: cu_seqlens is a list, expected a tensor of int32 or int64 of shape \(N\+1,\)"
    for call in (op, op.explain):
        with pytest.raises(ShapeError, match=expected):
            call(**sample.operands, **more)


@pytest.mark.parametrize("op", OPS, ids=[op.name for op in OPS])
def test_starts_that_do_not_fit(op):
    sample = next(iter(op.samples))
    batch, steps = sample.operands[op.names[0]].shape[:2]
    of_steps = rf"expected torch.bool \({batch}, {steps}\), a truth for each step"
    right = torch.zeros(batch, steps, dtype=torch.bool)
    for starts, actual in (
        (right.long(), rf"torch.int64 \({batch}, {steps}\)"), (right[:, 1:], rf"torch.bool \({batch}, {steps - 1}\)"),
        ([True], "a list"),
    ):  # fmt: skip
        with pytest.raises(ShapeError, match=f"{op.name}: starts is {actual}, {of_steps}"):
            op(**sample.operands, **sample.options, starts=starts)


def test_offsets_that_are_no_tensor_outside_the_frame():
    x, who = torch.zeros(1, 4, 2), "cu_seqlens is a tuple, expected a tensor of int"
    with pytest.raises(ShapeError, match=f"long_convolution: {who}"):
        scanl.ops.long_convolution(x, torch.ones(2, 3), cu_seqlens=(0, 4))
    with pytest.raises(ShapeError, match=f"segment_attention: {who}"):
        scanl.ops.segment_attention(x[..., None, :], x[..., None, :], x[..., None, :], window=2, cu_seqlens=(0, 4))
    with pytest.raises(ShapeError, match=f"mingru: {who}"):
        scanl.layers.build("mingru", 2)(x, cu_seqlens=(0, 4))


def _outside_the_frame() -> dict[str, tuple[Callable[[Tensor], Tensor], Tensor]]:
    """Functions beside the ops, each of one tensor."""
    w = torch.randn(3, 3, dtype=torch.float64) / 4

    def cell(s, x):
        return torch.tanh(s @ w + x)

    def attention(x):
        return scanl.ops.segment_attention(x.unsqueeze(2), x.unsqueeze(2), x.unsqueeze(2), window=2)[0]

    x = torch.randn(2, 5, 3, dtype=torch.float64)
    return {
        "associative_scan": (lambda x: scanl.ops.associative_scan(torch.mul, x), x),
        "long_convolution": (lambda x: scanl.ops.long_convolution(x, w)[0], x),
        "segment_attention": (attention, x),
        "nonlinear_scan": (lambda x: scanl.ops.nonlinear_scan(cell, x)[0], x),
        "nonlinear_scan newton": (lambda x: scanl.ops.nonlinear_scan(cell, x, method="newton")[0], x),
        "nonlinear_scan quasi_newton": (lambda x: scanl.ops.nonlinear_scan(cell, x, method="quasi_newton")[0], x),
        "fixed_point": (lambda x: scanl.ops.fixed_point(cell, x).state, x[:, 0]),
    }


@pytest.mark.parametrize("name", _outside_the_frame())
def test_lazy_bits_outside_the_frame(name):
    function, x = _outside_the_frame()[name]
    results = []
    for change in (lambda value: value, _lazy):
        leaf = x.clone().requires_grad_()
        y = function(change(leaf))
        results.append((y, *torch.autograd.grad(y, leaf, change(y.detach().cos()))))
    eps = torch.finfo(torch.float64).eps
    solved = "newton" in name or name == "fixed_point"  # to a residual of eps^(5/6)
    bound = 64 * (eps ** (5 / 6) if solved else eps)
    torch.testing.assert_close(results[1], results[0], rtol=bound, atol=bound)


@pytest.mark.parametrize("name", _outside_the_frame())
def test_function_transforms_outside_the_frame(name):
    function, x = _outside_the_frame()[name]
    if "newton" in name or name == "fixed_point":
        instead = "expected 'sequential'" if "newton" in name else "torch.autograd.grad"
        with pytest.raises(NotImplementedError, match=f"{name.split()[0]}: .* transformation of torch.func.*{instead}"):
            torch.func.grad(lambda x: function(x).sin().sum())(x)
        return
    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(function(leaf).sin().sum(), leaf)
    torch.testing.assert_close(torch.func.grad(lambda x: function(x).sin().sum())(x), expected)


def test_a_lazy_gradient_of_newtons_method_is_solved_at_once():
    """The kernel that solves the adjoint reads it too."""
    w = torch.tensor([[0.5, 0.1], [-0.2, 0.4]], dtype=torch.float64)
    x = torch.randn(2, 6, 2, dtype=torch.float64, requires_grad=True)
    y, _ = scanl.ops.nonlinear_scan(lambda s, x: s @ w + x, x, method="newton", max_iterations=1)
    torch.autograd.grad(y, x, _lazy(torch.ones_like(y)))


@each_in_the_frame
def test_function_transforms(op, backend):
    """`torch.func`: gradients, Jacobians, and gradients of a batch are right on every backend."""
    if isinstance(op, Cell) and backend == "triton" and EMULATED and not laws.ALL:
        pytest.skip("a cell's two kernels have one operator: the check of the backend for a CPU has seen it")
    sample = _some(op, backend)[0]
    more = laws.options(sample, backend)
    operands = laws.at(op, sample, torch.float64, backend)
    expected = laws.called(op, operands, more)
    weights = [torch.linspace(-1, 1, v.numel()).view(v.shape).to(v) for v in expected]

    def loss(operands, backend=backend):
        outputs = laws.called(op, operands, {**more, "backend": backend})
        return sum((w * value.sin()).sum() for w, value in zip(weights, outputs, strict=True))

    leaves = {name: value.clone().requires_grad_() for name, value in operands.items()}
    found = torch.autograd.grad(loss(leaves, "reference"), list(leaves.values()))
    expected = dict(zip(leaves, found, strict=True))
    torch.testing.assert_close(torch.func.grad(loss)(operands), expected)
    batch = {name: torch.stack([value, value.roll(1, -1)]) for name, value in operands.items()}
    each_alone = [torch.func.grad(loss)({name: v[i] for name, v in batch.items()}) for i in range(2)]
    mapped = torch.func.vmap(torch.func.grad(loss))(batch)
    torch.testing.assert_close(mapped, {name: torch.stack([g[name] for g in each_alone]) for name in mapped})
    first = op.names[0]

    def some(value, backend=backend):
        return op(**{**operands, first: value}, **more, backend=backend)[0].flatten()[:2]

    jacobian = torch.autograd.functional.jacobian(lambda value: some(value, "reference"), operands[first])
    torch.testing.assert_close(torch.func.jacrev(some)(operands[first]), jacobian)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own, when it loads its decompositions
@each_in_the_frame
def test_second_derivatives_by_function_transforms(op, backend):
    sample = _some(op, backend)[0]
    more = laws.options(sample, backend)
    operands = laws.at(op, sample, torch.float64, backend)
    if "second derivatives" in op.excused:
        pytest.skip(f"{op.name} is excused from second derivatives: {op.excused['second derivatives']}")
    by = op.state if op.form is None else op.names[0]
    state = operands[by].flatten()[:2]

    def loss(some, backend=backend):
        whole = torch.cat([some, operands[by].flatten()[2:]]).view(operands[by].shape)
        return sum(v.sin().sum() for v in laws.called(op, {**operands, by: whole}, {**more, "backend": backend}))

    exact = torch.autograd.functional.hessian(lambda some: loss(some, "reference"), state)
    torch.testing.assert_close(torch.func.jacrev(torch.func.jacrev(loss))(state), exact)
    if op.backends[backend].forward_mode:
        torch.testing.assert_close(torch.func.hessian(loss)(state), exact)
    else:
        with pytest.raises(NotImplementedError, match="has no forward-mode derivative; backend='parallel' or 'ref"):
            torch.func.hessian(loss)(state)
        torch.testing.assert_close(torch.func.hessian(lambda some: loss(some, "auto"))(state), exact)
        assert torch.func.jvp(lambda some: loss(some, "auto"), (state,), (state,))[1].isfinite()


@pytest.mark.skipif(sys.platform == "win32", reason="there the blocks are not kept")
def test_an_interrupt_is_not_lost_where_a_result_dies():
    """Ctrl-C is raised in the next line of Python's: that must be the caller's, not one that runs in a destructor."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells start background processes that ignore it
    held = [linear_scan(torch.ones(1, 2**12, 2**7), torch.ones(1), backend="cpu")[0]]
    with pytest.raises(KeyboardInterrupt):
        # All in C: the signal comes, then the last reference to the result goes, and no line of Python's is between
        deque(map(operator.call, [_thread.interrupt_main, held.clear]), maxlen=0)
    assert not held


def test_memory_is_taken_again_and_no_more_is_kept_than_said(monkeypatch):
    from scanl.ops._cpu import _memory

    monkeypatch.setattr(_memory, "_blocks", {})
    monkeypatch.setattr(_memory, "MAX_BYTES", 3 * _memory.MIN_BYTES)
    shape = (_memory.MIN_BYTES // 4,)
    first = _memory.empty(shape, torch.float32)
    place = first.data_ptr()
    assert _memory.empty(shape, torch.float32).data_ptr() != place  # in use
    del first
    both = [_memory.empty(shape, torch.float32) for _ in range(2)]
    assert place in [value.data_ptr() for value in both]
    held = [_memory.empty(shape, torch.float32).fill_(n) for n in range(5)]
    assert len(_memory._blocks) == 3
    assert [value[0].item() for value in held] == [0, 1, 2, 3, 4]
    _memory.empty((4 * shape[0],), torch.float32)
    assert len(_memory._blocks) == 3


def add_one(slots):
    """Add one to each element."""
    for unit in units(slots):
        part(slots.numbers, unit, 1, slots.dtype)[0] += 1


def _compiled_anew(dtype=torch.float32) -> bool:
    """Whether a new kernel, which runs, came from no cache."""
    added, numbers = kernel("numbers")(add_one), torch.zeros(4, dtype=dtype)
    added.run(dtype, added.pack(numbers=numbers), 4, 4)
    assert numbers.tolist() == [1, 1, 1, 1]
    return added.compiled[dtype].cache_hits == 0


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """A folder of its own for compiled kernels, and nothing said yet."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(_cache, "_warned", False)
    return tmp_path


def test_every_dtype_and_every_source_has_a_file_of_its_own(cache, monkeypatch):
    assert [_compiled_anew(dtype) for dtype in (torch.float32, torch.float64)] == [True, True]
    assert [_compiled_anew(dtype) for dtype in (torch.float32, torch.float64)] == [False, False]
    source = linecache.cache[__file__]
    changed = [*source[2], "# another comment\n"]
    monkeypatch.setitem(linecache.cache, __file__, (source[0], source[1], changed, source[3]))
    _cache.source_digest.cache_clear()
    assert _compiled_anew()
    helpers = _slots.__file__
    source = linecache.cache[helpers]
    monkeypatch.setitem(linecache.cache, helpers, (source[0], source[1], [*source[2], "# of a helper\n"], source[3]))
    _cache.source_digest.cache_clear()
    assert _compiled_anew()
    assert len(list(cache.rglob("*.nbc"))) == 4
    assert not list(cache.rglob("*.tmp"))


def test_files_that_were_not_used_for_longest_are_deleted(cache, monkeypatch):
    folder = kernel_files.folder()
    for age, name in enumerate(("newer", "older", "oldest")):
        kernel_files.write(folder / name, bytes(100))
        os.utime(folder / name, (1_000_000 - age, 1_000_000 - age))
    kernel_files.read(folder / "oldest")  # from now on the newest of all
    monkeypatch.setattr(kernel_files, "LIMIT", 250)
    kernel_files.write(folder / "another", bytes(100))
    assert {path.name for path in folder.iterdir()} == {"oldest", "another"}
    kernel_files.write(folder / "large", bytes(1000))  # what was just written stays
    assert {path.name for path in folder.iterdir()} == {"large"}


@pytest.mark.parametrize(
    ("system", "variables", "expected"),
    [
        ("linux", {"XDG_CACHE_HOME": "/x"}, "/x/scanl/kernels"),
        ("linux", {"XDG_CACHE_HOME": "relative"}, "/home/me/.cache/scanl/kernels"),
        ("linux", {}, "/home/me/.cache/scanl/kernels"),
        ("darwin", {"XDG_CACHE_HOME": "/x"}, "/home/me/Library/Caches/scanl/kernels"),
        ("win32", {"LOCALAPPDATA": "/local"}, "/local/scanl/kernels"),
        ("win32", {}, "/home/me/AppData/Local/scanl/kernels"),
        ("linux", {"XDG_CACHE_HOME": "/x", "NUMBA_CACHE_DIR": "/chosen"}, "/chosen/scanl"),
    ],
)
def test_the_folder_of_kernels_is_the_users(monkeypatch, system, variables, expected):
    for name in ("XDG_CACHE_HOME", "LOCALAPPDATA", "NUMBA_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ({"HOME": "/home/me"} | variables).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "platform", system)
    assert kernel_files.folder() == pathlib.Path(expected)


def test_nothing_is_generated_in_the_package(tmp_path):
    """Neither kernels of ops nor those of cells, nor their sources: all are in the user's cache."""
    package = pathlib.Path(scanl.__file__).parent
    before = {path for path in package.rglob("*") if path.suffix != ".pyc"}
    environment = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    run = [sys.executable, "-c", SCAN + ELMAN]
    done = subprocess.run(run, env={**environment, "XDG_CACHE_HOME": str(tmp_path)}, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert {path for path in package.rglob("*") if path.suffix != ".pyc"} == before
    kinds = sorted(path.name.partition("-")[0].partition("_")[0] + path.suffix for path in tmp_path.rglob("*.*"))
    assert kinds == ["elman.nbc", "elman.py", "linear.nbc"]


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="this platform does not fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_several_processes_write_at_the_same_time(cache):
    """Each writes whole files, and finds those of the others."""
    context = multiprocessing.get_context("fork")
    together, anew = context.Barrier(4), context.SimpleQueue()

    def work():
        together.wait(60)
        anew.put((_compiled_anew(), _compiled_anew()))

    workers = [context.Process(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0] * 4
    assert [again for _, again in (anew.get() for _ in workers)] == [False] * 4
    assert len(list(cache.rglob("*.nbc"))) == 1
    assert not list(cache.rglob("*.tmp"))


SCAN = """
import torch
from scanl.ops import linear_scan
y, _ = linear_scan(torch.ones(1, 3, 2), torch.ones(2), backend="cpu")
assert y[0, :, 0].tolist() == [1, 2, 3]
"""
ELMAN = """
from scanl.ops import elman
elman(torch.ones(1, 3, 2), torch.eye(2), backend="cpu")
"""


@pytest.mark.parametrize("left", [0.5, 0], ids=["half", "nothing"])
def test_a_damaged_file_of_the_cache_is_written_anew(cache, left):
    assert _compiled_anew()
    assert not _compiled_anew()
    (file,) = cache.rglob("*.nbc")
    whole = file.read_bytes()
    file.write_bytes(whole[: int(left * len(whole))])
    assert _compiled_anew()
    assert not _compiled_anew()


NO_CACHE = "compiled kernels cannot be kept on disk, .*; set the environment variable NUMBA_CACHE_DIR to a folder"


def _refused(*args, **more):
    raise PermissionError(errno.EACCES, "Permission denied")


def _full(*args, **more):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("owner", "function", "failure"),
    [(pathlib.Path, "mkdir", _refused), (pathlib.Path, "write_bytes", _full)],
    ids=["no folder can be written to", "full disk"],
)
def test_kernels_run_where_none_can_be_kept(cache, monkeypatch, owner, function, failure):
    """It is said once, in one line."""
    monkeypatch.setattr(owner, function, failure)
    with pytest.warns(RuntimeWarning, match=NO_CACHE) as caught:
        assert [_compiled_anew() for _ in range(2)] == [True, True]
    assert len(caught) == 1
    assert "\n" not in str(caught[0].message)


def test_a_damaged_cache_that_cannot_be_mended(cache, monkeypatch):
    assert _compiled_anew()
    for file in cache.rglob("*.nbc"):
        file.write_bytes(b"")
    monkeypatch.setattr(pathlib.Path, "write_bytes", _full)
    with pytest.warns(RuntimeWarning, match=NO_CACHE) as caught:
        assert _compiled_anew()
    assert len(caught) == 1


def _called(function) -> set[str]:
    """The operators of ours that a call reaches."""
    seen = set()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function.namespace == "scanl":
                seen.add(function.__name__)
            return function(*args, **(kwargs or {}))

    with Watch():
        function()
    return seen


def test_a_context_sets_the_backend():
    x, a = torch.randn(2, 5, 3), torch.rand(3)

    def used(**more):
        return _called(lambda: linear_scan(x, a, **more))

    compiled = {"linear_scan_cpu.default"}
    assert used() == compiled
    with scanl.ops.backend("parallel"):
        assert used() == set()
        assert used(backend="cpu") == compiled  # named at the call
        with scanl.ops.backend("cpu"):
            assert used() == compiled
            with scanl.ops.backend("auto"):
                assert used() == compiled
        assert used() == set()
        found = []
        thread = threading.Thread(target=lambda: found.append(used()))
        thread.start()
        thread.join()
        assert found == [compiled]  # each thread has its own
        with pytest.raises(ZeroDivisionError), scanl.ops.backend("cpu"):
            _ = 1 / 0
        assert used() == set()
    assert used() == compiled


def test_a_context_names_backends_in_the_order_of_preference():
    x, r = torch.randn(2, 3, 4, 1, 2), torch.randn(4, 1, 2, 2)  # sLSTM has no parallel form
    with scanl.ops.backend("parallel", "reference"):
        assert _called(lambda: scanl.ops.slstm(x, r)) == set()
    with scanl.ops.backend("parallel"), pytest.raises(BackendError, match="slstm: unknown backend 'parallel'; known: "):
        scanl.ops.slstm(x, r)
    meta = x.to("meta"), r.to("meta")
    both = r"slstm: unknown backend 'parallel'.*; slstm: backend 'cpu' cannot run these arguments: device meta"
    with scanl.ops.backend("parallel", "cpu"), pytest.raises(BackendError, match=both):
        scanl.ops.slstm(*meta)
    with pytest.raises(BackendError, match=r"scanl.ops.backend: unknown backend 'paralel'; did you mean 'parallel'\?"):
        scanl.ops.backend("paralel")
    with pytest.raises(BackendError, match=r"scanl.ops.backend: no backend is named, expected some of auto, reference"):
        scanl.ops.backend()


@pytest.mark.parametrize("name", scanl.layers.names(presets=False))
def test_a_context_reaches_the_ops_of_layers(name):
    """A layer's steps in plain torch alone: what export to ONNX and forward-mode derivatives need."""
    layer = scanl.layers.build(name, 12, **scanl.layers.get(name).sample).eval()
    x, state = torch.randn(1, 12), layer.init_state(1)
    with scanl.ops.backend("parallel", "reference"), torch.no_grad():
        assert _called(lambda: layer(x[:, None], state)) == set()


@pytest.mark.parametrize("inside", [False, True])
def test_a_context_is_compiled_without_a_break(inside):
    torch.compiler.reset()
    x, a = torch.randn(2, 5, 3), torch.rand(3)
    graphs = []

    def scan(x):
        if inside:
            with scanl.ops.backend("parallel"):
                return linear_scan(x, a)[0]
        return linear_scan(x, a)[0]

    def keep(graph, example):
        graphs.append(graph)
        return graph

    compiled = torch.compile(scan, fullgraph=True, backend=keep)

    def ours():
        return [node for node in graphs[-1].graph.nodes if "scanl" in str(node.target)]

    with scanl.ops.backend("parallel"):
        torch.testing.assert_close(compiled(x), scan(x))
    assert not ours()
    torch.testing.assert_close(compiled(x), linear_scan(x, a)[0])
    assert bool(ours()) != inside
    with scanl.ops.backend("reference"):
        torch.testing.assert_close(compiled(x), linear_scan(x, a)[0])
    assert not ours()


@pytest.mark.parametrize("steps", [(6,), (6, 7, 9)], ids=["numbers", "symbols"])
def test_a_compiled_call_is_checked_as_any_other(steps):
    """Where the compiler knows all sizes as numbers, and where lengths have changed so that it knows them no longer."""
    torch.compiler.reset()
    graphs = []

    def run(q, beta):
        return scanl.ops.delta_rule(q, q, q, beta)[0]

    def keep(graph, example):
        graphs.append(graph)
        return graph

    compiled = torch.compile(run, fullgraph=True, backend=keep)
    for count in steps:
        q, beta = torch.randn(2, count, 3, 4), torch.rand(2, count, 3)
        torch.testing.assert_close(compiled(q, beta), run(q, beta))
    assert len(graphs) == min(len(steps), 2)  # the second one takes any length
    with pytest.raises(ShapeError, match=r"delta_rule: beta has shape \(2, 5, 3\), expected "):
        torch.compile(run, backend="eager")(torch.randn(2, 8, 3, 4), torch.rand(2, 5, 3))


def test_an_option_that_changes_is_compiled():
    """At the second value the compiler takes it as a symbol, which is no constant."""
    torch.compiler.reset()
    q, beta = torch.randn(2, 5, 3, 4), torch.rand(2, 5, 3)

    def run(scale):
        return scanl.ops.delta_rule(q, q, q, beta, scale=scale)[0]

    compiled = torch.compile(run, fullgraph=True, backend="eager")
    for scale in (0.5, 0.7, 0.9):
        torch.testing.assert_close(compiled(scale), run(scale))


@pytest.mark.parametrize("op", OPS, ids=[op.name for op in OPS])
def test_the_signature_is_the_true_one(op):
    signature = inspect.signature(op)
    assert {*signature.parameters} == {*op.names, *op.options, "reverse", "cu_seqlens", "starts", "backend"}
    assert list(signature.parameters)[: len(op.positional)] == list(op.positional)
    for operand in op.operands:
        parameter = signature.parameters[operand.name]
        free = operand.optional or operand.name == op.state
        by_position = operand.name in op.positional
        assert parameter.kind is (parameter.POSITIONAL_OR_KEYWORD if by_position else parameter.KEYWORD_ONLY)
        assert parameter.default is (None if free else parameter.empty)
        if not operand.tree:
            assert parameter.annotation == (Tensor | None if free else Tensor)
    defaults = {"reverse": False, "cu_seqlens": None, "starts": None, "backend": "auto"}
    for name, default in ({name: option.default for name, option in op.options.items()} | defaults).items():
        assert signature.parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
        assert signature.parameters[name].default == default
    if op.form is None:
        assert signature.return_annotation == tuple[Tensor, Tensor]
    assert all(one.annotation is not one.empty for one in signature.parameters.values())
    sample = next(iter(op.samples))
    signature.bind(**sample.operands, **sample.options)


def _drawn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


@pytest.mark.parametrize("backend", ["cpu", "parallel"])
@pytest.mark.parametrize("a", [(3,), (1, 1), (2, 1, 3), ()], ids=str)
def test_the_gradient_of_a_decay_that_is_constant_over_many_steps(backend, a):
    """Kernels sum it in parts, of which a long sequence has several."""
    operands = {"x": _drawn(2, 600, 3), "a": 0.9 + 0.1 * torch.rand(a, dtype=torch.float64), "state": _drawn(2, 3)}
    laws.truth(linear_scan, OpSample(operands), {}, backend, torch.float64)


@pytest.mark.parametrize("cores", [1, 8])
@pytest.mark.parametrize("name", ["linear_attention", "delta_rule", "dplr_scan"])
def test_the_gradient_of_a_heads_decay_over_several_blocks_of_values(monkeypatch, name, cores):
    """With one decay a head, (H,), and more values than a kernel takes at once, on one core and on several."""
    from scanl.ops._cpu import _columns

    monkeypatch.setattr(_columns, "CORES", cores)
    _columns._divide.cache_clear()
    op, lead = registry.get(name), (2, 5, 2)
    operands = {"q": _drawn(*lead, 3), "k": _drawn(*lead, 3), "v": _drawn(*lead, 130)}
    operands |= {"beta": torch.rand(lead).double()} if name == "delta_rule" else {}
    operands |= {"a": _drawn(*lead, 3) / 4, "b": _drawn(*lead, 3) / 4} if name == "dplr_scan" else {}
    operands |= {"g": torch.rand(2).double().log(), "state": _drawn(2, 2, 3, 130)}
    try:
        for backend in op.preference()[:-1]:
            if not (backend == "triton" and cores > 1):
                laws.truth(op, OpSample(operands), {}, backend, torch.float64)
    finally:
        _columns._divide.cache_clear()


@pytest.mark.parametrize("backend", ["triton", "cpu", "parallel"])
@pytest.mark.parametrize("reverse", [False, True])
def test_the_gradient_of_step_sizes_between_5_and_20(backend, reverse):
    """Where softplus is nearly, but not yet, the identity."""
    op = registry.get("selective_scan")
    if backend not in op.backends:
        pytest.skip("needs triton")
    lead = (1, 16, 2)
    delta = torch.linspace(4.5, 21, 32, dtype=torch.float64).view(lead)
    operands = {"u": _drawn(*lead), "delta": delta, "A": -torch.rand(2, 3).double() / 20, "B": _drawn(1, 16, 3)}
    operands |= {"C": _drawn(1, 16, 3), "delta_bias": torch.zeros(2).double(), "state": _drawn(1, 2, 3)}
    laws.truth(op, OpSample(operands, {"delta_softplus": True}), {"reverse": reverse}, backend, torch.float64)
    laws.truth(op, OpSample(operands), {"reverse": reverse}, backend, torch.float64)
