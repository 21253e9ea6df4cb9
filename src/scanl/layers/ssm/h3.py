"""H3: linear attention with a shift and a diagonal state space model between its two products."""

from typing import Annotated, ClassVar, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.layers import options, registry
from scanl.layers.base import Hint, Layer, widen
from scanl.layers.initial_state import StateAxes
from scanl.layers.module import Module
from scanl.layers.packing import each_alone
from scanl.layers.parts.diagonal_ssm import diagonal_ssm
from scanl.layers.parts.diagonal_start import diagonal_systems
from scanl.layers.ssm._base import BY_CONVOLUTION
from scanl.ops import short_convolution
from scanl.options import divides


class H3State(NamedTuple):
    shift: Annotated[Tensor, StateAxes("state_dim - 1, dim", "the last keys")]
    diagonal: Annotated[
        Tensor,
        StateAxes(
            "head_dim, head_dim, num_heads, state_dim // 2",
            "the state of the system, for each pair of a key channel and a value channel",
            dtype=torch.complex64,
        ),
    ]


class ShiftKernel(Module):
    """The shift register of each channel: B (D, N) writes the input into it, C (1, D, N) reads it."""

    def __init__(self, dim: int, state_dim: int) -> None:
        super().__init__()
        self.B = nn.Parameter(torch.eye(1, state_dim).repeat(dim, 1))
        self.C = nn.Parameter(torch.empty(1, dim, state_dim).uniform_(-(state_dim**-0.5), state_dim**-0.5))

    def window(self) -> Tensor:
        """Return the kernel (D, N): Σ_n B_n C_{n+j} for each lag j, the longest lag first."""
        lagged = F.pad(self.C[0], (0, self.B.shape[1] - 1)).unfold(1, self.B.shape[1], 1)
        return torch.einsum("djn,dn->dj", lagged, self.B).flip(1)


class H3Kernel(Module):
    """Parameters of the diagonal systems.

    log_dt (H); inv_A_real = ln(-Re A) and A_imag (H, N/2); B (H, N/2, 2) and C (1, H, N/2, 2) as pairs of real numbers.
    """

    def __init__(self, num_heads: int, state_dim: int, init: str, dt_min: float, dt_max: float) -> None:
        super().__init__()
        start = diagonal_systems(num_heads, state_dim, init, dt_min, dt_max)
        self.C = nn.Parameter(start.C[None])
        self.log_dt = nn.Parameter(start.log_dt)
        self.B = nn.Parameter(start.B)
        self.inv_A_real = nn.Parameter(start.log_A_real)
        self.A_imag = nn.Parameter(start.A_imag)

    def system(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return A, B, C (H, N/2), complex, and Δ (H), in float32 or wider."""
        A = torch.complex(-widen(self.inv_A_real).exp(), widen(self.A_imag))
        B, C = (torch.view_as_complex(widen(pairs)) for pairs in (self.B, self.C[0]))
        return A, B, C, widen(self.log_dt).exp()


K = TypeVar("K", bound=nn.Module)


class KernelLevel(nn.Module, Generic[K]):
    """Adds the level `kernel` to parameter names, as in the released code."""

    kernel: K

    def __init__(self, kernel: K) -> None:
        super().__init__()
        self.kernel = kernel


@registry.register("h3")
class H3(Layer):
    """H3: keys pass through a shift register, their products with the values through S4D, and queries read the result.

    As in the released code, input channels are ordered by head, and output channels by value channel.

    Parameters as in the released H3: q_proj, k_proj, v_proj, output_linear (D, D) with biases; ssm_k_kernel.kernel: B
    (D, N), C (1, D, N); ssm_k_D (D); kernel.kernel: C (1, H, N/2, 2), B (H, N/2, 2), inv_A_real, A_imag (H, N/2),
    log_dt (H); D (H). B, A and Δ have no weight decay.
    Initialisation: shift B = (1, 0, ...), C uniform in ±1/sqrt(N); A as `s4d`, B 1 (of HiPPO for legs), C complex
    N(0, 1) times B; Δ log-uniform in [dt_min, dt_max]; ssm_k_D and D N(0, 1); the linear maps as in PyTorch.
    For "legs", B is HiPPO's, as in S4D-LegS. The released "diag-legs" has the same frequencies with B = 1.
    Calls of more than 16 steps convolve products of keys and values by FFT. Its rounding errors are relative to the
    largest product of the call (see `long_convolution`).
    """

    id = "S-h3"
    aliases = ("hungry_hungry_hippos",)
    equation = "y_t = W_o (q_t . SSM_diag(SSM_shift(k) x v)_t)"
    source = (
        'Fu et al., "Hungry Hungry Hippos: Towards Language Modeling with State Space Models", arXiv:2212.14052, '
        "algorithm 1"
    )
    op = "linear_scan"
    state: ClassVar = H3State
    excused: ClassVar = BY_CONVOLUTION
    sample: ClassVar = {"state_dim": 4, "head_dim": 2}
    residual_out = "output_linear"
    hints: ClassVar = {
        f"{module}.kernel.{name}": Hint(weight_decay=False, lr="lr")
        for module, names in (("ssm_k_kernel", ("B",)), ("kernel", ("log_dt", "B", "inv_A_real", "A_imag")))
        for name in names
    }

    def __init__(
        self,
        dim: options.Dim,
        state_dim: Annotated[
            options.EvenStateDim, "N, real numbers in the state of each of the two systems, even"
        ] = 64,
        head_dim: Annotated[
            options.HeadDim,
            divides("dim"),
            "K, channels of a head; each of the H = D/K heads has its own system for its K² products",
        ] = 1,
        init: options.DiagonalInit = "lin",
        dt_min: options.StepMin = 0.001,
        dt_max: options.StepMax = 0.1,
        discretization: options.Discretization = "bilinear",
        lr: Annotated[options.LearningRate, "learning rate of the systems; None for the optimizer's"] = None,
    ) -> None:
        super().__init__()
        self.dim, self.state_dim, self.discretization, self.lr = dim, state_dim, discretization, lr
        self.num_heads, self.head_dim = dim // head_dim, head_dim
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(dim, dim) for _ in range(3))
        self.ssm_k_kernel = KernelLevel(ShiftKernel(dim, state_dim))
        self.ssm_k_D = nn.Parameter(torch.randn(dim))
        self.kernel = KernelLevel(H3Kernel(self.num_heads, state_dim, init, dt_min, dt_max))
        self.D = nn.Parameter(torch.randn(self.num_heads))
        self.output_linear = nn.Linear(dim, dim)

    def run(self, x: Tensor, state: H3State | None, cu_seqlens: Tensor | None) -> tuple[Tensor, H3State]:
        shift, diagonal = state or (None, None)
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        held, shift = short_convolution(
            widen(k), widen(self.ssm_k_kernel.kernel.window()), None, shift, cu_seqlens=cu_seqlens
        )
        k = torch.addcmul(held, k, widen(self.ssm_k_D))
        q, k, v = (widen(tensor).unflatten(-1, (self.num_heads, self.head_dim)) for tensor in (q, k, v))
        kv = torch.einsum("bthk,bthv->btkvh", k, v)
        system = self.kernel.kernel.system()

        def run(kv: Tensor, start: Tensor | None) -> tuple[Tensor, Tensor]:
            # All products of a head use the same system, so they become rows of a batch.
            rows = kv.movedim(1, 3).flatten(0, 2)
            y, last = diagonal_ssm(
                rows, *system, None if start is None else start.flatten(0, 2), discretization=self.discretization
            )
            products = (kv.shape[0], self.head_dim, self.head_dim)
            return y.unflatten(0, products).movedim(3, 1), last.unflatten(0, products)

        if cu_seqlens is None:
            y, diagonal = run(kv, diagonal)
        else:
            y, diagonal = each_alone(run, kv, diagonal, cu_seqlens, after_zeros=2)
        y = torch.einsum("bthk,btkvh->btvh", q, torch.addcmul(y, kv, widen(self.D)))
        return self.output_linear(y.flatten(2).to(x.dtype)), H3State(shift, diagonal)
