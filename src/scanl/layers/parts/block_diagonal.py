"""Linear maps with a block-diagonal matrix: each block of channels is mixed separately."""

import torch
from torch import Tensor, nn

from scanl.layers.module import Module
from scanl.ops._frame.context import exactly

# Channels of a product, and rows from which on narrower blocks are joined to one of as many channels. Blocks of 4 take
# a third of the time of a dense matrix; joined, a sixth. For few rows the joining takes longer than the products.
JOINED, ROWS = 32, 64


def block_diagonal(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply each block of x (..., blocks * width) by its own matrix.

    weight: (blocks, width, width), input axis before output axis.   bias: (blocks, width).

    >>> block_diagonal(torch.tensor([1.0, 2.0]), torch.tensor([[[3.0]], [[5.0]]])).tolist()  # 1 * 3 and 2 * 5
    [3.0, 10.0]
    """
    blocks, width, _ = weight.shape
    # a size may be symbolic where it is traced, and a comparison would fix it
    many = torch.compiler.is_compiling() or (x.shape[:-1].numel() >= ROWS and not exactly())
    limit = max(1, JOINED // max(1, width)) if many else 1
    joined = next(count for count in range(limit, 0, -1) if blocks % count == 0)
    if joined > 1:  # `joined` blocks become one, with zeros beside them
        apart = torch.eye(joined, dtype=weight.dtype, device=weight.device).view(joined, 1, joined, 1)
        weight = (weight.unflatten(0, (-1, joined)).unsqueeze(-2) * apart).flatten(3, 4).flatten(1, 2)
        blocks, width, _ = weight.shape
        bias = None if bias is None else bias.reshape(blocks, width)
    parts = x.reshape(-1, blocks, width).transpose(0, 1)
    y = torch.bmm(parts, weight) if bias is None else torch.baddbmm(bias[:, None], parts, weight)
    return y.transpose(0, 1).reshape(x.shape)


class BlockDiagonalMap(Module):
    """y = W x + b, with W block-diagonal.

    weight: (blocks, width, width), output axis before input axis; initially N(0, std²).   bias: (D) or None; initially
    0.
    """

    def __init__(self, dim: int, blocks: int, std: float, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(blocks, dim // blocks, dim // blocks) * std)
        self.bias = nn.Parameter(torch.zeros(dim)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return block_diagonal(x, self.weight.mT, None if self.bias is None else self.bias.view(self.weight.shape[:2]))
