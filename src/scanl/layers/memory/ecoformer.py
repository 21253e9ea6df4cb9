"""EcoFormer: linear attention over binary codes of queries and keys, so that its products are sums."""

import math
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.errors import ShapeError
from scanl.layers import options, registry
from scanl.layers.base import Layer, widen
from scanl.layers.initial_state import StateAxes
from scanl.ops import normalized_linear_attention
from scanl.options import at_least


class _Sign(torch.autograd.Function):
    """±1, with the gradient of the argument clipped to ±1: straight through."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(y)
        return torch.where(y > 0, 1.0, -1.0).to(y.dtype) + 0 * y  # NaN stays

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:  # type: ignore[override]
        (y,) = ctx.saved_tensors
        return torch.where(y.abs() < 1, dy, 0 * y)


@registry.register("ecoformer")
class EcoFormer(Layer):
    """EcoFormer: queries and keys are one projection, hashed to codes of ±1; attention is an inner product of codes.

    The hash functions are not trained by gradients. They are drawn when the layer is made, and `learn_codes` fits them
    to a batch: similar tokens get similar codes. Call it once, on the first batch. Gradients pass a sign as if it were
    its argument clipped to ±1.

    Differs: the scale s of the distances comes from the batch from which the codes were learned. The scale of the
    present batch would depend on later steps. The sum of values has the factor c; in the authors' program the step's
    own value stands there. A step reads itself and the past; the paper's attention is for images and reads all steps. c
    is r + 1, as in the program; in the paper it is a power of two.

    Parameters as in the authors' program: to_qk, to_v, proj (D, D), proj with a bias. Buffers: A (H, r, m), the hash
    functions; anchor (H, m, K); mvec (H, m), the mean of κ; scale (H), s.
    Initialisation: linear weights and biases as in PyTorch; A N(0, 1); anchors of unit length in all directions; mvec
    and scale their means over the anchors.
    """

    id = "S-ecoformer"
    equation = (
        "o_t = sum_{j<=t} (c + h(x_t) . h(x_j)) v_j / sum_{j<=t} (c + h(x_t) . h(x_j)),  h(x) = sign(A (k(x) - m)),  "
        "k_i(x) = exp(-|x - a_i|^2 / 2s),  x = unit(W_qk x),  c = r + 1;  y = W_o o"
    )
    source = 'Liu et al., "EcoFormer: Energy-Saving Attention with Linear Complexity", arXiv:2209.09004, sec. 4'
    op = "linear_attention"
    state: ClassVar = StateAxes(
        "num_heads, num_bits + 1, head_dim + 1",
        "sums over steps: a row for each bit and one for c, a column for the denominator",
    )
    sample: ClassVar = {"num_heads": 2, "num_bits": 4, "num_anchors": 5}
    residual_out = "proj"
    excused: ClassVar = {
        "gradients_are_the_derivatives_and_reach_every_parameter": "the derivative of a sign is 0, and its gradient "
        "here is that of a clipped number",
    }

    A: Tensor
    anchor: Tensor
    mvec: Tensor
    scale: Tensor

    def __init__(
        self,
        dim: options.Dim,
        num_heads: Annotated[options.Heads, "H heads of K = D / H channels; a divisor of dim"] = 8,
        num_bits: Annotated[int, at_least(1), "r, length of a code"] = 16,
        num_anchors: Annotated[int, at_least(1), "m, anchors of the kernel"] = 25,
        bias: Annotated[options.Bias, "biases of to_qk and to_v"] = False,
    ) -> None:
        super().__init__()
        self.dim, self.num_heads, self.head_dim, self.num_bits = dim, num_heads, dim // num_heads, num_bits
        self.to_qk, self.to_v = (nn.Linear(dim, dim, bias=bias) for _ in range(2))
        self.proj = nn.Linear(dim, dim)
        self.register_buffer("A", torch.randn(num_heads, num_bits, num_anchors))
        self.register_buffer("anchor", F.normalize(torch.randn(num_heads, num_anchors, self.head_dim), dim=-1))
        self.register_buffer("mvec", torch.zeros(num_heads, num_anchors))
        self.register_buffer("scale", torch.ones(num_heads))
        self._measure(self.anchor)

    def run(self, x: Tensor, state: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
        kernel = self._kernel(self._hashed(x))
        codes = _Sign.apply(torch.einsum("bthm,hrm->bthr", kernel, widen(self.A)))
        codes = F.pad(codes, (0, 1), value=math.sqrt(self.num_bits + 1))
        v = widen(self.to_v(x)).unflatten(-1, (self.num_heads, -1))
        o, state = normalized_linear_attention(codes, codes, v, state=state, cu_seqlens=cu_seqlens)
        return self.proj(o.flatten(2).to(x.dtype)), state

    @torch.no_grad()
    def learn_codes(self, x: Tensor, *, similar: int = 10, steps: int = 100, lr: float = 5e-4) -> None:
        """Fit the hash functions to a batch of inputs (B, T, D) of the layer, in place.

        Anchors are random tokens of the first sequence. The wanted product of two tokens' codes is r for the `similar`
        most similar tokens of each token, -r for as many of the least similar, and 0 for others. Bits are fitted one by
        one, each to the error that the bits before it leave: by SGD with Nesterov's momentum 0.9, with 2 σ(y) - 1 for
        the sign. A bit changes only if its loss falls. Raises ShapeError if T is less than `similar` or than the number
        of anchors.
        """
        least = max(similar, self.anchor.shape[1])
        if x.ndim != 3 or x.shape[1] < least:
            raise ShapeError(
                f"learn_codes: x has shape {tuple(x.shape)}, expected (B, T, D) with T of at least {least}"
            )
        hashed = self._hashed(x)
        self.anchor.copy_(
            hashed[0, torch.randperm(x.shape[1], device=x.device)[: self.anchor.shape[1]]].transpose(0, 1)
        )
        self._measure(hashed.flatten(0, 1).transpose(0, 1))
        kernel = self._kernel(hashed).transpose(1, 2)
        products = hashed.transpose(1, 2) @ hashed.permute(0, 2, 3, 1)
        target = torch.zeros_like(products)
        for sign, largest in ((1.0, True), (-1.0, False)):
            target.scatter_(3, products.topk(similar, 3, largest).indices, sign * self.num_bits)

        def loss(y: Tensor) -> Tensor:
            return -torch.einsum("bhn,bhnl,bhl->bh", y, target, y).mean() / (y.shape[2] * self.num_bits)

        for bit in range(self.num_bits):
            current = self.A[:, bit].to(kernel.dtype)
            a = current.clone().requires_grad_()
            optimizer = torch.optim.SGD([a], lr, momentum=0.9, nesterov=True)
            for _ in range(steps):
                with torch.enable_grad():
                    fit = loss(2 * (kernel @ a[..., None]).squeeze(-1).sigmoid() - 1)
                a.grad = torch.autograd.grad(fit, a)[0]
                optimizer.step()
            codes = [torch.where((kernel @ row[..., None]).squeeze(-1) > 0, 1.0, -1.0) for row in (current, a)]
            old, new = (row.to(kernel.dtype) for row in codes)
            better = loss(new) < loss(old)
            self.A[:, bit].copy_(torch.where(better, a, current))
            code = torch.where(better, new, old)
            target = target - code[..., :, None] * code[..., None, :]

    def _hashed(self, x: Tensor) -> Tensor:
        """Return the vectors to hash, of unit length: (B, T, H, K)."""
        return F.normalize(widen(self.to_qk(x)).unflatten(-1, (self.num_heads, -1)), dim=-1)

    def _distances(self, x: Tensor) -> Tensor:
        """Return squares of distances of x (..., H, K) to the anchors, (..., H, m). All have unit length."""
        return 2 - 2 * torch.einsum("...hk,hmk->...hm", x, widen(self.anchor))

    def _kernel(self, x: Tensor) -> Tensor:
        return torch.exp(-self._distances(x) / (2 * widen(self.scale)[:, None])) - widen(self.mvec)

    @torch.no_grad()
    def _measure(self, x: Tensor) -> None:
        """Set the scale and the mean of the kernel to those of x (H, N, K)."""
        distances = self._distances(x.transpose(0, 1))
        self.scale.copy_(distances.mean((0, 2)).clamp(min=1e-6))
        self.mvec.copy_(torch.exp(-distances / (2 * widen(self.scale)[:, None])).mean(0))
