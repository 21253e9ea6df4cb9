"""A recurrent vision model: units of a feature map that inhibit and excite each other over some distance."""

from typing import Annotated

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.errors import ShapeError
from scanl.layers.state import Device, DType
from scanl.models.presets import whole
from scanl.models.saving import Saved
from scanl.options import Range, at_least

odd_count = Range("an odd number of pixels", lambda kernel, _: kernel % 2 == 1)


@whole("hgru", "=hGRU", "horizontal_gru", "horizontal_gated_recurrent_unit")
class HorizontalGRU(Saved):
    r"""Horizontal gated recurrent unit: at each step an image is read once more, and the map H settles.

    .. math:: Z = [X - [(\alpha H + \mu) \odot N(W_I * (\sigma(U_1 * H) \odot H))]_+]_+, \quad X = (W_X * x)^2

    .. math:: H \leftarrow [(1 - G) \odot H + G \odot [\kappa Z + \gamma C + \omega Z \odot C]_+]_+, \quad
        C = N(W_E * Z), \quad G = \sigma(U_2 * Z)

    [v]₊ is the softplus, * a convolution, N a norm with a scale of 0.1 at first, and α, μ, κ, γ, ω have one number a
    channel. The first stage inhibits, the second excites. The answer at each pixel is linear in the normed H.

    An image that is held for T steps is a sequence of T equal images. `bptt` trains the model at a number of steps, and
    `rbp`, `cg_rbp` and `neumann_rbp` where H settles. With their `penalty` it settles.

    Source: Linsley et al., "Learning Long-Range Spatial Dependencies with Horizontal Gated Recurrent Units",
    arXiv:1805.08315; Linsley et al., "Stable and Expressive Recurrent Vision Models", arXiv:2005.11362, and the second
    one's program. Differs: N is a layer norm of each image, where that program has a batch norm, so that an image's
    answer does not depend on the others; W_X is not made of Gabor filters, but orthogonal.
    Initialisation as in that program: convolutions orthogonal; α 0.1, μ 1, κ 0.5, γ 1, ω 0.5; the bias of U_1 in
    U(1, 7), and of U_2 the same with a minus sign.
    """

    name = "hgru"

    def __init__(
        self,
        size: Annotated[tuple[int, int], "Y and X, pixels of an image"],
        channels: Annotated[int, at_least(1), "numbers of a pixel"],
        dim: Annotated[int, at_least(1), "C, channels of the map"],
        outputs: Annotated[int, at_least(1), "numbers that are read out at a pixel"],
        kernel: Annotated[int, at_least(1), odd_count, "pixels across which units reach each other, odd"] = 15,
    ) -> None:
        super().__init__()
        self.size, self.channels, self.dim, self.kernel = tuple(size), channels, dim, kernel
        self.input = nn.Conv2d(channels, dim, kernel, padding=kernel // 2)
        self.inhibition = nn.Conv2d(dim, dim, kernel, padding=kernel // 2, bias=False)
        self.excitation = nn.Conv2d(dim, dim, kernel, padding=kernel // 2, bias=False)
        self.u1, self.u2 = nn.Conv2d(dim, dim, 1), nn.Conv2d(dim, dim, 1)
        norms = [nn.GroupNorm(1, dim, eps=1e-3) for _ in range(2)]
        self.norms = nn.ModuleList(norms)
        self.output_norm = nn.GroupNorm(1, dim, eps=1e-3)
        self.output = nn.Linear(dim, outputs)
        first = {"alpha": 0.1, "mu": 1.0, "kappa": 0.5, "gamma": 1.0, "omega": 0.5}
        self.mix = nn.ParameterDict({key: nn.Parameter(torch.full((dim, 1, 1), value)) for key, value in first.items()})
        for conv in (self.input, self.inhibition, self.excitation, self.u1, self.u2):
            nn.init.orthogonal_(conv.weight)
        bias = torch.empty(dim).uniform_(1, 7)
        self.u1.bias, self.u2.bias = nn.Parameter(bias), nn.Parameter(-bias)
        for norm in norms:
            nn.init.constant_(norm.weight, 0.1)

    def init_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> Tensor:
        """Return maps of zeros (B, C, Y, X)."""
        dtype = self.output.weight.dtype if dtype is None else dtype
        return torch.zeros(batch_size, self.dim, *self.size, device=device, dtype=dtype)

    def step(self, drive: Tensor, state: Tensor) -> Tensor:
        """Return the map H (B, C, Y, X) after one more step. drive: X, of the same shape."""
        inhibited = self.norms[0](self.inhibition(state * self.u1(state).sigmoid()))
        z = F.softplus(drive - F.softplus(inhibited * (self.mix["alpha"] * state + self.mix["mu"])))
        gate, excited = self.u2(z).sigmoid(), self.norms[1](self.excitation(z))
        h = F.softplus(self.mix["kappa"] * z + self.mix["gamma"] * excited + self.mix["omega"] * z * excited)
        return F.softplus((1 - gate) * state + gate * h)

    def forward(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Map images x (B, T, channels, Y, X) to answers (B, T, Y, X, outputs) and the map (B, C, Y, X).

        Raises ShapeError for a wrong shape of x.
        """
        if x.ndim != 5 or x.shape[2:] != (self.channels, *self.size):
            expected = f"(B, T, {self.channels}, {self.size[0]}, {self.size[1]})"
            raise ShapeError(f"hgru: x has shape {tuple(x.shape)}, expected {expected}")
        state = self.init_state(len(x), device=x.device) if state is None else state
        x, outputs = x.to(self.output.weight.dtype), []
        for image in x.unbind(1):
            state = self.step(self.input(image).square(), state)
            outputs.append(self.output(self.output_norm(state).movedim(1, -1)))
        empty = x.new_zeros(*x.shape[:2], *self.size, self.output.out_features)
        return (torch.stack(outputs, 1) if outputs else empty), state
