"""Layers of flash-linear-attention and of MiniMax, their kernels replaced by the naive forms beside them.

Those forms compute in float32 whatever they are given, and so do the norms here, so the bound is float32's.
"""

import inspect
import warnings

import pytest
import torch
from torch.nn import functional as F

from scanl import layers
from scanl.layers.parts.levels import levels
from scanl.ops import linear_attention
from tests.outside.test_memory import DIM, agree, plain_modules, shaken  # noqa: F401  (a fixture)

pytest.importorskip("transformers", reason="needs the extra `outside`")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it warns of a missing GPU
    pytest.importorskip("fla", reason="needs the extra `outside`")
    import fla.layers
    from fla.modules import FusedRMSNormGated, GroupNorm, RotaryEmbedding, feature_map
    from fla.modules.feature_map import SwishFeatureMap
    from fla.ops.abc.naive import naive_cumsum_abc
    from fla.ops.comba.naive import naive_chunk_comba
    from fla.ops.forgetting_attn.naive import naive_forgetting_attn
    from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule
    from fla.ops.gla.naive import naive_recurrent_gla
    from fla.ops.gsa.naive import naive_recurrent_gsa
    from fla.ops.kda.gate import naive_kda_gate, naive_kda_lowerbound_gate
    from fla.ops.kda.naive import naive_recurrent_kda
    from fla.ops.log_linear_attn.naive import naive_log_linear_attn
    from fla.ops.mesa_net.naive import naive_mesa_net_exact
    from fla.ops.path_attn.naive import naive_path_attn
from transformers.models.minimax import configuration_minimax, modeling_minimax

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("plain_modules", "gates_and_norms")]


def unit(x):
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


@pytest.fixture
def gates_and_norms(monkeypatch):
    def norm(self, x, gate):
        y = F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return y * (F.silu(gate) if self.activation in ("swish", "silu") else gate.sigmoid())

    def norm_linear(x, norm_weight, norm_bias, weight, bias, eps=1e-5, **_):
        return F.linear(F.rms_norm(x, norm_weight.shape, norm_weight, eps), weight, bias)

    monkeypatch.setattr(FusedRMSNormGated, "forward", norm)
    for module in ("gsa", "hgrn2"):
        monkeypatch.setattr(f"fla.layers.{module}.rms_norm_linear", norm_linear)


def by_heads(x, heads):
    """Repeat heads of queries and keys for the heads of values."""
    return x.repeat_interleave(heads // x.shape[2], 2)


@pytest.mark.parametrize(
    "options", [{}, {"num_v_heads": 4, "allow_neg_eigval": True}, {"safe_gate": True, "lower_bound": -5.0}], ids=str
)
def test_kda(monkeypatch, options):
    def kda(q, k, v, g, beta, A_log, dt_bias, safe_gate, allow_neg_eigval, **_):
        gate = naive_kda_lowerbound_gate if safe_gate else naive_kda_gate
        beta = beta.sigmoid() * (2 if allow_neg_eigval else 1)
        q, k = (by_heads(unit(each), v.shape[2]) for each in (q, k))
        return naive_recurrent_kda(q, k, v, gate(g, A_log, dt_bias), beta)[0], None

    monkeypatch.setattr("fla.layers.kda.chunk_kda", kda)
    theirs = shaken(fla.layers.KimiDeltaAttention(hidden_size=DIM, head_dim=4, num_heads=2, **options))
    ours = {key: value for key, value in options.items() if key != "lower_bound"}
    layer = layers.build("kda", DIM, head_dim=4, num_heads=2, **ours)
    layer.load_state_dict(theirs.state_dict())
    agree(layer, lambda x: theirs(x)[0], dict(theirs.named_parameters()), 2e-5)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gated_deltaproduct", {}),
        ("gated_deltaproduct", {"num_householder": 3, "num_v_heads": 4, "allow_neg_eigval": False}),
        ("deltaproduct", {"use_forget_gate": False, "use_output_gate": False}),
    ],
    ids=str,
)
def test_deltaproduct(monkeypatch, name, options):
    def product(q, k, v, g, beta, num_householder, **_):
        """As their layer does where it decodes."""
        B, T, H, _ = q.shape
        reads = q.new_zeros(B, T, num_householder, *q.shape[2:])
        reads[:, :, -1] = unit(q)
        decays = q.new_zeros(B, T, num_householder, H)
        if g is not None:
            decays[:, :, 0] = g
        o = naive_recurrent_gated_delta_rule(reads.flatten(1, 2), unit(k), v, beta, decays.flatten(1, 2))[0]
        return o.unflatten(1, (T, num_householder))[:, :, -1], None

    monkeypatch.setattr("fla.layers.gated_deltaproduct.chunk_gated_delta_product", product)
    theirs = shaken(fla.layers.GatedDeltaProduct(hidden_size=DIM, head_dim=4, num_heads=2, **options))
    ours = {key: value for key, value in options.items() if not key.startswith("use_")}
    layer = layers.build(name, DIM, head_dim=4, num_heads=2, **ours)
    layer.load_state_dict(theirs.state_dict())
    agree(layer, lambda x: theirs(x)[0], dict(theirs.named_parameters()), 2e-5)


@pytest.mark.parametrize("options", [{}, {"use_output_gate": False, "correction_factor": 0.02}], ids=str)
def test_comba(monkeypatch, options):
    def comba(q, k, v, p, g, beta, **_):
        return naive_chunk_comba(unit(q), unit(k), v, unit(p), g, beta, chunk_size=16)

    monkeypatch.setattr("fla.layers.comba.chunk_comba", comba)
    theirs = shaken(fla.layers.Comba(hidden_size=DIM, head_dim=4, num_heads=2, **options))
    ours = {key.removeprefix("use_"): value for key, value in options.items()}
    layer = layers.build("comba", DIM, head_dim=4, num_heads=2, **ours)
    layer.load_state_dict(theirs.state_dict())
    agree(layer, lambda x: theirs(x)[0], dict(theirs.named_parameters()), 2e-5)


@pytest.mark.parametrize("slots", [3, 8])
def test_gsa(monkeypatch, slots):
    def gsa(q, k, v, s, g, scale, **_):
        return naive_recurrent_gsa(q, k, v, s, g, scale)[0], None

    monkeypatch.setattr("fla.layers.gsa.chunk_gsa", gsa)
    monkeypatch.setattr(SwishFeatureMap, "forward", lambda self, x: F.silu(x))
    theirs = shaken(fla.layers.GatedSlotAttention(hidden_size=DIM, num_heads=2, num_slots=slots, layer_idx=0))
    layer = layers.build("gsa", DIM, num_heads=2, num_slots=slots)
    layer.load_state_dict(theirs.state_dict())
    agree(layer, lambda x: theirs(x)[0], dict(theirs.named_parameters()), 2e-5)


@pytest.mark.parametrize(
    ("options", "ours"),
    [
        ({}, {}),
        (
            {"use_rope": False, "use_output_gate": False, "expand_k": 1.0},
            {"rope_base": None, "output_gate": False, "expand_k": 1.0},
        ),
    ],
    ids=str,
)
def test_abc(monkeypatch, options, ours):
    def attend(*_, q, k, v, s, **__):
        return naive_cumsum_abc(*(each.transpose(1, 2) for each in (q, k, v, s)))[0].transpose(1, 2), None

    def rotary(self, q, k, **_):
        K, T = q.shape[-1], q.shape[1]
        angles = torch.arange(T)[:, None] * 10000.0 ** (-torch.arange(0, K, 2) / K)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        return tuple(
            torch.cat([a * cos - b * sin, b * cos + a * sin], -1) for a, b in (each.chunk(2, -1) for each in (q, k))
        )

    monkeypatch.setattr("fla.layers.abc.chunk_abc", attend)
    monkeypatch.setattr(RotaryEmbedding, "forward", rotary)
    theirs = shaken(fla.layers.ABCAttention(hidden_size=DIM, num_heads=2, num_slots=5, layer_idx=0, **options))
    layer = layers.build("abc", DIM, num_heads=2, num_slots=5, **ours)
    layer.load_state_dict({key: value for key, value in theirs.state_dict().items() if "rotary" not in key})
    agree(layer, lambda x: theirs(x)[0], dict(theirs.named_parameters()), 2e-5)


@pytest.mark.parametrize("index", [0, 2])
def test_hgrn2(monkeypatch, index):
    def gla(q, k, v, g, **_):
        return naive_recurrent_gla(q, k, v, g)[0], None

    for name in ("chunk_gla", "fused_recurrent_gla", "fused_chunk_gla"):
        monkeypatch.setattr(f"fla.layers.hgrn2.{name}", gla)
    monkeypatch.setattr("fla.layers.hgrn2.swish", F.silu)
    theirs = shaken(fla.layers.HGRN2Attention(hidden_size=DIM, expand_ratio=4, layer_idx=index))
    stack = [layers.build("hgrn2", DIM, head_dim=4) for _ in range(4)]
    for at, layer in enumerate(stack):
        layer.enter_stack(at, stack)
    layer, bound = stack[index], torch.full((DIM,), index / 4)
    if index == 0:
        layer.gamma = None  # which the bounds of the layers above are made of
    layer.load_state_dict(theirs.state_dict(), strict=False)
    agree(layer, lambda x: theirs(x, lower_bound=bound)[0], dict(theirs.named_parameters()), 2e-5)


@pytest.mark.parametrize("options", [{}, {"use_output_gate": True, "qk_norm": True}], ids=str)
def test_forgetting_attention(monkeypatch, options):
    def norm(self, x):
        y = x.unflatten(-1, (self.num_groups, -1))
        return (y * (y.square().mean(-1, keepdim=True) + self.eps).rsqrt()).flatten(-2) * self.weight

    monkeypatch.setattr(
        "fla.layers.forgetting_attn.parallel_forgetting_attn", lambda *args, **_: naive_forgetting_attn(*args)
    )
    monkeypatch.setattr(GroupNorm, "forward", norm)
    theirs = shaken(fla.layers.ForgettingAttention(hidden_size=DIM, num_heads=2, **options))
    layer = layers.build("forgetting_attention", DIM, num_heads=2, **options)
    layer.load_state_dict(theirs.state_dict())
    # the gradient of a gate's bias is a difference of large sums
    agree(layer, lambda x: theirs(x)[0], dict(theirs.named_parameters()), 1e-4)


def test_based(monkeypatch):
    plain = inspect.unwrap(feature_map.flatten_diag_outer_product_off1)  # without its checkpoint
    monkeypatch.setattr(feature_map, "flatten_diag_outer_product_off1", plain)
    theirs = shaken(fla.layers.BasedLinearAttention(hidden_size=DIM, feature_dim=4, num_heads=2, num_key_value_heads=2))
    layer = layers.build("based", DIM, head_dim=4, num_heads=2)
    layer.load_state_dict(theirs.state_dict(), strict=False)
    agree(layer, theirs.forward_reference, dict(theirs.named_parameters()), 2e-5)


@pytest.mark.parametrize(("index", "depth"), [(0, 1), (2, 6)])
def test_lightning(index, depth):
    config = configuration_minimax.MiniMaxConfig(
        hidden_size=DIM, num_attention_heads=3, head_dim=4, num_hidden_layers=depth, block_size=16, hidden_act="silu",
        layer_types=["linear_attention"] * depth,
    )  # fmt: skip
    theirs = shaken(modeling_minimax.MiniMaxLightningAttention(config, index))
    layer = layers.build("lightning", DIM, num_heads=3, head_dim=4)
    layer.enter_stack(index, [layer] * depth)
    layer.load_state_dict(dict(theirs.named_parameters()))
    agree(layer, lambda x: theirs(x, (x, x), None)[0], dict(theirs.named_parameters()), 2e-5)


@pytest.mark.parametrize("options", [{}, {"use_output_gate": True, "lambda_lower_bound": 0.1}], ids=str)
def test_mesanet(monkeypatch, options):
    """Their exact solution, with damping so large that conjugate gradients reach it in float32."""

    def mesa(q, k, v, g, beta, lamb, **_):
        return *naive_mesa_net_exact(unit(q), unit(k), v, g, lamb, beta)[:1], None, None

    monkeypatch.setattr("fla.layers.mesa_net.chunk_mesa_net", mesa)
    theirs = shaken(fla.layers.MesaNet(hidden_size=DIM, head_dim=4, num_heads=2, **options))
    ours = {key.removeprefix("use_"): value for key, value in options.items()}
    layer = layers.build("mesanet", DIM, head_dim=4, num_heads=2, **ours)
    layer.load_state_dict(theirs.state_dict())
    agree(layer, lambda x: theirs(x)[0], dict(theirs.named_parameters()), 1e-4)


@pytest.mark.parametrize("options", [{}, {"num_kv_heads": 2, "use_low_rank_w": False, "use_qk_norm": True}], ids=str)
def test_path_attention(monkeypatch, options):
    def path(q, k, v, w, beta, g, **_):
        return naive_path_attn(q, k, v, w, beta, torch.zeros(q.shape[:3]), q.shape[-1] ** -0.5, 16), None

    monkeypatch.setattr("fla.layers.path_attn.parallel_path_attn", path)
    monkeypatch.setattr("fla.layers.path_attn.l2_norm", lambda x, **_: unit(x))
    theirs = shaken(fla.layers.PaTHAttention(hidden_size=DIM, num_heads=4, **options))
    ours = {"num_kv_heads": options.get("num_kv_heads"), "qk_norm": "use_qk_norm" in options}
    layer = layers.build("path_attention", DIM, num_heads=4, rank=None if "use_low_rank_w" in options else 32, **ours)
    if "use_qk_norm" in options:
        layer.maybe_q_norm.eps = layer.maybe_k_norm.eps = theirs.maybe_q_norm.eps
    layer.load_state_dict(theirs.state_dict())
    agree(layer, lambda x: theirs(x)[0], dict(theirs.named_parameters()), 2e-5)


def test_log_linear_levels():
    """Their masked form, from which the levels of `log_linear_mamba2` are read back."""
    q, k, v = torch.randn(2, 37, 1, 3), torch.randn(2, 37, 1, 3), torch.randn(2, 37, 2, 4)
    g, weights = -torch.rand(2, 37, 2), torch.rand(2, 37, 2, 7)
    at = levels(torch.arange(37)[None], 7)
    o, _ = linear_attention(
        q,
        k,
        torch.where(at.writes[:, :, None, :, None], v[:, :, :, None], 0).flatten(2, 3),
        g[..., None].masked_fill(at.begins[:, :, None], -torch.inf).flatten(2, 3),
        scale=1.0,
    )
    y = (torch.where(at.reads[:, :, None], weights[..., 1:], 0)[..., None] * o.unflatten(2, (2, -1))).sum(3)
    y = y + (weights[..., 0] * (q * k).sum(-1))[..., None] * v
    torch.testing.assert_close(y, naive_log_linear_attn(q, k, v, g, weights))
