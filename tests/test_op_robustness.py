"""What callers do to any op beside calling it: laws over every op and backend, as in test_ops.py."""

import pytest
import torch
from torch import Tensor

import laws
from scanl.ops import linear_scan
from scanl.ops._op import REGISTRY, Op, Sample

CASES = [
    pytest.param(op, backend, id=f"{op.name}-{backend}") for op in REGISTRY.values() for backend in op.preference()
]
FUSED = [case for case in CASES if case.values[1] in ("cpu", "triton")]
each = pytest.mark.parametrize(("op", "backend"), CASES)
EMULATED = not torch.cuda.is_available()  # Triton's interpreter is thousands of times slower than a GPU


def _some(op: Op, backend: str) -> list[Sample]:
    """Samples that a backend takes; one where Triton is emulated."""
    able = [sample for sample in op.samples() if not laws.refusal(op, sample, backend)]
    return able[:1] if backend == "triton" and EMULATED else able


def _lazy(value: Tensor) -> Tensor:
    """The same numbers, of which memory holds the conjugate or the negative, and a bit that says so."""
    lazy = value.conj().resolve_conj().conj() if value.is_complex() else torch._neg_view(-value)
    assert lazy.is_conj() or lazy.is_neg()
    return lazy


@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=["negative", "conjugate"])
def test_lazy_bits(op, backend, dtype):
    """A lazily negated or conjugated operand, state or incoming gradient is what it stands for."""
    chosen = op.backends[backend]
    if dtype not in op.dtypes or chosen.compute_dtype(dtype) not in chosen.dtypes:
        pytest.skip(f"{op.name} on {backend} does not take {dtype}")
    for sample in _some(op, backend):
        more = {**laws.options(sample, backend), "backend": backend}
        operands = laws.at(op, sample, dtype, backend)
        rounding = laws.own_rounding(op, operands, laws.options(sample, backend))
        y, last = op(**operands, **more)
        for name in operands:
            found = op(**{**operands, name: _lazy(operands[name])}, **more)
            for value, plain in zip(found, (y, last), strict=True):
                laws.close(value, plain, rounding, f"{op.name} {backend}, {name} lazy")
        weights = [torch.linspace(-1, 1, v.numel()).view(v.shape).to(v) for v in (y, last)]
        results = []
        for change in (lambda value: value, _lazy):
            leaves = {name: value.clone().requires_grad_() for name, value in operands.items()}
            outputs = op(**{name: change(value) for name, value in leaves.items()}, **more)
            given = [change(weight) for weight in weights]
            results.append((*outputs, *torch.autograd.grad(outputs, list(leaves.values()), given)))
        for name, plain, value in zip(("y", "last", *operands), *results, strict=True):
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
