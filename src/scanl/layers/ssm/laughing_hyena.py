"""Laughing Hyena: Hyena whose filters are sums of modes, so that it streams with a small state. `distil` makes it."""

from typing import Annotated, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from scanl.errors import ConfigError
from scanl.layers import options, registry
from scanl.layers.base import Hint, widen
from scanl.layers.initial_state import StateAxes
from scanl.layers.parts.diagonal_ssm import diagonal_ssm
from scanl.layers.parts.short_convolution import convolve
from scanl.layers.ssm.hyena import Hyena, ShortFilterLayer
from scanl.options import at_least

SPARE_DIRECTIONS = 8  # directions of the search for singular vectors beyond those that are needed
ROUNDS = 4  # of that search
MAX_RADIUS = 1 - 1e-7  # radius of a mode


class LaughingHyenaState(NamedTuple):
    short: Annotated[Tensor, StateAxes("conv_size - 1, (order + 1) * dim", "the last inputs of the short filter")]
    modes: Annotated[Tensor, StateAxes("order - 1, dim, state_dim", dtype=torch.complex64)]


@registry.register("laughing_hyena")
class LaughingHyena(ShortFilterLayer):
    """Laughing Hyena: products and long convolutions in turn, as `hyena`, with filters of M complex modes.

    A filter is the response of a diagonal recurrence, so a step costs O(M D), and the length of sequences has no limit.
    A long sequence is computed as a convolution, a few steps as the recurrence. Both give the same function. `distil`
    makes this layer from a trained `hyena`. The layer can also be trained from the start.

    Parameters: in_proj, out_proj and short_filter as in `hyena`; log_decay = ln(-ln|λ|), angle and residue, R
    (N-1, D, M), the last with pairs of real numbers; bias (N-1, D). The modes have no weight decay.
    Initialisation: |λ| log-uniform in its decay from 1e-3 to 1 a step, angles uniform in [0, π]; R complex
    N(0, 1/M); bias N(0, 1); all else as in PyTorch.
    """

    id = "S-laughinghyena"
    equation = "z^1 = v,  z^{n+1} = x^n * (h^n conv z^n + b^n z^n),  y = W_o z;  h_j = Re sum_m R_m lambda_m^j"
    source = (
        'Massaroli et al., "Laughing Hyena Distillery: Extracting Compact Recurrences From Convolutions", '
        "arXiv:2310.18780, sec. 3"
    )
    op = "linear_scan"
    carried_by = "turns"
    state: ClassVar = LaughingHyenaState
    sample: ClassVar = {"state_dim": 3, "order": 3}
    hints: ClassVar = dict.fromkeys(("log_decay", "angle", "residue"), Hint(weight_decay=False, lr="lr"))

    def __init__(
        self,
        dim: options.Dim,
        state_dim: Annotated[options.StateDim, "M, modes of each filter"] = 16,
        order: Annotated[int, at_least(2), "N, number of products; there are N - 1 long convolutions"] = 2,
        conv_size: options.ConvSize = 3,
        lr: Annotated[options.LearningRate, "learning rate of the modes; None for the optimizer's"] = 1e-3,
    ) -> None:
        super().__init__()
        self._make_projections(dim, order, conv_size)
        self.state_dim, self.lr, sizes = state_dim, lr, (order - 1, dim, state_dim)
        self.log_decay = nn.Parameter(torch.empty(sizes).uniform_(-6.907755, 0.0))
        self.angle = nn.Parameter(torch.empty(sizes).uniform_(0.0, torch.pi))
        self.residue = nn.Parameter(torch.randn(*sizes, 2) * (0.5 / state_dim) ** 0.5)
        self.bias = nn.Parameter(torch.randn(order - 1, dim))

    def run(
        self, x: Tensor, state: LaughingHyenaState | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, LaughingHyenaState]:
        short, modes = state or (None, None)
        mixed, short = convolve(self.short_filter, self.in_proj(x), short, cu_seqlens=cu_seqlens)
        first, *others, v = widen(mixed).split(self.dim, -1)
        A = torch.complex(-widen(self.log_decay).exp(), widen(self.angle))
        C = torch.view_as_complex(widen(self.residue)) / 2  # the part takes twice the real part
        step, after = torch.ones_like(A.real[0, :, 0]), []
        for n, gate in enumerate(reversed(others)):
            v = v * gate
            y, last = diagonal_ssm(
                v, A[n], torch.ones_like(A[n]), C[n], step, None if modes is None else modes[:, n],
                discretization="dirac", cu_seqlens=cu_seqlens,
            )  # fmt: skip
            v = torch.addcmul(y, v, widen(self.bias[n]))
            after.append(last)
        return self.out_proj((v * first).to(x.dtype)), LaughingHyenaState(short, torch.stack(after, 1))


class ModalFit(NamedTuple):
    """Modes of F filters, h_j = b [j = 0] + Re Σ R λ^j, and how good they are.

    modes: λ (F, M) complex128.   residue: R (F, M) complex128, 0 for modes that are not used.   bias: b (F).
    order: (F,) real numbers of state of each.   error: (F,) norm of the difference over that of the filter.
    singular: (F, K) Hankel singular values over the largest. No system of order n is closer in Hankel norm than the
    (n+1)-th.
    """

    modes: Tensor
    residue: Tensor
    bias: Tensor
    order: Tensor
    error: Tensor
    singular: Tensor


def fit_modes(filters: Tensor, *, tolerance: float = 1e-4, largest: int = 64) -> ModalFit:
    """Fit each filter (F, L) by modes: the fewest that are enough by its Hankel singular values.

    The order is the smallest n with σ_{n+1}/σ_1 at most `tolerance`, and at most `largest`. Singular values below about
    1e-7 of the largest are those of rounding. The singular vectors of the Hankel matrix H_{ij} = h_{i+j+1} shift by one
    row under the system's matrix, whose eigenvalues are the modes (Ho and Kalman, 1966; Kung, 1978). The residues are
    the least squares fit of all lags but the first, which b gives exactly. Differs: the paper fits modes and residues
    by gradient descent.
    Raises ConfigError for a tolerance not in (0, 1), or less than 3 lags.
    """
    if not 0 < tolerance < 1 or largest < 1:
        raise ConfigError(f"distil: tolerance, largest are {tolerance}, {largest}, expected in (0, 1) and at least 1")
    if filters.shape[-1] < 3:
        raise ConfigError(f"distil: a filter has {filters.shape[-1]} lags, expected at least 3")
    fits = [_fit_one(h, tolerance, largest) for h in filters.detach().double()]
    modes, residue, *others = zip(*fits, strict=True)
    count = max(map(len, modes))
    pad = [torch.stack([torch.cat([v, v.new_full((count - len(v),), 0.5)]) for v in modes])]
    pad += [torch.stack([torch.cat([v, v.new_zeros(count - len(v))]) for v in residue])]
    return ModalFit(*pad, *map(torch.stack, others))


def _fit_one(h: Tensor, tolerance: float, largest: int) -> tuple[Tensor, ...]:
    steps = len(h) - 1
    rows = (steps + 1) // 2
    u, singular = _singular_vectors(h[1:], rows, min(rows, largest + SPARE_DIRECTIONS))
    scaled = singular / singular[0].clamp(min=torch.finfo(h.dtype).tiny)
    order = int((scaled[:largest] > tolerance).sum().clamp(min=1, max=max(1, rows - 1)))
    # u[1:] = u[:-1] A in the least squares sense
    poles = torch.linalg.eigvals(torch.linalg.lstsq(u[:-1, :order], u[1:, :order]).solution)
    poles = poles[poles.imag >= -1e-12]  # one of each conjugate pair
    poles = torch.polar(poles.abs().clamp(1e-12, MAX_RADIUS), poles.angle())
    powers = torch.exp(torch.arange(1, steps + 1, dtype=h.dtype)[:, None] * poles.log())
    table = torch.cat([powers.real, -powers.imag], 1)
    weights = torch.linalg.lstsq(table, h[1:, None], driver="gelsd").solution[:, 0]
    residue = torch.complex(*weights.chunk(2))
    error = (table @ weights - h[1:]).norm() / h.norm().clamp(min=torch.finfo(h.dtype).tiny)
    return poles, residue, h[0] - residue.real.sum(), torch.tensor(order), error, scaled


def _singular_vectors(h: Tensor, rows: int, count: int) -> tuple[Tensor, Tensor]:
    """Return the first left singular vectors (rows, count) of H_{ij} = h_{i+j}, i, j < rows, and singular values.

    Subspace iteration, in which H is applied by FFT. H is symmetric.
    """
    size = 1 << (3 * rows).bit_length()
    spectrum = torch.fft.rfft(h[: 2 * rows - 1], size)

    def apply(q: Tensor) -> Tensor:
        turned = torch.fft.rfft(q.flip(0).T, size)
        return torch.fft.irfft(turned * spectrum, size)[:, rows - 1 : 2 * rows - 1].T

    generator = torch.Generator().manual_seed(0)
    q = torch.linalg.qr(torch.randn(rows, count, generator=generator, dtype=h.dtype))[0]
    for _ in range(ROUNDS):
        q = torch.linalg.qr(apply(q))[0]
    u, singular, _ = torch.linalg.svd(apply(q), full_matrices=False)
    return u, singular


@torch.no_grad()
def distil(layer: Hyena, *, tolerance: float = 1e-4, largest: int = 64) -> tuple[LaughingHyena, ModalFit]:
    """Return the recurrence of a trained Hyena, and the fit of its (N-1) D filters, with those of a channel adjacent.

    Hyena's filters end at max_length lags. The filters of the result go on and fade. See `fit_modes` for the arguments.
    """
    fit = fit_modes(layer.filter_fn(), tolerance=tolerance, largest=largest)
    weight = layer.in_proj.weight
    recurrence = LaughingHyena(layer.dim, fit.modes.shape[1], layer.order, layer.conv_size)
    recurrence = recurrence.to(weight.device, weight.dtype)
    for name in ("in_proj", "out_proj", "short_filter"):
        recurrence.get_submodule(name).load_state_dict(layer.get_submodule(name).state_dict())

    def by_convolution(values: Tensor) -> Tensor:
        return values.unflatten(0, (layer.dim, layer.order - 1)).transpose(0, 1)

    recurrence.log_decay.copy_(by_convolution((-fit.modes.abs().log()).log()))
    recurrence.angle.copy_(by_convolution(fit.modes.angle()))
    recurrence.residue.copy_(torch.view_as_real(by_convolution(fit.residue).contiguous()))
    recurrence.bias.copy_(by_convolution(fit.bias + layer.filter_fn.bias.double().flatten()))
    return recurrence, fit
