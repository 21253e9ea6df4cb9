"""Equations that several layers of this family are written with, and what their tests share."""

import math

import torch
from torch.nn import functional as F

from by_hand import DIM, assert_uniform, convolve, gelu_tanh, layer_norm, linear, rms, sigmoid, silu, softplus, unit
from scanl import layers


def learned(matrices, biases, norm, v):
    """x + LN(f(x)), the model that TTT layers and Titans learn, for one head."""
    z = v
    for index, (matrix, bias) in enumerate(zip(matrices, biases, strict=True)):
        z = matrix.T @ (z if index == 0 else gelu_tanh(z)) + bias
    weight, bias = norm
    return v + (z - z.mean()) / torch.sqrt(z.var(correction=0) + 1e-6) * weight + bias


def gradients(matrices, biases, norm, k, v):
    """Of half the square of what is missing, by the model's matrices and biases; they keep their own graph."""
    own = [part.clone().requires_grad_() for part in (*matrices, *biases)]
    half = len(matrices)
    loss = (learned(own[:half], own[half:], norm, k) - v).square().sum() / 2
    found = torch.autograd.grad(loss, own, create_graph=True)
    return found[:half], found[half:]


def ttt(layer, xs):
    H, K, b, count = layer.num_heads, layer.head_dim, layer.chunk_size, len(layer.hidden) + 1
    rates = layer.rope_base ** (-torch.arange(0, K, 2) / K)
    norms = list(zip(layer.ttt_norm_weight, layer.ttt_norm_bias, strict=True))
    W = [[layer.get_parameter(f"W{n + 1}")[h] for n in range(count)] for h in range(H)]
    B = [[layer.get_parameter(f"b{n + 1}")[h, 0] for n in range(count)] for h in range(H)]
    ys = []

    def turned(v, i):
        return torch.view_as_real(torch.view_as_complex(v.view(-1, 2)) * torch.exp(1j * i * rates)).flatten()

    steps = []
    for t, x in enumerate(xs):
        i = t % b
        if i == 0:
            steps = []
        steps.append(x)
        now, read = [], []
        for h in range(H):
            moved, shifted = [m.clone() for m in W[h]], [m.clone() for m in B[h]]
            for j, past in enumerate(steps):
                k = turned(linear(layer.k_proj, past).view(H, K)[h], j)
                v = linear(layer.v_proj, past).view(H, K)[h]
                gate = sigmoid(layer.learnable_ttt_lr_weight[h, 0] @ past + layer.learnable_ttt_lr_bias[h, 0])
                rate = torch.clamp(1 / (i + 1) + layer.learnable_token_idx[i], min=0) * layer.base_lr * gate / K
                by_matrix, by_bias = gradients(W[h], B[h], norms[h], k, v)
                moved = [m - rate * g for m, g in zip(moved, by_matrix, strict=True)]
                shifted = [m - rate * g for m, g in zip(shifted, by_bias, strict=True)]
            q = turned(linear(layer.q_proj, x).view(H, K)[h], i)
            read.append(learned(moved, shifted, norms[h], q))
            now.append((moved, shifted))
        if i == b - 1:
            W, B = [moved for moved, _ in now], [shifted for _, shifted in now]
        y = torch.cat(read)
        y = (y - y.mean()) / torch.sqrt(y.var(correction=0) + 1e-6) * layer.post_norm.weight + layer.post_norm.bias
        y = y if layer.g_proj is None else y * gelu_tanh(linear(layer.g_proj, x))
        ys.append(linear(layer.o_proj, y))
    return ys


def convolved(conv, xs, activation=silu):
    return [activation(y) for y in (xs if conv is None else convolve(xs, conv))]


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


def projected(layer, xs, activation):
    """q, k and v of every step, through their convolutions if there are any."""
    pairs = [(layer.q_conv1d, layer.q_proj), (layer.k_conv1d, layer.k_proj), (layer.v_conv1d, layer.v_proj)]
    return zip(*(convolved(conv, [linear(project, x) for x in xs], activation) for conv, project in pairs), strict=True)


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


def expanded(x, p):
    return torch.stack([x[i] * p[j] for j in range(len(p)) for i in range(len(x))])


def gated_outer_products(layer, x, expansions):
    """k, q, v, β and γ of every head, and its expansions, before any activation."""
    H = layer.num_heads
    parts = linear(layer.linear_kqvbetagammas, x).view(H, 5, -1)
    return zip(*parts.unbind(1), linear(layer.linear_p1p2p3, x).view(H, expansions, -1), strict=True)


def in_a_stack(name, index, depth, **options):
    stack = [layers.build(name, DIM, **options) for _ in range(depth)]
    for at, layer in enumerate(stack):
        layer.enter_stack(at, stack)
    return stack[index]


def assert_time_steps(bias, low=0.001, high=0.1):
    """softplus of the bias is log-uniform."""
    assert_uniform(F.softplus(bias.double()).log(), math.log(low), math.log(high))


def undecayed(layer):
    """Names of parameters that no weight decay reaches, and that are of no linear map."""
    groups = {id(p) for group in layers.param_groups(layer) if group.get("weight_decay") == 0 for p in group["params"]}
    return {name for name, parameter in layer.named_parameters() if id(parameter) in groups}
