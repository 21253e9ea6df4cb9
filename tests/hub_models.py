"""Tiny models of transformers with random weights, one for each class that a patch replaces.

`CASES[name].build()` builds one for the laws of `tests/hub`. Its `wrong` says which laws the original breaks: there
the patch is compared with the whole prompt at once, or with each sequence alone.
"""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

VOCAB = 50


class Case(NamedTuple):
    """build: the model.   wrong: what the original gets wrong, among "pieces", "steps", "padding", "cache".

    "beams": beam search with its cache.   "order": its cache cannot be reordered, so that beams go without it.
    "generate": its cache, in `generate`: what it gives without one is wanted.
    "static": a static cache, with transformers 5.24: what it gives with one is wanted there.
    "masks": its attention takes no mask of packed sequences, nor of padding fed alone; the laws of both go without it.

    alike: its modules are those of a model before it, with other options. The laws of numbers hold for it in every run,
    the laws of copies, of hooks and of `generate` are tried with --all.
    """

    build: Callable[[], Any]
    wrong: frozenset[str] = frozenset()
    alike: bool = False


def _made(model: type, config: Any) -> Any:
    torch.manual_seed(0)
    return model(config).eval()


def _plain(model: Any) -> Any:
    return model


def _stirred(model: Any) -> Any:
    """Biases, norms, skips and their like off the constants that they start from, so that the laws see them."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model


def _random(model: Any) -> Any:
    """Biases, which begin at zero, and norms, at one, so that both count."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data = noise if name.endswith("bias") else 1 + 0.3 * noise
    return model


def _remembering(model: Any) -> Any:
    """Decays slow enough to remember."""
    for name, parameter in _random(model).named_parameters():
        if name.endswith("A_log"):
            parameter.data = torch.linspace(-3, 0, parameter.numel()).view_as(parameter)
    return model


def _noisy(model: Any) -> Any:
    """All weights off what they start from: gates that begin as constants, and embeddings too small to tell apart."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    return model


CASES: dict[str, Case] = {}
_SIZES = {"hidden_size": 32, "vocab_size": VOCAB}
_WIDE = {"initializer_range": 0.2}  # so that what a layer adds is no rounding beside the residual stream


def _add(name: str, build: Callable[[], Any], *wrong: str, alike: bool = False) -> None:
    CASES[name] = Case(build, frozenset(wrong), alike)


def _case(
    name: str, prefix: str, change: Callable[[Any], Any], *wrong: str, alike: bool = False, config: str = "",
    **options: Any,
) -> None:  # fmt: skip
    """Add a causal language model of transformers: `prefix` of its class, a config of `prefix` and `config`."""

    def build() -> Any:
        import transformers

        model = getattr(transformers, f"{prefix}ForCausalLM")
        made = getattr(transformers, f"{prefix}{config}Config")(**{**_SIZES, **options})
        return change(_made(_unwrapped(model) if change is _remembering else model, made))

    _add(name, build, *wrong, alike=alike)


def _unwrapped(model: type) -> type:
    """Give a model transformers' own code for the CPU: it takes flash-linear-attention's kernels, where installed."""
    modeling = inspect.getmodule(model)
    for name, function in vars(modeling).copy().items():
        if "delta" in name and inspect.isfunction(function):
            setattr(modeling, name, inspect.unwrap(function))
    return model


_MIXED = {"intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
_TWO = {"num_hidden_layers": 2}
_THREE = {"num_hidden_layers": 3}
_ATTENTION_BETWEEN = ["linear_attention", "full_attention", "linear_attention"]
_JAMBA = {"attn_layer_period": 3, "attn_layer_offset": 1, "mamba_d_state": 8}
_SMALL_MAMBA = {"mamba_n_heads": 8, "mamba_d_state": 8, "mamba_chunk_size": 8}

_case("mamba", "Mamba", _plain, "pieces", **_TWO, state_size=8)
_case("falcon_mamba", "FalconMamba", _plain, "pieces", **_TWO, state_size=8)
_case("jamba", "Jamba", _plain, "pieces", **_MIXED, **_THREE, **_JAMBA, num_experts=2, num_experts_per_tok=1)
_ZAMBA = {**_MIXED, **_JAMBA, "num_key_value_heads": 4, "num_hidden_layers": 6}
_case("zamba", "Zamba", _plain, "pieces", **_ZAMBA, mamba_dt_rank=4, n_mamba_heads=2)

_MAMBA2 = {**_WIDE, **_TWO, "num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2, "chunk_size": 8}
_case("mamba2", "Mamba2", _stirred, **_MAMBA2)
_case(
    "mamba2_biased", "Mamba2", _stirred, "padding", **_MAMBA2, use_bias=True, use_conv_bias=False, hidden_act="gelu"
)  # fmt: skip
# Step sizes that the limit changes
_case("mamba2_limited", "Mamba2", _stirred, "steps", alike=True, **_MAMBA2, time_step_limit=(0.02, 0.05))
_case(
    "bamba", "Bamba", _stirred, "padding", **_WIDE, **_MIXED, **_THREE, **_SMALL_MAMBA, attn_layer_indices=[1],
    mamba_n_groups=2, mamba_proj_bias=True,
)  # fmt: skip
_case(
    "zamba2", "Zamba2", _stirred, "steps", **_WIDE, **_THREE, intermediate_size=48, num_attention_heads=4,
    layers_block_type=["linear_attention", "hybrid", "linear_attention"], n_mamba_heads=8, mamba_ngroups=2,
    mamba_d_state=8, chunk_size=8,
)  # fmt: skip
_FALCON_H1 = {
    **_WIDE, **_MIXED, **_TWO, **_SMALL_MAMBA, "mamba_d_ssm": 48, "mamba_n_heads": 6, "mamba_n_groups": 2,
    "ssm_in_multiplier": 0.7, "ssm_multipliers": [0.5, 1.5, 0.8, 1.2, 2.0], "ssm_out_multiplier": 1.3,
}  # fmt: skip
_case("falcon_h1", "FalconH1", _stirred, **_FALCON_H1)
_NORMED = {**_FALCON_H1, "mamba_rms_norm": True}
_case("falcon_h1_norm_first", "FalconH1", _stirred, **_NORMED, mamba_norm_before_gate=True)
_case("falcon_h1_gate_first", "FalconH1", _stirred, alike=True, **_NORMED, mamba_norm_before_gate=False)
_case(
    "nemotron_h", "NemotronH", _stirred, "steps", **_WIDE, **_MIXED, head_dim=8, mamba_num_heads=8, mamba_head_dim=8,
    layers_block_type=["linear_attention", "mlp", "full_attention", "linear_attention"], n_groups=2, ssm_state_size=8,
    chunk_size=8,
)  # fmt: skip
_case(
    "granitemoehybrid", "GraniteMoeHybrid", _stirred, **_WIDE, **_MIXED, **_THREE, **_SMALL_MAMBA,
    shared_intermediate_size=48, layer_types=_ATTENTION_BETWEEN, num_local_experts=2, num_experts_per_tok=1,
)  # fmt: skip


def _minimax(name: str, *wrong: str, alike: bool = False, layers: str, **options: Any) -> None:
    types = [f"{layer}_attention" for layer in layers.split()]
    options |= {"layer_types": types, "num_hidden_layers": len(types), "block_size": 4}
    options |= {"num_local_experts": 2, "num_experts_per_tok": 1}
    _case(name, "MiniMax", _random, *wrong, alike=alike, **_WIDE, **_MIXED, **options)


_minimax("minimax", "generate", layers="full linear full linear")
_minimax(
    "minimax_linear_first", "generate", "pieces", alike=True, layers="linear full linear", head_dim=6, hidden_act="gelu"
)
_minimax("minimax_without_attention", "generate", alike=True, layers="linear linear")

_LFM = {**_WIDE, **_MIXED, **_THREE, "layer_types": ["conv", "full_attention", "conv"]}
_case("lfm2", "Lfm2", _random, **_LFM, block_multiple_of=8)
# What the projection adds at padding enters the original's convolution.
_case("lfm2_biased", "Lfm2", _random, "padding", **_LFM, block_multiple_of=8, conv_bias=True, conv_L_cache=5)
_LFM_EXPERTS = {"moe_intermediate_size": 24, "num_dense_layers": 1, "num_experts": 2, "num_experts_per_tok": 1}
_case("lfm2_moe", "Lfm2Moe", _random, **_LFM, **_LFM_EXPERTS)
_case(
    "lfm3", "Lfm3", _random, **_WIDE, **_MIXED, num_hidden_layers=4, head_dim=8, sliding_window=8,
    layer_types=["conv", "full_attention", "sliding_attention", "conv"], pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
_INKLING = {
    **_WIDE, **_TWO, "num_attention_heads": 4, "num_key_value_heads": 2, "moe_intermediate_size": 24, "head_dim": 8,
    "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8, "sliding_window_size": 8, "d_rel": 4,
    "rel_extent": 16, "n_routed_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip
_case(
    "inkling", "Inkling", _random, config="Text", **_INKLING, intermediate_size=48, n_shared_experts=1,
    layer_types=["hybrid_sliding", "hybrid"], mlp_layer_types=["dense", "sparse"],
)  # fmt: skip
# Without full attention, whose keys and values have convolutions of another kind, which are left alone
_case(
    "inkling2", "Inkling2", _random, "static", config="Text", **_INKLING, layer_types=["hybrid_sliding"] * 2,
    unpadded_vocab_size=VOCAB, eos_token_id=2,
)  # fmt: skip

_DELTA = {
    **_WIDE, **_THREE, "num_attention_heads": 4, "num_key_value_heads": 2, "layer_types": _ATTENTION_BETWEEN,
    "pad_token_id": 0, "eos_token_id": None,
    "rms_norm_eps": 0.01,  # an output near zero is no blown up rounding then
}  # fmt: skip
_HEADED = {
    **_DELTA, "linear_key_head_dim": 8, "linear_value_head_dim": 12, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}  # fmt: skip
_QWEN = {**_HEADED, "head_dim": 8, "intermediate_size": 48}
_EXPERTS = {"moe_intermediate_size": 24, "num_experts_per_tok": 1}
_QWEN_MOE = {**_HEADED, **_EXPERTS, "head_dim": 8, "num_experts": 2, "shared_expert_intermediate_size": 24}
_LATENT = {
    **_DELTA, **_EXPERTS, "intermediate_size": 48, "num_key_value_heads": 4, "num_local_experts": 2, "kv_lora_rank": 8,
    "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "n_group": 1, "topk_group": 1,
    "mlp_layer_types": ["dense", "sparse", "dense"],
}  # fmt: skip
_INDEXER = {"n_heads": 2, "kv_heads": 1, "head_dim": 8, "budget": 32, "compress_ratio": 2}
_QWEN4 = {**_QWEN_MOE, "hc_count": 2, "hc_lowrank": 8} | {f"indexer_{name}": size for name, size in _INDEXER.items()}

_case("qwen3_next", "Qwen3Next", _remembering, **_QWEN, num_experts=0)
_case(  # another activation after the convolution, and a window of 3
    "qwen3_next_gelu", "Qwen3Next", _remembering, alike=True, **_QWEN, num_experts=0, linear_conv_kernel_dim=3,
    hidden_act="gelu",
)  # fmt: skip
_case("qwen3_5", "Qwen3_5", _remembering, config="Text", **_QWEN)
_case("qwen3_5_moe", "Qwen3_5Moe", _remembering, config="Text", **_QWEN_MOE)
_case("qwen4_exp", "Qwen4Exp", _remembering, config="Text", **_QWEN4)
_case("qwen4_exp_sigmoid", "Qwen4Exp", _remembering, alike=True, config="Text", **_QWEN4, output_gate_type="sigmoid")
_OLMO = {**_HEADED, "intermediate_size": 48}
_case("olmo_hybrid", "OlmoHybrid", _remembering, **_OLMO)
_case("olmo_hybrid_positive", "OlmoHybrid", _remembering, alike=True, **_OLMO, linear_allow_neg_eigval=False)
_case("kimi_linear", "KimiLinear", _remembering, **_LATENT, linear_head_dim=8, linear_num_heads=4)
_case("bailing_hybrid", "BailingHybrid", _remembering, **_LATENT, head_dim=8)
_case("bailing_hybrid_unbounded", "BailingHybrid", _remembering, alike=True, **_LATENT, head_dim=8, kda_safe_gate=False)


def _glm5(bound: float | None) -> Any:
    from transformers import Glm5NextConfig, Glm5NextForConditionalGeneration

    text = {**_SIZES, **_LATENT, "qk_rope_head_dim": 0, "n_routed_experts": 2, "q_lora_rank": 8, "hc_mult": 2}
    index = {"index_topk": 32, "index_head_dim": 8, "index_n_heads": 2, "index_kpool": 2}
    linear = {"linear_head_dim": 8, "linear_num_heads": 4, "linear_lower_bound": bound}
    del text["num_local_experts"]
    vision = {"depth": 0, "hidden_size": 8, "num_heads": 2, "intermediate_size": 8, "out_hidden_size": 32}
    config = Glm5NextConfig(text_config={**text, **index, **linear}, vision_config=vision)
    return _remembering(_made(_unwrapped(Glm5NextForConditionalGeneration), config))


_add("glm5_next", lambda: _glm5(-5.0), "masks")
_add("glm5_next_unbounded", lambda: _glm5(None), "masks", alike=True)

_RWKV = {**_THREE, "context_length": 64, "bos_token_id": 1, "eos_token_id": 2}
_case("rwkv", "Rwkv", _noisy, "padding", "generate", **_RWKV)
# Weights that are halved with every layer while the model is not trained
_case("rwkv_rescaled", "Rwkv", _noisy, "padding", "generate", **_RWKV, rescale_every=1, intermediate_size=40)

_GEMMA = {**_MIXED, "intermediate_size": 64, "num_hidden_layers": 4, "num_key_value_heads": 1}
_case("recurrent_gemma", "RecurrentGemma", _noisy, "pieces", "padding", "beams", **_GEMMA)
_case(  # a recurrence wider than the model, a longer convolution, a window shorter than the prompt
    "recurrent_gemma_wide", "RecurrentGemma", _noisy, "pieces", "padding", "beams", alike=True, **_GEMMA, lru_width=48,
    conv1d_width=5, attention_window_size=8, hidden_activation="silu", block_types=("recurrent", "attention"),
)  # fmt: skip


def _xlstm(**options: Any) -> Any:
    from transformers import xLSTMConfig
    from transformers.initialization import no_init_weights
    from transformers.models.xlstm.modeling_xlstm import xLSTMForCausalLM

    config = xLSTMConfig(hidden_size=128, num_hidden_layers=2, num_heads=2, chunk_size=4, vocab_size=VOCAB, **options)
    with no_init_weights():  # the model's own fails for fused weights
        model = _made(xLSTMForCausalLM, config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    return model


_add("xlstm", _xlstm, "padding", "order")
_add("xlstm_fused", lambda: _xlstm(weight_mode="fused", use_bias=True, gate_soft_cap=5.0, eps=1e-3), "padding", "order")
