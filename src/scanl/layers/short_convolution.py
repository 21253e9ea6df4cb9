r"""Short depthwise convolution.

.. math:: y_t = b + \sum_{j=0}^{W-1} c_j \odot x_{t-j}
"""

import torch
from torch import Tensor, nn

from scanl.errors import ConfigError
from scanl.layers.base import Layer
from scanl.layers.packing import sequence_index
from scanl.layers.state import Device, DType, State


class _Window(torch.autograd.Function):
    """y_t = b + Σ_j w_j x_{t+j} over x (B, T+W-1, D): W fused multiply-adds each way.

    On two CPU cores at (8, 256, 256), W=4, this takes 1.6 ms both ways, `conv1d` with its transposes 13.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        length = x.shape[1] - weight.shape[0] + 1
        first = x[:, :length]
        y = first * weight[0] if bias is None else torch.addcmul(bias, first, weight[0])
        for j in range(1, weight.shape[0]):
            y.addcmul_(x[:, j : j + length], weight[j])
        return y

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        (grad,), (x, weight) = grad_outputs, ctx.saved_tensors
        length = grad.shape[1]
        dx = torch.zeros_like(x)
        for j in range(weight.shape[0]):
            dx[:, j : j + length].addcmul_(grad, weight[j])
        dw = [(grad * x[:, j : j + length]).sum((0, 1)) for j in range(weight.shape[0])]
        return dx, torch.stack(dw), grad.sum((0, 1)) if ctx.needs_input_grad[2] else None


def _window(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if x.shape[1] != weight.shape[0]:
        return _Window.apply(x, weight, bias)  # type: ignore[no-any-return]
    y = (x * weight).sum(1, keepdim=True)  # one step: fewer and plainer calls
    return y if bias is None else y + bias


class ShortConvolution(Layer):
    """Depthwise convolution over the last few steps, whole sequences or pieces of any length alike.

    Args:
        dim: D, channels.
        kernel_size: W, the window.
        bias: add b.
        causal: look back only. Otherwise the window is centred (its longer half in the past when W is even),
            the layer sees the future, and there is no state.

    x, y: (B, T, D).   State: the last W-1 inputs (B, W-1, D), zeros at the start, always of full length.
    Parameters as of `nn.Conv1d(D, D, W, groups=D)`: `conv.weight` (D, 1, W), newest input last; `conv.bias`.
    """

    id = "P-shortconv"
    equation = "y_t = b + sum_j c_j * x_{t-j}"
    residual_out = None

    def __init__(self, dim: int, kernel_size: int = 4, bias: bool = True, causal: bool = True) -> None:
        super().__init__()
        if kernel_size < 1:
            raise ConfigError(f"short_convolution: kernel_size is {kernel_size}, expected at least 1")
        self.dim = dim
        self.kernel_size = kernel_size
        self.causal = causal
        self.bidirectional = not causal
        self.conv = nn.Conv1d(dim, dim, kernel_size, groups=dim, bias=bias)

    def init_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> State:
        if not self.causal:
            return ()
        return self._zeros(batch_size, self.kernel_size - 1, self.dim, device=device, dtype=dtype)

    def forward(self, x: Tensor, state: State = None, *, cu_seqlens: Tensor | None = None) -> tuple[Tensor, State]:
        self._check(x, state, cu_seqlens)
        rows = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        behind = self.kernel_size - 1 if self.causal else self.kernel_size // 2
        ahead = self.kernel_size - 1 - behind
        before = x.new_zeros(rows, behind, self.dim) if state is None or not self.causal else state.to(x.dtype)
        weight = self.conv.weight[:, 0].t()
        if cu_seqlens is None:
            after = [] if self.causal else [x.new_zeros(rows, ahead, self.dim)]
            window = torch.cat([before, x, *after], 1)
            y = _window(window, weight, self.conv.bias)
            if not self.causal:
                return y, ()
            last = window[:, x.shape[1] :]
            # A copy, so that the state does not hold a long window in memory.
            return y, last if x.shape[1] == 1 else last.clone()
        # Each sequence between its own cache and its own zeros, end to end; so the n-th starts n (W-1) later.
        after = x.new_zeros(rows, ahead, self.dim)
        total, gap = x.shape[1], self.kernel_size - 1
        owner = sequence_index(cu_seqlens, total)
        outputs = torch.arange(total, device=x.device) + owner * gap
        row = torch.arange(rows, device=x.device)[:, None]
        starts = cu_seqlens[:-1, None] + row * gap + torch.arange(behind, device=x.device)
        ends = cu_seqlens[1:, None] + row * gap + behind + torch.arange(ahead, device=x.device)
        window = x.new_zeros(total + rows * gap, self.dim)
        places = torch.cat([starts.flatten(), outputs + behind, ends.flatten()])
        window = window.index_copy(0, places, torch.cat([before.flatten(0, 1), x[0], after.flatten(0, 1)]))
        y = _window(window[None], weight, self.conv.bias)[:, outputs]
        last = cu_seqlens[1:, None] + row * gap + torch.arange(behind, device=x.device)
        return y, window[last] if self.causal else ()
