"""State-space models: each layer against its equation, step by step, how it starts, and what only it knows."""

import math
import re
from itertools import combinations, pairwise

import pytest
import torch
from torch.nn import functional as F

import laws
from by_hand import (
    DIM,
    T,
    assert_normal,
    assert_uniform,
    convolve,
    follows_time,
    gelu,
    gelu_tanh,
    layer_norm,
    linear,
    shaken,
    sigmoid,
    silu,
    softplus,
)
from scanl import layers
from scanl.errors import ConfigError, ShapeError
from scanl.layers import (
    DLR,
    DSS,
    GSS,
    H3,
    LRU,
    LSSL,
    RGLRU,
    S4,
    S4D,
    S5,
    S7,
    DenseLTI,
    DSSSoftmax,
    Hawk,
    Hyena,
    LiquidS4,
    Mamba,
    MegaEMA,
    S7Full,
    SGConv,
    param_groups,
)
from scanl.layers import state as states
from scanl.layers.parts import dense_ssm, diagonal_ssm, hippo
from scanl.layers.ssm import s4 as s4_layer
from scanl.ops import ssm_kernel_dplr
from scanl.ops.fused.rglru_gates import BoundedSqrt


def growing(layer):
    """Some of the real parts of Λ above 0."""
    with torch.no_grad():
        layer.Lambda_re[::2] = 1.0
    return layer


def held(spans, xs):
    """How long each step lasts: one unit where nothing is said."""
    return torch.ones(len(xs)) if spans is None else spans


def mamba(layer, xs, spans=None):
    mixed = [layer.in_proj.weight @ x for x in xs]
    us = [silu(v) for v in convolve([v[: layer.width] for v in mixed], layer.conv1d)]
    h, ys = torch.zeros(layer.width, layer.state_dim), []
    A = -torch.exp(layer.A_log)
    for u, v, span in zip(us, mixed, held(spans, xs), strict=True):
        low, B, C = (layer.x_proj.weight @ u).split([layer.rank, layer.state_dim, layer.state_dim])
        delta = torch.log(1 + torch.exp(layer.dt_proj.weight @ low + layer.dt_proj.bias)) * span
        h = torch.exp(delta[:, None] * A) * h + (delta * u)[:, None] * B
        ys.append(layer.out_proj.weight @ ((h @ C + layer.D * u) * silu(v[layer.width :])))
    return ys


def s4d(layer, xs, spans=None):
    A = torch.complex(-torch.exp(layer.kernel.log_A_real), layer.kernel.A_imag)
    C = torch.complex(*layer.kernel.C.unbind(-1))
    conv = layer.output_linear[0]
    s, ys = torch.zeros_like(A), []
    for x, span in zip(xs, held(spans, xs), strict=True):
        step = (layer.kernel.log_dt.exp() * span)[:, None]
        if layer.discretization == "zoh":
            s = torch.exp(step * A) * s + (torch.exp(step * A) - 1) / A * x[:, None]
        elif layer.discretization == "bilinear":
            s = ((1 + step / 2 * A) * s + step * x[:, None]) / (1 - step / 2 * A)
        else:
            s = torch.exp(step * A) * s + x[:, None]
        y = conv.weight[..., 0] @ gelu(2 * (C * s).sum(1).real + layer.D * x) + conv.bias
        ys.append(y[: layer.dim] / (1 + torch.exp(-y[layer.dim :])))
    return ys


def liquid_s4(layer, xs, spans=None):
    """The expansion term by term: each product of inputs with the coefficient of its earliest one.

    Where the steps differ in duration, the recurrence of each degree.
    """
    A, C = torch.complex(-torch.exp(layer.kernel.log_A_real), layer.kernel.A_imag), layer.kernel.C
    C, step, conv = torch.complex(*C.unbind(-1)), torch.exp(layer.kernel.log_dt)[:, None], layer.output_linear[0]
    if layer.discretization == "bilinear":
        a, b = (1 + step / 2 * A) / (1 - step / 2 * A), step / (1 - step / 2 * A)
    else:
        a, b = torch.exp(step * A), (torch.exp(step * A) - 1) / A
    ys, unit, degrees = [], step, [torch.zeros_like(A) for _ in range(layer.degree or len(xs))]
    for t in range(len(xs)):
        s = torch.zeros_like(A)
        if spans is not None:
            step = unit * spans[t]
            if layer.discretization == "bilinear":
                a, b = (1 + step / 2 * A) / (1 - step / 2 * A), step / (1 - step / 2 * A)
            else:
                a, b = torch.exp(step * A), (torch.exp(step * A) - 1) / A
            below = [torch.ones_like(A), *degrees[:-1]]
            degrees = [a * each + b * xs[t][:, None] * low for each, low in zip(degrees, below, strict=True)]
            s = sum(degrees)
        for p in () if spans is not None else range(1, min(layer.degree or t + 1, t + 1) + 1):
            for chosen in combinations(range(t + 1), p):
                product = torch.stack([xs[i] for i in chosen]).prod(0)
                s = s + a ** (t - chosen[0] - (p - 1)) * b**p * product[:, None]
        y = conv.weight[..., 0] @ gelu(2 * (C * s).sum(1).real + layer.D * xs[t]) + conv.bias
        ys.append(y[: layer.dim] * sigmoid(y[layer.dim :]))
    return ys


def s4(layer, xs, spans=None):
    kernel, gated = layer.layer.kernel, layer.output_linear[0]
    B, C, P = (torch.complex(*part[0].unbind(-1)) for part in (kernel.B, kernel.C, kernel.P))
    Lambda = torch.complex(-torch.exp(kernel.A_real), -kernel.A_imag)
    B, C, P, Lambda = (torch.cat([part, part.conj()], -1) for part in (B, C, P, Lambda))
    A = torch.diag_embed(Lambda) - P[:, :, None] * P[:, None].conj()
    unit, eye = torch.exp(kernel.inv_dt)[:, :, None], torch.eye(A.shape[-1])
    s, ys = torch.zeros_like(B), []
    for x, span in zip(xs, held(spans, xs), strict=True):
        step = unit * span
        right = ((eye + step / 2 * A) @ s[..., None])[..., 0] + step[..., 0] * B * x[:, None]
        s = torch.linalg.solve(eye - step / 2 * A, right)
        y = gated.weight @ gelu((C * s).sum(1).real + layer.layer.D[0] * x) + gated.bias
        ys.append(y[: layer.dim] / (1 + torch.exp(-y[layer.dim :])))
    return ys


def s5(layer, xs, spans=None):
    Lambda = torch.complex(layer.Lambda_re.clamp(max=-1e-4) if layer.clip_eigs else layer.Lambda_re, layer.Lambda_im)
    if getattr(layer, "stable", False):
        Lambda = -1 / (Lambda * Lambda + 0.5)
    B, C = (torch.complex(*part.unbind(-1)) for part in (layer.B, layer.C))
    s, ys = torch.zeros_like(Lambda), []
    for x, span in zip(xs, held(spans, xs), strict=True):
        unit = layer.log_step[:, 0].exp() if layer.name == "s5" else softplus(linear(layer.step_size, x))
        step = unit * span
        if layer.discretization != "bilinear":
            written = unit if layer.discretization == "async" else step
            s = torch.exp(step * Lambda) * s + (torch.exp(written * Lambda) - 1) / Lambda * (B @ x.to(B.dtype))
        else:
            s = ((1 + step / 2 * Lambda) * s + step * (B @ x.to(B.dtype))) / (1 - step / 2 * Lambda)
        y = (C @ s).real * (2 if layer.conj_sym else 1) + layer.D * x
        g = 0.5 * y * (1 + torch.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))
        if layer.activation == "gelu":
            y = g
        elif layer.activation != "none":
            gate = 1 / (1 + torch.exp(-layer.out2(g)))
            y = {"half_glu1": g, "half_glu2": y, "full_glu": layer.out1 and layer.out1(g)}[layer.activation] * gate
        ys.append(y)
    return ys


def s7_full(layer, xs):
    N, D, s, ys = layer.state_dim, layer.dim, torch.zeros(layer.state_dim), []
    for x in xs:
        A, B, C, skip, bias = linear(layer.x_proj, x).split([N, D * N, D * N, D, N])
        s = (1 - 1 / ((A + layer.base) ** 2 + 0.5)) * s + B.view(D, N).T @ x + bias
        z = C.view(D, N) @ s + skip * x
        ys.append(z * sigmoid(linear(layer.gate_proj, gelu(z))))
    return ys


def lru(layer, xs, spans=None):
    log = torch.complex(-layer.nu_log.exp(), layer.theta_log.exp())
    B, C = torch.complex(layer.B_re, layer.B_im), torch.complex(layer.C_re, layer.C_im)
    h, ys = torch.zeros_like(log), []
    for x, span in zip(xs, held(spans, xs), strict=True):
        entered = (torch.exp(log * span) - 1) / (torch.exp(log) - 1)
        h = torch.exp(log * span) * h + entered * layer.gamma_log.exp() * (B @ x.to(B.dtype))
        ys.append((C @ h).real + layer.D * x)
    return ys


def h3(layer, xs):
    """Both systems as recurrences: the shift register moves by one a step, the diagonal one has a state a product."""
    shift, diagonal = layer.ssm_k_kernel.kernel, layer.kernel.kernel
    A = torch.complex(-torch.exp(diagonal.inv_A_real), diagonal.A_imag)
    B, C = torch.complex(*diagonal.B.unbind(-1)), torch.complex(*diagonal.C[0].unbind(-1))
    step, K = torch.exp(diagonal.log_dt)[:, None], layer.head_dim
    if layer.discretization == "bilinear":
        a, b = (1 + step / 2 * A) / (1 - step / 2 * A), step * B / (1 - step / 2 * A)
    else:
        a, b = torch.exp(step * A), (torch.exp(step * A) - 1) / A * B
    register = torch.zeros(layer.dim, layer.state_dim)
    states = torch.zeros(K, K, *A.shape, dtype=A.dtype)
    ys = []
    for x in xs:
        q, k, v = (project(x) for project in (layer.q_proj, layer.k_proj, layer.v_proj))
        register = torch.cat([torch.zeros(layer.dim, 1), register[:, :-1]], 1) + shift.B * k[:, None]
        k = (shift.C[0] * register).sum(1) + layer.ssm_k_D * k
        q, k, v = (each.view(-1, K).T for each in (q, k, v))  # (K, H)
        product = k[:, None] * v[None]  # (K, K, H)
        states = a * states + b * product[..., None]
        read = 2 * (C * states).sum(-1).real + layer.D * product
        ys.append(layer.output_linear((q[:, None] * read).sum(0).flatten()))
    return ys


def hyena(layer, xs, shift=0.0):
    """The filters lag by lag, from the formula of the position, and every convolution as a sum."""
    net, D, L, N = layer.filter_fn.implicit_filter, layer.dim, layer.max_length, layer.order
    rates = torch.linspace(math.log(0.01) / 1.5, math.log(0.01) / 0.3, D * (N - 1)).abs()
    filters = []
    for lag in range(L):
        h = layer.filter_fn.pos_emb.z[0, lag]
        for i in sorted(int(i) for i in net if int(i) % 2 == 0)[:-1]:
            h = torch.sin(net["1"].freq[0] * net[str(i)](h))
        h = list(net.values())[-1](h)
        filters.append(h * (torch.exp(-lag / (L - 1) * rates) + shift))
    filters = torch.stack(filters).view(L, D, N - 1)
    mixed = [
        torch.stack(parts)
        for parts in zip(
            *(m.split(D) for m in convolve([layer.in_proj(x) for x in xs], layer.short_filter)), strict=True
        )
    ]
    v = mixed[-1]
    for n in range(N - 1):
        v = v * mixed[N - 1 - n]
        bias = layer.filter_fn.bias.view(D, N - 1)[:, n]
        v = torch.stack([
            sum(filters[j, :, n] * v[t - j] for j in range(min(L, t + 1))) + bias * v[t] for t in range(len(xs))
        ])  # fmt: skip
    return [layer.out_proj(each) for each in v * mixed[0]]


def after_systems(layer, read, x):
    return layer.output_linear.weight @ gelu(read + layer.D[0] * x) + layer.output_linear.bias


def dss(layer, xs, spans=None):
    """The kernel lag by lag as the paper has it; the time between two steps takes the place of the lag."""
    kernel = layer.kernel
    step = torch.exp(kernel.log_dt)
    step = step if step.ndim == 2 else torch.stack([step, step], 1)
    if kernel.max_length is None:
        Lambda = torch.complex(-torch.exp(kernel.Lambda_log_neg_re), kernel.Lambda_im)
    else:
        Lambda = torch.complex(*kernel.Lambda.unbind(-1))
    A, W = torch.complex(step[:, :1] * Lambda.real, step[:, 1:] * Lambda.imag), torch.complex(*kernel.W[0].unbind(-1))
    times = torch.cat([torch.zeros(1), held(spans, xs).cumsum(0)])
    ys = []
    for t in range(len(xs)):
        read = 0
        for s in range(t + 1):
            power = torch.exp(A * (times[t + 1] - times[s + 1]))
            if kernel.max_length is None:
                entering = (torch.exp(A * (times[s + 1] - times[s])) - 1) / Lambda
            else:
                powers = torch.stack([torch.exp(A * r) for r in range(kernel.max_length)])
                q = Lambda * (torch.exp(torch.where(Lambda.real > 0, -A, A) * kernel.max_length) - 1)
                bound = q.abs() ** 2 / (q.abs() ** 2 + 1e-7)
                entering = bound / Lambda / powers.sum(0)
            read = read + (W * entering * power).sum(1) * xs[s]
        ys.append(after_systems(layer, read.real, xs[t]))
    return ys


def dlr(layer, xs):
    kernel = layer.kernel
    Lambda = torch.exp(torch.complex(-(kernel.Lambda_log_neg_re**2), kernel.Lambda_im))
    W, s, ys = torch.complex(*kernel.W[0].unbind(-1)), torch.zeros(layer.dim, layer.state_dim, dtype=Lambda.dtype), []
    for x in xs:
        s = Lambda * s + x[:, None]
        read = (W * s).sum(1)
        read = {"real": read.real, "imag": read.imag, "sum": read.real + read.imag}[layer.config["variant"]]
        ys.append(after_systems(layer, read, x))
    return ys


def gss(layer, xs, spans=None):
    inner, s, ys = layer.dss, 0, []
    imag = torch.exp(inner.Lambda_imag) if inner.imag_exp else inner.Lambda_imag
    Lambda, C = torch.complex(-torch.exp(inner.Lambda_real), imag), torch.complex(inner.C_real, inner.C_imag)
    for x, span in zip(xs, held(spans, xs), strict=True):
        u = layer_norm(gelu(layer.to_v[0].weight @ x), inner.norm)
        s = torch.exp(span * Lambda) * s + (torch.exp(span * Lambda) - 1) / Lambda * u[:, None]
        read = (C * s).sum(1).real + inner.param_D * u
        gate = gelu(layer.to_u[0].weight @ x)
        ys.append(layer.to_out.weight @ (gate * (layer.to_gate.weight @ read)) + layer.to_out.bias)
    return ys


def lssl(layer, xs, spans=None):
    N = layer.state_dim
    s, ys = torch.zeros(layer.dim, N), []
    for x, span in zip(xs, held(spans, xs), strict=True):
        moved = []
        for i in range(layer.dim):
            P, Q, d, T = (part[i if layer.learn == 2 else 0] for part in (layer.P, layer.Q, layer.d, layer.T))
            tridiagonal = torch.diag(T[1]) + torch.diag(T[0, 1:], -1) + torch.diag(T[2, :-1], 1)
            A = torch.diag(P) @ (torch.diag(d) + torch.linalg.solve(tridiagonal, torch.eye(N))) @ torch.diag(Q)
            step = torch.exp(layer.log_dt[i]) * span
            right = (torch.eye(N) - step / 2 * A) @ s[i] + step * torch.sqrt(2 * torch.arange(N) + 1.0) * x[i]
            moved.append(torch.linalg.solve(torch.eye(N) + step / 2 * A, right))
        s = torch.stack(moved)
        y = gelu((layer.C * s).sum(1) + layer.skip * x)
        ys.append(layer.output_linear.weight @ y + layer.output_linear.bias)
    return ys


def sgconv(layer, xs):
    """The kernel lag by lag: between the middles of two stretched numbers runs a line."""
    k, scales, lags = layer.conv_size, len(layer.kernel_list), []
    for i, w in enumerate(layer.kernel_list):
        stretch = 2 ** max(0, i - 1)
        for j in range(k * stretch):
            at = min(max((j + 0.5) / stretch - 0.5, 0.0), k - 1.0)
            low = int(at)
            value = (1 - (at - low)) * w[0, :, low] + (at - low) * w[0, :, min(low + 1, k - 1)]
            lags.append(value * layer.multiplier[0, :, 0] ** (scales - 1 - i))
    assert len(lags) >= layer.max_length
    ys = []
    for t in range(len(xs)):
        read = sum(lags[j] * xs[t - j] for j in range(min(layer.max_length, t + 1)))
        ys.append(after_systems(layer, read / layer.kernel_norm[0, :, 0], xs[t]))
    return ys


def growing_modes(layer):
    """The real parts of λ of every other mode above 0."""
    with torch.no_grad():
        layer.kernel.Lambda[::2, 0] = 0.7
    return layer


def block_diagonal(gate, x):
    return torch.block_diag(*gate.w).t() @ x + gate.b.flatten()


def rglru(layer, xs):
    h, ys = torch.zeros(layer.dim), []
    for t, x in enumerate(xs):
        r, i = sigmoid(block_diagonal(layer.a_gate, x)), sigmoid(block_diagonal(layer.input_gate, x))
        a = torch.exp(-8 * r * torch.log(1 + layer.a_param.exp()))
        h = a * h + (torch.sqrt(1 - a**2) if t else 1) * (i * x)
        ys.append(h)
    return ys


def hawk(layer, xs):
    branch = convolve([layer.linear_x.weight @ x + layer.linear_x.bias for x in xs], layer.conv_1d.conv)
    gates = [gelu_tanh(layer.linear_y.weight @ x + layer.linear_y.bias) for x in xs]
    hs = rglru(layer.rg_lru, branch)
    return [layer.linear_out.weight @ (g * h) + layer.linear_out.bias for g, h in zip(gates, hs, strict=True)]


def mega_ema(layer, xs):
    """The released code, a step at a time: h = q h + p beta x, its step p the logit `delta`, its damping `alpha`."""
    p = sigmoid(layer.delta[..., 0])
    q = 1 - p * sigmoid(layer.alpha[..., 0])
    h, ys = torch.zeros(layer.dim, layer.state_dim), []
    for x in xs:
        h = q * h + p * layer.beta[..., 0] * x[:, None]
        ys.append(silu((h * layer.gamma).sum(1) / math.sqrt(layer.state_dim) + layer.omega * x))
    return ys


def dense_lti(layer, xs):
    s, ys = torch.zeros(layer.state_dim), []
    for x in xs:
        s = layer.A @ s + layer.B @ x
        ys.append(layer.C @ s + layer.D * x)
    return ys


EQUATIONS = {
    "mamba": (lambda: Mamba(DIM, state_dim=4, conv_size=3, rank=2), mamba),
    "mamba_without_a_bias": (lambda: Mamba(DIM, state_dim=2, expand=1.5, conv_bias=False), mamba),
    "s4d": (lambda: S4D(DIM, 6), s4d),
    "s4d_bilinear": (lambda: S4D(DIM, 4, discretization="bilinear", init="inv"), s4d),
    "s4d_dirac": (lambda: S4D(DIM, 4, discretization="dirac"), s4d),
    "s5": (lambda: S5(DIM, 12, blocks=3), s5),
    "s5_bilinear": (lambda: S5(DIM, discretization="bilinear", activation="half_glu2", clip_eigs=True), s5),
    "s5_all_eigenvalues": (lambda: S5(DIM, 5, conj_sym=False, init="lecun_normal", activation="full_glu"), s5),
    "s5_clipped": (lambda: growing(S5(DIM, clip_eigs=True)), s5),
    "s5_plain": (lambda: S5(DIM, init="complex_normal", activation="none"), s5),
    "s5_gelu": (lambda: S5(DIM, activation="gelu"), s5),
    "s7": (lambda: S7(DIM, 12, blocks=3), s5),
    "s7_async": (lambda: S7(DIM, 5, conj_sym=False, discretization="async", activation="none"), s5),
    "s7_stable": (lambda: S7(DIM, 12, blocks=3, stable=True), s5),
    "s7_bilinear": (lambda: S7(DIM, discretization="bilinear", clip_eigs=True), s5),
    "lru": (lambda: LRU(DIM, 5), lru),
}
EQUATIONS |= {
    "dss": (lambda: DSS(DIM, 5), dss),
    "dss_of_one_step_size": (lambda: DSS(DIM, 3, init="lin", sep_dt_re_im=False), dss),
    "dss_softmax": (lambda: DSSSoftmax(DIM, 4, max_length=9), dss),
    "dss_softmax_growing": (lambda: growing_modes(DSS(DIM, 4, 60, sep_dt_re_im=False)), dss),
    "gss": (lambda: GSS(DIM, 2, 4, 5), gss),
    "gss_of_free_frequencies": (lambda: GSS(DIM, state_dim=3, imag_exp=False), gss),
}
EQUATIONS |= {
    "liquid_s4": (lambda: LiquidS4(DIM, 4, dt_min=0.3, dt_max=0.9), liquid_s4),
    "liquid_s4_of_degree_four": (lambda: LiquidS4(DIM, 2, 4, dt_min=0.3, dt_max=0.9, discretization="zoh"), liquid_s4),
    "liquid_s4_of_all_degrees": (lambda: LiquidS4(DIM, 4, None, dt_min=0.3, dt_max=0.9), liquid_s4),
    "lssl": (lambda: LSSL(DIM, 5), lssl),
    "lssl_fixed": (lambda: LSSL(DIM, 3, learn=0), lssl),
    "lssl_of_each_channel": (lambda: LSSL(DIM, 3, learn=2, dt_min=0.1), lssl),
    "s4": (lambda: S4(DIM, 6), s4),
}
TIMED = list(EQUATIONS)
EQUATIONS |= {
    "dense_lti": (lambda: DenseLTI(DIM, 5), dense_lti),
    "s7_full": (lambda: S7Full(DIM, 3), s7_full),
    "dlr": (lambda: DLR(DIM, 6), dlr),
    "sgconv": (lambda: SGConv(DIM, 4, 1, 1.5, 3.0), sgconv),
    "sgconv_of_one_scale": (lambda: SGConv(DIM, 3, 8), sgconv),
    "dlr_imag": (lambda: DLR(DIM, 5, "imag"), dlr),
    "dlr_sum": (lambda: DLR(DIM, 5, "sum"), dlr),
    "h3": (lambda: H3(DIM, 6, 2), h3),
    "h3_alone": (lambda: H3(DIM, 4, discretization="zoh", init="legs"), h3),
    "hyena": (lambda: Hyena(DIM, 5, hidden_dim=6), hyena),
    "hyena_dna": (
        lambda: layers.build("hyena_dna", DIM, max_length=5, hidden_dim=6),
        lambda layer, xs: hyena(layer, xs, shift=0.05),
    ),
    "hyena_of_order_four": (lambda: Hyena(DIM, 40, 4, 6, emb_dim=7, depth=1, frequency=3.0), hyena),
    "rglru": (lambda: RGLRU(DIM, 2), rglru),
    "hawk": (lambda: Hawk(DIM, 2, 6), hawk),
    "mega_ema": (lambda: MegaEMA(DIM, 3), mega_ema),
}


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", TIMED)
def test_a_layer_follows_the_time_between_its_steps(name):
    follows_time(*EQUATIONS[name])


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", ["s4d", "dss", "gss", "s5_plain", "lru"])
def test_a_step_of_two_units_is_two_steps_with_the_input_held(name):
    layer, x = shaken(EQUATIONS[name][0]()), torch.randn(2, T, DIM)
    twice, last = layer(x.repeat_interleave(2, 1))
    once, also = layer(x, timespans=torch.full((2, T), 2.0))
    torch.testing.assert_close(once, twice[:, 1::2])
    torch.testing.assert_close(also, last)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", TIMED)
def test_wrong_timespans_are_refused(name):
    layer, x = EQUATIONS[name][0](), torch.randn(2, T, DIM)
    for wrong, message in (
        (torch.ones(2, T + 1), rf"timespans is torch.float64 \(2, 8\), expected a floating dtype and \(2, {T}\)"),
        (torch.ones(2, T, dtype=torch.int64), rf"timespans is torch.int64 \(2, {T}\), expected a floating dtype"),
        (0.5, "timespans is a float, expected a tensor"),
        (torch.ones(2, T, device="meta"), "timespans is on meta, expected cpu because of x"),
    ):
        with pytest.raises(ShapeError, match=rf"{layer.name}: {message}"):
            layer(x, timespans=wrong)


# --- the whole sequence as a convolution, and step by step

CONVOLVED = ["s4d", "s4d_bilinear", "dss", "dss_softmax_growing", "dlr", "gss", "s4", "h3", "h3_alone", "mega_ema"]
CONVOLVED += ["hyena", "hyena_of_order_four", "sgconv", "lssl"]


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", CONVOLVED)
def test_a_convolution_is_the_recurrence(name):
    """The laws have sequences too short for the convolution; here it is cut anywhere, and laid beside the loop."""
    layer, x = shaken(EQUATIONS[name][0]()), torch.randn(2, 53, DIM)
    _, before = layer(torch.randn(2, 5, DIM))
    for state in (None, states.detach(before)):
        whole, last = layer(x, state)
        for size in (1, 7, 16, 17, 23, 36, 52):
            after, ys = state, []
            for piece in x.split(size, 1):
                y, after = layer(piece, after)
                ys.append(y)
            torch.testing.assert_close(torch.cat(ys, 1), whole)
            for (_, found), (_, expected) in zip(states.leaves(after), states.leaves(last), strict=True):
                torch.testing.assert_close(found, expected)
    torch.testing.assert_close(layer(x)[0][0], torch.stack(EQUATIONS[name][1](layer, list(x[0]))))


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", CONVOLVED)
@pytest.mark.parametrize("carried", [False, True])
def test_long_packed_sequences_equal_each_alone(name, carried):
    layer, x, cuts = shaken(EQUATIONS[name][0]()), torch.randn(1, 64, DIM), [0, 5, 5, 22, 64]
    before = states.detach(layer(torch.randn(4, 5, DIM))[1]) if carried else None
    y, last = layer(x, before, cu_seqlens=torch.tensor(cuts))
    for n, (start, end) in enumerate(pairwise(cuts)):
        row = slice(n, n + 1)
        alone, state = layer(x[:, start:end], states.index(before, row))
        torch.testing.assert_close(y[:, start:end], alone)
        for (_, found), (_, expected) in zip(states.leaves(states.index(last, row)), states.leaves(state), strict=True):
            torch.testing.assert_close(found, expected)
    nothing, last = layer(x[:, :0], layer.init_state(0), cu_seqlens=torch.tensor([0]))
    assert nothing.shape == (1, 0, DIM)
    assert all(leaf.shape[0] == 0 for _, leaf in states.leaves(last))
    assert layer(torch.randn(0, 20, DIM))[0].shape == (0, 20, DIM)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", CONVOLVED)
def test_gradients_of_the_convolution(name, monkeypatch):
    layer, x = shaken(EQUATIONS[name][0]()), torch.randn(2, 21, DIM).requires_grad_()
    _, before = layer(torch.randn(2, 5, DIM))
    before = states.detach(before)

    def gradients():
        leaves = [leaf.clone().requires_grad_() for _, leaf in states.leaves(before)]
        places = iter(leaves)
        y, last = layer(x, states.map_leaves(lambda leaf: next(places), before))
        ends = [leaf.abs().square().sum() for _, leaf in states.leaves(last)]
        loss = (y.square() * torch.arange(21)[:, None]).sum() + sum(ends)
        return torch.autograd.grad(loss, [x, *leaves, *layer.parameters()])

    found = gradients()
    for module in (diagonal_ssm, s4_layer, dense_ssm):
        monkeypatch.setattr(module, "FEW", 100)
    torch.testing.assert_close(found, gradients())
    for module in (diagonal_ssm, s4_layer, dense_ssm):
        monkeypatch.setattr(module, "FEW", 0)
    short = torch.randn(1, 5, DIM).requires_grad_()
    assert torch.autograd.gradgradcheck(lambda x: layer(x)[0], (short,), fast_mode=True)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", ["s4d", "hyena", *(pytest.param(n, marks=pytest.mark.long) for n in ("s4", "h3"))])
def test_the_convolution_compiles(name):
    layer, x = shaken(EQUATIONS[name][0]()), torch.randn(2, 40, DIM)
    before = states.detach(layer(x)[1])
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager" if laws.ALL else "eager")
    torch.testing.assert_close(compiled(x, before), layer(x, before))


# --- what only they know


@pytest.mark.usefixtures("double")
def test_s7_of_steps_that_do_not_select_is_s5():
    """Also, an event that lasts no time writes, and forgets nothing."""
    plain, layer, x = S5(DIM, 6), S7(DIM, 6, activation="half_glu1"), torch.randn(2, T, DIM)
    layer.load_state_dict({k: v for k, v in plain.state_dict().items() if k != "log_step"}, strict=False)
    with torch.no_grad():
        layer.step_size.weight.zero_()
        layer.step_size.bias.copy_(plain.log_step[:, 0].exp().expm1().log())
    spans = torch.rand(2, T) + 0.1
    torch.testing.assert_close(layer(x, timespans=spans), plain(x, timespans=spans))
    events = S7(DIM, 6, discretization="async")
    before = events(x)[1]
    after = events(0 * x[:, :1], before, timespans=torch.zeros(2, 1))[1]
    torch.testing.assert_close(after, before)


@pytest.mark.usefixtures("double")
def test_released_parameters_of_mega_give_released_numbers():
    """A step of 1/2 and a damping of 1/4: by hand, after one step h = x/2, after two (1 - 1/8) x/2 + x'/2."""
    layer, quarter = MegaEMA(1, 1), math.log(1 / 3)
    released = {"delta": [[[0.0]]], "alpha": [[[quarter]]], "beta": [[[1.0]]], "gamma": [[1.0]], "omega": [0.0]}
    layer.load_state_dict({name: torch.tensor(value) for name, value in released.items()}, strict=True)
    y, _ = layer(torch.tensor([[[1.0], [3.0]]]))
    torch.testing.assert_close(y.flatten(), silu(torch.tensor([0.5, 0.4375 + 1.5])))


def test_rglru_bounds_the_derivative_of_its_root():
    layer = RGLRU(DIM, 2)
    torch.nn.init.constant_(layer.a_param, -200.0)  # a = 1: the square root stands at 0
    x = torch.ones(1, 3, DIM)
    y, _ = layer(x)
    y.sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters())
    plain = torch.zeros(1, requires_grad=True)
    root = BoundedSqrt.apply(plain + torch.tensor([0.0, 1e-8, 0.25]))
    (gradient,) = torch.autograd.grad(root.sum(), plain)
    torch.testing.assert_close(gradient, torch.tensor([1000.0 + 1000.0 + 1.0]))


# --- initialisation


@pytest.mark.usefixtures("double")
def test_init_of_mamba():
    layer = Mamba(64, state_dim=5, expand=100)
    torch.testing.assert_close(layer.A_log.exp(), torch.arange(1.0, 6).expand(6400, 5))
    torch.testing.assert_close(layer.D.detach(), torch.ones(6400))
    assert layer.dt_proj.weight.shape == (6400, 4)
    assert_uniform(layer.dt_proj.weight, -0.5, 0.5)
    assert_uniform(torch.log(torch.log(1 + layer.dt_proj.bias.exp())), math.log(1e-3), math.log(1e-1))
    layer = Mamba(16, dt_init="constant", rank=9, dt_min=1e-6, dt_max=1e-5)
    torch.testing.assert_close(layer.dt_proj.weight.detach(), torch.full((32, 9), 1 / 3))
    torch.testing.assert_close(torch.log(1 + layer.dt_proj.bias.exp()), torch.full((32,), 1e-4))


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize(
    ("init", "frequencies"),
    [
        ("lin", lambda n: math.pi * n),
        ("inv", lambda n: 64 / math.pi * (64 / (2 * n + 1) - 1)),
        ("real", lambda n: 0 * n),
    ],
)
def test_init_of_s4d(init, frequencies):
    layer = S4D(3000, init=init)
    n = torch.arange(32.0)
    torch.testing.assert_close(layer.kernel.A_imag.detach(), frequencies(n).expand(3000, 32))
    real = n + 1 if init == "real" else torch.full_like(n, 0.5)
    torch.testing.assert_close(layer.kernel.log_A_real.exp(), real.expand(3000, 32))
    assert_uniform(layer.kernel.log_dt, math.log(1e-3), math.log(1e-1))
    assert_normal(layer.kernel.C, math.sqrt(0.5))
    assert_normal(layer.D, 1.0)
    assert layer.output_linear[0].weight.shape == (6000, 3000, 1)


def legs(size):
    A = torch.zeros(size, size)
    for n in range(size):
        for k in range(n + 1):
            A[n, k] = -(n + 1) if n == k else -math.sqrt((2 * n + 1) * (2 * k + 1))
    return A


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("size", [2, 5, 64])
def test_legs_is_diagonal_and_of_rank_one(size):
    Lambda, P, B, V = hippo.diagonal_legs(size)
    A = V @ (torch.diag(Lambda) - P[:, None] * P.conj()) @ V.mH
    torch.testing.assert_close(A, legs(size).to(A.dtype), atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(V @ B, torch.sqrt(2 * torch.arange(float(size)) + 1).to(B.dtype))
    assert (Lambda.imag.diff() > 0).all()
    if size % 2 == 0:
        layer = S4D(1, size, init="legs")
        both = torch.cat([layer.kernel.A_imag[0], -layer.kernel.A_imag[0]]).sort()[0]
        torch.testing.assert_close(both, Lambda.imag)
        spread = torch.view_as_complex(S4D(4000, size, init="legs").kernel.C.detach()).abs().square().mean(0).sqrt()
        cut = torch.complex(B.real, B.imag.clamp(-2, 2))[size // 2 :].abs()
        torch.testing.assert_close(spread, cut, rtol=0.1, atol=0)


@pytest.mark.usefixtures("double")
def test_init_of_dss():
    layer = DSS(3000)
    kernel, both = layer.kernel, hippo.diagonal_legs(128).Lambda
    torch.testing.assert_close(kernel.Lambda_log_neg_re.exp(), torch.full((64,), 0.5))
    torch.testing.assert_close(kernel.Lambda_im.detach(), both.imag[both.imag > 0])
    torch.testing.assert_close(kernel.log_dt[:, 0], kernel.log_dt[:, 1])
    assert_uniform(kernel.log_dt[:, 0], math.log(1e-3), math.log(1e-1))
    assert_normal(kernel.W, 1.0)
    assert_normal(layer.D, 1.0)
    free = DSSSoftmax(2, init="lin", sep_dt_re_im=False).kernel
    expected = torch.stack([torch.full((64,), -0.5), math.pi * torch.arange(64.0)], 1)
    torch.testing.assert_close(free.Lambda.detach(), expected)
    assert free.log_dt.shape == (2,)
    slow = dict.fromkeys((f"kernel.{name}" for name, _ in kernel.named_parameters()), (0.0, 1e-3))
    assert without_decay(layer) == slow | dict.fromkeys(("D", "output_linear.bias"), (0.0, None))


@pytest.mark.usefixtures("double")
def test_init_of_dlr():
    layer = DLR(50, 20_000)
    assert_uniform(torch.log(2 * layer.kernel.Lambda_log_neg_re**2), math.log(1e-4), math.log(1e-1))
    torch.testing.assert_close(layer.kernel.Lambda_im.detach(), 2 * math.pi * torch.arange(20_000.0) / 20_000)
    assert_normal(layer.kernel.W, 1 / 20_000)
    slow = ("kernel.Lambda_im", "kernel.Lambda_log_neg_re", "kernel.W")
    found = dict.fromkeys(slow, (0.0, 1e-4)) | dict.fromkeys(("D", "output_linear.bias"), (0.0, None))
    assert without_decay(layer) == found


@pytest.mark.usefixtures("double")
def test_sgconv_stretches_its_kernels():
    """Four scales, the longest stretched fourfold and cut, over more steps than there are lags; and piece by piece."""
    layer, x = SGConv(DIM, 31, 4, 1.5, 4.0), torch.randn(1, 40, DIM)
    whole, last = layer(x)
    torch.testing.assert_close(whole[0], torch.stack(sgconv(layer, list(x[0]))))
    for size in (1, 7, 33):
        state, ys = None, []
        for piece in x.split(size, 1):
            y, state = layer(piece, state)
            ys.append(y)
        torch.testing.assert_close(torch.cat(ys, 1), whole)
        torch.testing.assert_close(state, last)


@pytest.mark.usefixtures("double")
def test_init_of_sgconv():
    layer = SGConv(3000, 64, 16, 1.0, 3.0)
    assert len(layer.kernel_list) == 3
    for kernel in layer.kernel_list:
        assert_normal(kernel, 1.0)
    assert_normal(layer.D, 1.0)
    torch.testing.assert_close(layer.multiplier.flatten(), 1 + 2 * torch.arange(3000.0) / 2999)
    response = layer._kernels() / layer.kernel_norm
    assert response.shape == (1, 3000, 64)
    torch.testing.assert_close(response.square().sum(-1), torch.ones(1, 3000))


@pytest.mark.parametrize("degree", [1, 2])
def test_liquid_s4_in_blocks_is_liquid_s4_token_by_token(degree):
    """Blocks, a rest, a state that enters, and packed sequences of which one is shorter than a block."""
    layer, x = shaken(LiquidS4(DIM, 4, degree)).double(), torch.randn(2, 75, DIM, dtype=torch.float64)
    with torch.no_grad():
        _, state = layer(torch.randn(2, 3, DIM, dtype=torch.float64))
        y, last = layer(x, state)
        packed, _ = layer(torch.cat([x[:1], x[1:, :9]], 1), state, cu_seqlens=torch.tensor([0, 75, 84]))
        ys = []
        for t in range(75):
            token, state = layer.step(x[:, t], state)
            ys.append(token)
    torch.testing.assert_close(y, torch.stack(ys, 1))
    torch.testing.assert_close(last, state)
    torch.testing.assert_close(packed[0], torch.cat([y[0], y[1, :9]]))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_liquid_s4_in_blocks_keeps_what_is_not_finite_from_the_past(value):
    layer, x = LiquidS4(DIM, 4), torch.randn(2, 96, DIM)
    spoilt = x.clone()
    spoilt[0, 40, 1] = value
    with torch.no_grad():
        (exact, _), (y, last) = layer(x), layer(spoilt)
    assert torch.equal(y[0, :40], exact[0, :40])
    assert torch.equal(y[1], exact[1])
    assert not y[0, 40:].isfinite().any()  # the linear map mixes channels
    assert not last[0, :, 1].isfinite().any()
    assert last[0, :, 0].isfinite().all()


@pytest.mark.usefixtures("double")
def test_liquid_s4_of_degree_one_is_s4d():
    torch.manual_seed(0)
    liquid = LiquidS4(DIM, 6, 1, discretization="zoh")
    torch.manual_seed(0)
    plain, x = S4D(DIM, 6, init="legs"), torch.randn(2, 30, DIM)
    torch.testing.assert_close(liquid.state_dict(), plain.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(liquid(x)[0], plain(x)[0])
    assert without_decay(liquid) == without_decay(plain)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("learn", [0, 1, 2])
def test_lssl_starts_as_hippo(learn):
    layer, eye = LSSL(3, 12, learn=learn), torch.eye(12)
    A, B = layer.system()
    for i in range(3):
        step = torch.exp(layer.log_dt[i])
        back = torch.linalg.inv(eye - step / 2 * legs(12))
        torch.testing.assert_close(A[i], back @ (eye + step / 2 * legs(12)))
        torch.testing.assert_close(B[i], back @ (step * torch.sqrt(2 * torch.arange(12.0) + 1)))
    free = {"C", "skip", "output_linear.weight", "output_linear.bias"}
    learned = {name for name, _ in layer.named_parameters()} - free
    assert learned == ({"P", "Q", "d", "T", "log_dt"} if learn else set())
    assert layer.P.shape[0] == (3 if learn == 2 else 1)
    rates = {**dict.fromkeys(("P", "Q", "d", "T"), 1e-4), "log_dt": 1e-3} if learn else {}
    found = dict.fromkeys(("C", "skip", "output_linear.bias"), (0.0, None))
    assert without_decay(layer) == found | {name: (0.0, rate) for name, rate in rates.items()}


@pytest.mark.usefixtures("double")
def test_init_of_lssl():
    layer = LSSL(3000, 8)
    assert_uniform(layer.log_dt, math.log(1e-3), math.log(1e-1))
    assert_normal(layer.C, 1.0)
    assert_normal(layer.skip, 1.0)


@pytest.mark.usefixtures("double")
def test_init_of_gss():
    layer = GSS(1600)
    for name in ("C_real", "C_imag", "Lambda_real", "Lambda_imag", "param_D"):
        assert_normal(getattr(layer.dss, name), 1.0)
    shapes = {name: tuple(parameter.shape) for name, parameter in layer.named_parameters()}
    assert shapes["dss.C_real"] == (400, 512)
    assert shapes["to_u.0.weight"] == (4800, 1600)
    assert shapes["to_v.0.weight"] == (400, 1600)
    assert_uniform(layer.to_gate.weight, -1 / 20, 1 / 20)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("dss", {"state_dim": 0}, "dss: state_dim is 0, expected at least 1"),
        ("dss", {"max_length": "softmax"}, "dss: max_length is 'softmax', expected an integer or None"),
        ("dss", {"init": "lim"}, "dss: unknown init 'lim'; did you mean 'lin'?"),
        ("dss", {"max_length": 0}, "dss: max_length is 0, expected at least 1"),
        ("dss_softmax", {"max_length": 0}, "dss_softmax: max_length is 0, expected at least 1"),
        ("dss_softmax", {"max_length": -1}, "dss_softmax: max_length is -1, expected at least 1"),
        ("dss", {"dt_min": 0.0}, "dss: dt_min is 0.0, expected more than 0"),
        ("dlr", {"state_dim": 0}, "dlr: state_dim is 0, expected at least 1"),
        ("dlr", {"variant": "rael"}, "dlr: unknown variant 'rael'; did you mean 'real'?"),
        ("dlr", {"dt_max": 1e-9}, "dlr: dt_max is 1e-09, expected at least dt_min=0.0001"),
        ("sgconv", {"max_length": 0}, "sgconv: max_length is 0, expected at least 1"),
        ("sgconv", {"conv_size": 0}, "sgconv: conv_size is 0, expected at least 1"),
        ("sgconv", {"decay_min": 3.0}, "sgconv: decay_max is 2.0, expected at least decay_min=3.0"),
        ("liquid_s4", {"degree": 0}, "liquid_s4: degree is 0, expected at least 1"),
        ("liquid_s4", {"state_dim": 3}, "liquid_s4: state_dim is 3, expected an even number"),
        ("lssl", {"state_dim": 0}, "lssl: state_dim is 0, expected at least 1"),
        ("lssl", {"learn": 3}, "lssl: learn is 3, expected 0 or 1 or 2"),
        ("gss", {"width": 0}, "gss: width is 0, expected at least 1"),
        ("gss", {"state_dim": 0}, "gss: state_dim is 0, expected at least 1"),
        ("gss", {"expand": 0.01}, "gss: expand is 0.01, expected at least 1/8 because of dim=8"),
    ],
)
def test_wrong_options_of_diagonal_layers_are_refused(name, options, message):
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        layers.build(name, DIM, **options)


@pytest.mark.usefixtures("double")
def test_init_of_h3():
    layer = H3(3000)
    shift, kernel = layer.ssm_k_kernel.kernel, layer.kernel.kernel
    assert (shift.B[:, 0] == 1).all()
    assert not shift.B[:, 1:].any()
    assert_uniform(shift.C, -1 / 8, 1 / 8)
    torch.testing.assert_close(kernel.inv_A_real.exp(), torch.full((3000, 32), 0.5))
    torch.testing.assert_close(kernel.A_imag.detach(), (math.pi * torch.arange(32.0)).expand(3000, 32))
    assert_uniform(kernel.log_dt, math.log(1e-3), math.log(1e-1))
    torch.testing.assert_close(kernel.B.detach(), torch.tensor([1.0, 0.0]).expand(3000, 32, 2))
    for normal, std in ((kernel.C, math.sqrt(0.5)), (layer.D, 1.0), (layer.ssm_k_D, 1.0)):
        assert_normal(normal, std)


@pytest.mark.usefixtures("double")
def test_init_of_hyena():
    layer = Hyena(2000, 64, emb_dim=7, frequency=14.0)
    filters, t = layer.filter_fn, torch.arange(64.0)
    assert_normal(filters.bias, 1.0)
    assert (filters.implicit_filter["1"].freq == 14).all()
    lag = filters.pos_emb.z.detach()[0]
    torch.testing.assert_close(lag[:, 0], t / 63)
    for i, band in enumerate([1e-4, 1.00005, 2.0]):
        torch.testing.assert_close(lag[:, 1 + i], torch.cos(2 * math.pi * band * t / 64))
        torch.testing.assert_close(lag[:, 4 + i], -torch.sin(2 * math.pi * band * t / 64))
    deltas = filters.modulation.deltas[0, 0].abs()
    torch.testing.assert_close(torch.exp(-deltas[[0, -1]] * torch.tensor([1.5, 0.3])), torch.full((2,), 0.01))


@pytest.mark.usefixtures("double")
def test_hyena_takes_the_state_of_the_released_code():
    """There one sine stands at three places of a sequence, and so do its frequencies."""
    layer, other = Hyena(DIM, 16), Hyena(DIM, 16)
    given = dict(layer.state_dict())
    given |= {f"filter_fn.implicit_filter.{place}.freq": given["filter_fn.implicit_filter.1.freq"] for place in (3, 5)}
    assert not any(other.load_state_dict(given, strict=True))
    x = torch.randn(1, 9, DIM)
    torch.testing.assert_close(other(x)[0], layer(x)[0])


@pytest.mark.usefixtures("double")
def test_init_of_s4():
    layer, legs_64 = S4(3000), hippo.diagonal_legs(64)
    kernel = layer.layer.kernel
    assert_uniform(kernel.inv_dt, math.log(1e-3), math.log(1e-1))
    assert_normal(kernel.C, math.sqrt(0.5))
    assert_normal(layer.layer.D, 1.0)
    torch.testing.assert_close(kernel.A_real.exp(), torch.full((3000, 32), 0.5))
    torch.testing.assert_close(-kernel.A_imag.detach()[0], legs_64.Lambda.imag[:32])
    B, P = (torch.complex(*part.detach()[0, 0].unbind(-1)) for part in (kernel.B, kernel.P))
    torch.testing.assert_close(P, legs_64.P[:32])
    torch.testing.assert_close(B.real, legs_64.B[:32].real)
    torch.testing.assert_close(B.imag, legs_64.B[:32].imag.clamp(-2, 2))


@pytest.mark.usefixtures("double")
def test_s4_has_the_kernel_of_hippo():
    """With Im B not cut: C e^{jΔA} B of the bilinear rule, where A and B are HiPPO-LegS's own."""
    layer = S4(1, 6)
    kernel = layer.layer.kernel
    whole = hippo.diagonal_legs(6)
    with torch.no_grad():
        kernel.B.copy_(torch.view_as_real(whole.B[:3].resolve_conj())[None, None])
        C = torch.view_as_complex(kernel.C[0, 0])
        step, eye = kernel.inv_dt[0].exp(), torch.eye(6)
        A, B = legs(6), torch.sqrt(2 * torch.arange(6.0) + 1)
        back = torch.linalg.inv(eye - step / 2 * A)
        V = torch.cat([whole.V[:, :3], whole.V[:, :3].conj()], 1)
        row = (torch.cat([C, C.conj()]) @ V.mH).real
        s, expected = back @ B * step, []
        for _ in range(40):
            expected.append(row @ s)
            s = back @ (eye + step / 2 * A) @ s
        system = [part[None] if part.ndim < 2 else part for part in kernel.system()]
        found = ssm_kernel_dplr(*(part.reshape(1, -1) for part in system[:4]), step, 40)[0]
        torch.testing.assert_close(torch.stack(expected), found)
        impulse = torch.zeros(1, 40, 1)
        impulse[:, 0] = 1
        y, _ = s4_layer._convolution(impulse, *kernel.system(), None)
        torch.testing.assert_close(y[0, :, 0], found)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("conj_sym", [True, False])
def test_init_of_s5(conj_sym):
    layer = S5(300, 512, 8, conj_sym)
    block = hippo.diagonal_legs(64)
    kept = 32 if conj_sym else 64
    torch.testing.assert_close(layer.Lambda_re.detach(), torch.full((8 * kept,), -0.5))
    torch.testing.assert_close(layer.Lambda_im.detach(), block.Lambda.imag[:kept].repeat(8))
    assert_uniform(layer.log_step, math.log(1e-3), math.log(1e-1))
    assert_normal(layer.D, 1.0)
    B, C = (torch.complex(*part.detach().unbind(-1)) for part in (layer.B, layer.C))
    if conj_sym:  # with the other eigenvector of each pair, what was drawn is real again
        V = torch.block_diag(*[block.V[:, :32]] * 8)
        drawn = 2 * (V @ B).real
    else:
        V = torch.block_diag(*[block.V] * 8)
        drawn = V @ B
        assert drawn.imag.abs().max() < 1e-9
        drawn, drawn_C = drawn.real, C @ V.mH
        assert abs(drawn_C.real.std() * math.sqrt(512) - 1) < 0.02
        assert drawn_C.real.abs().max() < 2 / 0.8796 / math.sqrt(512)
        assert abs(S5(40, 20, 1, False, "lecun_normal").C.std() * math.sqrt(40 * 20) - 1) < 0.1
    assert abs(drawn.std() * math.sqrt(512) - 1) < 0.02
    assert drawn.abs().max() < 2 / 0.8796 / math.sqrt(512)
    assert_normal(S5(300, init="complex_normal").C, math.sqrt(0.5))


def without_decay(layer):
    """Names of the weights of maps that are not decayed, and rates of learning by name."""
    groups = {id(p): group for group in param_groups(layer) for p in group["params"]}
    found = {name: groups[id(parameter)] for name, parameter in layer.named_parameters()}
    return {
        name: (group.get("weight_decay"), group.get("lr"))
        for name, group in found.items()
        if group.keys() != {"params"}
    }


@pytest.mark.usefixtures("double")
def test_what_is_not_decayed():
    assert without_decay(Mamba(8)) == dict.fromkeys(
        ("A_log", "D", "conv1d.weight", "conv1d.bias", "dt_proj.bias"), (0.0, None)
    )
    free = dict.fromkeys(("D", "kernel.C", "output_linear.0.weight", "output_linear.0.bias"), (0.0, None))
    slow = ("kernel.log_dt", "kernel.log_A_real", "kernel.A_imag")
    assert without_decay(S4D(8)) == free | dict.fromkeys(slow, (0.0, 1e-3))
    found = without_decay(S4(8))
    for name in ("inv_dt", "A_real", "A_imag", "B", "P"):
        assert found[f"layer.kernel.{name}"] == (0.0, 1e-3)
    assert found["layer.kernel.C"] == found["layer.D"] == (0.0, None)
    found = without_decay(H3(8, lr=1e-4))
    for name in ("kernel.kernel.log_dt", "kernel.kernel.B", "kernel.kernel.inv_A_real", "ssm_k_kernel.kernel.B"):
        assert found[name] == (0.0, 1e-4)
    assert found["kernel.kernel.C"] == found["ssm_k_kernel.kernel.C"] == found["D"] == (0.0, None)
    found = without_decay(Hyena(8, 16))
    assert found["filter_fn.pos_emb.z"] == (0.0, 1e-5)
    assert found["filter_fn.implicit_filter.2.weight"] == found["filter_fn.implicit_filter.1.freq"] == (0.0, 1e-3)
    slow_s5 = dict.fromkeys(("Lambda_re", "Lambda_im", "B", "log_step"), (0.0, 1e-3))
    assert without_decay(S5(8)) == slow_s5 | dict.fromkeys(("C", "D", "out2.bias"), (0.0, None))
    assert without_decay(S4D(8, lr=None)) == free | dict.fromkeys(slow, (0.0, None))


@pytest.mark.parametrize(("r_min", "r_max", "max_phase"), [(0.0, 1.0, 2 * math.pi), (0.9, 0.999, math.pi / 10)])
def test_init_of_lru(r_min, r_max, max_phase):
    layer = LRU(16, 20_000, r_min, r_max, max_phase)
    radius, phase = torch.exp(-layer.nu_log.exp()), layer.theta_log.exp()
    assert_uniform(radius.double() ** 2, r_min**2 - 1e-6, r_max**2 + 1e-6)  # uniform over the ring's area
    assert_uniform(phase, 0, max_phase * (1 + 1e-6))
    normalised = layer.gamma_log.exp() ** 2 / (1 - radius.double() ** 2)
    torch.testing.assert_close(normalised.median(), torch.tensor(1.0, dtype=torch.float64), rtol=1e-5, atol=0)
    assert layer.gamma_log.isfinite().all()
    assert layer.nu_log.isfinite().all()
    for B in (layer.B_re, layer.B_im):
        assert_normal(B, math.sqrt(1 / 32))
    for C in (layer.C_re, layer.C_im):
        assert_normal(C, math.sqrt(1 / 20_000))
    assert_normal(LRU(10_000, 1).D, 1.0)


def test_init_of_rglru_and_hawk():
    layer = RGLRU(20_000, 200)
    assert_uniform(torch.exp(-F.softplus(layer.a_param).double()) ** 2, 0.9**2 - 1e-6, 0.999**2 + 1e-6)
    for gate in (layer.a_gate, layer.input_gate):
        assert_normal(gate.w, math.sqrt(1 / 100))
        assert not gate.b.any()
    block = Hawk(96)
    assert block.width == 128
    assert [Hawk(dim).width for dim in (8, 256, 1024)] == [8, 320, 1344]
    assert_normal(block.linear_x.weight, math.sqrt(1 / 96))
    assert_normal(block.linear_y.weight, math.sqrt(1 / 96))
    assert_normal(block.linear_out.weight, math.sqrt(1 / 128))
    assert_normal(Hawk(4, 8, 4096).conv_1d.conv.weight, math.sqrt(0.01 / 4))
    assert not block.linear_out.bias.any()


def test_init_of_s7():
    layer = S7(64, 2000, blocks=100)
    assert_uniform(layer.step_size.weight, -0.5, 0.5)
    assert_uniform(F.softplus(layer.step_size.bias).log(), math.log(1e-3), math.log(1e-1))


def test_init_of_stable_and_of_full_s7():
    """The eigenvalues of both parametrisations are the same at the start; a decay is never above 1 in size."""
    torch.manual_seed(0)
    plain = S7(8, 48, blocks=3)
    torch.manual_seed(0)
    stable = S7(8, 48, blocks=3, stable=True)
    torch.testing.assert_close(stable._eigenvalues(), plain._eigenvalues(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(stable.B, plain.B)
    full = S7Full(64, 5)
    assert_normal(full.x_proj.weight, 0.02)
    assert full.base.tolist() == [-0.5] * 5
    y, last = full(100 * torch.randn(2, 50, 64))
    assert y.isfinite().all()
    assert full(0 * torch.randn(2, 500, 64), last)[1].abs().max() <= last.abs().max()


def test_init_of_mega_ema():
    layer = MegaEMA(500, 16)
    assert_normal(layer.alpha, 0.2)
    assert_normal(layer.delta, 0.2)
    assert_normal(layer.beta[:, 0::2], 0.02, 1.0)
    assert_normal(layer.beta[:, 1::2], 0.02, -1.0)
    assert_normal(layer.gamma, 1.0)
    assert_normal(layer.omega, 1.0)


# --- options

WRONG = [
    ("mamba", {"state_dim": 0}, "mamba: state_dim is 0, expected at least 1"),
    ("mamba", {"expand": 0.1}, "mamba: expand is 0.1, expected at least 1/8 because of dim=8"),
    ("mamba", {"rank": "all"}, "mamba: rank is 'all', expected an integer or None"),
    ("mamba", {"dt_min": 0.2}, "mamba: dt_max is 0.1, expected at least dt_min=0.2"),
    ("mamba", {"dt_init": "zero"}, "mamba: unknown dt_init 'zero'; known: random, constant"),
    ("s4d", {"state_dim": 3}, "s4d: state_dim is 3, expected an even number of at least 2"),
    ("s4d", {"init": "leg"}, r"s4d: unknown init 'leg'; did you mean 'legs'\?"),
    ("s4d", {"discretization": "euler"}, "s4d: unknown discretization 'euler'; known: zoh, bilinear"),
    ("s5", {"blocks": 3}, "s5: state_dim is 8, expected a multiple of 6 because of blocks=3 and conj_sym=True"),
    ("s7", {"stable": True, "clip_eigs": True}, "s7: clip_eigs is True, expected False because stable is True"),
    ("s7_full", {"state_dim": 0}, "s7_full: state_dim is 0, expected at least 1"),
    ("s5", {"blocks": 0}, "s5: blocks is 0, expected at least 1"),
    ("s5", {"init": "normal"}, "s5: unknown init 'normal'; did you mean 'lecun_normal'"),
    ("s5", {"discretization": "euler"}, "s5: unknown discretization 'euler'; known: zoh, bilinear"),
    ("s5", {"activation": "glu"}, "s5: unknown activation 'glu'"),
    ("s5", {"dt_min": 0}, "s5: dt_min is 0, expected more than 0"),
    ("s4", {"state_dim": 5}, "s4: state_dim is 5, expected an even number of at least 2"),
    ("s4", {"dt_max": 1e-4}, "s4: dt_max is 0.0001, expected at least dt_min=0.001"),
    ("h3", {"state_dim": 3}, "h3: state_dim is 3, expected an even number of at least 2"),
    ("h3", {"head_dim": 3}, "h3: head_dim is 3, expected a divisor of dim=8"),
    ("h3", {"init": "invs"}, r"h3: unknown init 'invs'; did you mean 'inv'\?"),
    ("h3", {"discretization": "euler"}, "h3: unknown discretization 'euler'; known: zoh, bilinear"),
    ("h3", {"dt_min": -1}, "h3: dt_min is -1, expected more than 0"),
    ("hyena", {"order": 1}, "hyena: order is 1, expected at least 2"),
    ("hyena", {"emb_dim": 4}, "hyena: emb_dim is 4, expected an odd number of at least 3"),
    ("hyena", {"max_length": 0}, "hyena: max_length is 0, expected at least 1"),
    ("hyena", {"conv_size": 0}, "hyena: conv_size is 0, expected at least 1"),
    ("s4d", {"dt_max": 0.0}, "s4d: dt_max is 0.0, expected at least dt_min=0.001"),
]


@pytest.mark.parametrize(("name", "options", "message"), WRONG)
def test_wrong_options_are_refused(name, options, message):
    with pytest.raises(ConfigError, match=message):
        layers.build(name, DIM, **options)


@pytest.mark.usefixtures("double")
def test_a_dense_system_is_a_convolution_and_a_diagonal_system():
    layer, x = DenseLTI(DIM, 5), torch.randn(2, T, DIM)
    y, last = layer(x)
    kernel = layer.kernel(T)  # as `F.conv1d` reads it: (outputs, inputs, T), the oldest first
    torch.testing.assert_close(F.conv1d(F.pad(x.mT, (T - 1, 0)), kernel.permute(1, 2, 0).flip(2)).mT, y)
    diagonal = layer.diagonal()
    torch.testing.assert_close(diagonal(x)[0], y)
    eigenvalues = torch.linalg.eigvals(layer.A.detach())
    torch.testing.assert_close(eigenvalues.abs(), torch.full((5,), 0.99))
    assert last.shape == (2, 5)
    with torch.no_grad():
        layer.A.copy_(torch.eye(5).roll(1, 0).tril())  # nilpotent: one eigenvector
    with pytest.raises(
        ConfigError, match="dense_lti: A has no complete set of eigenvectors, expected a diagonalizable"
    ):
        layer.diagonal()
    with pytest.raises(ConfigError, match="dense_lti: length is 0, expected at least 1"):
        layer.kernel(0)
    with pytest.raises(ConfigError, match="dense_lti: r_max is 1, expected less than 1"):
        DenseLTI(DIM, r_max=1)
    with pytest.raises(ConfigError, match="dense_lti: state_dim is 0, expected at least 1"):
        DenseLTI(6, 0)


@pytest.mark.usefixtures("double")
def test_mamba3_mimo_in_pieces_of_time_is_the_whole():
    """A packed sequence is not cut; a row of a batch is. Values, states, and all gradients, the second one too."""
    layer = shaken(layers.build("mamba3_mimo", DIM, state_dim=8, head_dim=4, expand=2, rank=2))
    x = torch.randn(1, 150, DIM, requires_grad=True)
    results = []
    for more in ({}, {"cu_seqlens": torch.tensor([0, 150])}):
        y, state = layer(x, **more)
        leaves = [x, *layer.parameters()]
        grads = torch.autograd.grad(y.square().sum() + state.ssm.square().sum(), leaves, create_graph=True)
        second = torch.autograd.grad(grads[0].square().sum(), x)
        results.append([y, *state, *grads, *second])
    for mine, other in zip(*results, strict=True):
        torch.testing.assert_close(mine, other)
