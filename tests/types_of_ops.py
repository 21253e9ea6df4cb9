"""What a type checker sees of ops. `make lint` reads this file: an error that is ignored here has to be one."""
# pyright: reportUnnecessaryTypeIgnoreComment=true

from typing import assert_type

from torch import Tensor

from scanl import ops


def right(x: Tensor, packed: Tensor | None) -> None:
    assert_type(ops.linear_scan(x, x), tuple[Tensor, Tensor])
    assert_type(
        ops.linear_scan(x, a=x, state=None, reverse=True, cu_seqlens=packed, backend="cpu"), tuple[Tensor, Tensor]
    )
    assert_type(ops.linear_attention(x, x, x, x, u=x, scale=1.0)[1], Tensor)
    assert_type(ops.linear_scan.explain(x, x), str)


def wrong(x: Tensor) -> None:
    ops.linear_scan(1, x)  # pyright: ignore[reportArgumentType]
    ops.linear_scan(x)  # pyright: ignore[reportCallIssue]
    ops.linear_scan(x, x, revers=True)  # pyright: ignore[reportCallIssue]
    ops.linear_scan(x, x, cu_seqlens=[0, 4])  # pyright: ignore[reportArgumentType]
    ops.linear_scan(x, x, scale=1.0)  # pyright: ignore[reportCallIssue]
    ops.linear_attention(x, x, x, scale="1")  # pyright: ignore[reportArgumentType]
