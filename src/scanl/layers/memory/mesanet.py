"""MesaNet: each step reads the linear map that best fits all keys and values so far, by ridge regression."""

import math
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.layers import options, registry
from scanl.layers.base import UNDECAYED_HINT, widen
from scanl.layers.initial_state import StateAxes
from scanl.layers.parts.norm import GatedRMSNorm
from scanl.layers.parts.query_key_value import LastInputs, QueryKeyValue
from scanl.ops import linear_attention
from scanl.ops._frame.nonfinite import readable
from scanl.ops.delta_rule import unit
from scanl.options import at_least, below


class DecayedSums(NamedTuple):
    """Decayed sums over the past."""

    keys: Annotated[Tensor, StateAxes("*memory", "G, of k kᵀ")]
    values: Annotated[Tensor, StateAxes("*memory", "S, of k vᵀ")]


class MesaState(NamedTuple):
    recurrent: Annotated[DecayedSums, DecayedSums]
    conv: LastInputs


@registry.register("mesanet")
class MesaNet(QueryKeyValue):
    """MesaNet: the state holds the sums of a ridge regression from keys to values, which each step solves.

    Conjugate gradients solve all steps at once. Each iteration is one pass of `linear_attention` with the search
    directions as queries. The gradient is that of the solution: the backward pass solves once more, with the gradient
    as the right-hand side.

    Parameters as in flash-linear-attention: q_proj, k_proj, v_proj (H K, D); a_proj, b_proj (H, D) with a bias;
    lambda_params (H K), without weight decay; q_conv1d, k_conv1d with weight (H K, 1, W); g_proj (H K, D) for the gate;
    o_norm.weight (K); o_proj (D, H K).
    Differs: the iterations start from 0. A step whose residual is the rounding error of its query is solved: a further
    iteration does not change it. The released code instead adds 1e-5 to its divisors and makes all iterations.
    Initialisation: linear weights N(0, 0.02²), their bias 0, λ 1, the norm 1, the convolutions as in PyTorch.
    """

    id = "S-mesanet"
    kind: ClassVar = {"linear": True, "elementwise": True, "gated": True, "online": False}
    equation = (
        "G_t = alpha_t G_{t-1} + beta_t k_t k_t^T,  S_t = alpha_t S_{t-1} + beta_t k_t v_t^T,  "
        "o_t = S_t^T (G_t + Diag(lambda))^{-1} q_t;  alpha, beta = sigmoid(W x + b),  y = W_o RMSNorm(o)"
    )
    source = (
        'von Oswald et al., "MesaNet: Sequence Modeling by Locally Optimal Test-Time Training", arXiv:2506.05233, '
        "eq. (5)"
    )
    op = "linear_attention"
    carried_by = "turns"
    state: ClassVar = MesaState
    sample: ClassVar = {"num_heads": 2, "head_dim": 3, "max_iterations": 4}
    residual_out = "o_proj"
    hints: ClassVar = {"lambda_params": UNDECAYED_HINT}

    def __init__(
        self,
        dim: options.Dim,
        num_heads: Annotated[options.FreeHeads | None, "H, number of heads; by default dim / head_dim"] = None,
        head_dim: Annotated[options.HeadDim, "K, channels of a query, a key and a value"] = 128,
        output_gate: Annotated[options.OutputGate, "a SiLU gate after the norm"] = False,
        conv_size: Annotated[
            options.ConvSizeOrNone, "W, window of the causal convolutions of q and k; None for no convolutions"
        ] = 4,
        conv_bias: options.ConvBias = False,
        lambda_lower_bound: Annotated[float, at_least(0), below(1), "least λ"] = 0.25,
        max_iterations: Annotated[
            options.MaxIterations, "iterations at most; in exact arithmetic K of them are enough"
        ] = 30,
        norm_eps: options.NormEps = 1e-5,
    ) -> None:
        super().__init__()
        # torch.compile cannot trace a backward pass that takes gradients, so it calls the function as it is. It is not
        # told where the function is defined, because that would import the compiler with every layer.
        torch.compiler.allow_in_graph(_solve)
        heads = max(1, dim // head_dim) if num_heads is None else num_heads
        self.dim, self.num_heads, self.head_dim = dim, heads, head_dim
        self.lambda_lower_bound, self.max_iterations = lambda_lower_bound, max_iterations
        width = heads * head_dim
        self.memory = (heads, head_dim, head_dim)
        self._make_projections((width, width, width), conv_size, conv_bias)
        self.v_conv1d, self.windows = None, self.windows[:2]
        self.a_proj, self.b_proj = nn.Linear(dim, heads), nn.Linear(dim, heads)
        self.lambda_params = nn.Parameter(torch.full((width,), math.log(math.expm1(1 - lambda_lower_bound))))
        self.g_proj = nn.Linear(dim, width, bias=False) if output_gate else None
        self.o_norm = GatedRMSNorm(head_dim, norm_eps)
        self.o_proj = nn.Linear(width, dim, bias=False)
        for module in self.children():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def run(self, x: Tensor, state: MesaState | None, cu_seqlens: Tensor | None) -> tuple[Tensor, MesaState]:
        qkv, sums, conv = self._read(x, state, cu_seqlens, (True, True, False))
        q, k, v = (widen(tensor).unflatten(-1, (self.num_heads, self.head_dim)) for tensor in qkv)
        q, k, g = unit(q, 1e-6), unit(k, 1e-6), F.logsigmoid(widen(self.a_proj(x)))
        write = widen(self.b_proj(x)).sigmoid()[..., None] * k
        damping = F.softplus(widen(self.lambda_params)) + self.lambda_lower_bound
        keys, values = (None, None) if sums is None else (tensor.to(q.dtype) for tensor in sums)
        solved = _solve(q, k, write, g, damping.view(self.num_heads, -1), keys, cu_seqlens, self.max_iterations)
        _, keys = linear_attention(solved, k, write, g, state=keys, scale=1.0, cu_seqlens=cu_seqlens)
        o, values = linear_attention(solved, write, v, g, state=values, scale=1.0, cu_seqlens=cu_seqlens)
        o = self.o_norm(o, None if self.g_proj is None else self.g_proj(x).view_as(o))
        return self.o_proj(o.to(x.dtype).flatten(-2)), MesaState(DecayedSums(keys, values), conv)


def _product(
    p: Tensor, k: Tensor, write: Tensor, g: Tensor, damping: Tensor, keys: Tensor | None, cu_seqlens: Tensor | None
) -> Tensor:
    """Return (G_t + Diag(λ)) p_t of every step."""
    return linear_attention(p, k, write, g, state=keys, scale=1.0, cu_seqlens=cu_seqlens)[0] + damping * p


class _ConjugateGradients(torch.autograd.Function):
    """Solve (G_t + Diag(λ)) x_t = q_t for every step by conjugate gradients.

    A step is solved once its residual is at most eps of its right-hand side: later iterations leave it as it is, and
    none is made when all steps are solved. So the result of a step does not depend on the others.
    With w the solution for the gradient dx as right-hand side, dq = w, and the operands of G get the gradient of
    -w · (G_t + Diag(λ)) x_t, x constant.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        q: Tensor,
        k: Tensor,
        write: Tensor,
        g: Tensor,
        damping: Tensor,
        keys: Tensor | None,
        cu_seqlens: Tensor | None,
        steps: int,
    ) -> Tensor:
        x, r, p = torch.zeros_like(q), q, q
        residual = (r * r).sum(-1, keepdim=True)
        least = torch.finfo(q.dtype).eps ** 2 * residual
        for _ in range(steps):
            moved = _product(p, k, write, g, damping, keys, cu_seqlens)
            curvature = (p * moved).sum(-1, keepdim=True)
            size = torch.where((curvature > 0) & ~(residual <= least), residual / curvature, 0)
            x, r = torch.addcmul(x, size, p), torch.addcmul(r, size, moved, value=-1)
            after = (r * r).sum(-1, keepdim=True)
            p = torch.addcmul(r, torch.where(residual > 0, after / residual, 0), p)
            residual = after
            if readable(residual) and bool((residual <= least).all()):
                break
        ctx.save_for_backward(x, k, write, g, damping, keys, cu_seqlens)
        ctx.steps = steps
        return x

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, *operands, cu_seqlens = ctx.saved_tensors
        again = torch.is_grad_enabled()
        w = _ConjugateGradients.apply(dx, *operands, cu_seqlens, ctx.steps)
        with torch.enable_grad():
            # Each operand under a name of its own: x depends on the operands too, and is constant here.
            k, write, g, damping = (tensor.view_as(tensor) for tensor in operands[:4])
            keys = None if operands[4] is None else operands[4].view_as(operands[4])
            inputs = (k, write, g, damping, keys)
            needed = zip(inputs, ctx.needs_input_grad[1:6], strict=True)
            sources = [tensor for tensor, needs in needed if needs and tensor is not None]
            product = _product(x, k, write, g, damping, keys, cu_seqlens)
            gradients = iter(torch.autograd.grad(product, sources, -w, create_graph=again)) if sources else iter(())
        return w, *(next(gradients) if needs else None for needs in ctx.needs_input_grad[1:6]), None, None


def _solve(*operands: Any) -> Tensor:
    """`_ConjugateGradients.apply`; a function, which torch.compile can be told to call as it is."""
    return _ConjugateGradients.apply(*operands)
