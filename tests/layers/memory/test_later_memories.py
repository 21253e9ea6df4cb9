"""Matrix memories of 2024 and later: each layer against its equation, how it starts, and what only it knows."""

import math

import pytest
import torch
from torch.utils._pytree import tree_flatten

from by_hand import DIM, assert_normal, assert_uniform, gelu_tanh, linear, rms, sigmoid, silu, softplus, unit
from scanl import layers, ops
from scanl.errors import ConfigError
from scanl.layers.memory import mesanet as mesanet_module
from tests.layers.memory.test_memory import assert_time_steps, convolved, projected, undecayed

pytestmark = pytest.mark.cells_by_loop("name")


def mamba3(layer, xs):
    H, N, P, R, A = layer.num_heads, layer.state_dim, layer.head_dim, layer.rank, layer.pairs
    S, angle = torch.zeros(H, N, P), torch.zeros(H, A)
    before_k, before_x = torch.zeros(H, R, N), torch.zeros(H, R, P)
    ys = []

    def turned(v, h):
        v = v.clone()
        for j in range(A):
            m, n = (2 * j, 2 * j + 1) if R == 1 else (j, j + N // 2)
            a, b, by = v[m].clone(), v[n].clone(), angle[h, j]
            v[m], v[n] = a * by.cos() - b * by.sin(), a * by.sin() + b * by.cos()
        return v

    for x in xs:
        z, u, B, C, dt, a, trapezoid, turn = linear(layer.in_proj, x).split(layer.widths)
        dt, lam = softplus(dt + layer.dt_bias), sigmoid(trapezoid)
        alpha = torch.exp(-dt * softplus(a).clamp(min=layer.A_floor))
        angle = angle + torch.outer(dt, math.pi * torch.tanh(turn))
        z, u = z.view(H, P), u.view(H, P)
        B, C = (part.view(R, layer.num_groups, N) for part in (B, C))
        read, keys, inputs, memories = [], [], [], []
        for h in range(H):
            g = h // (H // layer.num_groups)
            k = [turned(rms(B[r, g]) * layer.B_norm.weight + layer.B_bias[h, r], h) for r in range(R)]
            q = [turned(rms(C[r, g]) * layer.C_norm.weight + layer.C_bias[h, r], h) for r in range(R)]
            ins = [u[h] if R == 1 else u[h] * layer.mimo_x[h, r] for r in range(R)]
            now = alpha[h] * S[h]
            for r in range(R):
                now = now + (1 - lam[h]) * dt[h] * alpha[h] * torch.outer(before_k[h, r], before_x[h, r])
                now = now + lam[h] * dt[h] * torch.outer(k[r], ins[r])
            y = torch.zeros(P)
            for r in range(R):
                o, gate = now.T @ q[r] + layer.D[h] * ins[r], z[h] if R == 1 else z[h] * layer.mimo_z[h, r]
                if layer.norm is not None:
                    o = rms(o) * layer.norm.weight.view(H, P)[h]
                y = y + (1 if R == 1 else layer.mimo_o[h, r]) * o * silu(gate)
            read.append(y)
            keys.append(torch.stack(k))
            inputs.append(torch.stack(ins))
            memories.append(now)
        S, before_k, before_x = torch.stack(memories), torch.stack(keys), torch.stack(inputs)
        ys.append(linear(layer.out_proj, torch.cat(read)))
    return ys


def mesanet(layer, xs):
    """The ridge regression solved outright at each step."""
    H, K = layer.num_heads, layer.head_dim
    qs, ks = (
        convolved(conv, [linear(project, x) for x in xs])
        for conv, project in ((layer.q_conv1d, layer.q_proj), (layer.k_conv1d, layer.k_proj))
    )
    damping = (softplus(layer.lambda_params) + layer.lambda_lower_bound).view(H, K)
    G, S, ys = torch.zeros(H, K, K), torch.zeros(H, K, K), []
    for x, q, k in zip(xs, qs, ks, strict=True):
        alpha, beta = sigmoid(linear(layer.a_proj, x)), sigmoid(linear(layer.b_proj, x))
        q, k, v = q.view(H, K), k.view(H, K), linear(layer.v_proj, x).view(H, K)
        G = torch.stack([alpha[h] * G[h] + beta[h] * torch.outer(unit(k[h]), unit(k[h])) for h in range(H)])
        S = torch.stack([alpha[h] * S[h] + beta[h] * torch.outer(unit(k[h]), v[h]) for h in range(H)])
        solved = [torch.linalg.solve(G[h] + torch.diag(damping[h]), unit(q[h])) for h in range(H)]
        y = torch.cat([rms(S[h].T @ solved[h]) * layer.o_norm.weight for h in range(H)])
        y = y if layer.g_proj is None else y * silu(linear(layer.g_proj, x))
        ys.append(linear(layer.o_proj, y))
    return ys


def momentum_deltanet(layer, xs):
    H, K, V = layer.num_heads, layer.head_dim, layer.head_v_dim
    S, M, ys = torch.zeros(H, K, V), torch.zeros(H, K, V), []
    for x, (q, k, v) in zip(xs, projected(layer, xs, silu), strict=True):
        q, k, v = q.view(H, K), k.view(H, K), v.view(H, V)
        eta = 1 + torch.tanh(linear(layer.e_proj, x) / math.sqrt(layer.dim))
        theta = torch.atan(eta * torch.exp(layer.log_factor))
        beta = torch.sin(theta) ** 2 * sigmoid(linear(layer.b_proj, x))
        decay = torch.exp(-layer.A_log.exp() * softplus(linear(layer.a_proj, x) + layer.dt_bias))
        alpha = torch.cos(theta) ** 2 * decay
        mu = torch.exp(-layer.Mu_log.exp() * softplus(linear(layer.m_proj, x) + layer.mu_bias))
        mu = mu.clamp(min=math.exp(layer.min_log_mu))
        read, memories, momenta = [], [], []
        for h in range(H):
            query, key = unit(q[h] - layer.D_log[h].exp() * k[h]), unit(k[h])
            momenta.append(mu[h] * M[h] + eta[h] * torch.outer(key, v[h] - alpha[h] * S[h].T @ key))
            memories.append(alpha[h] * S[h] + beta[h] * momenta[h])
            read.append(rms(memories[h].T @ query / math.sqrt(K)) * layer.o_norm.weight)
        S, M, y = torch.stack(memories), torch.stack(momenta), torch.cat(read)
        y = y if layer.g_proj is None else y * silu(linear(layer.g_proj, x))
        ys.append(linear(layer.o_proj, y))
    return ys


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


def titans(layer, xs):
    H, K, c = layer.num_heads, layer.head_dim, layer.chunk_size
    norms = list(zip(layer.memory_norm_weight, layer.memory_norm_bias, strict=True))
    M = [[layer.get_parameter(f"M{n + 1}")[h] for n in range(layer.depth)] for h in range(H)]
    Z, none, ys = [[torch.zeros_like(m) for m in head] for head in M], [0.0] * layer.depth, []
    start = M
    for t, (x, (q, k, v)) in enumerate(zip(xs, projected(layer, xs, silu), strict=True)):
        if t % c == 0:
            start = [list(head) for head in M]
        alpha, eta, theta = (
            sigmoid(linear(project, x)) for project in (layer.alpha_proj, layer.eta_proj, layer.theta_proj)
        )
        read = []
        for h in range(H):
            query, key, value = (part.view(H, K)[h] for part in (q, k, v))
            found, _ = gradients(start[h], [torch.zeros(m.shape[1]) for m in start[h]], norms[h], unit(key), value)
            Z[h] = [eta[h] * z - theta[h] * 2 / K * g for z, g in zip(Z[h], found, strict=True)]
            M[h] = [(1 - alpha[h]) * m + z for m, z in zip(M[h], Z[h], strict=True)]
            read.append(rms(learned(M[h], none, norms[h], unit(query))) * layer.o_norm.weight)
        ys.append(linear(layer.o_proj, torch.cat(read) * sigmoid(linear(layer.g_proj, x))))
    return ys


def level_of(t, s):
    """0 for the step itself; otherwise one more than the highest bit in which two positions differ."""
    return (t ^ s).bit_length()


def log_linear_mamba2(layer, xs):
    """The sum over all pairs of steps, with the level of each pair written out."""
    H, G, N, P, L = layer.num_heads, layer.num_groups, layer.state_dim, layer.head_dim, layer.levels
    mixed = [linear(layer.in_proj, x).split([H * P, H * P + 2 * G * N, H, H * L]) for x in xs]
    branches = [u.split(layer.widths) for u in convolved(layer.conv1d, [u for _, u, _, _ in mixed])]
    deltas = [softplus(dt + layer.dt_bias) for _, _, dt, _ in mixed]
    ys = []
    for t, (z, _, _, weights) in enumerate(mixed):
        read = []
        for h in range(H):
            g = h // (H // G)
            y = layer.D[h] * branches[t][0].view(H, P)[h]
            for s in range(t + 1):
                level = level_of(t, s)
                weight = softplus(layer.L[h, level] * weights.view(H, L)[h, level])
                decay = math.prod(torch.exp(-layer.A_log[h].exp() * deltas[r][h]) for r in range(s + 1, t + 1))
                score = branches[t][2].view(G, N)[g] @ branches[s][1].view(G, N)[g]
                y = y + weight * decay * score * deltas[s][h] * branches[s][0].view(H, P)[h]
            read.append(y)
        gated = torch.cat(read) * silu(z)
        y = torch.cat([rms(part) for part in gated.chunk(G)]) * layer.norm.weight
        ys.append(linear(layer.out_proj, y))
    return ys


def log_linear_gated_deltanet(layer, xs):
    """A binary counter: what a level holds is added to the next one when its bit is carried."""
    H, G, K, V, L = layer.num_v_heads, layer.num_heads, layer.head_dim, layer.head_v_dim, layer.levels
    S = [[torch.zeros(K, V) for _ in range(L)] for _ in range(H)]
    ys = []
    for t, (x, (q, k, v)) in enumerate(zip(xs, projected(layer, xs, silu), strict=True)):
        beta, weights = sigmoid(linear(layer.b_proj, x)), linear(layer.l_proj, x).view(H, L)
        alpha = torch.exp(-layer.A_log.exp() * softplus(linear(layer.a_proj, x) + layer.dt_bias))
        read = []
        for h in range(H):
            query, key = (unit(part.view(G, K)[h // (H // G)]) for part in (q, k))
            if t > 0:  # what steps 0 to t - 1 left in the lower levels moves up to the first level that is free
                free = (t & -t).bit_length()
                S[h][free] = torch.stack(S[h][:free]).sum(0)
                S[h][:free] = [torch.zeros(K, V)] * free
            S[h] = [alpha[h] * (part - beta[h] * torch.outer(key, key @ part)) for part in S[h]]
            S[h][0] = S[h][0] + beta[h] * torch.outer(key, v.view(H, V)[h])
            o = sum(softplus(layer.L[h, n] * weights[h, n]) * S[h][n].T @ query for n in range(L))
            read.append(rms(o / math.sqrt(K)) * layer.o_norm.weight)
        y = torch.cat(read)
        ys.append(linear(layer.o_proj, y if layer.g_proj is None else y * silu(linear(layer.g_proj, x))))
    return ys


def t2r(layer, xs):
    """The quadratic form: one map of features for queries and keys."""
    H, K, each = layer.num_heads, layer.head_dim, layer.num_heads // layer.num_kv_heads

    def turned(v, t):
        half = layer.rotated // 2
        angles = t * layer.rope_base ** (-torch.arange(half) / max(1, half))
        a, b, rest = v.split([half, half, K - 2 * half], -1)
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin(), rest], -1)

    def features(v, h):
        return torch.relu(layer.phi_weight[h] @ v + layer.phi_bias[h])

    ks = [turned(linear(layer.k_proj, x).view(-1, K), t) for t, x in enumerate(xs)]
    vs, ys = [linear(layer.v_proj, x).view(-1, K) for x in xs], []
    for t, x in enumerate(xs):
        q, read = turned(linear(layer.q_proj, x).view(H, K), t), []
        for h in range(H):
            scores = [features(q[h] / math.sqrt(K), h) @ features(k[h // each], h) for k in ks[: t + 1]]
            top = sum(score * v[h // each] for score, v in zip(scores, vs, strict=False))
            read.append(top / torch.stack(scores).sum().clamp(min=layer.eps))
        ys.append(linear(layer.o_proj, torch.cat(read)))
    return ys


EQUATIONS = {
    "t2r": (lambda: layers.build("t2r", DIM, num_heads=4, num_kv_heads=2, num_features=6), t2r),
    "t2r_rotated": (
        lambda: layers.build("t2r", DIM, num_heads=2, num_features=5, rope_fraction=1.0, bias=True, eps=0.3),
        t2r,
    ),
    "log_linear_mamba2": (
        lambda: layers.build("log_linear_mamba2", DIM, state_dim=3, head_dim=4, num_groups=2, max_length=16),
        log_linear_mamba2,
    ),
    "log_linear_gated_deltanet": (
        lambda: layers.build("log_linear_gated_deltanet", DIM, head_dim=3, num_heads=2, num_v_heads=4, max_length=16),
        log_linear_gated_deltanet,
    ),
    "log_linear_gated_deltanet_plain": (
        lambda: layers.build(
            "log_linear_gated_deltanet", DIM, num_heads=2, output_gate=False, conv_size=None, max_length=15
        ),
        log_linear_gated_deltanet,
    ),
    "ttt_linear": (lambda: layers.build("ttt_linear", DIM, num_heads=2, chunk_size=3), ttt),
    "ttt_linear_whole": (lambda: layers.build("ttt_linear", DIM, output_gate=True, base_lr=3.0, rope_base=100.0), ttt),
    "ttt_mlp": (lambda: layers.build("ttt_mlp", DIM, num_heads=2, chunk_size=3, base_lr=2.0), ttt),
    "titans": (lambda: layers.build("titans", DIM, num_heads=2, chunk_size=3), titans),
    "titans_each_step": (
        lambda: layers.build("titans", DIM, num_heads=1, depth=1, chunk_size=1, conv_size=None),
        titans,
    ),
    "mesanet": (lambda: layers.build("mesanet", DIM, num_heads=2, head_dim=3, max_iterations=6), mesanet),
    "mesanet_gated": (
        lambda: layers.build(
            "mesanet", DIM, head_dim=4, output_gate=True, conv_size=None, lambda_lower_bound=0.1, max_iterations=8
        ),
        mesanet,
    ),
    "momentum_deltanet": (lambda: layers.build("momentum_deltanet", DIM, head_dim=3, num_heads=2), momentum_deltanet),
    "momentum_deltanet_plain": (
        lambda: layers.build(
            "momentum_deltanet", DIM, expand_v=1.0, num_heads=2, output_gate=False, conv_size=None, min_log_mu=-0.1
        ),
        momentum_deltanet,
    ),
    "mamba3": (lambda: layers.build("mamba3", DIM, state_dim=8, head_dim=4, num_groups=2), mamba3),
    "mamba3_normed": (
        lambda: layers.build("mamba3", DIM, state_dim=6, head_dim=8, rope_fraction=1.0, output_norm=True, A_floor=0.5),
        mamba3,
    ),
    "mamba3_mimo": (lambda: layers.build("mamba3_mimo", DIM, state_dim=8, head_dim=8, rank=3), mamba3),
    "mamba3_mimo_normed": (
        lambda: layers.build("mamba3_mimo", DIM, state_dim=4, head_dim=4, num_groups=2, rank=2, output_norm=True),
        mamba3,
    ),
}


def test_init_of_mamba3():
    layer = layers.build("mamba3_mimo", 64, head_dim=32)
    assert layer.in_proj.weight.shape == (4 * 64 + 2 * 4 * 128 + 3 * 4 + 32, 64)
    assert all((part == 1).all() for part in (layer.B_bias, layer.C_bias, layer.D, layer.mimo_z, layer.B_norm.weight))
    assert layer.B_bias.shape == (4, 4, 128)
    assert (torch.cat([layer.mimo_x, layer.mimo_o]) == 1 / 4).all()
    assert {"dt_bias", "D"} <= undecayed(layer)
    assert_time_steps(layers.build("mamba3", 4, expand=2000, state_dim=4, head_dim=1).dt_bias)


@pytest.mark.usefixtures("double")
def test_mamba3_turned_by_a_half_at_each_one_tracks_parity():
    """A rotation by π wherever the input is 1 turns the state's sign, and a step of 0 keeps it."""
    layer = layers.build("mamba3", 2, state_dim=4, head_dim=4, expand=2, rope_fraction=1.0)
    torch.nn.init.zeros_(layer.in_proj.weight)
    *_, a, trapezoid, turn = layer.in_proj.weight.split(layer.widths)
    with torch.no_grad():
        layer.dt_bias.fill_(math.log(math.e - 1))  # Δ = 1
        turn[:, 0], turn[:, 1] = 1e3, 0.0  # x is (bit, 1)
        a[:, 1] = -1e3
        trapezoid[:, 1] = 1e3
    bits = torch.tensor([1.0, 0, 1, 1, 0, 1, 1, 1])
    _, state = layer(torch.stack([bits, torch.ones(8)], -1)[None])
    half_turns = (state.angle / math.pi).round() % 2
    assert (half_turns == bits.sum() % 2).all()


def test_init_of_mesanet():
    layer = layers.build("mesanet", 256, output_gate=True)
    for project in (layer.q_proj, layer.v_proj, layer.a_proj, layer.b_proj, layer.g_proj, layer.o_proj):
        assert_normal(project.weight, 0.02)
    assert not torch.cat([layer.a_proj.bias, layer.b_proj.bias]).any()
    torch.testing.assert_close(softplus(layer.lambda_params) + 0.25, torch.ones(256))
    assert {"lambda_params"} <= undecayed(layer)
    assert (layer.num_heads, layer.v_conv1d, layer.max_iterations) == (2, None, 30)


@pytest.mark.usefixtures("double")
@pytest.mark.usefixtures("double")
def test_mesanet_stops_when_all_steps_are_solved(monkeypatch):
    """Its outputs and gradients are those of a direct solve, and 16 unknowns need no 200 iterations."""
    made = []
    product = mesanet_module._product
    monkeypatch.setattr(mesanet_module, "_product", lambda *given: made.append(0) or product(*given))
    q, k = (torch.randn(2, 9, 2, 16, requires_grad=True) for _ in range(2))
    damping = (1 + torch.rand(2, 16)).requires_grad_()
    g = torch.nn.functional.logsigmoid(torch.randn(2, 9, 2))

    def direct(q, k, damping):
        G, xs = torch.zeros(2, 2, 16, 16), []
        for t in range(9):
            G = g[:, t, :, None, None].exp() * G + 0.5 * k[:, t, :, :, None] * k[:, t, :, None]
            xs.append(torch.linalg.solve(G + torch.diag_embed(damping), q[:, t]))
        return torch.stack(xs, 1)

    with torch.no_grad():
        k /= k.norm(dim=-1, keepdim=True)
    x, other = mesanet_module._solve(q, k, 0.5 * k, g, damping, None, None, 200), direct(q, k, damping)
    assert len(made) < 40
    torch.testing.assert_close(x, other)
    cotangent = torch.randn_like(x)
    for own, by_hand in zip(*(torch.autograd.grad(y, (q, k, damping), cotangent) for y in (x, other)), strict=True):
        torch.testing.assert_close(own, by_hand)


def test_mesanet_recalls_a_linear_map():
    """Without decay and almost without damping, keys that span their space and values W k give W back."""
    layer = layers.build("mesanet", 4, num_heads=1, head_dim=4, conv_size=None, lambda_lower_bound=0.0)
    with torch.no_grad():
        layer.lambda_params.fill_(-30.0)
        for bias in (layer.a_proj.bias, layer.b_proj.bias):
            bias.fill_(40.0)
        layer.q_proj.weight.copy_(torch.randn(4, 4))
        layer.k_proj.weight.copy_(torch.randn(4, 4))
        layer.o_proj.weight.copy_(torch.eye(4))
    x = torch.randn(1, 6, 4)
    keys = unit_rows(torch.nn.functional.silu(layer.k_proj(x)[0]))
    layer.v_proj = Given(keys @ torch.arange(16.0).sin().view(4, 4))
    last = unit_rows(torch.nn.functional.silu(layer.q_proj(x)[0]))[-1]
    torch.testing.assert_close(layer(x)[0][0, -1], rms(last @ torch.arange(16.0).sin().view(4, 4)))


class Given(torch.nn.Module):
    """A projection that gives these values, whatever it reads."""

    def __init__(self, values):
        super().__init__()
        self.values = values

    def forward(self, x):
        return self.values[None]


def unit_rows(x):
    return torch.stack([unit(row) for row in x])


def test_init_of_momentum_deltanet():
    layer = layers.build("momentum_deltanet", 64, head_dim=2, num_heads=4000)
    for name, high in (("A_log", 16), ("Mu_log", 16), ("log_factor", 4), ("D_log", 1)):
        assert_uniform(getattr(layer, name).exp(), 0, high)
    assert_time_steps(layer.dt_bias)
    assert torch.equal(layer.mu_bias, layer.dt_bias)
    assert layer.min_log_mu == -2
    assert_normal(layer.e_proj.weight, 0.02)
    assert_normal(layer.m_proj.weight, 0.02)
    assert {"A_log", "Mu_log", "log_factor", "D_log", "dt_bias", "mu_bias"} <= undecayed(layer)


def test_init_of_ttt():
    layer = layers.build("ttt_mlp", 256)
    weights = (layer.q_proj.weight, layer.o_proj.weight, layer.W1, layer.W2, layer.learnable_ttt_lr_weight)
    for weight in weights:
        assert_normal(weight, 0.02)
    zeros = (layer.b1, layer.b2, layer.learnable_ttt_lr_bias, layer.learnable_token_idx, layer.ttt_norm_bias)
    assert not any(part.any() for part in zeros)
    assert (layer.ttt_norm_weight == 1).all()
    assert (layer.num_heads, layer.base_lr, layer.chunk_size) == (4, 0.1, 16)
    assert (layer.W1.shape, layer.b2.shape) == ((4, 64, 256), (4, 1, 64))


def test_init_of_titans():
    layer = layers.build("titans", 256)
    assert (layer.num_heads, layer.depth, layer.chunk_size) == (4, 2, 16)
    assert_uniform(layer.M1, -math.sqrt(6 / 320), math.sqrt(6 / 320))
    assert_uniform(layer.M2, -math.sqrt(6 / 320), math.sqrt(6 / 320))
    assert (layer.memory_norm_weight == 1).all()
    assert not layer.memory_norm_bias.any()
    assert_uniform(layer.alpha_proj.weight, -1 / 16, 1 / 16)
    starts = [sigmoid(linear.bias) for linear in (layer.alpha_proj, layer.eta_proj, layer.theta_proj)]
    torch.testing.assert_close(torch.stack(starts), torch.tensor([[0.01], [0.5], [0.01]]).expand(3, 4))


def test_init_of_log_linear():
    for layer, heads in (
        (layers.build("log_linear_mamba2", 128), 4),
        (layers.build("log_linear_gated_deltanet", 48), 6),
    ):
        assert layer.L.shape == (heads, 15)
        assert (layer.L == 1).all()
        assert {"L", "A_log", "dt_bias"} <= undecayed(layer)
    assert_normal(layer.l_proj.weight, 0.02)
    torch.testing.assert_close(layers.build("log_linear_mamba2", 128).A_log.exp(), torch.arange(1.0, 5))


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize(
    ("name", "plain"), [("log_linear_mamba2", "mamba2"), ("log_linear_gated_deltanet", "gated_deltanet")]
)
def test_log_linear_with_equal_weights_is_the_linear_form(name, plain):
    """Where each level is read with the same weight, the levels together are the whole past."""
    options = {"head_dim": 4, "state_dim": 3} if plain == "mamba2" else {"head_dim": 3, "num_heads": 2}
    layer, linear_form = layers.build(name, DIM, max_length=70, **options), layers.build(plain, DIM, **options)
    weights = {key: value for key, value in layer.state_dict().items() if key not in ("L", "l_proj.weight")}
    if plain == "mamba2":
        weights["in_proj.weight"] = weights["in_proj.weight"][: linear_form.in_proj.out_features]
    linear_form.load_state_dict(weights)
    layer.L.data.zero_()  # softplus(0) = ln 2
    x = torch.randn(2, 70, DIM)
    if plain == "mamba2":
        layer.D.data.mul_(math.log(2))
    for each in (layer, linear_form):  # without its ε, the norm takes the factor out
        (each.norm if plain == "mamba2" else each.o_norm).eps = 0.0
    torch.testing.assert_close(layer(x)[0], linear_form(x)[0])


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", ["log_linear_mamba2", "log_linear_gated_deltanet"])
@pytest.mark.parametrize("length", [65, 128, 201, 330])
def test_levels_of_a_sequence_from_its_start_are_those_of_its_steps(name, length):
    """The weights differ between levels. The other side is the plain loop of one op, in two calls with a state between.

    The lengths are one step over a chunk, whole chunks, an odd number of chunks, and a level of four chunks.
    """
    groups = {"num_groups": 2, "state_dim": 3, "head_dim": 4} if name == "log_linear_mamba2" else {"head_dim": 3}
    layer = layers.build(name, DIM, max_length=700, **groups)
    layer.L.data = torch.rand_like(layer.L) * 3
    x = torch.randn(2, length, DIM, requires_grad=True)
    leaves = [x, *layer.parameters()]

    def with_gradients(y, state):
        parts = [y, *(part for part in tree_flatten(state)[0] if part.is_floating_point())]
        torch.manual_seed(1)
        return [*parts, *torch.autograd.grad(sum((part * torch.randn_like(part)).sum() for part in parts), leaves)]

    at_once = with_gradients(*layer(x))
    with ops.backend("reference"):
        first, state = layer(x[:, :1])
        rest, state = layer(x[:, 1:], state)
    for own, other in zip(at_once, with_gradients(torch.cat([first, rest], 1), state), strict=True):
        torch.testing.assert_close(own, other)


@pytest.mark.parametrize("fault", [math.nan, math.inf])
def test_levels_keep_what_is_not_finite_out_of_earlier_steps(fault):
    layer = layers.build("log_linear_mamba2", DIM, state_dim=3, head_dim=4, max_length=300)
    x = torch.randn(2, 200, DIM)
    clean = layer(x)[0]
    x[1, 150, 2] = fault
    y = layer(x)[0]
    torch.testing.assert_close(y[0], clean[0])
    torch.testing.assert_close(y[1, :150], clean[1, :150])
    assert not y[1, 150].isfinite().any()


def test_init_of_t2r():
    layer = layers.build("t2r", 256)
    assert_normal(layer.q_proj.weight, 1 / 16)
    assert_uniform(layer.phi_weight, -(32**-0.5), 32**-0.5)
    assert_uniform(layer.phi_bias, -(32**-0.5), 32**-0.5)
    assert layer.phi_weight.shape == (8, 64, 32)
    assert (layer.eps, layer.rotated) == (1e-2, 0)


WRONG = [
    ("t2r", {"num_features": 0}, "num_features is 0, expected at least 1"),
    ("log_linear_mamba2", {"max_length": 0}, "max_length is 0, expected at least 1"),
    ("log_linear_gated_deltanet", {"max_length": 0}, "max_length is 0, expected at least 1"),
    ("ttt_linear", {"num_heads": 3}, "num_heads is 3, expected a divisor of dim/2=4"),
    ("ttt_mlp", {"chunk_size": 0}, "chunk_size is 0, expected at least 1"),
    ("titans", {"num_heads": 3}, "num_heads is 3, expected a divisor of dim=8"),
    (
        "titans",
        {"depth": 3},
        "depth is 3, expected 1 or 2",
    ),
    ("mesanet", {"max_iterations": 0}, "max_iterations is 0, expected at least 1"),
    ("mesanet", {"lambda_lower_bound": 1.0}, "lambda_lower_bound is 1.0, expected less than 1"),
    ("momentum_deltanet", {"head_dim": 0}, "head_dim is 0, expected at least 1"),
    ("mamba3", {"head_dim": 5}, r"head_dim is 5, expected a divisor of expand \* dim, with expand=2 and dim=8"),
    (
        "mamba3",
        {"head_dim": 4, "num_groups": 3},
        r"num_groups is 3, expected a divisor of expand \* dim / head_dim, with",
    ),
    ("mamba3", {"rank": 0}, "rank is 0, expected at least 1"),
    ("mamba3", {"head_dim": 4, "rope_fraction": 0.3}, "rope_fraction is 0.3, expected 0.5 or 1"),
    ("mamba3", {"head_dim": 4, "state_dim": 2}, "state_dim is 2, expected at least 2 / rope_fraction=4"),
]


@pytest.mark.parametrize(("name", "options", "message"), WRONG)
def test_wrong_options_are_refused(name, options, message):
    with pytest.raises(ConfigError, match=f"^{name}: .*{message}"):
        layers.build(name, DIM, **options)
