"""Choose the backend of a call: what each backend can run, why it cannot, and the order of preference."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from scanl.errors import BackendError, unknown
from scanl.ops._frame.declaration import COMPLEX, FLOATING, WIDER, short

ORDER = ("triton", "cpu", "parallel", "reference")  # the order in which "auto" tries backends


@dataclass(frozen=True)
class Backend:
    """One implementation of an op, and its limits."""

    name: str
    run: Callable[..., tuple[Tensor, Any]]
    devices: tuple[str, ...] | None = None  # None: any device
    dtypes: tuple[torch.dtype, ...] = FLOATING + COMPLEX  # narrower operands are widened first
    whole: bool = False  # handles reverse and cu_seqlens itself; else it gets forward time and one sequence per row
    package: str | None = None  # a package that it needs and that is not installed; None: nothing is missing
    needs: Callable[..., Sequence[str]] = lambda **sizes: ()  # (sizes, options, names of `given` operands) -> reasons
    faults: Callable[[torch.device, torch.dtype], Sequence[str]] = lambda device, dtype: ()  # reasons not to trust it
    forward_mode: bool = True  # has derivatives in forward mode (torch.func.jvp, jacfwd, hessian)
    excused: Mapping[str, str] = field(default_factory=dict)  # tests that it need not pass, each with the reason
    half_products: bool = False  # with half-precision operands, factors of products are rounded to half, sums float32

    def reasons(self, device: torch.device, dtype: torch.dtype, sizes: Mapping[str, Any], *, named: bool) -> list[str]:
        """Return why it cannot run these arguments; empty if it can. named: the caller named this backend."""
        return [*self._against(device, dtype, named=named), *self.needs(**sizes)]

    def can_run(self, device: torch.device, dtype: torch.dtype, sizes: Mapping[str, Any]) -> bool:
        """Return whether "auto" may take it. What it needs is asked last: for a cell it is a trace of the step."""
        return not self._against(device, dtype, named=False) and not self.needs(**sizes)

    def _against(self, device: torch.device, dtype: torch.dtype, *, named: bool) -> list[str]:
        reasons = []
        emulated = named and self.name == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
        if self.devices is not None and device.type not in self.devices and not (emulated and device.type == "cpu"):
            reasons.append(f"device {device.type} (runs on {', '.join(self.devices)})")
        elif self.package is not None:
            reasons.append(f"package {self.package} is not installed")
        if not named and not self.forward_mode and in_forward_mode():
            reasons.append("it has no derivative in forward mode, which this call asks for")
        compute = self.compute_dtype(dtype)
        if compute not in self.dtypes:
            reasons.append(f"dtype {short(dtype)} (takes {', '.join(map(short, self.dtypes))})")
        if not reasons:
            reasons.extend(self.faults(device, compute))
        return reasons

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype if dtype in self.dtypes else WIDER.get(dtype, dtype)


def preference(backends: Iterable[str]) -> list[str]:
    """Sort backends into the order in which "auto" tries them."""
    return sorted(backends, key=ORDER.index)


def choose(
    op: str,
    backends: Mapping[str, Backend],
    names: Sequence[str],
    device: torch.device,
    dtype: torch.dtype,
    sizes: Mapping[str, Any],
) -> Backend:
    """Return the first preferred backend that can run; "auto" stands for all. BackendError says why none can."""
    refusals = []
    for name in names:
        if name == "auto":
            for candidate in preference(backends):
                if backends[candidate].can_run(device, dtype, sizes):
                    return backends[candidate]
        elif name not in backends:
            refusals.append(f"{op}: {unknown('backend', name, ['auto', *backends])}")
        else:
            reasons = backends[name].reasons(device, dtype, sizes, named=True)
            if not reasons:
                return backends[name]
            refusals.append(f"{op}: backend {name!r} cannot run these arguments: {'; '.join(reasons)}")
    raise BackendError("; ".join(refusals))


def explain(backends: Mapping[str, Backend], device: torch.device, dtype: torch.dtype, sizes: Mapping[str, Any]) -> str:
    """Return one line per backend: that it can run, or why not."""
    reasons = {name: backends[name].reasons(device, dtype, sizes, named=False) for name in preference(backends)}
    return "\n".join(f"{name}: {'; '.join(against) or 'can run'}" for name, against in reasons.items())


def in_forward_mode() -> bool:
    return forward_ad._current_level >= 0


def transforming() -> bool:
    """Return whether a transformation of torch.func is active."""
    return torch._C._functorch.peek_interpreter_stack() is not None  # pyright: ignore[reportAttributeAccessIssue]
