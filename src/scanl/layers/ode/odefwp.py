"""Continuous-time fast weight programmer: a learning rule as a differential equation of a matrix of weights."""

from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor, nn

from scanl.layers import options, registry
from scanl.layers.base import widen
from scanl.layers.initial_state import StateAxes
from scanl.layers.module import Module
from scanl.layers.ode._field import METHODS, evolve
from scanl.layers.ode._timed import TimedCell
from scanl.layers.parts.cell_cases import cases
from scanl.ops import delta_rule, linear_attention
from scanl.ops.cell import cell
from scanl.options import one_of

EQUATION = (
    "dW/dt = beta tanh(v - W k) k^T (delta), beta tanh(v) k^T (hebb) or "
    "tanh(v) (beta softmax(k - W^T tanh(v)))^T (oja),  y_t = W_t q_t"
)


@cell(
    "q: B T H K, k: B T H K, v: B T H V, beta: B T H, dt: B T 1, state: B H K V -> B T H V",
    equation="dW/dt = beta k tanh(v - k W)^T (delta) or beta softmax(k - W v) v^T (oja),  y_t = q_t W_t",
    source='Irie, Faccio and Schmidhuber, "Neural Differential Equations for Learning to Program Neural Nets Through '
    "Continuous Learning Rules\", arXiv:2206.01649, eq. (13) to (18), as in the authors' program",
)
def odefwp_cell(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    dt: Tensor,
    state: Tensor,
    *,
    variant: str = "delta",
    method: str = "rk4",
    substeps: int = 1,
) -> tuple[Tensor, Tensor]:
    """Let the weights W (K, V) evolve for dt under a rule that is not linear in them, then read them at q."""

    def flow(w: Tensor) -> Tensor:
        if variant == "delta":
            key, value = k, torch.tanh(v - (k[..., None] * w).sum(2))
        else:
            key, value = torch.softmax(k - (w * v[:, :, None]).sum(3), -1), v
        return (beta[..., None] * key)[..., None] * value[:, :, None]

    state = evolve(flow, state, dt[:, :, None, None], method, substeps)
    return (q[..., None] * state).sum(2), state


cases(
    odefwp_cell,
    "H=2 K=3 V=4",
    "beta has shape (2, 5), expected (B, T, H)",
    "k has shape (2, 5, 2, 4), expected (B, T, H, K) with B=2",
    options=[{}, {"variant": "oja", "method": "euler", "substeps": 2}],
    beta=Tensor.abs,
    dt=lambda dt: dt.abs() / 2,
)


def effective_rate(beta: Tensor, k: Tensor, span: Tensor, method: str, substeps: int) -> Tensor:
    """Return the β of one delta rule that equals so many steps of the method along dW/dt = β k (v - k W)^T.

    A step multiplies what is missing at k by a polynomial p of z = β |k|² dt, so all of them write (1 - p^n) / |k|².
    """
    dt = span / substeps
    z = beta * k.square().sum(-1) * dt
    r = {"euler": torch.ones_like(z), "midpoint": 1 - z / 2, "rk4": 1 - z / 2 + z**2 / 6 - z**3 / 24}[method]
    factor, total = 1 - z * r, torch.zeros_like(z)
    for _ in range(substeps):
        total = 1 + factor * total
    return beta * dt * r * total


class UpdateNet(Module):
    """The slow net: keys, values and learning rates of an input."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.input_proj = nn.Linear(dim, dim)
        self.input_layer_norm = nn.LayerNorm(dim)
        self.kvb_net = nn.Linear(dim, num_heads * (2 * (dim // num_heads) + 1))


@registry.register("odefwp")
class ODEFWP(TimedCell):
    """Continuous-time fast weight programmer: between inputs a differential equation changes the weights that are read.

    With k and q the softmax of a linear map, v a linear map (in "oja" and "hebb" its tanh) and β its sigmoid. The rules
    that are linear in W run as `delta_rule` and `linear_attention`, which give the numbers of the method exactly.

    Parameters as in the authors' program: update_net.input_proj, update_net.input_layer_norm, update_net.kvb_net
    (H (2D/H + 1), D), of each head k, v and β; query_net, out_proj (D, D). Initialisation as in PyTorch.
    Differs: here W starts at 0, is read at every step, and each input is held until the next one. In the authors'
    program the rule at the first input gives the initial W. W is read once, after the last input, and a feed-forward
    block follows. Inputs are interpolated. Their NCDE variants, which use the derivative of the input, are left out.
    """

    added: ClassVar = {}  # its cell has solvers of its own, so the steps run one after another
    id = "S-odefwp"
    aliases = (
        "continuous_time_fast_weight_programmer",
        "continuous_time_fwp",
        "neural_ode_linear_transformer",
        "ode_linear_transformer",
    )
    equation = EQUATION
    cell = odefwp_cell
    state: ClassVar = StateAxes("num_heads, head_dim, head_dim", "the transpose of W")
    residual_out = "out_proj"
    sample: ClassVar = {"num_heads": 3}

    def __init__(
        self,
        dim: options.Dim,
        num_heads: options.Heads = 8,
        variant: Annotated[
            Literal["delta", "delta_linear", "oja", "hebb"],
            'the rule: "delta", with tanh around the error v - W k; "delta_linear", with tanh around v alone; "oja"; '
            'or "hebb"',
        ] = "delta",
        method: Annotated[
            options.Method, one_of(METHODS), 'steps of fixed length, "euler", "midpoint" or "rk4"'
        ] = "rk4",
        substeps: Annotated[options.Substeps, "steps of the method for each input"] = 1,
    ) -> None:
        super().__init__()
        self.dim, self.num_heads, self.head_dim = dim, num_heads, dim // num_heads
        self.variant, self.method, self.substeps = variant, method, substeps
        self.update_net = UpdateNet(dim, num_heads)
        self.query_net, self.out_proj = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def operands(self, x: Tensor, spans: Tensor) -> list[Tensor]:
        net, width = self.update_net, self.head_dim
        h = net.input_layer_norm(net.input_proj(x))
        k, v, beta = widen(net.kvb_net(h)).unflatten(-1, (self.num_heads, -1)).split([width, width, 1], -1)
        q = widen(self.query_net(h)).unflatten(-1, (self.num_heads, -1)).softmax(-1)
        k = k if self.variant == "oja" else k.softmax(-1)
        v = v if self.variant == "delta" else v.tanh()
        return [q, k, v, beta[..., 0].sigmoid(), spans]

    def output(self, h: Tensor) -> Tensor:
        return self.out_proj(h.flatten(-2))

    def _scan(self, x: Tensor, spans: Tensor, state: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
        if self.variant in ("delta", "oja"):
            return super()._scan(x, spans, state, cu_seqlens)
        q, k, v, beta, _ = self.operands(x, spans)
        if self.variant == "hebb":
            v = v * (beta * spans)[..., None]
            return linear_attention(q, k, v, state=state, scale=1.0, cu_seqlens=cu_seqlens)
        beta = effective_rate(beta, k, spans, self.method, self.substeps)
        return delta_rule(q, k, v, beta, state=state, scale=1.0, cu_seqlens=cu_seqlens)
