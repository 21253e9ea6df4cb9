"""Equations that several layers of this family are written with, and what their tests share."""

import math

import torch

from by_hand import convolve as by_hand_convolve
from by_hand import gelu, linear, sigmoid, silu, softplus
from scanl.layers import param_groups


def direction(layer, us, zs, suffix):
    conv, x_proj, dt_proj = (layer.get_submodule(name + suffix) for name in ("conv1d", "x_proj", "dt_proj"))
    A_log, D = (layer.A_b_log, layer.D_b) if suffix else (layer.A_log, layer.D)
    h, ys = torch.zeros_like(A_log), []
    for u, z in zip([silu(u) for u in by_hand_convolve(us, conv)], zs, strict=True):
        low, B, C = (x_proj.weight @ u).split([layer.rank, layer.state_dim, layer.state_dim])
        delta = softplus(dt_proj.weight @ low + dt_proj.bias)
        h = torch.exp(-delta[:, None] * torch.exp(A_log)) * h + (delta * u)[:, None] * B
        ys.append((h @ C + D * u) * silu(z))
    return ys


def bimamba(layer, xs):
    us, zs = zip(*((layer.in_proj.weight @ x).chunk(2) for x in xs), strict=True)
    ahead = direction(layer, list(us), zs, "")
    back = direction(layer, list(us)[::-1], zs[::-1], "_b")[::-1]
    scale = 0.5 if layer.divide_out else 1
    return [scale * (layer.out_proj.weight @ (a + b)) for a, b in zip(ahead, back, strict=True)]


SIZES = {"state_dim": 3, "conv_size": 3, "rank": 2}


def rotated(v, position, first, second):
    """Each pair of channels (first, second) turned by the angle of its position."""
    out = v.clone()
    for i, (a, b) in enumerate(zip(first, second, strict=True)):
        angle = torch.tensor(position * 10000.0 ** (-2 * i / len(v)))
        out[a] = v[a] * angle.cos() - v[b] * angle.sin()
        out[b] = v[b] * angle.cos() + v[a] * angle.sin()
    return out


def cema(layer, xs):
    p = sigmoid(layer.alpha[..., 0])
    turn = torch.arange(1, layer.state_dim + 1) * sigmoid(layer.theta[..., 0]) * 2 * math.pi / layer.state_dim
    q = (1 - p * sigmoid(layer.delta[..., 0])) * torch.complex(turn.cos(), turn.sin())
    gamma = torch.complex(layer.gamma[..., 0], layer.gamma[..., 1]) / math.sqrt(layer.state_dim)
    h, ys = torch.zeros(layer.dim, layer.state_dim, dtype=torch.complex128), []
    for x in xs:
        h = q * h + p * x[:, None]
        ys.append((gamma * h).sum(1).real + layer.omega[:, 0] * x)
    return ys


def window(layer, spans, i):
    """The memory's system of step i, from its definition where steps have durations."""
    if spans is None:
        return layer.A, layer.B[:, 0]
    n = torch.arange(layer.state_dim)
    sign = torch.where(n[:, None] < n, -1.0, -((-1.0) ** (n[:, None] - n)))
    return discrete((2 * n[:, None] + 1) * sign, (2 * n + 1) * (-1.0) ** n, spans[i] / layer.theta, "zoh")


def discrete(A, B, dt, method):
    """By the definitions: sums of powers of A, or the trapezoidal rule."""
    eye = torch.eye(len(A))
    if method == "bilinear":
        back = torch.linalg.inv(eye - dt / 2 * A)
        return back @ (eye + dt / 2 * A), back @ (dt * B)
    squarings = 12
    small = dt * A / 2**squarings
    power, integral = eye, torch.zeros_like(A)
    for k in range(12):
        integral = integral + power / float(math.factorial(k + 1))
        power = power @ small
    exponential = small @ integral + eye  # over a small step; then the step is doubled
    for _ in range(squarings):
        integral = integral + exponential @ integral
        exponential = exponential @ exponential
    return exponential, integral @ (dt / 2**squarings * B)


def system(measure, N):
    """The matrices by their entries, as the paper has them."""
    if measure == "lagt":
        A = [[-0.5 if n == k else -1.0 * (n > k) for k in range(N)] for n in range(N)]
        return torch.tensor(A), torch.ones(N)
    if measure == "fourier":
        b = [1.0 if n == 0 else math.sqrt(2) * (n % 2 == 0) for n in range(N)]
        A = [[-2 * b[n] * b[k] for k in range(N)] for n in range(N)]
        for f in range(N // 2):
            A[2 * f + 1][2 * f] += 2 * math.pi * f
            A[2 * f][2 * f + 1] -= 2 * math.pi * f
        return torch.tensor(A), 2 * torch.tensor(b)
    sign = 1 if measure == "legt" else 0
    A = [
        [
            -math.sqrt((2 * n + 1) * (2 * k + 1)) * (1 if n > k else sign * (-1) ** (n - k))
            if n != k
            else -(2 * n + 1 if sign else n + 1)
            for k in range(N)
        ]
        for n in range(N)
    ]
    return torch.tensor(A, dtype=torch.float64), torch.tensor([math.sqrt(2 * n + 1) for n in range(N)])


def held(spans, xs):
    """How long each step lasts: one unit where nothing is said."""
    return torch.ones(len(xs)) if spans is None else spans


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


def after_systems(layer, read, x):
    return layer.output_linear.weight @ gelu(read + layer.D[0] * x) + layer.output_linear.bias


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


def mega_ema(layer, xs):
    """The released code, a step at a time: h = q h + p beta x, its step p the logit `delta`, its damping `alpha`."""
    p = sigmoid(layer.delta[..., 0])
    q = 1 - p * sigmoid(layer.alpha[..., 0])
    h, ys = torch.zeros(layer.dim, layer.state_dim), []
    for x in xs:
        h = q * h + p * layer.beta[..., 0] * x[:, None]
        ys.append(silu((h * layer.gamma).sum(1) / math.sqrt(layer.state_dim) + layer.omega * x))
    return ys


def legs(size):
    A = torch.zeros(size, size)
    for n in range(size):
        for k in range(n + 1):
            A[n, k] = -(n + 1) if n == k else -math.sqrt((2 * n + 1) * (2 * k + 1))
    return A


def without_decay(layer):
    """Names of the weights of maps that are not decayed, and rates of learning by name."""
    groups = {id(p): group for group in param_groups(layer) for p in group["params"]}
    found = {name: groups[id(parameter)] for name, parameter in layer.named_parameters()}
    return {
        name: (group.get("weight_decay"), group.get("lr"))
        for name, group in found.items()
        if group.keys() != {"params"}
    }
