"""`scanl ops`: list what each backend of each op supports, from the registry, as on the pages of the ops."""

from collections.abc import Sequence

import scanl.ops  # noqa: F401 (fills the registry)
from scanl.cli.parser import Parser
from scanl.ops import registry
from scanl.ops.registry import Backend, HigherOrder, Op

HEADER = ("op", "backend", "device", "dtypes", "backward pass", "packed, reversed")


def list_ops(argv: Sequence[str]) -> int:
    """Print a line for each backend of each op. Cells are left out: they belong to their layers."""
    Parser("ops", "The ops and their backends.").parse(argv)
    print(table())
    return 0


def table(*ops: Op | HigherOrder) -> str:
    """Return a Markdown table of the backends of ops; without an argument, of all ops except cells."""
    rows = [HEADER, tuple("---" for _ in HEADER)]
    for op in ops or [op for op in registry.every() if not isinstance(op, registry.Cell)]:
        rows += [_row(op, op.backends[backend]) for backend in op.preference()]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _row(op: Op | HigherOrder, backend: Backend) -> tuple[str, ...]:
    takes = [dtype for dtype in op.dtypes if backend.compute_dtype(dtype) in backend.dtypes]
    fused = backend.name in ("cpu", "triton")
    packed = "in one call" if backend.whole else "sequence by sequence, flipped"
    return (
        f"`{op.name}`",
        f"`{backend.name}`",
        ", ".join(backend.devices) if backend.devices else "any",
        ", ".join(str(dtype).removeprefix("torch.") for dtype in takes),
        "fused" if fused else "autograd",
        "by the caller" if isinstance(op, HigherOrder) else packed,
    )
