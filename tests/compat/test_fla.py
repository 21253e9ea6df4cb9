"""The functions of flash-linear-attention against plain loops: outputs, states, and the gradients of all arguments."""

import inspect
import itertools
import math

import pytest
import torch
from torch.nn import functional as F

from scanl.compat import fla
from scanl.compat.calls import FUNCTIONS, KERNEL, REFUSED_ARGUMENTS
from scanl.errors import ConfigError, ShapeError

COVERS = ["compat/calls", "compat/recurrences"]

H, K, V, M, T, N = 2, 3, 4, 5, 7, 2  # M slots, or N writes in a step


def memory(q, k, v, S, *, g=None, gv=None, a=None, b=None, u=None, scale=None):
    """Step by step: o_t = scale S_tᵀ q_t, S_t = (Diag(e^g) + a bᵀ) S_{t-1} Diag(e^gv) + k vᵀ."""
    os = []
    for t in range(q.shape[1]):
        write, previous = k[:, t, :, :, None] * v[:, t, :, None], S
        if a is not None:
            write = write + a[:, t, :, :, None] * (b[:, t, :, None] @ S)
        S = S if g is None else g[:, t].exp()[..., None] * S
        S = (S if gv is None else gv[:, t].exp()[..., None, :] * S) + write
        seen = S if u is None else previous + u[..., None] * write
        os.append((q[:, t, :, None] @ seen)[:, :, 0])
    return (q.shape[-1] ** -0.5 if scale is None else scale) * torch.stack(os, 1), S


def heads(count, function):
    return torch.stack([torch.tensor(function(h), dtype=torch.float64) for h in range(count)])


def delta(q, k, v, beta, g, state, scale=None):
    """S = e^g S + k β (v - (e^g S)ᵀ k)ᵀ."""
    read = k if g is None else g.exp() * k
    return memory(q, k, beta[..., None] * v, state, g=g, a=-beta[..., None] * k, b=read, scale=scale)


def unit(x):
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def by_head(g):
    return g[..., None].expand(*g.shape, K)


def slots(q, k, v, s, g, state):
    logits, keys = memory(q, k, s, state[0], gv=g)
    o, values = memory(logits.softmax(-1), s, v, state[1], g=g, scale=1)
    return o, (keys, values)


def product(q, k, v, g, beta, num_householder, state):
    steps = []
    for t in range(q.shape[1]):
        state = g[:, t].exp()[..., None, None] * state
        at = slice(t * num_householder, (t + 1) * num_householder)
        o, state = delta(q[:, t : t + 1].expand_as(k[:, at]), k[:, at], v[:, at], beta[:, at], None, state)
        steps.append(o[:, -1:])
    return torch.cat(steps, 1), state


def line(x, g, state):
    hs = []
    for t in range(x.shape[1]):
        state = g[:, t].exp() * state + x[:, t]
        hs.append(state)
    return torch.stack(hs, 1), state


# By the names of the functions in scanl.compat.recurrences: the recurrence, and the axes of its other operands.
PLAIN = {
    "gla": (lambda q, k, v, g, state: memory(q, k, v, state, g=g), {"g": (T, H, K)}),
    "simple_gla": (
        lambda q, k, v, g, g_gamma, state: memory(q, k, v, state, g=by_head(g + g_gamma)),
        {"g": (T, H), "g_gamma": (H,)},
    ),
    "retention": (
        lambda q, k, v, state: memory(
            q, k, v, state, g=by_head(heads(H, lambda h: math.log(1 - 2 ** (-5 - h))).expand(q.shape[:3]))
        ),
        {},
    ),
    "lightning_attn": (
        lambda q, k, v, layer_idx, num_layers, state: memory(
            q, k, v, state, g=by_head(heads(H, lambda h: -8 / H * (1 - layer_idx / num_layers) * h).expand(q.shape[:3]))
        ),
        {"layer_idx": 1, "num_layers": 3},
    ),
    "linear_attn": (lambda q, k, v, normalize, state: memory(q, k, v, state), {"normalize": False}),
    "rwkv6": (lambda r, k, v, w, u, state: memory(r, k, v, state, g=w, u=u), {"w": (T, H, K), "u": (H, K)}),
    "gsa": (slots, {"s": (T, H, M), "g": (T, H, M)}),
    "delta": (lambda q, k, v, beta, state: delta(q, k, v, beta, None, state), {"beta": (T, H)}),
    "gated_delta_rule": (
        lambda q, k, v, g, beta, state: delta(q, k, v, beta, by_head(g), state),
        {"g": (T, H), "beta": (T, H)},
    ),
    "kda": (lambda q, k, v, g, beta, state: delta(q, k, v, beta, g, state), {"g": (T, H, K), "beta": (T, H)}),
    "gated_delta_product": (product, {"g": (T, H), "num_householder": N}),
    "comba": (
        lambda q, k, v, p, g, beta, state: memory(
            q, k, beta[..., None] * v, state, g=by_head(g), a=-beta[..., None] * k, b=p
        ),
        {"p": (T, H, K), "g": (T, H), "beta": (T, H)},
    ),
    "dplr": (
        lambda q, k, v, a, b, state, gk=None: memory(q, k, v, state, g=gk, a=b, b=a),
        {"a": (T, H, K), "b": (T, H, K), "gk": (T, H, K)},
    ),
    "rwkv7": (
        lambda r, w, k, v, a, b, state: memory(r, k, v, state, g=w, a=b, b=a, scale=1),
        {"w": (T, H, K), "a": (T, H, K), "b": (T, H, K), "scale": 1.0},
    ),
    "mul_rwkv7": (
        lambda r, w, k, v, kk, a, state: memory(r, k, v, state, g=w, a=kk * a, b=-kk, scale=1),
        {"w": (T, H, K), "kk": (T, H, K), "a": (T, H, K)},
    ),
    "hgrn": (line, {"x": (T, 6), "g": (T, 6)}),
}  # fmt: skip


def draw(name, rows, shape):
    x = torch.randn(rows, *shape, dtype=torch.float64) if name not in ("u", "g_gamma") else torch.randn(shape).double()
    if name in ("g", "gk", "w", "g_gamma"):
        x = -x.abs() / 2
    return (x.sigmoid() if name == "beta" else x / 2).requires_grad_()


def drawn(function, rows):
    """Arguments of a function for as many rows, by name; the state is apart."""
    family = function.body.__name__.removeprefix("parallel_")
    axes = {"q": (T, H, K), "r": (T, H, K), "k": (T, H, K), "v": (T, H, V)} | PLAIN[family][1]
    if family == "gated_delta_product":
        axes |= {"k": (T * N, H, K), "v": (T * N, H, V), "beta": (T * N, H)}
    values = {}
    for name in function.names:
        key = "g" if (name, family) == ("gk", "gla") else name
        if key in axes:
            axis = axes[key]
            values[name] = draw(name, rows, axis) if isinstance(axis, tuple) else axis
    shapes = {"gsa": [(H, K, M), (H, M, V)], "hgrn": [(6,)]}.get(family, [(H, K, V)])
    state = tuple(torch.randn(rows, *shape, dtype=torch.float64).requires_grad_() for shape in shapes)
    return values, state if len(state) > 1 else state[0]


def plain(function, values, state):
    loop = PLAIN[function.body.__name__.removeprefix("parallel_")][0]
    wanted = inspect.signature(loop).parameters
    named = {("g" if name == "gk" and "gk" not in wanted else name): value for name, value in values.items()}
    zeros = {name: torch.zeros(()) for name in ("g_gamma", "gv") if name in wanted}
    return loop(**zeros | {name: value for name, value in named.items() if name in wanted}, state=state)


def tensors(*values):
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from tensors(*value)


def agree(ours, theirs, values, state):
    """Outputs, states and gradients of all arguments."""
    leaves = list(tensors(*values.values(), state))
    results = []
    for result in (ours, theirs):
        ys = list(tensors(*result))
        total = sum((y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).cos().view(y.shape)).sum() for y in ys)
        results.append([*ys, *torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)])
    for mine, other in zip(*results, strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_equals_the_loop(name):
    function = FUNCTIONS[name]
    values, state = drawn(function, 2)
    if "initial_state" in function.names:
        result = getattr(fla, name)(**values, initial_state=state, output_final_state=True)
        agree(result, plain(function, values, state), values, state)
    zeros = torch.zeros_like(state) if isinstance(state, torch.Tensor) else tuple(map(torch.zeros_like, state))
    o, last = getattr(fla, name)(**values) if name != "fused_recurrent_rwkv7" else (None, None)
    assert last is None or last == (None, None)
    if o is not None:
        agree((o,), plain(function, values, zeros)[:1], values, ())


@pytest.mark.parametrize("name", [name for name, function in FUNCTIONS.items() if "cu_seqlens" in function.names])
def test_packed_sequences_are_alone(name):
    function = FUNCTIONS[name]
    values, state = drawn(function, 2)
    first = 3
    row = {key: torch.cat([value[:1], value[1:, : value.shape[1] // T * first]], 1) if _timed(value) else value
           for key, value in values.items()}  # fmt: skip
    cu_seqlens = torch.tensor([0, T, T + first])
    start = {"initial_state": state, "output_final_state": True} if "initial_state" in function.names else {}
    packed, last = getattr(fla, name)(**row, **start, cu_seqlens=cu_seqlens)
    for at, steps in ((0, T), (1, first)):
        alone = {
            key: value[at : at + 1, : value.shape[1] // T * steps] if _timed(value) else value
            for key, value in values.items()
        }
        own = {**start, "initial_state": _rows(state, at)} if start else {}
        o, final = getattr(fla, name)(**alone, **own)
        torch.testing.assert_close(packed[:, at * T : at * T + steps], o)
        for mine, other in zip(tensors(last), tensors(final), strict=True):
            torch.testing.assert_close(mine[at : at + 1], other)


def _timed(value):
    return isinstance(value, torch.Tensor) and value.ndim > 2


def _rows(state, at):
    return state[at : at + 1] if isinstance(state, torch.Tensor) else tuple(part[at : at + 1] for part in state)


@pytest.mark.parametrize("name", [name for name, function in FUNCTIONS.items() if "reverse" in function.names])
def test_reverse_is_the_sequence_turned(name):
    function = FUNCTIONS[name]
    values, state = drawn(function, 2)
    turned = {key: value.flip(1) if _timed(value) else value for key, value in values.items()}
    start = {"initial_state": state, "output_final_state": True}
    o, last = getattr(fla, name)(**values, **start, reverse=True)
    expected, final = getattr(fla, name)(**turned, **start)
    torch.testing.assert_close((o, last), (expected.flip(1), final))


@pytest.mark.parametrize("name", [name for name, function in FUNCTIONS.items() if "state_v_first" in function.names])
def test_state_with_values_first(name):
    function = FUNCTIONS[name]
    values, state = drawn(function, 2)
    o, last = getattr(fla, name)(**values, initial_state=state, output_final_state=True)
    start = {"initial_state": state.mT, "output_final_state": True}
    y, turned = getattr(fla, name)(**values, **start, state_v_first=True)
    torch.testing.assert_close((y, turned.mT), (o, last))
    if "transpose_state_layout" in function.more:
        with pytest.warns(DeprecationWarning, match="an old name of state_v_first"):
            torch.testing.assert_close(getattr(fla, name)(**values, **start, transpose_state_layout=True)[1], turned)
        with pytest.raises(
            ConfigError, match="transpose_state_layout is an old name of state_v_first, expected only one"
        ):
            getattr(fla, name)(**values, state_v_first=True, transpose_state_layout=True)


@pytest.mark.parametrize("name", ["chunk_linear_attn", "fused_recurrent_linear_attn"])
def test_normalized_linear_attention(name):
    function = FUNCTIONS[name]
    values, S = drawn(function, 2)
    values = {key: value.detach().abs().requires_grad_() for key, value in values.items() if key != "normalize"}
    z = torch.rand(2, 1, H, K, dtype=torch.float64, requires_grad=True)
    sums = values["k"].cumsum(1) + z
    o, last = memory(values["q"], values["k"], values["v"], S)
    o = o / ((values["q"] * K**-0.5 * sums).sum(-1, keepdim=True) + 1e-10)
    ours = getattr(fla, name)(**values, initial_state=(S, z), output_final_state=True, normalize=True)
    agree(ours, (o, (last, sums[:, -1:])), values, (S, z))
    _, (nothing, total) = getattr(fla, name)(**values, initial_state=S, normalize=True)
    assert nothing is None
    torch.testing.assert_close(total, values["k"].sum(1, keepdim=True))


@pytest.mark.parametrize("name", ["chunk_linear_attn", "fused_chunk_linear_attn", "fused_recurrent_linear_attn"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_sum_of_nothing_normalizes_nothing(name, dtype):
    """Keys or queries that are 0, as padding has them, read 0; q_t·z_t is that at the first step."""
    values, _ = drawn(FUNCTIONS[name], 2)
    values = {key: value.detach().abs().to(dtype) for key, value in values.items() if key != "normalize"}
    values["k"][0, :3], values["q"][1, 4] = 0, 0
    values = {key: value.requires_grad_() for key, value in values.items()}
    o, _ = getattr(fla, name)(**values, normalize=True)
    assert o.dtype == dtype
    assert not o[0, :3].any()
    assert not o[1, 4].any()
    assert o[0, 3:].all()
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(o.sum(), list(values.values())))
    weights = torch.einsum("bthk,bshk->bhts", *(values[key].double() for key in "qk")).tril()
    mean = torch.einsum("bhts,bshv->bthv", weights, values["v"].double()) / weights.sum(-1).mT[..., None]
    torch.testing.assert_close(o[0, 3:].double(), mean[0, 3:], rtol=8 * torch.finfo(dtype).eps, atol=1e-7)


@pytest.mark.parametrize("name", ["chunk_linear_attn", "fused_recurrent_linear_attn"])
def test_a_state_without_sums_is_one_of_sums_zero(name):
    values, S = drawn(FUNCTIONS[name], 2)
    values = {key: value.abs() for key, value in values.items() if key != "normalize"}
    zero, options = torch.zeros(2, 1, H, K, dtype=S.dtype), {"output_final_state": True, "normalize": True}
    alone, both = (getattr(fla, name)(**values, initial_state=start, **options) for start in (S, (S, zero)))
    torch.testing.assert_close(alone, both)
    torch.testing.assert_close(alone[1][1], values["k"].sum(1, keepdim=True))


@pytest.mark.parametrize("name", ["chunk_delta_rule", "chunk_gated_delta_rule", "fused_recurrent_kda", "chunk_comba"])
def test_unit_queries_and_keys(name):
    values, _ = drawn(FUNCTIONS[name], 2)
    normed = {key: unit(value) if key in ("q", "k", "p") else value for key, value in values.items()}
    ours = getattr(fla, name)(**values, use_qk_l2norm_in_kernel=True)
    torch.testing.assert_close(ours, getattr(fla, name)(**normed))
    zero = {key: torch.zeros_like(value) if key in ("q", "k", "p") else value for key, value in values.items()}
    assert not getattr(fla, name)(**zero, use_qk_l2norm_in_kernel=True)[0].any()


@pytest.mark.parametrize("name", ["chunk_gated_delta_rule", "fused_recurrent_gdn", "chunk_kda", "fused_recurrent_kda"])
def test_gates_inside(name):
    values, _ = drawn(FUNCTIONS[getattr(fla, name).__name__], 2)
    by_key = "kda" in name
    g, beta = torch.randn_like(values["g"]), torch.randn_like(values["beta"])
    A_log, dt_bias = torch.randn(H).double(), torch.randn(H * K if by_key else H).double()
    rate, bias = (A_log.exp()[:, None], dt_bias.view(H, K)) if by_key else (A_log.exp(), dt_bias)
    gates = {"use_gate_in_kernel": True, "A_log": A_log, "dt_bias": dt_bias}
    strength = {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True}
    expected = getattr(fla, name)(**values | {"g": -rate * F.softplus(g + bias), "beta": 2 * beta.sigmoid()})
    torch.testing.assert_close(getattr(fla, name)(**values | {"g": g, "beta": beta}, **gates, **strength), expected)
    with pytest.raises(ConfigError, match="allow_neg_eigval is True, expected False"):
        getattr(fla, name)(**values, allow_neg_eigval=True)
    with pytest.raises(ConfigError, match="A_log is None, expected a tensor because of use_gate_in_kernel=True"):
        getattr(fla, name)(**values, use_gate_in_kernel=True)
    if by_key:
        expected = getattr(fla, name)(**values | {"g": -5 * (rate * (g + bias)).sigmoid()})
        torch.testing.assert_close(getattr(fla, name)(**values | {"g": g}, **gates, lower_bound=-5.0), expected)
        expected = getattr(fla, name)(**values | {"g": -5 * (g + bias).sigmoid()})
        bounded = gates | {"A_log": None, "lower_bound": -5.0}
        torch.testing.assert_close(getattr(fla, name)(**values | {"g": g}, **bounded), expected)


def test_decays_of_heads_and_keys_add():
    values, _ = drawn(FUNCTIONS["fused_recurrent_gated_delta_rule"], 2)
    g, gk = (draw("g", 2, shape) for shape in ((T, H), (T, H, K)))
    values |= {"g": g, "gk": gk}
    expected = fla.fused_recurrent_kda(values["q"], values["k"], values["v"], g[..., None] + gk, values["beta"])
    torch.testing.assert_close(fla.fused_recurrent_gated_delta_rule(**values), expected)


def test_more_heads_of_values_or_queries():
    values, state = drawn(FUNCTIONS["chunk_gated_delta_rule"], 2)
    fewer = {key: value[:, :, :1] if key in ("q", "k") else value for key, value in values.items()}
    shared = {key: value.expand_as(values[key]) for key, value in fewer.items()}
    torch.testing.assert_close(
        fla.chunk_gdn(**fewer, initial_state=state), fla.chunk_gdn(**shared, initial_state=state)
    )
    values, state = drawn(FUNCTIONS["chunk_comba"], 2)
    fewer = {key: value[:, :, :1] if key in ("q", "k", "p") else value for key, value in values.items()}
    shared = {key: value.expand_as(values[key]) for key, value in fewer.items()}
    torch.testing.assert_close(fla.chunk_comba(**fewer), fla.chunk_comba(**shared))
    values, state = drawn(FUNCTIONS["chunk_gsa"], 2)
    fewer = {key: value if key == "q" else value[:, :, :1] for key, value in values.items()}
    shared = {key: value.expand_as(values[key]) for key, value in fewer.items()}
    start = [part[:, :1] for part in state], [part[:, :1].expand_as(part) for part in state]
    (o, last), (y, final) = (
        fla.chunk_gsa(**each, initial_state=tuple(first), output_final_state=True)
        for each, first in zip((fewer, shared), start, strict=True)
    )
    torch.testing.assert_close((o, *last), (y, *(part[:, :1] for part in final)))
    with pytest.raises(ShapeError, match="gsa: q has 1 heads, expected a multiple of H=2 from k"):
        fla.chunk_gsa(**values | {"q": values["q"][:, :, :1]})


@pytest.mark.parametrize(
    "name", [name for name, each in FUNCTIONS.items() if each.body.__name__ in ("gated_delta_rule", "kda", "comba")]
)
def test_heads_of_values_share_queries_and_keys(name):
    """Value head h reads query and key head h // 2."""
    function, shared = FUNCTIONS[name], [h // 2 for h in range(2 * H)]
    values, _ = drawn(function, 2)
    few = [key for key in values if key in ("q", "k", "p")]
    values |= {key: draw(key, 2, (T, 2 * H, *x.shape[3:])) for key, x in values.items() if key not in few}
    state = torch.randn(2, 2 * H, K, V, dtype=torch.float64).requires_grad_()
    own = values | {key: values[key][:, :, shared] for key in few}
    ours = getattr(fla, name)(**values, initial_state=state, output_final_state=True)
    agree(ours, plain(function, own, state), values, state)


@pytest.mark.parametrize("name", ["chunk_gsa", "fused_recurrent_gsa"])
def test_heads_of_queries_share_keys_and_states(name):
    """Query head h reads key head h // 2, as repeated keys have it."""
    shared, (values, state) = [h // 2 for h in range(2 * H)], drawn(FUNCTIONS[name], 2)
    values["q"] = draw("q", 2, (T, 2 * H, K))
    own = {key: value if key == "q" else value[:, :, shared] for key, value in values.items()}
    o, last = slots(**own, state=tuple(part[:, shared] for part in state))
    ours = getattr(fla, name)(**values, initial_state=state, output_final_state=True)
    agree(ours, (o, tuple(part[:, ::2] for part in last)), values, state)


@pytest.mark.parametrize("name", ["parallel_simple_gla", "parallel_retention"])
def test_attention_matrix(name):
    values, _ = drawn(FUNCTIONS[name], 2)
    o, attention = getattr(fla, name)(**values, output_attentions=True)
    torch.testing.assert_close(torch.einsum("bhts,bshv->bthv", attention, values["v"]), o)
    assert attention.triu(1).count_nonzero() == 0
    with pytest.raises(ConfigError, match="output_attentions is True, expected False because of cu_seqlens"):
        getattr(fla, name)(**values, output_attentions=True, cu_seqlens=torch.tensor([0, T]))


@pytest.mark.parametrize("cu_seqlens", [None, torch.tensor([0, 4, T])])
def test_slots_without_gates_are_averages(cu_seqlens):
    values, _ = drawn(FUNCTIONS["chunk_gsa"], 1)
    q, k, v, s = (values[name].detach() for name in "qkvs")
    bounds = [0, T] if cu_seqlens is None else cu_seqlens.tolist()
    for first, end in itertools.pairwise(bounds):
        for t in range(first, end):
            weights = s[0, first : t + 1].softmax(0)
            keys = torch.einsum("thk,thm->hkm", k[0, first : t + 1], weights)
            slots = torch.einsum("thm,thv->hmv", weights, v[0, first : t + 1])
            read = torch.einsum("hk,hkm->hm", q[0, t] * K**-0.5, keys).softmax(-1)
            o, _ = fla.fused_recurrent_gsa(q, k, v, s, cu_seqlens=cu_seqlens)
            torch.testing.assert_close(o[0, t], torch.einsum("hm,hmv->hv", read, slots))


def test_slots_without_gates_add_to_their_first_state():
    """The first step has weight 1 beside it; z_t is the logarithm of the sum of the exponentials so far."""
    values, state = drawn(FUNCTIONS["chunk_gsa"], 2)
    q, k, v, s = (values.pop(name) for name in "qkvs")
    z = torch.stack([s[:, : t + 1].exp().sum(1).log() for t in range(T)], 1)
    g = torch.stack([z[:, max(0, t - 1)] - z[:, t] for t in range(T)], 1)
    ours = fla.chunk_gsa(q, k, v, s, initial_state=state, output_final_state=True)
    agree(ours, slots(q, k, v, (s - z).exp(), g, state), {"q": q, "k": k, "v": v, "s": s}, state)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    for name, function in FUNCTIONS.items():
        values, _ = drawn(function, 2)
        with torch.no_grad():
            half = {key: value.to(dtype) if isinstance(value, torch.Tensor) else value for key, value in values.items()}
            wide = {key: value.float() if isinstance(value, torch.Tensor) else value for key, value in half.items()}
            o, expected = (getattr(fla, name)(**each)[0] for each in (half, wide))
        assert o.dtype == dtype
        error = (o.float() - expected).abs().max() / expected.abs().max()
        assert error < 8 * torch.finfo(dtype).eps, name


@pytest.mark.parametrize("v_first", [False, True])
@torch.no_grad()
def test_states_before_each_chunk_of_kda(v_first):
    """They are what shorter calls return. Packed sequences begin with their own states."""
    values, state = drawn(FUNCTIONS["chunk_kda"], 2)
    state = state.mT.contiguous() if v_first else state
    more = {"output_final_state": True, "state_v_first": v_first}
    asked = {"return_intermediate_states": True, "chunk_size": 3, **more}

    def after(steps, row=slice(None)):
        some = {name: value[row, :steps] for name, value in values.items()}
        return fla.chunk_kda(**some, initial_state=state[row], **more)[1]

    o, last, between = fla.chunk_kda(**values, initial_state=state, **asked)
    torch.testing.assert_close((o, last), fla.chunk_kda(**values, initial_state=state, **more))
    torch.testing.assert_close(between, torch.stack([state, after(3), after(6)], 1))
    assert fla.chunk_kda(**values, **asked)[2][:, 0].count_nonzero() == 0
    row = {name: torch.cat([value[:1, :4], value[1:]], 1) for name, value in values.items()}
    cu_seqlens = torch.tensor([0, 4, 4 + T])
    between = fla.chunk_kda(**row, initial_state=state, cu_seqlens=cu_seqlens, **asked)[2]
    first, second = ([state[[n]], *(after(steps, slice(n, n + 1)) for steps in (3, 6))] for n in range(2))
    torch.testing.assert_close(between, torch.stack([*first[:2], *second], 1))


def test_compiles_whole():
    values, _ = drawn(FUNCTIONS["chunk_gla"], 2)
    compiled = torch.compile(fla.chunk_gla, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(**values), fla.chunk_gla(**values))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_arguments_of_kernels_are_ignored_and_others_refused(name):
    function = FUNCTIONS[name]
    values, _ = drawn(function, 2)
    ignored = {key: 16 for key in (*function.ignored, *function.more) if key in KERNEL}
    ours, plainly = getattr(fla, name)(**values, **ignored)[0], getattr(fla, name)(**values)[0]
    assert torch.equal(ours, plainly)
    for key in function.refused:
        with pytest.raises(
            ConfigError, match=rf"{name}: {key} is not (None|False), as expected: {REFUSED_ARGUMENTS[key]}"
        ):
            getattr(fla, name)(**values, **{key: True})
    with pytest.raises(ConfigError, match=f"{name}: unknown argument 'head_first'"):
        getattr(fla, name)(**values, head_first=True)


def test_arguments_are_bound_as_python_does():
    q = torch.zeros(1, 1, 1, 1)
    with pytest.raises(TypeError, match=r"chunk_gla\(\) misses v, g"):
        fla.chunk_gla(q, q)
    with pytest.raises(TypeError, match=r"chunk_gla\(\) got several values of 'k'"):
        fla.chunk_gla(q, q, k=q)
    with pytest.raises(TypeError, match=r"chunk_hgrn\(\) takes 4 arguments, but 5 were passed"):
        fla.chunk_hgrn(q, q, None, False, None)
