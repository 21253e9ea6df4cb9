"""A stack of recurrent layers with error weights, by which targets reach a layer from the one above."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.errors import ConfigError
from scanl.layers.base import Layer
from scanl.layers.state import Device, DType
from scanl.models.stack import Backbone
from scanl.options import at_least


class AlignedStack(Backbone):
    r"""A stack of Elman layers without norms or residuals, whose layers can learn from targets of their own.

    .. math:: z^\ell_t = \tanh h^\ell_t, \quad h^\ell_t = W^\ell z^{\ell-1}_t + V^\ell z^\ell_{t-1} + b^\ell

    Under `align` the backward pass is local representation alignment: a layer gets the pull g = E^{ℓ+1} e^{ℓ+1} from
    the layer above, has the target φ(h^ℓ - β g), and its mismatch e^ℓ = z^ℓ - φ(h^ℓ - β g) takes the place of the
    gradient. Nothing goes back in time. Outside of it gradients are the exact ones, and E has none. `lra` trains it.

    Parameters of a layer: W, V, E (D, D) and b (D). W and V are normal with standard deviation `std`, E is normal with
    1, b is 0.
    Source: Ororbia and Mali, "Biologically Motivated Algorithms for Propagating Local Target Representations",
    arXiv:1805.11703, LRA-E. Differs: the paper's network has no V; its biases are not trained.
    """

    name: ClassVar[str] = "aligned_stack"

    def __init__(
        self,
        dim: Annotated[int, at_least(1), "D, units of a layer"],
        depth: Annotated[int, at_least(1), "number of layers"],
        *,
        std: Annotated[float, at_least(0), "standard deviation of the initial W and V"] = 0.1,
    ) -> None:
        super().__init__()
        self.dim, self.depth = dim, depth

        def matrices(std: float) -> nn.ParameterList:
            return nn.ParameterList(nn.Parameter(torch.randn(dim, dim) * std) for _ in range(depth))

        self.W, self.V, self.E = matrices(std), matrices(std), matrices(1.0)
        self.b = nn.ParameterList(nn.Parameter(torch.zeros(dim)) for _ in range(depth))
        self._alignment: tuple[float, float] | None = None

    def mixers(self) -> list[Layer]:
        return []

    @property
    def timed(self) -> bool:
        return False

    @contextmanager
    def align(self, beta: float, gamma: float) -> Iterator[None]:
        """Let forward passes in this context have local alignment as their backward pass.

        beta: β, strength of the pull.   gamma: the update of E is γ times that of W, transposed.
        """
        outer, self._alignment = self._alignment, (beta, gamma)
        try:
            yield
        finally:
            self._alignment = outer

    def init_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> tuple[Tensor, ...]:
        dtype = self.W[0].dtype if dtype is None else dtype
        return tuple(torch.zeros(batch_size, self.dim, device=device, dtype=dtype) for _ in range(self.depth))

    def forward(
        self,
        x: Tensor,
        state: tuple[Tensor, ...] | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        timespans: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Map x (B, T, D) to the units of the top layer (B, T, D), and the units of all layers at the last step.

        Raises ConfigError for packed rows or durations, which it does not take.
        """
        if cu_seqlens is not None or timespans is not None:
            name = "timespans" if cu_seqlens is None else "cu_seqlens (of a mask)"
            raise ConfigError(f"aligned_stack: {name} is given, expected none; give rows of one length")
        units = list(self.init_state(len(x), device=x.device) if state is None else state)
        top = []
        for below in x.unbind(1):
            for layer in range(self.depth):
                below = units[layer] = self._units(layer, below, units[layer])
            top.append(below)
        return (torch.stack(top, 1) if top else x), tuple(units)

    def _units(self, layer: int, below: Tensor, past: Tensor) -> Tensor:
        W, V, b = self.W[layer], self.V[layer], self.b[layer]
        if self._alignment is None:
            return torch.tanh(F.linear(below, W, b) + F.linear(past, V))
        return _AlignedUnits.apply(below, past, W, V, b, self.E[layer], *self._alignment)


class _AlignedUnits(torch.autograd.Function):
    """The units of a layer; the backward pass gives its mismatch with its target in place of the gradient."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        below, past, W, V, b, E, ctx.beta, ctx.gamma = inputs
        h = F.linear(below, W, b) + F.linear(past, V)
        ctx.save_for_backward(below, past, h, E)
        return torch.tanh(h)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *pulls: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        below, past, h, E = ctx.saved_tensors
        mismatch = torch.tanh(h) - torch.tanh(h - ctx.beta * pulls[0])
        change = mismatch.T @ below
        return mismatch @ E.T, None, change, mismatch.T @ past, mismatch.sum(0), ctx.gamma * change.T, None, None
