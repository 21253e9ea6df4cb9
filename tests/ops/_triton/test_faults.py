"""Half-precision products are refused where the compiler is known to get them wrong; `auto` takes another backend."""

import pytest
import torch

from scanl.errors import BackendError
from scanl.ops import delta_rule, dplr_scan, linear_attention
from scanl.ops._frame import dispatch
from scanl.ops._triton import _assembler
from scanl.ops.registry import HALF_DTYPES, Op

OPS = pytest.mark.parametrize("op", [linear_attention, delta_rule, dplr_scan], ids=lambda op: op.name)
WRONG = "half-precision products are wrong on compute capability 9.0 with ptxas 12.8, expected 13.3 or newer"


@pytest.mark.parametrize(
    ("capability", "triton", "assembler", "named"),
    [
        ((9, 0), "3.6.0", "12.8", "capability 9.0 with ptxas 12.8, expected 13.3 or newer"),
        ((9, 0), "3.8.0", "12.9", "capability 9.0 with ptxas 12.9, expected 13.3 or newer"),
        ((9, 0), "3.8.0", "13.2", "capability 9.0 with ptxas 13.2, expected 13.3 or newer"),
        ((9, 0), "3.6.0", "13.4", "capability 9.0 with triton 3.6.0, expected 3.9 or newer"),
        ((9, 0), "3.9.0", "13.3", None),
        ((9, 0), "3.9.0", "13.4", None),
        ((10, 3), "3.8.0", "13.3", "capability 10.3 with triton 3.8.0, expected 3.9 or newer"),
        ((10, 0), "3.10.0+git1", "13.4", None),
        ((8, 0), "3.6.0", "12.8", None),
        ((12, 0), "3.6.0", "12.9", None),
    ],
    ids=str,
)
def test_known_faults(capability, triton, assembler, named):
    reasons = _assembler.known(*capability, triton, assembler)
    assert len(reasons) == (named is not None)
    assert all(named in reason for reason in reasons)


def sizes(op: Op) -> dict:
    sample = next(iter(op.samples))
    operands = {name: sample.operands.get(name) for name in op.names}
    options = {name: option.default for name, option in op.options.items()}
    return {**op.sizes(operands, None), **options, "given": frozenset(op.required)}


def hopper(monkeypatch: pytest.MonkeyPatch, triton: str, assembler: str) -> None:
    """Let torch tell of an H100, and triton of its version and of this assembler."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(_assembler, "versions", lambda architecture: (triton, assembler))


@OPS
@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
def test_half_precision_is_refused_by_name_and_left_to_another_backend(op, dtype, monkeypatch):
    hopper(monkeypatch, "3.6.0", "12.8")
    device, arguments = torch.device("cuda"), sizes(op)
    (reason,) = op.backends["triton"].reasons(device, dtype, arguments, named=True)
    assert reason.startswith(WRONG)
    assert dispatch.choose(op.name, op.backends, ("auto",), device, dtype, arguments).name == "parallel"


@OPS
@pytest.mark.parametrize(
    ("dtype", "triton", "assembler"), [(torch.float32, "3.6.0", "12.8"), (torch.bfloat16, "3.9.0", "13.3")], ids=str
)
def test_other_dtypes_and_versions_are_not_refused(op, dtype, triton, assembler, monkeypatch):
    hopper(monkeypatch, triton, assembler)
    device, arguments = torch.device("cuda"), sizes(op)
    assert dispatch.choose(op.name, op.backends, ("auto",), device, dtype, arguments).name == "triton"


@OPS
def test_the_interpreter_takes_half_precision(op):
    if torch.cuda.is_available():
        pytest.skip("with a device the kernels are compiled")
    assert not op.backends["triton"].reasons(torch.device("cpu"), torch.float16, sizes(op), named=True)


@OPS
@pytest.mark.gpu
def test_a_call_on_a_device(op):
    """It is refused if the device's versions have a known fault, and runs if they have none."""
    sample = next(iter(op.samples))
    operands = {name: value.to("cuda", torch.bfloat16) for name, value in sample.operands.items()}
    if _assembler.faults(torch.device("cuda")):
        with pytest.raises(BackendError, match="half-precision products are wrong on compute capability"):
            op(**operands, backend="triton")
    else:
        assert op(**operands, backend="triton")[0].isfinite().all()
