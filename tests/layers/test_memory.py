"""Matrix memories: each layer against its equation, step by step, how it starts, and what only it knows."""

import math

import pytest
import torch
from by_hand import DIM, T, assert_normal, assert_uniform, convolve, linear, rms, sigmoid, silu, softplus, unit
from torch.nn import functional as F

from scanl import layers
from scanl.errors import ConfigError
from scanl.layers import state as states


def convolved(conv, xs, activation=silu):
    return [activation(y) for y in (xs if conv is None else convolve(xs, conv))]


def mamba2(layer, xs):
    H, G, N = layer.heads, layer.ngroups, layer.d_state
    inner = H * layer.headdim
    widths = [inner, inner + 2 * G * N, H]
    mixed = [linear(layer.in_proj, x).split(widths) for x in xs]
    branches = convolved(layer.conv1d, [u for _, u, _ in mixed])
    S = [torch.zeros(N, layer.headdim) for _ in range(H)]
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


def gated_deltanet(layer, xs):
    H, G, K, V = layer.num_v_heads, layer.num_heads, layer.head_dim, layer.head_v_dim
    pairs = [(layer.q_conv1d, layer.q_proj), (layer.k_conv1d, layer.k_proj), (layer.v_conv1d, layer.v_proj)]
    qs, ks, vs = (convolved(conv, [linear(project, x) for x in xs]) for conv, project in pairs)
    S, ys = torch.zeros(H, K, V), []
    for x, q, k, v in zip(xs, qs, ks, vs, strict=True):
        beta = (2 if layer.allow_neg_eigval else 1) * sigmoid(linear(layer.b_proj, x))
        alpha = torch.exp(-layer.A_log.exp() * softplus(linear(layer.a_proj, x) + layer.dt_bias))
        q, k, v = q.view(G, K), k.view(G, K), v.view(H, V)
        rows, read = [], []
        for h in range(H):
            g = h // (H // G)
            row, o = delta(S[h], unit(q[g]), unit(k[g]), v[h], beta[h], alpha[h])
            rows.append(row)
            read.append(rms(o, layer.o_norm.eps) * layer.o_norm.weight)
        S, y = torch.stack(rows), torch.cat(read)
        if layer.g_proj is not None:
            y = y * silu(linear(layer.g_proj, x))
        ys.append(linear(layer.o_proj, y))
    return ys


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
    }[layer.qk_activation]
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
    if name == "polynomial":
        return (1 + q @ k) ** 2
    if name == "cosine_reweighting":
        return F.relu(q) @ F.relu(k) * math.cos(math.pi / 2 * apart / fm.horizon)
    if name == "positive_random_features":
        phi = [torch.exp(fm.projection @ z - z @ z / 2) for z in (q / len(q) ** 0.25, k / len(k) ** 0.25)]
        return phi[0] @ phi[1] / len(fm.projection)
    assert name == "fourier_features"
    w = fm.projection * fm.sigma[h]
    return torch.cos(w @ (q / q.norm() - k / k.norm())).mean()


def linear_attention(layer, xs):
    """The quadratic form: a sum over all pairs of steps, with the decays between them written out."""
    H, ys = layer.num_heads, []
    for t, x in enumerate(xs):
        heads = []
        for h in range(H):
            top, bottom = torch.zeros(layer.head_v_dim), torch.zeros(())
            for s in range(t + 1 if layer.causal else len(xs)):
                q, k, v = (
                    linear(project, z).view(H, -1)[h]
                    for project, z in ((layer.q_proj, x), (layer.k_proj, xs[s]), (layer.v_proj, xs[s]))
                )
                if layer.feature_map.name == "dpfp":
                    q, k = (dpfp(z, layer.feature_map.nu) for z in (q, k))
                    weight = (q / (q.sum() + 1e-4)) @ (k / (k.sum() + 1e-4))
                else:
                    weight = kernel(layer, q, k, t - s, h)
                if layer.gate_proj is not None:
                    gates = [sigmoid(linear(layer.gate_proj, xs[r])[h]) for r in range(s, t + 1)]
                    weight = weight * (1 - gates[0]) * math.prod(gates[1:])
                top, bottom = top + weight * v, bottom + weight
            o = top / bottom.clamp(min=1e-6) if layer.normalize else top
            heads.append(o if layer.norm is None else rms(o) * layer.norm.weight)
        ys.append(linear(layer.o_proj, torch.cat(heads)))
    return ys


def dpfp(v, nu):
    r = torch.cat([F.relu(v), F.relu(-v)])
    return torch.stack([r[i] * r[i - j] for j in range(1, nu + 1) for i in range(len(r))])


def attention(name="linear_attention", **options):
    return lambda: layers.build(name, DIM, num_heads=2, **options), linear_attention


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
    H, K = layer.heads, layer.size
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
    "mamba2": (lambda: layers.build("mamba2", DIM, d_state=3, headdim=4), mamba2),
    "mamba2_groups": (
        lambda: layers.build("mamba2", DIM, d_state=3, headdim=2, ngroups=4, d_conv=1, bias=True, conv_bias=False),
        mamba2,
    ),
    "gated_deltanet": (lambda: layers.build("gated_deltanet", DIM, head_dim=3, num_heads=2), gated_deltanet),
    "gated_deltanet_shared": (
        lambda: layers.build(
            "gated_deltanet", DIM, head_dim=4, num_heads=1, num_v_heads=3, expand_v=0.5, use_gate=False, conv_bias=True
        ),
        gated_deltanet,
    ),
    "gated_deltanet_negative_eigenvalues": (
        lambda: layers.build("gated_deltanet_negative_eigenvalues", DIM, head_dim=3, num_heads=2, use_short_conv=False),
        gated_deltanet,
    ),
    "qwen3_next_deltanet": (
        lambda: layers.build("qwen3_next_deltanet", DIM, head_dim=3, num_heads=2, num_v_heads=4),
        gated_deltanet,
    ),
    "gla": (lambda: layers.build("gla", DIM, num_heads=2, gate_low_rank_dim=3), gla),
    "gla_convolved": (
        lambda: layers.build(
            "gla",
            DIM,
            expand_k=1.0,
            expand_v=0.5,
            num_heads=4,
            use_short_conv=True,
            conv_bias=True,
            use_output_gate=False,
            gate_logit_normalizer=2,
        ),
        gla,
    ),
    "deltanet": (lambda: layers.build("deltanet", DIM, num_heads=2), deltanet),
    "deltanet_2021": (lambda: layers.build("deltanet_2021", DIM, num_heads=2), deltanet),
    "deltanet_gated": (
        lambda: layers.build(
            "deltanet", DIM, num_heads=2, use_gate=True, allow_neg_eigval=True, conv_bias=True, qk_activation="identity"
        ),
        deltanet,
    ),
    "deltanet_negative_eigenvalues": (
        lambda: layers.build("deltanet_negative_eigenvalues", DIM, num_heads=2),
        deltanet,
    ),
    "deltanet_wide": (
        lambda: layers.build(
            "deltanet", DIM, num_heads=4, expand_k=0.5, expand_v=2.0, use_beta=False, qk_activation="relu"
        ),
        deltanet,
    ),
    "retnet": (lambda: layers.build("retnet", DIM, num_heads=2), retnet),
    "retnet_narrow": (lambda: layers.build("retnet", DIM, num_heads=4, value_dim=12), retnet),
    "linear_attention": attention(expand_k=0.5, expand_v=2.0),
    "unnormalised_linear_attention": attention("unnormalised_linear_attention"),
    "noncausal_linear_attention": attention("noncausal_linear_attention"),
    "linear_attention_bidirectional_unnormalised": attention(causal=False, feature_map="identity", normalize=False),
    "linear_attention_taylor": attention(feature_map="taylor"),
    "polynomial_attention": attention("polynomial_attention"),
    "performer": attention("performer", num_features=5),
    "rfa": attention("rfa", num_features=64),
    "rfa_gate": attention("rfa_gate", num_features=64),
    "dpfp": attention("dpfp"),
    "dpfp_normalised": attention("dpfp", normalize=True),
    "cosformer": attention("cosformer", horizon=20),
    "linear_attention_cosformer_bidirectional": attention(feature_map="cosine_reweighting", horizon=20, causal=False),
    "mlstm": (
        lambda: layers.build("mlstm", DIM, num_heads=2, proj_factor=1.5, round_proj_up_to_multiple_of=4),
        mlstm,
    ),
    "mlstm_bias": (
        lambda: layers.build(
            "mlstm",
            DIM,
            num_heads=4,
            round_proj_up_to_multiple_of=8,
            qkv_proj_blocksize=2,
            bias=True,
            conv1d_kernel_size=2,
        ),
        mlstm,
    ),
    "mlstm_large": (lambda: layers.build("mlstm_large", DIM, num_heads=2), mlstm_large),
    "mlstm_large_capped": (
        lambda: layers.build(
            "mlstm_large",
            DIM,
            num_heads=4,
            qk_dim_factor=1.5,
            v_dim_factor=2.0,
            gate_soft_cap=5.0,
            norm_eps=0.1,
            eps=0.1,
        ),
        mlstm_large,
    ),
    "gateloop": (lambda: layers.build("gateloop", DIM), gateloop),
    "gateloop_heads": (lambda: layers.build("gateloop", DIM, heads=2, dim_inner=6), gateloop),
    "gateloop_polar": (
        lambda: layers.build("gateloop", DIM, polar=True, sub_ln=False, add_swish_gating=False),
        gateloop,
    ),
    "gateloop_polar_heads": (lambda: layers.build("gateloop", DIM, polar=True, heads=4), gateloop),
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
    layer = layers.build("mamba2", 4000, d_state=1, headdim=2, expand=1)
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
    layer = layers.build("deltanet", 256, use_gate=True)
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
    layer = layers.build("linear_attention", 64, num_heads=1, gate=True, feature_map="fourier_features")
    for project in (layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj, layer.gate_proj):
        assert_uniform(project.weight, -1 / 8, 1 / 8)
    assert (layer.feature_map.sigma == 1).all()
    assert layer.feature_map.projection.shape == (round(64 * math.log(64)), 64)
    assert "feature_map.projection" in layer.state_dict()
    block = layer.feature_map.projection[:64].double()
    angles = F.normalize(block) @ F.normalize(block).T
    torch.testing.assert_close(angles, torch.eye(64).double(), rtol=0, atol=1e-5)


def test_performer_comes_near_softmax():
    torch.manual_seed(0)
    layer = layers.build(
        "linear_attention", DIM, num_heads=2, feature_map="positive_random_features", num_features=20_000
    )
    x = torch.randn(2, 20, DIM)
    q, k, v = (project(x).view(2, 20, 2, 4).transpose(1, 2) for project in (layer.q_proj, layer.k_proj, layer.v_proj))
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
    torch.testing.assert_close(layer(x)[0], layer.o_proj(expected), rtol=0, atol=0.03)


def test_init_of_mlstm():
    layer = layers.build("mlstm", 200, num_blocks=3)
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
    wide = layers.build("mlstm", 2, num_heads=4000, round_proj_up_to_multiple_of=4000)
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
    layer = layers.build("mlstm", DIM, num_heads=4, round_proj_up_to_multiple_of=8)
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
    ("mamba2", {"headdim": 5}, r"headdim is 5, expected a divisor of expand \* dim=16"),
    ("mamba2", {"headdim": 4, "ngroups": 3}, r"ngroups is 3, expected a divisor of expand \* dim / headdim=4"),
    ("mamba2", {"d_state": 0}, "d_state is 0 and d_conv is 4, expected at least 1"),
    ("mamba2", {"headdim": 4, "A_init_range": (0, 1)}, r"A_init_range is \(0, 1\), expected 0 < low <= high"),
    ("mamba2", {"headdim": 4, "dt_min": 1.0}, "dt_min is 1.0 and dt_max is 0.1, expected 0 < dt_min <= dt_max"),
    ("gated_deltanet", {"head_dim": 0}, "head_dim is 0, num_heads is 6 and conv_size is 4, expected at least 1"),
    ("gated_deltanet", {"num_v_heads": 7}, "num_v_heads is 7, expected a multiple of num_heads=6"),
    ("gated_deltanet", {"head_dim": 3, "expand_v": 0.5}, "expand_v is 0.5, expected a whole number of channels of"),
    ("gla", {"expand_k": 0.3}, r"expand_k is 0.3 and num_heads is 4, expected expand_k \* dim=2.4 to be a multiple"),
    ("gla", {"num_heads": 3}, r"expand_k is 0.5 and num_heads is 3, expected expand_k \* dim=4 to be a multiple"),
    ("gla", {"gate_low_rank_dim": 0}, "gate_low_rank_dim is 0, gate_logit_normalizer is 16 and conv_size is 4"),
    ("deltanet", {"num_heads": 3}, r"expand_k is 1.0 and num_heads is 3, expected expand_k \* dim=8 to be a multiple"),
    ("deltanet", {"conv_size": 0}, "conv_size is 0, expected at least 1"),
    ("deltanet", {"qk_activation": "gelu"}, "qk_activation is 'gelu', expected one of silu, relu, elu, identity"),
    ("deltanet", {"qk_norm": "l1"}, "qk_norm is 'l1', expected 'l2' or 'sum'"),
    ("retnet", {"num_heads": 8}, "num_heads is 8, expected a divisor of dim/2=4"),
    ("retnet", {"num_heads": 2, "value_dim": 5}, "value_dim is 5, expected a multiple of num_heads=2"),
    ("linear_attention", {"num_heads": 3}, "num_heads is 3, expected expand_k"),
    ("linear_attention", {"gate": True, "causal": False}, "gate is True, expected False because of causal=False"),
    ("linear_attention", {"output_norm": "l2"}, "output_norm is 'l2', expected 'identity' or 'rmsnorm'"),
    ("mlstm", {"num_heads": 3}, "num_heads is 3, expected a divisor of 64 channels because of proj_factor"),
    ("mlstm", {"qkv_proj_blocksize": 0}, "qkv_proj_blocksize is 0, expected a divisor of 64 channels"),
    ("mlstm", {"proj_factor": 0}, "proj_factor is 0, round_proj_up_to_multiple_of is 64, conv1d_kernel_size is 4 and"),
    ("mlstm_large", {"num_heads": 3}, "num_heads is 3, expected a divisor of 4 channels because of qk_dim_factor=0.5"),
    ("mlstm_large", {"num_heads": 4, "v_dim_factor": 0}, "of 0 channels because of v_dim_factor=0"),
    ("mlstm_large", {"num_heads": 4, "gate_soft_cap": 0}, "gate_soft_cap is 0, expected more than 0"),
    ("gateloop", {"heads": 3}, "heads is 3, expected a divisor of dim_inner=8"),
]


@pytest.mark.parametrize(("name", "options", "message"), WRONG)
def test_wrong_options_are_refused(name, options, message):
    with pytest.raises(ConfigError, match=f"^{name}: .*{message}"):
        layers.build(name, DIM, **options)


def test_wrong_feature_maps_are_refused():
    with pytest.raises(ConfigError, match=r"unknown feature map 'elu_plus_on'; did you mean 'elu_plus_one'\?"):
        layers.build("linear_attention", 8, feature_map="elu_plus_on")
    with pytest.raises(ConfigError, match="feature_map: num_features is 0 and horizon is 4096, expected positive"):
        layers.build("linear_attention", 8, feature_map="fourier_features", num_features=0)
    with pytest.raises(ConfigError, match="feature_map: num_features is 1 and horizon is 0, expected positive"):
        layers.build("linear_attention", 8, feature_map="cosine_reweighting", horizon=0)
