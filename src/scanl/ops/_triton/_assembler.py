"""Refuse half-precision products of matrices where the compiler is known to get them wrong.

Triton translates a kernel to PTX, and ptxas, NVIDIA's assembler, translates that to machine code. On compute capability
9 (Hopper) a product on tensor cores reads factors at addresses in uniform registers. ptxas 12.8, which comes with
triton 3.6, computes some of these addresses from a register that no instruction has written. The product then reads
other memory: its numbers are wrong, or the access is illegal. An H100 showed both, and the machine code shows why.
ptxas up to 13.2 may also overwrite a factor in registers before the product has read it (triton issue 9433 and pull
request 11781). ptxas 13.3 mends that; triton 3.9 brings 13.4. With ptxas 13.4, triton 3.6 still made one wrong kernel
on an H100: the gradient of v of `linear_attention` without a decay, in bfloat16 with 128 channels.

On compute capability 10 triton before 3.9 may add two products wrongly to one sum in a loop (triton issue 10821). No
such device has run these kernels.
"""

import functools
import os

import torch

ASSEMBLER = (13, 3)
COMPILER = (3, 9)


def faults(device: torch.device) -> list[str]:
    """Return why half-precision products would be wrong on this device; empty if no fault is known."""
    if device.type != "cuda" or torch.version.cuda is None or os.environ.get("TRITON_INTERPRET") == "1":
        return []
    major, minor = torch.cuda.get_device_capability(device)
    return known(major, minor, *versions(major * 10 + minor)) if major in (9, 10) else []


@functools.cache
def versions(architecture: int) -> tuple[str, str]:
    """Return the versions of triton and of the assembler that it uses for this architecture, such as 90."""
    import triton
    from triton.backends.nvidia.compiler import get_ptxas

    return triton.__version__, get_ptxas(architecture).version


def known(major: int, minor: int, triton: str, assembler: str) -> list[str]:
    """Return the known faults of these versions for this compute capability."""
    what = f"half-precision products are wrong on compute capability {major}.{minor}"
    if major == 9 and _numbers(assembler) < ASSEMBLER:
        return [f"{what} with ptxas {assembler}, expected 13.3 or newer (see docs/gpu.md)"]
    if major in (9, 10) and _numbers(triton) < COMPILER:
        return [f"{what} with triton {triton}, expected 3.9 or newer (see docs/gpu.md)"]
    return []


def _numbers(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)
