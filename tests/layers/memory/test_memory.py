"""Matrix memories: each layer against its equation, step by step, how it starts, and what only it knows."""

import math

import pytest
import torch
from torch.nn import functional as F

from by_hand import (
    DIM,
    T,
    assert_normal,
    assert_orthogonal,
    assert_uniform,
    convolve,
    layer_norm,
    linear,
    rms,
    sigmoid,
    silu,
    softplus,
    unit,
)
from scanl import layers
from scanl.errors import ConfigError
from scanl.layers import state as states
from scanl.layers.parts.feature_map import FeatureMap
from scanl.layers.parts.kernel_memory import attend_by_kernel
from scanl.ops import linear_attention as linear_attention_op

pytestmark = pytest.mark.cells_by_loop("name")


def convolved(conv, xs, activation=silu):
    return [activation(y) for y in (xs if conv is None else convolve(xs, conv))]


def mamba2(layer, xs):
    H, G, N = layer.num_heads, layer.num_groups, layer.state_dim
    inner = H * layer.head_dim
    widths = [inner, inner + 2 * G * N, H]
    mixed = [linear(layer.in_proj, x).split(widths) for x in xs]
    branches = convolved(layer.conv1d, [u for _, u, _ in mixed])
    S = [torch.zeros(N, layer.head_dim) for _ in range(H)]
    ys = []
    for (z, _, dt), u in zip(mixed, branches, strict=True):
        x, B, C = u[:inner].view(H, -1), u[inner : inner + G * N].view(G, N), u[inner + G * N :].view(G, N)
        delta = softplus(dt + layer.dt_bias)
        heads = []
        for h in range(H):
            group = h // (H // G)
            decay = torch.exp(-layer.A_log[h].exp() * delta[h])
            S[h] = decay * S[h] + torch.outer(B[group], delta[h] * x[h])
            heads.append(S[h].T @ C[group] + layer.D[h] * x[h])
        gated = torch.cat(heads) * silu(z)
        y = torch.cat([rms(part) for part in gated.chunk(G)]) * layer.norm.weight
        ys.append(linear(layer.out_proj, y))
    return ys


def delta(S, q, k, v, beta, decay=1.0):
    """One step of the delta rule on one head: the memory after it, and what q reads."""
    S = decay * S
    S = S + beta * torch.outer(k, v - S.T @ k)
    return S, S.T @ q / math.sqrt(len(q))


def gated_deltanet(layer, xs, step=None, gate=silu, decay=None):
    """Of n writes a step: the first sees the decayed memory, the others what the one before left.

    step: (S, q, k, v, beta, alpha, head of keys) -> S and what is read, instead of the delta rule.
    """
    H, G, K, V = layer.num_v_heads, layer.num_heads, layer.head_dim, layer.head_v_dim
    n = layer.num_householder
    pairs = [(layer.q_conv1d, layer.q_proj), (layer.k_conv1d, layer.k_proj), (layer.v_conv1d, layer.v_proj)]
    qs, ks, vs = (convolved(conv, [linear(project, x) for x in xs]) for conv, project in pairs)
    S, ys = torch.zeros(H, K, V), []
    for x, q, k, v in zip(xs, qs, ks, vs, strict=True):
        beta = ((2 if layer.allow_neg_eigval else 1) * sigmoid(linear(layer.b_proj, x))).view(n, H)
        if decay is not None:
            alpha = torch.exp(decay(layer, x))
        elif layer.forget_gate:
            alpha = torch.exp(-layer.A_log.exp() * softplus(linear(layer.a_proj, x) + layer.dt_bias))
        else:
            alpha = torch.ones(H)
        q, k, v = q.view(G, K), k.view(n, G, K), v.view(n, H, V)
        rows, read = [], []
        for h in range(H):
            g, row = h // (H // G), S[h]
            for j in range(n):
                kept = alpha[h] if j == 0 else torch.ones(())
                if step is None:
                    row, o = delta(row, unit(q[g]), unit(k[j, g]), v[j, h], beta[j, h], kept.unsqueeze(-1))
                else:
                    row, o = step(layer, row, q[g], k[j, g], v[j, h], beta[j, h], kept, g)
            rows.append(row)
            read.append(rms(o, layer.o_norm.eps) * layer.o_norm.weight)
        S, y = torch.stack(rows), torch.cat(read)
        if layer.g_proj is not None:
            w = x
            for module in layer.g_proj if isinstance(layer.g_proj, torch.nn.Sequential) else [layer.g_proj]:
                w = linear(module, w)
            y = y * gate(w)
        ys.append(linear(layer.o_proj, y))
    return ys


def kda(layer, xs):
    def decay(layer, x):
        f = linear(layer.f_proj[1], linear(layer.f_proj[0], x)) + layer.dt_bias
        f, rate = f.view(layer.num_v_heads, -1), layer.A_log.exp()[:, None]
        return -5 * sigmoid(rate * f) if layer.safe_gate else -rate * softplus(f)

    return gated_deltanet(layer, xs, gate=sigmoid, decay=decay)


def comba(layer, xs):
    def step(layer, S, q, k, v, beta, alpha, g):
        p = sigmoid(layer.decay[g]) * k
        read = unit(q - layer.D[g] * p)
        S = alpha * S + beta * torch.outer(unit(k), v - S.T @ unit(p))
        return S, S.T @ read / math.sqrt(len(q))

    return gated_deltanet(layer, xs, step, sigmoid)


def projected(layer, xs, activation):
    """q, k and v of every step, through their convolutions if there are any."""
    pairs = [(layer.q_conv1d, layer.q_proj), (layer.k_conv1d, layer.k_proj), (layer.v_conv1d, layer.v_proj)]
    return zip(*(convolved(conv, [linear(project, x) for x in xs], activation) for conv, project in pairs), strict=True)


def gla(layer, xs):
    H, K, V = layer.num_heads, layer.head_k_dim, layer.head_v_dim
    S, ys = torch.zeros(H, K, V), []
    identity = layer.q_conv1d is None
    for x, (q, k, v) in zip(xs, projected(layer, xs, (lambda v: v) if identity else silu), strict=True):
        alpha = sigmoid(linear(layer.gk_proj[1], linear(layer.gk_proj[0], x))) ** (1 / layer.gate_logit_normalizer)
        read = []
        for h, (q_h, k_h, v_h) in enumerate(zip(q.view(H, K), k.view(H, K), v.view(H, V), strict=True)):
            now = torch.diag(alpha.view(H, K)[h]) @ S[h] + torch.outer(k_h, v_h)
            S = torch.cat([S[:h], now[None], S[h + 1 :]])
            read.append(rms(now.T @ q_h / math.sqrt(K)))
        if layer.g_proj is None:
            y = torch.cat([o * layer.g_norm.weight for o in read])
        else:
            gated = torch.cat([o * layer.g_norm_swish_gate.weight for o in read])
            y = gated * silu(linear(layer.g_proj, x))
        ys.append(linear(layer.o_proj, y))
    return ys


def deltanet(layer, xs):
    H, K, V = layer.num_heads, layer.head_k_dim, layer.head_v_dim
    map_of = {
        "silu": silu,
        "relu": F.relu,
        "elu": lambda v: torch.where(v > 0, v + 1, torch.exp(v)),
        "identity": lambda v: v,
    }[layer.activation]
    norm = unit if layer.qk_norm == "l2" else lambda v: v / v.abs().sum().clamp(min=1e-6)
    pairs = [(layer.q_conv1d, layer.q_proj, map_of), (layer.k_conv1d, layer.k_proj, map_of)]
    pairs.append((layer.v_conv1d, layer.v_proj, silu))
    qs, ks, vs = (convolved(conv, [linear(project, x) for x in xs], act) for conv, project, act in pairs)
    S, ys = torch.zeros(H, K, V), []
    for x, q, k, v in zip(xs, qs, ks, vs, strict=True):
        beta = torch.ones(H) if layer.b_proj is None else sigmoid(linear(layer.b_proj, x))
        beta = beta * (2 if layer.allow_neg_eigval else 1)
        q, k, v = q.view(H, K), k.view(H, K), v.view(H, V)
        steps = [delta(S[h], norm(q[h]), norm(k[h]), v[h], beta[h]) for h in range(H)]
        S = torch.stack([memory for memory, _ in steps])
        y = torch.cat([rms(o) * layer.o_norm.weight for _, o in steps])
        if layer.g_proj is not None:
            y = y * silu(linear(layer.g_proj, x))
        ys.append(linear(layer.o_proj, y))
    return ys


def retnet(layer, xs):
    H, K = layer.num_heads, layer.key_dim
    theta = 1 / 10000 ** torch.linspace(0, 1, K // 2)
    S, ys = [0] * H, []
    for t, x in enumerate(xs):
        q, k, v = (linear(project, x).view(H, -1) for project in (layer.q_proj, layer.k_proj, layer.v_proj))
        read = []
        for h in range(H):
            turned = [torch.view_as_complex(z[h].view(-1, 2)) * torch.exp(1j * theta * t) for z in (q, k)]
            q_h, k_h = (torch.view_as_real(z).flatten() for z in turned)
            S[h] = (1 - 2 ** (-5 - h)) * S[h] + torch.outer(k_h / math.sqrt(K), v[h])
            read.append(rms(S[h].T @ q_h, 1e-6))
        ys.append(linear(layer.out_proj, silu(linear(layer.g_proj, x)) * torch.cat(read)))
    return ys


def kernel(layer, q, k, apart, h):
    """What a feature map's inner product must be, without features; random maps have their own projection."""
    fm = layer.feature_map
    scaled = q @ k / math.sqrt(len(q))
    name = fm.name
    if name == "elu_plus_one":
        return torch.where(q > 0, q + 1, q.exp()) @ torch.where(k > 0, k + 1, k.exp())
    if name == "identity":
        return q @ k
    if name == "taylor":
        return 1 + scaled + scaled**2 / 2
    if name == "quadratic":
        return scaled**2
    if name == "arc_cosine_features":
        return F.relu(fm.projection @ q) @ F.relu(fm.projection @ k) / len(fm.projection)
    if name == "polynomial":
        return (1 + q @ k) ** fm.degree
    if name == "cosine_reweighting":
        return F.relu(q) @ F.relu(k) * math.cos(math.pi / 2 * apart / fm.horizon)
    if name == "positive_random_features":
        phi = [torch.exp(fm.projection @ z - z @ z / 2) for z in (q / len(q) ** 0.25, k / len(k) ** 0.25)]
        return phi[0] @ phi[1] / len(fm.projection)
    assert name == "fourier_features"
    w = fm.projection[h] * fm.sigma[h]
    return torch.cos(w @ (q / (q.norm() + 1e-3) - k / (k.norm() + 1e-3))).mean()


def linear_attention(layer, xs):
    """The quadratic form: a sum over all pairs of steps, with the decays between them written out."""
    H, ys = layer.num_heads, []
    for t, x in enumerate(xs):
        heads = []
        for h in range(H):
            top, bottom = torch.zeros(layer.head_v_dim), torch.zeros(())
            for s in range(t + 1 if layer.causal else len(xs)):
                q, k, v = linear(layer.q_proj, x), linear(layer.k_proj, xs[s]), linear(layer.v_proj, xs[s])
                if layer.q_norm is not None:
                    q, k = layer_norm(q, layer.q_norm), layer_norm(k, layer.k_norm)
                q, k, v = (part.view(H, -1)[h] for part in (q, k, v))
                if layer.feature_map.name == "dpfp":
                    q, k = (dpfp(z, layer.feature_map.nu) for z in (q, k))
                    weight = (q / (q.sum() + 1e-4)) @ (k / (k.sum() + 1e-4))
                else:
                    weight = kernel(layer, q, k, t - s, h)
                if layer.gate_proj is not None:
                    gates = [sigmoid(linear(layer.gate_proj, xs[r])[h]) for r in range(s, t + 1)]
                    weight = weight * (1 - gates[0]) * math.prod(gates[1:])
                top, bottom = top + weight * v, bottom + weight
            o = top / bottom.clamp(min=layer.eps) if layer.normalize else top
            heads.append(o if layer.norm is None else rms(o) * layer.norm.weight)
        ys.append(linear(layer.o_proj, torch.cat(heads)))
    return ys


def dpfp(v, nu):
    r = torch.cat([F.relu(v), F.relu(-v)])
    return torch.stack([r[i] * r[i - j] for j in range(1, nu + 1) for i in range(len(r))])


def attention(name="linear_attention", **options):
    return lambda: layers.build(name, DIM, num_heads=2, **options), linear_attention


def decaying_fast_weights(layer, xs):
    H, K, V = layer.num_heads, layer.head_k_dim, layer.head_v_dim
    S, ys = torch.zeros(H, K, V), []
    for x in xs:
        q, k, fk = (linear(project, x).view(H, K) for project in (layer.q_proj, layer.k_proj, layer.fk_proj))
        v, fv = (linear(project, x).view(H, V) for project in (layer.v_proj, layer.fv_proj))
        S = torch.stack(
            [torch.outer(sigmoid(fk[h]), sigmoid(fv[h])) * S[h] + torch.outer(k[h], v[h]) for h in range(H)]
        )
        ys.append(linear(layer.o_proj, torch.cat([S[h].T @ q[h] for h in range(H)])))
    return ys


def slots(layer, xs, kept, written, queries, read):
    """Slots m of keys and values, each kept and written by numbers of its own, that softmax attention reads."""
    H, M = layer.num_heads, layer.num_slots
    keys, values = torch.zeros(H, M, layer.head_k_dim), torch.zeros(H, M, layer.head_v_dim)
    ys = []
    for t, x in enumerate(xs):
        q, k, v = queries(t, x)
        o = []
        for h in range(H):
            for m in range(M):
                keys = keys.index_put(
                    (torch.tensor(h), torch.tensor(m)), kept[t][h, m] * keys[h, m] + written[t][h, m] * k[h]
                )
                values = values.index_put(
                    (torch.tensor(h), torch.tensor(m)), kept[t][h, m] * values[h, m] + written[t][h, m] * v[h]
                )
            weights = torch.exp(keys[h] @ q[h])
            o.append(values[h].T @ weights / weights.sum())
        ys.append(linear(layer.o_proj, read(x, o)))
    return ys


def gsa(layer, xs):
    H = layer.num_heads
    kept = [(sigmoid(linear(layer.f_proj, x)) ** (1 / layer.gate_logit_normalizer)).view(H, -1) for x in xs]

    def queries(t, x):
        return [silu(linear(project, x)).view(H, -1) for project in (layer.q_proj, layer.k_proj, layer.v_proj)]

    def read(x, o):
        return rms(silu(torch.cat(o)), layer.g_norm.eps) * layer.g_norm.weight

    return slots(layer, xs, kept, [1 - a for a in kept], queries, read)


def abc(layer, xs):
    """A mean over so many weights keeps the part that the ones before are of all."""
    H, K = layer.num_heads, layer.head_k_dim
    weights = [torch.exp(linear(layer.s_proj, x).clamp(-layer.clamp, layer.clamp)).view(H, -1) for x in xs]
    sums = [sum(weights[: t + 1]) for t in range(len(xs))]

    def turn(v, t):
        half = layer.rotated // 2
        angles = t * 10000.0 ** (-torch.arange(half) / max(1, half))
        a, b, rest = v.split([half, half, K - 2 * half], -1)
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin(), rest], -1)

    def queries(t, x):
        q, k, v = (linear(project, x).view(H, -1) for project in (layer.q_proj, layer.k_proj, layer.v_proj))
        return turn(q, t) / math.sqrt(K), turn(k, t), v

    def read(x, o):
        y = torch.cat([rms(part, layer.g_norm.eps) * layer.g_norm.weight for part in o])
        return y if layer.g_proj is None else y * silu(linear(layer.g_proj, x))

    kept = [1 - e / z for e, z in zip(weights, sums, strict=True)]
    return slots(layer, xs, kept, [e / z for e, z in zip(weights, sums, strict=True)], queries, read)


def hgrn2(layer, xs):
    H, K = layer.dim // layer.head_dim, layer.head_dim
    bound, S, ys = layer.lower_bound(), torch.zeros(layer.dim // layer.head_dim, layer.head_dim, layer.head_dim), []
    for x in xs:
        f = (bound + (1 - bound) * sigmoid(linear(layer.f_proj, x))).view(H, K)
        q, v = silu(linear(layer.q_proj, x)).view(H, K), linear(layer.i_proj, x).view(H, K)
        S = torch.stack([torch.diag(f[h]) @ S[h] + torch.outer(1 - f[h], v[h]) for h in range(H)])
        o = torch.cat([S[h].T @ q[h] for h in range(H)]) / math.sqrt(K)
        ys.append(linear(layer.o_proj, rms(o, layer.g_norm.eps) * layer.g_norm.weight))
    return ys


def hgrn2_of_a_stack():
    """The third of four, whose bound is learned."""
    layer = in_a_stack("hgrn2", 2, 4, head_dim=4)
    layer._bound.lowest.gamma.requires_grad_(False).normal_()
    return layer


def transnormer(layer, xs, blocks, weight, norm):
    """Both kinds of TransNormer, as a sum over pairs of steps of one block."""
    H, K, ys = layer.num_heads, layer.head_dim, []

    def placed(z, t):
        z = z - 2 * layer.urpe.v * (layer.urpe.v @ z)
        turned = torch.view_as_complex(z[: K // 2 * 2].view(-1, 2)) * torch.exp(1j * layer.urpe.theta[0, 0] * t)
        return torch.cat([torch.view_as_real(turned).flatten(), z[K // 2 * 2 :]])

    parts = [[linear(project, x).view(H, K) for project in (layer.q_proj, layer.k_proj, layer.v_proj)] for x in xs]
    for t in range(len(xs)):
        seen, heads = range(t // blocks * blocks, t + 1), []
        for h in range(H):
            scores = weight([(parts[t][0][h], parts[s][1][h], placed, t % blocks, s % blocks) for s in seen])
            heads.append(sum(score * parts[s][2][h] for score, s in zip(scores, seen, strict=True)))
        o = torch.cat(heads)
        ys.append(linear(layer.out_proj, o / (o.norm() / math.sqrt(len(o)) + 1e-8) if norm else o))
    return ys


def norm_attention(layer, xs):
    plus = layer.activation == "elu_plus_one"

    def phi(v):
        return torch.where(v > 0, v, v.exp() - 1) + plus

    def weight(pairs):
        return [placed(phi(q), t) @ placed(phi(k), s) for q, k, placed, t, s in pairs]

    return transnormer(layer, xs, len(xs), weight, True)


def diag_attention(layer, xs):
    def weight(pairs):
        scores = torch.stack([placed(q, t) @ placed(k, s) / math.sqrt(len(q)) for q, k, placed, t, s in pairs])
        return torch.exp(scores) / torch.exp(scores).sum() if layer.softmax else F.relu(scores)

    return transnormer(layer, xs, layer.window, weight, not layer.softmax)


def expanded(x, p):
    return torch.stack([x[i] * p[j] for j in range(len(p)) for i in range(len(x))])


def gated_outer_products(layer, x, expansions):
    """k, q, v, β and γ of every head, and its expansions, before any activation."""
    H = layer.num_heads
    parts = linear(layer.linear_kqvbetagammas, x).view(H, 5, -1)
    return zip(*parts.unbind(1), linear(layer.linear_p1p2p3, x).view(H, expansions, -1), strict=True)


def relit(layer, xs):
    H, K = layer.num_heads, layer.head_dim
    C, s, ys = [0] * H, [0] * H, []
    for x in xs:
        o = []
        for h, (k, q, v, beta, gamma, (p1, p3)) in enumerate(gated_outer_products(layer, x, 2)):
            k, gamma = expanded(F.relu(k), F.relu(p1)), expanded(sigmoid(gamma), sigmoid(p3))
            q = F.relu(layer.query_weight[h] @ q + layer.query_bias[h])
            q, write = expanded(q[:K], q[K:]), torch.outer(sigmoid(beta), gamma)
            C[h] = (1 - write) * C[h] + write * torch.outer(v, k)
            s[h] = (1 - gamma) * s[h] + gamma * k
            o.append(C[h] @ q / (s[h] @ q + layer.eps))
        ys.append(linear(layer.project, torch.cat(o)))
    return ys


def arelit(layer, xs):
    H, r = layer.num_heads, layer.rank
    omegas = [-math.pi + 2 * math.pi * m / max(1, r - 1) for m in range(r)]
    ks, vs, s, ys = [[0] * r for _ in range(H)], [[0] * r for _ in range(H)], [0] * H, []
    for t, x in enumerate(xs):
        o = []
        for h, (k, q, v, beta, gamma, (p1, p2, p3)) in enumerate(gated_outer_products(layer, x, 3)):
            k, q = expanded(F.relu(k), F.relu(p1)), expanded(F.relu(q), F.relu(p2))
            gamma, beta, top = expanded(sigmoid(gamma), sigmoid(p3)), sigmoid(beta), 0
            for m in range(r):
                wave = math.cos(omegas[m] * (t + 2))
                ks[h][m] = (1 - gamma) * ks[h][m] + wave * gamma * k
                vs[h][m] = (1 - beta) * vs[h][m] + wave * beta * v
                top = top + (ks[h][m] @ q) * vs[h][m]
            s[h] = (1 - gamma) * s[h] + gamma * k
            o.append(top / (2 * r * (s[h] @ q) + layer.eps))
        ys.append(linear(layer.project, torch.cat(o)))
    return ys


def rdn(layer, xs):
    H, K = layer.num_heads, layer.head_dim
    S, last, ys = [torch.zeros(K, K)] * H, [torch.zeros(K)] * H, []
    for x in xs:
        parts = linear(layer.slow_net, x).view(H, -1)
        for h in range(H):
            q, k, v, b = parts[h].split([K, K, K, 1])
            back = torch.tanh(last[h])
            q, k = torch.exp(q + back @ layer.R_q[0, h]), torch.exp(k + back @ layer.R_k[0, h])
            v, beta = v + back @ layer.R_v[0, h], sigmoid(b + layer.r_b[0, h] @ back)
            S[h], o = delta(S[h], q / q.sum(), k / k.sum(), v, beta)
            last[h] = o * math.sqrt(K)
        ys.append(linear(layer.out_linear, torch.cat(last)))
    return ys


def srwm(layer, xs):
    """The four matrices apart, each changed with its own learning rate."""
    H, K, ys = layer.num_heads, layer.head_dim, []
    now = [[weight[0, h] for weight in (layer.W_y, layer.W_q, layer.W_k, layer.w_b)] for h in range(H)]
    for x in xs:
        o = []
        for h, part in enumerate(x.view(H, K)):
            part = torch.exp(part) / torch.exp(part).sum() if layer.softmax else part
            y, q, k, b = (weight.T @ part for weight in now[h])
            q, k = torch.exp(q) / torch.exp(q).sum(), torch.exp(k) / torch.exp(k).sum()
            now[h] = [
                weight + sigmoid(rate) * torch.outer(k, weight.T @ q - weight.T @ k)
                for weight, rate in zip(now[h], b, strict=True)
            ]
            o.append(y)
        ys.append(linear(layer.out_linear, torch.cat(o)))
    return ys


def in_a_stack(name, index, depth, **options):
    stack = [layers.build(name, DIM, **options) for _ in range(depth)]
    for at, layer in enumerate(stack):
        layer.enter_stack(at, stack)
    return stack[index]


def lightning(layer, xs, depth=0.0):
    """depth: index of the layer over that of the highest."""
    H, K = layer.num_heads, layer.head_dim
    S, ys = torch.zeros(H, K, K), []
    for x in xs:
        q, k, v = silu(linear(layer.qkv_proj, x)).view(H, 3, K).unbind(1)
        decays = [math.exp(-(2 ** (-8 * (h + 1) / H)) * (1 - depth + 1e-5)) for h in range(H)]
        S = torch.stack([decays[h] * S[h] + torch.outer(k[h], v[h]) for h in range(H)])
        o = rms(torch.cat([S[h].T @ q[h] for h in range(H)]), 1e-6) * layer.norm.weight
        ys.append(linear(layer.out_proj, o * sigmoid(linear(layer.output_gate, x))))
    return ys


def transnormerllm(layer, xs, depth=0.0, slopes=(2**-4, 2**-8)):
    """The quadratic form: positions are cosines of the angles between steps."""
    H, ys = layer.num_heads, []
    parts = [linear(layer.qkvu_proj, x).chunk(4) for x in xs]
    for t in range(len(xs)):
        o = [0] * H
        for s in range(t + 1):
            q, k, v = silu(parts[t][0]).view(H, -1), silu(parts[s][1]).view(H, -1), parts[s][2].view(H, -1)
            turn = torch.ones(q.shape) if layer.lrpe is None else torch.cos((t - s) * layer.lrpe.theta)
            for h in range(H):
                weight = (q[h] * k[h] * turn[h]).sum() * math.exp(-slopes[h] * (1 - depth + 1e-5) * (t - s))
                o[h] = o[h] + weight * v[h]
        o = torch.cat(o)
        ys.append(linear(layer.out_proj, parts[t][3] * o / (o.norm() / math.sqrt(len(o)) + 1e-8)))
    return ys


def mlstm(layer, xs):
    """The recurrence without a stabiliser; the 1e-6 of the released code is added to a denominator times e^-m."""
    H, cell = layer.num_heads, layer.mlstm_cell
    P = layer.width // H

    def headwise(module, v):
        return torch.block_diag(*module.weight) @ v + (0 if module.bias is None else module.bias)

    mixed = [linear(layer.proj_up, x).chunk(2) for x in xs]
    branches = convolved(layer.conv1d.conv, [u for u, _ in mixed])
    C, n, m, ys = torch.zeros(H, P, P), torch.zeros(H, P), torch.zeros(H), []
    for (u, z), conv in zip(mixed, branches, strict=True):
        q, k, v = headwise(layer.q_proj, conv), headwise(layer.k_proj, conv), headwise(layer.v_proj, u)
        gates = torch.cat([q, k, v])
        i, f = torch.exp(linear(cell.igate, gates)), sigmoid(linear(cell.fgate, gates))
        m = torch.maximum(f.log() + m, i.log())
        q, k, v = q.view(H, P), k.view(H, P) / math.sqrt(P), v.view(H, P)
        C = f[:, None, None] * C + i[:, None, None] * k[:, :, None] * v[:, None, :]
        n = f[:, None] * n + i[:, None] * k
        heads = []
        for h in range(H):
            o = C[h].T @ q[h] / (max(abs(n[h] @ q[h]), torch.ones(())) + 1e-6 * torch.exp(m[h]))
            heads.append((o - o.mean()) / torch.sqrt(o.var(correction=0) + 1e-5))
        y = torch.cat(heads) * (1 + cell.outnorm.weight) + layer.learnable_skip * conv
        ys.append(linear(layer.proj_down, y * silu(z)))
    return ys


def mlstm_large(layer, xs):
    """As mlstm, on x itself; gates of c tanh(x / c)."""
    H, cap = layer.num_heads, layer.gate_soft_cap
    K, V = layer.q.out_features // H, layer.v.out_features // H
    C, n, m, ys = torch.zeros(H, K, V), torch.zeros(H, K), torch.zeros(H), []
    for x in xs:
        i = torch.exp(cap * torch.tanh(linear(layer.igate_preact, x) / cap))
        f = sigmoid(cap * torch.tanh(linear(layer.fgate_preact, x) / cap))
        m = torch.maximum(f.log() + m, i.log())
        q, k, v = (layer.q.weight @ x).view(H, K), (layer.k.weight @ x).view(H, K), (layer.v.weight @ x).view(H, V)
        C = f[:, None, None] * C + i[:, None, None] * k[:, :, None] * v[:, None, :]
        n = f[:, None] * n + i[:, None] * k
        heads = []
        for h in range(H):
            read = q[h] / math.sqrt(K)
            o = C[h].T @ read / (max(abs(n[h] @ read), torch.ones(())) + layer.eps * torch.exp(m[h]))
            heads.append((o - o.mean()) / torch.sqrt(o.var(correction=0) + layer.multihead_norm.eps))
        y = torch.cat(heads) * layer.multihead_norm.weight
        ys.append(layer.out_proj.weight @ (sigmoid(layer.ogate_preact.weight @ x) * y))
    return ys


def gateloop(layer, xs):
    H, K = layer.num_heads, layer.head_dim
    S, ys = torch.zeros(H, K, K, dtype=torch.complex128), []
    for x in xs:
        q, k, v = linear(layer.to_qkv, x).view(3, H, K)
        alpha, beta = linear(layer.to_a[0], x).view(H, K, 2).unbind(-1)
        a = sigmoid(alpha) * torch.exp(1j * beta)
        if layer.polar:
            a = sigmoid(torch.sqrt(alpha**2 + beta**2)) * torch.exp(1j * torch.atan2(beta, alpha))
        S = torch.stack([torch.diag(a[h]) @ S[h] + torch.outer(k[h], v[h]) for h in range(H)])
        y = torch.cat([(S[h].T @ q[h].to(S.dtype)).real for h in range(H)])
        if isinstance(layer.maybe_sub_ln, torch.nn.LayerNorm):
            y = (y - y.mean()) / torch.sqrt(y.var(correction=0) + 1e-5)
            y = y * layer.maybe_sub_ln.weight + layer.maybe_sub_ln.bias
        if layer.to_gates is not None:
            y = y * silu(linear(layer.to_gates[0], x))
        ys.append(linear(layer.to_out, y))
    return ys


EQUATIONS = {
    "mamba2": (lambda: layers.build("mamba2", DIM, state_dim=3, head_dim=4), mamba2),
    "mamba2_groups": (
        lambda: layers.build(
            "mamba2", DIM, state_dim=3, head_dim=2, num_groups=4, conv_size=1, bias=True, conv_bias=False
        ),
        mamba2,
    ),
    "gated_deltanet": (lambda: layers.build("gated_deltanet", DIM, head_dim=3, num_heads=2), gated_deltanet),
    "gated_deltanet_shared": (
        lambda: layers.build(
            "gated_deltanet",
            DIM,
            head_dim=4,
            num_heads=1,
            num_v_heads=3,
            expand_v=0.5,
            output_gate=False,
            conv_bias=True,
        ),
        gated_deltanet,
    ),
    "gated_deltanet_negative_eigenvalues": (
        lambda: layers.build("gated_deltanet_negative_eigenvalues", DIM, head_dim=3, num_heads=2, conv_size=None),
        gated_deltanet,
    ),
    "qwen3_next_deltanet": (
        lambda: layers.build("qwen3_next_deltanet", DIM, head_dim=3, num_heads=2, num_v_heads=4),
        gated_deltanet,
    ),
    "gated_deltaproduct": (
        lambda: layers.build("gated_deltaproduct", DIM, head_dim=3, num_heads=2, num_v_heads=4),
        gated_deltanet,
    ),
    "deltaproduct": (
        lambda: layers.build("deltaproduct", DIM, head_dim=3, num_heads=2, num_householder=3, expand_v=1.0),
        gated_deltanet,
    ),
    "kda": (lambda: layers.build("kda", DIM, head_dim=3, num_heads=2, num_v_heads=4, expand_v=2.0), kda),
    "kda_safe": (
        lambda: layers.build("kda", DIM, head_dim=4, safe_gate=True, conv_size=None),
        kda,
    ),
    "kda_negative_eigenvalues": (lambda: layers.build("kda_negative_eigenvalues", DIM, head_dim=4), kda),
    "comba": (lambda: layers.build("comba", DIM, head_dim=3, num_heads=2, num_v_heads=4), comba),
    "comba_plain": (
        lambda: layers.build("comba", DIM, num_heads=2, output_gate=False, conv_size=None, correction_factor=0.02),
        comba,
    ),
    "gla": (lambda: layers.build("gla", DIM, num_heads=2, gate_rank=3), gla),
    "gla_convolved": (
        lambda: layers.build(
            "gla",
            DIM,
            expand_k=1.0,
            expand_v=0.5,
            num_heads=4,
            conv_size=4,
            conv_bias=True,
            output_gate=False,
            gate_logit_normalizer=2,
        ),
        gla,
    ),
    "deltanet": (lambda: layers.build("deltanet", DIM, num_heads=2), deltanet),
    "deltanet_2021": (lambda: layers.build("deltanet_2021", DIM, num_heads=2), deltanet),
    "deltanet_gated": (
        lambda: layers.build(
            "deltanet", DIM, num_heads=2, output_gate=True, allow_neg_eigval=True, conv_bias=True, activation="identity"
        ),
        deltanet,
    ),
    "deltanet_negative_eigenvalues": (
        lambda: layers.build("deltanet_negative_eigenvalues", DIM, num_heads=2),
        deltanet,
    ),
    "deltanet_wide": (
        lambda: layers.build(
            "deltanet", DIM, num_heads=4, expand_k=0.5, expand_v=2.0, use_beta=False, activation="relu"
        ),
        deltanet,
    ),
    "retnet": (lambda: layers.build("retnet", DIM, num_heads=2), retnet),
    "retnet_narrow": (lambda: layers.build("retnet", DIM, num_heads=4, expand_v=1.5), retnet),
    "linear_attention": attention(expand_k=0.5, expand_v=2.0),
    "unnormalised_linear_attention": attention("unnormalised_linear_attention"),
    "noncausal_linear_attention": attention("noncausal_linear_attention"),
    "linear_attention_bidirectional_unnormalised": attention(causal=False, feature_map="identity", normalize=False),
    "linear_attention_taylor": attention(feature_map="taylor"),
    "polynomial_attention": attention("polynomial_attention"),
    "polynomial_attention_by_kernel": attention("polynomial_attention", degree=8),
    "performer": attention("performer", num_features=5),
    "rfa": attention("rfa"),
    "rfa_unbounded": attention("rfa", num_features=5, eps=1e-6),
    "rfa_gate": attention("rfa_gate"),
    "arc_cosine_attention": attention("arc_cosine_attention"),
    "fwp": attention("fwp"),
    "based": attention("based", head_dim=3),
    "rebased": attention("rebased", head_dim=3),
    "dpfp": attention("dpfp"),
    "dpfp_normalised": attention("dpfp", normalize=True),
    "cosformer": attention("cosformer", horizon=20),
    "linear_attention_cosformer_bidirectional": attention(feature_map="cosine_reweighting", horizon=20, causal=False),
    "mlstm": (
        lambda: layers.build("mlstm", DIM, num_heads=2, expand=1.5, multiple_of=4),
        mlstm,
    ),
    "mlstm_bias": (
        lambda: layers.build(
            "mlstm",
            DIM,
            num_heads=4,
            multiple_of=8,
            block_size=2,
            bias=True,
            conv_size=2,
        ),
        mlstm,
    ),
    "mlstm_large": (lambda: layers.build("mlstm_large", DIM, num_heads=2), mlstm_large),
    "mlstm_large_capped": (
        lambda: layers.build(
            "mlstm_large",
            DIM,
            num_heads=4,
            expand_k=1.5,
            expand_v=2.0,
            gate_soft_cap=5.0,
            norm_eps=0.1,
            eps=0.1,
        ),
        mlstm_large,
    ),
    "decaying_fast_weights": (
        lambda: layers.build("decaying_fast_weights", DIM, num_heads=2, expand_k=0.5, expand_v=1.5),
        decaying_fast_weights,
    ),
    "decaying_fast_weights_unbiased": (
        lambda: layers.build("decaying_fast_weights", DIM, num_heads=4, bias=False),
        decaying_fast_weights,
    ),
    "gsa": (lambda: layers.build("gsa", DIM, num_heads=2, num_slots=3), gsa),
    "gsa_wide": (
        lambda: layers.build("gsa", DIM, num_heads=4, num_slots=5, expand_k=0.5, expand_v=2.0, gate_logit_normalizer=1),
        gsa,
    ),
    "abc": (lambda: layers.build("abc", DIM, num_heads=2, num_slots=3), abc),
    "abc_plain": (
        lambda: layers.build(
            "abc", DIM, num_heads=2, num_slots=5, expand_k=0.75, rope_base=None, output_gate=False, clamp=0.5
        ),
        abc,
    ),
    "hgrn2": (lambda: layers.build("hgrn2", DIM), hgrn2),
    "hgrn2_in_a_stack": (hgrn2_of_a_stack, hgrn2),
    "lightning": (lambda: layers.build("lightning", DIM, num_heads=3, head_dim=2), lightning),
    "lightning_in_a_stack": (
        lambda: in_a_stack("lightning", 1, 4, num_heads=2),
        lambda layer, xs: lightning(layer, xs, 1 / (3 + 1e-5)),
    ),
    "transnormerllm": (lambda: layers.build("transnormerllm", DIM, num_heads=2), transnormerllm),
    "transnormerllm_in_a_stack": (
        lambda: in_a_stack("transnormerllm", 2, 4, num_heads=4),
        lambda layer, xs: transnormerllm(layer, xs, 2 / 3, (2**-2, 2**-4, 2**-6, 2**-8)),
    ),
    "transnormerllm_positioned": (
        lambda: in_a_stack("transnormerllm", 3, 4, num_heads=1, lrpe=True),
        lambda layer, xs: transnormerllm(layer, xs, 1.0, (2**-8,)),
    ),
    "norm_attention": (lambda: layers.build("norm_attention", DIM, num_heads=2), norm_attention),
    "norm_attention_t2": (lambda: layers.build("norm_attention_t2", DIM, num_heads=1), norm_attention),
    "diag_attention": (lambda: layers.build("diag_attention", DIM, num_heads=2, window=3), diag_attention),
    "diag_attention_whole": (lambda: layers.build("diag_attention", DIM, num_heads=4, softmax=True), diag_attention),
    "diag_attention_t2": (lambda: layers.build("diag_attention_t2", DIM, num_heads=2, window=2), diag_attention),
    "relit": (lambda: layers.build("relit", DIM, num_heads=2, head_dim=5, eta=3), relit),
    "relit_narrow": (lambda: layers.build("relit", DIM, num_heads=1, head_dim=6, eps=0.5), relit),
    "arelit": (lambda: layers.build("arelit", DIM, num_heads=2, head_dim=5), arelit),
    "arelit_seven": (lambda: layers.build("arelit", DIM, num_heads=1, head_dim=6, eta=3, rank=7, eps=0.5), arelit),
    "rdn": (lambda: layers.build("rdn", DIM, num_heads=2), rdn),
    "srwm": (lambda: layers.build("srwm", DIM, num_heads=2), srwm),
    "srwm_softmax": (lambda: layers.build("srwm", DIM, num_heads=1, softmax=True), srwm),
    "gateloop": (lambda: layers.build("gateloop", DIM), gateloop),
    "gateloop_heads": (lambda: layers.build("gateloop", DIM, num_heads=2, width=6), gateloop),
    "gateloop_polar": (
        lambda: layers.build("gateloop", DIM, polar=True, output_norm=False, output_gate=False),
        gateloop,
    ),
    "gateloop_polar_heads": (lambda: layers.build("gateloop", DIM, polar=True, num_heads=4), gateloop),
}


# --- initialisation


def assert_time_steps(bias, low=0.001, high=0.1):
    """softplus of the bias is log-uniform."""
    assert_uniform(F.softplus(bias.double()).log(), math.log(low), math.log(high))


def undecayed(layer):
    """Names of parameters that no weight decay reaches, and that are of no linear map."""
    groups = {id(p) for group in layers.param_groups(layer) if group.get("weight_decay") == 0 for p in group["params"]}
    return {name for name, parameter in layer.named_parameters() if id(parameter) in groups}


def test_init_of_mamba2():
    layer = layers.build("mamba2", 4000, state_dim=1, head_dim=2, expand=1)
    assert_uniform(layer.A_log.exp(), 1, 16)
    assert_time_steps(layer.dt_bias)
    assert (layer.D == 1).all()
    assert (layer.norm.weight == 1).all()
    assert_uniform(layer.in_proj.weight, -1 / math.sqrt(4000), 1 / math.sqrt(4000))
    assert_uniform(layer.conv1d.weight, -1 / 2, 1 / 2)
    assert {"A_log", "D", "dt_bias"} <= undecayed(layer)
    assert layer.in_proj.bias is None
    layer = layers.build("mamba2", 64)
    assert layer.in_proj.weight.shape == (2 * 128 + 2 * 128 + 2, 64)
    assert layer.conv1d.weight.shape == (128 + 2 * 128, 1, 4)


def test_init_of_gated_deltanet():
    layer = layers.build("gated_deltanet", 64, head_dim=2, num_heads=4000)
    assert_uniform(layer.A_log.exp(), 0, 16)
    assert_time_steps(layer.dt_bias)
    for project in (layer.q_proj, layer.k_proj, layer.v_proj, layer.a_proj, layer.b_proj, layer.g_proj, layer.o_proj):
        assert_normal(project.weight, 0.02)
    assert_uniform(layer.q_conv1d.weight, -1 / 2, 1 / 2)
    assert (layer.o_norm.weight == 1).all()
    assert {"A_log", "dt_bias"} <= undecayed(layer)


def test_init_of_deltaproduct():
    layer = layers.build("gated_deltaproduct", 64, head_dim=8, num_heads=4)
    assert (layer.k_proj.out_features, layer.v_proj.out_features, layer.b_proj.out_features) == (64, 128, 8)
    for project in (layer.k_proj, layer.v_proj, layer.b_proj):
        assert_normal(project.weight, 0.02)
    names = dict(layers.build("deltaproduct", 64).named_parameters())
    assert not {"A_log", "dt_bias", "a_proj.weight", "g_proj.weight"} & names.keys()


def test_init_of_kda():
    layer = layers.build("kda", 64, head_dim=2, num_heads=4000)
    assert_uniform(layer.A_log.exp(), 1, 16)
    assert_time_steps(layer.dt_bias)
    assert layer.dt_bias.shape == (8000,)
    for project in (layer.q_proj, layer.b_proj, layer.o_proj, *layer.f_proj, *layer.g_proj):
        assert_normal(project.weight, 0.02)
    assert not layer.g_proj[1].bias.any()
    assert {"A_log", "dt_bias"} <= undecayed(layer)
    assert layers.build("kda", 512).num_heads == 4
    assert not layers.build("kda", 128, safe_gate=True).A_log.any()


def test_init_of_comba():
    layer = layers.build("comba", 64, head_dim=2, num_heads=4000, correction_factor=0.02)
    assert_uniform(layer.A_log.exp(), 0, 16)
    assert_time_steps(layer.dt_bias)
    assert_normal(layer.g_proj.weight, 0.02)
    assert (layer.decay == 1).all()
    assert (layer.D == 0.02).all()
    assert {"A_log", "dt_bias", "D"} <= undecayed(layer)


def test_init_of_gla():
    layer = layers.build("gla", 256)
    for project in (layer.q_proj, layer.k_proj, layer.v_proj, layer.g_proj, *layer.gk_proj, layer.o_proj):
        limit = 2**-2.5 * math.sqrt(6 / sum(project.weight.shape))
        assert_uniform(project.weight, -limit, limit)
    assert not layer.gk_proj[1].bias.any()
    assert (layer.q_proj.weight.shape, layer.v_proj.weight.shape) == ((128, 256), (256, 256))
    assert layer.gk_proj[0].weight.shape == (16, 256)
    assert (layer.g_norm_swish_gate.weight == 1).all()


def test_init_of_deltanet():
    layer = layers.build("deltanet", 256, output_gate=True)
    for project in (layer.q_proj, layer.k_proj, layer.v_proj, layer.b_proj, layer.g_proj, layer.o_proj):
        assert_normal(project.weight, 0.02)
    assert_uniform(layer.k_conv1d.weight, -1 / 2, 1 / 2)
    assert (layer.o_norm.weight == 1).all()


def test_init_of_retnet():
    layer = layers.build("retnet", 256)
    for project in (layer.q_proj, layer.k_proj, layer.v_proj, layer.g_proj):
        limit = 2**-2.5 * math.sqrt(6 / sum(project.weight.shape))
        assert_uniform(project.weight, -limit, limit)
    limit = 2**-1 * math.sqrt(6 / (256 + 512))
    assert_uniform(layer.out_proj.weight, -limit, limit)


@pytest.mark.usefixtures("double")
def test_retention_does_not_care_where_it_starts():
    """Only differences of positions count, a million steps on as well."""
    layer, x = layers.build("retnet", DIM, num_heads=2), torch.randn(1, T, DIM)
    late = layer.init_state(1)._replace(steps=torch.tensor([[1_000_000]]))
    torch.testing.assert_close(layer(x, late)[0], layer(x)[0], rtol=1e-7, atol=1e-8)
    assert layer(x, late)[1].steps.item() == 1_000_000 + T


def test_init_of_linear_attention():
    layer = layers.build("performer", 64, num_heads=1, forget_gate=True, qk_norm="layernorm")
    for project in (layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj, layer.gate_proj):
        assert_uniform(project.weight, -1 / 8, 1 / 8)
    for norm in (layer.q_norm, layer.k_norm):
        assert (norm.weight == 1).all()
        assert not norm.bias.any()
    assert layer.feature_map.projection.shape == (266, 64)  # 64 ln 64 = 266.17
    assert "feature_map.projection" in layer.state_dict()
    block = layer.feature_map.projection[:64].double()
    angles = F.normalize(block) @ F.normalize(block).T
    torch.testing.assert_close(angles, torch.eye(64).double(), rtol=0, atol=1e-5)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize(
    ("name", "width", "steps"),
    [("taylor", 3, 150), ("quadratic", 2, 130), ("polynomial", 2, 64), ("polynomial", 9, 300)],
)
def test_attention_by_kernel_is_that_by_features(name, width, steps, begins):
    """Within a chunk, over chunks of a block, and over blocks: values, all gradients, and their gradients."""
    features = FeatureMap(name, 3, width)
    q, k = (torch.randn(2, steps, 3, width) for _ in range(2))
    v, state = torch.randn(2, steps, 3, 4), torch.randn(2, 3, features.width, 4)
    leaves = [leaf.requires_grad_() for leaf in (q, k, v, *([state] if begins else []))]
    results = []
    for o, S in (
        attend_by_kernel(features, q, k, v, state if begins else None),
        linear_attention_op(
            features(q, None), features(k, None), v, state=state if begins else None, scale=1.0, backend="reference"
        ),
    ):
        grads = torch.autograd.grad(o.sin().sum() + S.sin().sum(), leaves, create_graph=True)
        results.append([o, S, *grads, *torch.autograd.grad(sum(grad.square().sum() for grad in grads), leaves)])
    torch.testing.assert_close(*results)


def test_attention_by_kernel_keeps_what_is_not_finite_from_the_past():
    features, steps, bad = FeatureMap("quadratic", 1, 2), 150, 70
    q, k, v = torch.randn(1, steps, 1, 2), torch.randn(1, steps, 1, 2), torch.randn(1, steps, 1, 3)
    finite, _ = attend_by_kernel(features, q, k, v, None)
    for spoilt, channels in ((k, slice(0, 3)), (v, slice(1, 2))):
        kept, spoilt[0, bad, 0, 1] = spoilt[0, bad, 0, 1].clone(), torch.nan
        o, S = attend_by_kernel(features, q, k, v, None)
        assert torch.equal(o[:, :bad], finite[:, :bad])
        assert o[0, bad:, 0, channels].isnan().all()
        assert S[..., channels].isnan().all()
        spoilt[0, bad, 0, 1] = kept
    assert o[0, :, 0, ::2].isfinite().all()


def test_init_of_rfa():
    layer = layers.build("rfa", 128, num_heads=2)
    assert (layer.feature_map.sigma == 1).all()
    assert layer.feature_map.projection.shape == (2, 64, 64)
    assert_normal(layer.feature_map.projection, 1.0)


@pytest.mark.parametrize("name", ["performer", "rfa"])
def test_projections_are_redrawn_on_demand(name):
    layer = layers.build(name, DIM, num_heads=2)
    kept = {key: value.clone() for key, value in layer.state_dict().items()}
    layer.feature_map.redraw(torch.Generator().manual_seed(1))
    drawn = layer.feature_map.projection.clone()
    assert (drawn != kept["feature_map.projection"]).all()
    layer.feature_map.redraw(torch.Generator().manual_seed(1))
    assert torch.equal(layer.feature_map.projection, drawn)
    layer.load_state_dict(kept)
    assert torch.equal(layer.feature_map.projection, kept["feature_map.projection"])
    with pytest.raises(ConfigError, match="redraw is called, expected a random map and not 'elu_plus_one'"):
        layers.build("linear_attention", DIM).feature_map.redraw()


def test_sizes_of_based():
    layer = layers.build("based", 24)
    assert (layer.head_dim, layer.head_v_dim, layer.feature_map.width) == (16, 3, 153)
    assert layers.build("rebased", 24).feature_map.width == 136


def test_performer_comes_near_softmax():
    torch.manual_seed(0)
    layer = layers.build(
        "linear_attention", DIM, num_heads=2, feature_map="positive_random_features", num_features=20_000
    )
    x = torch.randn(2, 20, DIM)
    q, k, v = (project(x).view(2, 20, 2, 4).transpose(1, 2) for project in (layer.q_proj, layer.k_proj, layer.v_proj))
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
    torch.testing.assert_close(layer(x)[0], layer.o_proj(expected), rtol=0, atol=0.03)


def test_init_of_decaying_fast_weights():
    layer = layers.build("decaying_fast_weights", 64)
    for project in (layer.q_proj, layer.k_proj, layer.v_proj, layer.fk_proj, layer.fv_proj, layer.o_proj):
        assert_uniform(project.weight, -1 / 8, 1 / 8)


@pytest.mark.parametrize("name", ["gsa", "abc", "hgrn2"])
def test_init_of_slots_and_hgrn2(name):
    layer = layers.build(name, 256)
    projections = [module for module in layer.children() if isinstance(module, torch.nn.Linear)]
    assert len(projections) == {"gsa": 5, "abc": 6, "hgrn2": 4}[name]
    for project in projections:
        assert_normal(project.weight, 0.02)
    assert (layer.g_norm.weight == 1).all()


def test_bounds_of_hgrn2_rise_with_depth():
    stack = [layers.build("hgrn2", 256) for _ in range(4)]
    for index, layer in enumerate(stack):
        layer.enter_stack(index, stack)
    assert [float(torch.as_tensor(layer.lower_bound()).detach().mean()) for layer in stack] == [0, 0.25, 0.5, 0.75]
    assert stack[1].init_state(1).shape == (1, 2, 128, 128)
    assert [layer.gamma is None for layer in stack] == [False, True, True, True]


def test_weights_of_abc_stay_finite():
    """Logits of ±1000 are clipped; a slot that got e^32 and then e^-32 forgets nothing."""
    layer = layers.build("abc", DIM, num_heads=2, num_slots=3)
    with torch.no_grad():
        layer.s_proj.weight.mul_(1e5)
    x = torch.randn(2, 300, DIM)
    y, state = layer(x)
    exact, _ = layer.double()(x.double())
    assert all(leaf.isfinite().all() for _, leaf in states.leaves(state))
    torch.testing.assert_close(y.double(), exact, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["lightning", "transnormerllm"])
def test_init_of_lightning(name):
    layer = layers.build(name, 256)
    projections = [module for module in layer.children() if isinstance(module, torch.nn.Linear)]
    assert len(projections) == {"lightning": 3, "transnormerllm": 2}[name]
    for project in projections:
        assert_normal(project.weight, 0.02)
    if name == "transnormerllm":
        torch.testing.assert_close(layer.lrpe.theta.flatten(), 10000 ** (-2 * torch.arange(256) / 256))
    else:
        assert (layer.norm.weight == 1).all()


def test_positions_of_transnormerllm_are_in_the_lowest_layer():
    at = [in_a_stack("transnormerllm", index, 3, num_heads=2).lrpe is not None for index in range(3)]
    assert at == [True, False, False]
    assert in_a_stack("transnormerllm", 0, 3, num_heads=2, lrpe=False).lrpe is None
    highest = in_a_stack("transnormerllm", 2, 3, num_heads=2)
    assert highest.rate == pytest.approx(1e-5)
    assert highest.init_state(1).recurrent.shape == (1, 2, 4, 4)


@pytest.mark.parametrize("name", ["norm_attention", "diag_attention"])
def test_init_of_transnormer(name):
    layer = layers.build(name, 256)
    for project in (layer.q_proj, layer.k_proj, layer.v_proj, layer.out_proj):
        gain = 0.5 if name == "norm_attention" and project is not layer.out_proj else 1
        limit = math.sqrt(gain * 6 / 512)
        assert_uniform(project.weight, -limit, limit)
    assert_uniform(layer.v_proj.bias, -1 / 16, 1 / 16)
    assert not layer.out_proj.bias.any()
    torch.testing.assert_close(layer.urpe.theta.flatten(), 10000 ** (-2 * torch.arange(16) / 32))
    assert layer.urpe.v.norm().item() == pytest.approx(1)
    assert "urpe.v" in layer.state_dict()


@pytest.mark.parametrize("name", ["rfa", "rfa_gate", "arc_cosine_attention"])
def test_init_of_random_feature_attention(name):
    """The released code of RFA: Xavier uniform of gain 1/sqrt(2); the output's bias 0, the others as in PyTorch."""
    layer = layers.build(name, 256)
    for project in (layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj):
        limit = math.sqrt(3 / 512)
        assert_uniform(project.weight, -limit, limit)
    for project in (layer.q_proj, layer.k_proj, layer.v_proj):
        assert_uniform(project.bias, -1 / 16, 1 / 16)
    assert not layer.o_proj.bias.any()


@pytest.mark.parametrize("name", ["relit", "arelit"])
def test_init_of_relit(name):
    """In the released code of `relit` each map of each head is a matrix of its own, in that of `arelit` one map is."""
    layer = layers.build(name, 32, num_heads=2, head_dim=8, eta=4)
    alone = name == "relit"
    for project, rows in ((layer.linear_kqvbetagammas, 8), (layer.linear_p1p2p3, 4), (layer.project, 32)):
        for block in project.weight.split(rows if alone else len(project.weight)):
            assert_orthogonal(block, math.sqrt(2))
        assert not project.bias.any()
    if alone:
        for head in layer.query_weight:
            assert_orthogonal(head[:8], math.sqrt(2))
            assert_orthogonal(head[8:], math.sqrt(2))
        assert not layer.query_bias.any()


@pytest.mark.usefixtures("double")
def test_arelit_with_many_frequencies_has_a_decay_of_rows_times_one_of_columns():
    torch.manual_seed(0)
    layer = layers.build("arelit", DIM, num_heads=1, head_dim=6, eta=3, rank=128, eps=1e-30)
    torch.nn.init.ones_(layer.linear_kqvbetagammas.bias)  # so that no denominator is 0
    torch.nn.init.ones_(layer.linear_p1p2p3.bias)
    xs, S, s = list(torch.randn(20, DIM)), 0, 0
    y, _ = layer(torch.stack(xs)[None])
    for t, x in enumerate(xs):
        ((k, q, v, beta, gamma, (p1, p2, p3)),) = gated_outer_products(layer, x, 3)
        k, q = expanded(F.relu(k), F.relu(p1)), expanded(F.relu(q), F.relu(p2))
        gamma, beta = expanded(sigmoid(gamma), sigmoid(p3)), sigmoid(beta)
        S = torch.outer(1 - beta, 1 - gamma) * S + torch.outer(beta * v, gamma * k)
        s = (1 - gamma) * s + gamma * k
        if t > 3:
            torch.testing.assert_close(4 * y[0, t], layer.project(S @ q / (s @ q)), rtol=0, atol=0.05)


def test_init_of_rdn():
    layer = layers.build("rdn", 256)
    for weight in (layer.R_q, layer.R_k, layer.R_v, layer.r_b):
        assert_normal(weight, 32**-0.5)
    for project in (layer.slow_net, layer.out_linear):
        assert_uniform(project.weight, -1 / 16, 1 / 16)
    assert layer.slow_net.out_features == 8 * 97


def test_init_of_srwm():
    layer = layers.build("srwm", 512)
    for weight in (layer.W_y, layer.W_q, layer.W_k, layer.w_b):
        assert_normal(weight, 1 / 8)
    assert_uniform(layer.out_linear.weight, -(512**-0.5), 512**-0.5)


@pytest.mark.usefixtures("double")
def test_srwm_that_does_not_learn_is_a_linear_layer():
    layer, x = layers.build("srwm", DIM, num_heads=1), torch.rand(1, T, DIM)
    torch.nn.init.constant_(layer.w_b, -1e4)  # times inputs above 0
    y, state = layer(x)
    torch.testing.assert_close(y, layer.out_linear(x @ layer.W_y[0, 0]))
    assert not state.any()


def test_init_of_mlstm():
    layer = layers.build("mlstm", 200)
    layer.enter_stack(0, [layer] * 3)
    assert layer.width == 448
    small = math.sqrt(2 / 1000)
    for project in (layer.proj_up, layer.q_proj, layer.k_proj, layer.v_proj):
        assert_normal(project.weight, small)
    assert_normal(layer.proj_down.weight, 2 / 3 / math.sqrt(200))
    assert not layer.mlstm_cell.igate.weight.any()
    assert not layer.mlstm_cell.fgate.weight.any()
    assert (layer.mlstm_cell.fgate.bias == torch.linspace(3, 6, 4)).all()
    assert (layer.learnable_skip == 1).all()
    assert not layer.mlstm_cell.outnorm.weight.any()
    wide = layers.build("mlstm", 2, num_heads=4000, multiple_of=4000)
    assert_normal(wide.mlstm_cell.igate.bias, 0.1)


def test_init_of_mlstm_large():
    layer = layers.build("mlstm_large", 200, num_heads=4)
    assert (layer.q.out_features, layer.v.out_features) == (100, 200)
    for project in (layer.q, layer.k, layer.v):
        assert_normal(project.weight, math.sqrt(2 / 1000))
    assert not layer.ogate_preact.weight.any()
    assert_normal(layer.out_proj.weight, 2 / math.sqrt(200))
    assert not layer.igate_preact.weight.any()
    assert not layer.fgate_preact.weight.any()
    assert (layer.igate_preact.bias == -10).all()
    assert (layer.fgate_preact.bias == torch.linspace(3, 6, 4)).all()
    assert (layer.multihead_norm.weight == 1).all()


def test_gates_of_mlstm_stay_in_range():
    """Input gates of e^±40 and forget gates of nearly 0 and nearly 1, in float32, as in float64."""
    torch.manual_seed(0)
    layer = layers.build("mlstm", DIM, num_heads=4, multiple_of=8)
    with torch.no_grad():
        layer.mlstm_cell.igate.weight.normal_(std=30)
        layer.mlstm_cell.fgate.weight.normal_(std=30)
    x = torch.randn(2, 300, DIM)
    y, state = layer(x)
    exact, _ = layer.double()(x.double())
    assert all(leaf.isfinite().all() for _, leaf in states.leaves(state))
    torch.testing.assert_close(y.double(), exact, rtol=0, atol=1e-3)


def test_init_of_gateloop():
    layer = layers.build("gateloop", 64)
    for project in (layer.to_qkv, layer.to_a[0], layer.to_gates[0], layer.to_out):
        assert_uniform(project.weight, -1 / 8, 1 / 8)


WRONG = [
    ("mamba2", {"head_dim": 5}, r"head_dim is 5, expected a divisor of expand \* dim, with expand=2 and dim=8"),
    (
        "mamba2",
        {"head_dim": 4, "num_groups": 3},
        r"num_groups is 3, expected a divisor of expand \* dim / head_dim, with",
    ),
    ("mamba2", {"state_dim": 0}, "state_dim is 0, expected at least 1"),
    ("mamba2", {"expand": 0}, "expand is 0, expected at least 1"),
    ("mamba2", {"head_dim": 4, "dt_min": 0}, "dt_min is 0, expected more than 0"),
    ("mamba2", {"head_dim": 4, "dt_min": 1.0}, "dt_max is 0.1, expected at least dt_min=1.0"),
    ("gated_deltanet", {"head_dim": 0}, "head_dim is 0, expected at least 1"),
    ("gated_deltanet", {"num_v_heads": 7}, "num_v_heads is 7, expected a multiple of num_heads=6"),
    ("gated_deltanet", {"head_dim": 3, "expand_v": 0.5}, "expand_v is 0.5, expected a whole number of channels of"),
    ("gated_deltaproduct", {"num_householder": 0}, "num_householder is 0, expected at least 1"),
    ("kda", {"head_dim": 0}, "head_dim is 0, expected at least 1"),
    ("gla", {"expand_k": 0.3}, "expand_k is 0.3, expected dim=8 times it to be a multiple of num_heads=4"),
    ("gla", {"num_heads": 3}, "expand_k is 0.5, expected dim=8 times it to be a multiple of num_heads=3"),
    ("gla", {"gate_rank": 0}, "gate_rank is 0, expected at least 1"),
    ("deltanet", {"num_heads": 3}, "expand_k is 1.0, expected dim=8 times it to be a multiple of num_heads=3"),
    ("deltanet", {"conv_size": 0}, "conv_size is 0, expected at least 1"),
    ("deltanet", {"activation": "gelu"}, "unknown activation 'gelu'"),
    ("deltanet", {"qk_norm": "l1"}, "unknown qk_norm 'l1'"),
    ("retnet", {"num_heads": 8}, "num_heads is 8, expected a divisor of dim/2=4"),
    ("retnet", {"num_heads": 2, "expand_v": 0.625}, "expand_v is 0.625, expected dim=8 times it to be a multiple of"),
    ("linear_attention", {"num_heads": 3}, "expand_k is 1.0, expected dim=8 times it to be a multiple of num_heads=3"),
    ("linear_attention", {"head_dim": 0}, "head_dim is 0, expected at least 1"),
    (
        "linear_attention",
        {"forget_gate": True, "causal": False},
        "forget_gate is True, expected False because of causal=False",
    ),
    ("linear_attention", {"qk_norm": "l2"}, "unknown qk_norm 'l2'"),
    ("mlstm", {"num_heads": 3}, "num_heads is 3, expected a divisor of 64 channels because of expand=2.0"),
    ("mlstm", {"block_size": 0}, "block_size is 0, expected at least 1"),
    ("mlstm", {"block_size": 3}, "block_size is 3, expected a divisor of 64 channels because of expand=2.0"),
    ("mlstm", {"expand": 0}, "expand is 0, expected more than 0"),
    ("mlstm_large", {"num_heads": 3}, "expand_k is 0.5, expected dim=8 times it to be a multiple of num_heads=3"),
    ("mlstm_large", {"num_heads": 4, "expand_v": 0}, "expand_v is 0, expected more than 0"),
    ("mlstm_large", {"num_heads": 4, "gate_soft_cap": 0}, "gate_soft_cap is 0, expected more than 0"),
    (
        "decaying_fast_weights",
        {"num_heads": 3},
        "expand_k is 1.0, expected dim=8 times it to be a multiple of num_heads=3",
    ),
    ("gsa", {"num_heads": 3}, "expand_k is 1.0, expected dim=8 times it to be a multiple of num_heads=3"),
    ("gsa", {"num_slots": 0}, "num_slots is 0, expected at least 1"),
    ("abc", {"num_slots": 0}, "num_slots is 0, expected at least 1"),
    ("abc", {"clamp": 0}, "clamp is 0, expected more than 0"),
    ("gsa", {"gate_logit_normalizer": 0}, "gate_logit_normalizer is 0, expected more than 0"),
    (
        "abc",
        {"num_heads": 4},
        "expand_k is 0.5, expected an even number of channels of a head because of rope_base, not 1",
    ),
    ("hgrn2", {"head_dim": 3}, "head_dim is 3, expected a divisor of dim=8"),
    ("lightning", {"num_heads": 3}, "num_heads is 3, expected a divisor of dim=8 without head_dim"),
    ("lightning", {"head_dim": 0}, "head_dim is 0, expected at least 1"),
    ("transnormerllm", {"num_heads": 3}, "num_heads is 3, expected a divisor of dim=8"),
    ("norm_attention", {"num_heads": 3}, "num_heads is 3, expected a divisor of dim=8"),
    ("norm_attention", {"activation": "relu"}, "unknown activation 'relu'"),
    ("diag_attention", {"num_heads": 3}, "num_heads is 3, expected a divisor of dim=8"),
    ("diag_attention", {"window": 0}, "window is 0, expected at least 1"),
    ("relit", {"eta": 0}, "eta is 0, expected at least 1"),
    ("arelit", {"head_dim": 0}, "head_dim is 0, expected at least 1"),
    ("arelit", {"rank": 0}, "rank is 0, expected at least 1"),
    ("rdn", {"num_heads": 3}, "num_heads is 3, expected a divisor of dim=8"),
    ("srwm", {"num_heads": 3}, "num_heads is 3, expected a divisor of dim=8"),
    ("gateloop", {"num_heads": 3}, "num_heads is 3, expected a divisor of width=8"),
    ("gateloop", {"width": 0}, "width is 0, expected at least 1"),
]


@pytest.mark.parametrize(("name", "options", "message"), WRONG)
def test_wrong_options_are_refused(name, options, message):
    with pytest.raises(ConfigError, match=f"^{name}: .*{message}"):
        layers.build(name, DIM, **options)


def test_options_of_another_delta_rule_are_refused():
    with pytest.raises(ConfigError, match="unknown option of comba 'num_householder'"):
        layers.build("comba", DIM, num_householder=2)
    with pytest.raises(ConfigError, match="unknown option of kda 'forget_gate'"):
        layers.build("kda", DIM, forget_gate=False)
    with pytest.raises(ConfigError, match="unknown option of momentum_deltanet 'num_v_heads'"):
        layers.build("momentum_deltanet", DIM, num_v_heads=12)


def test_a_preset_sets_options_that_its_layer_inherits():
    layer = layers.build("qwen3_next_deltanet", 32)
    assert (layer.config["expand_v"], layer.config["num_v_heads"], layer.config["norm_eps"]) == (1.0, 32, 1e-6)
    assert (layer.head_v_dim, layer.num_v_heads, layer.o_norm.eps) == (2, 32, 1e-6)
    layer = layers.build("qwen3_next_deltanet", 32, expand_v=2.0)
    assert (layer.config["expand_v"], layer.head_v_dim) == (2.0, 4)


def test_kda_without_an_output_gate_norms_alone():
    layer = layers.build("kda", DIM, head_dim=4, output_gate=False)
    gated = layers.build("kda", DIM, head_dim=4)
    gated.load_state_dict(layer.state_dict(), strict=False)
    assert gated.g_proj is not None
    for weight in gated.g_proj.parameters():
        torch.nn.init.zeros_(weight)  # so every gate is 1/2
    x = torch.randn(2, 5, DIM)
    torch.testing.assert_close(layer(x)[0], 2 * gated(x)[0])


def test_wrong_feature_maps_are_refused():
    with pytest.raises(ConfigError, match=r"unknown feature map 'elu_plus_on'; did you mean 'elu_plus_one'\?"):
        layers.build("linear_attention", 8, feature_map="elu_plus_on")
    with pytest.raises(ConfigError, match="linear_attention: num_features is 0, expected at least 1"):
        layers.build("linear_attention", 8, feature_map="fourier_features", num_features=0)
    with pytest.raises(ConfigError, match="linear_attention: horizon is 0, expected more than 0"):
        layers.build("linear_attention", 8, feature_map="cosine_reweighting", horizon=0)
