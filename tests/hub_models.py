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


CASES: dict[str, Case] = {}


def case(*wrong: str, alike: bool = False) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    def add(build: Callable[[], Any]) -> Callable[[], Any]:
        CASES[build.__name__] = Case(build, frozenset(wrong), alike)
        return build

    return add


def _made(model: type, config: Any) -> Any:
    torch.manual_seed(0)
    return model(config).eval()


@case("pieces")
def mamba():
    from transformers import MambaConfig, MambaForCausalLM

    return _made(MambaForCausalLM, MambaConfig(hidden_size=32, num_hidden_layers=2, state_size=8, vocab_size=VOCAB))


@case("pieces")
def falcon_mamba():
    from transformers import FalconMambaConfig, FalconMambaForCausalLM

    config = FalconMambaConfig(hidden_size=32, num_hidden_layers=2, state_size=8, vocab_size=VOCAB)
    return _made(FalconMambaForCausalLM, config)


@case("pieces")
def jamba():
    from transformers import JambaConfig, JambaForCausalLM

    config = JambaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_layer_period=3,
        attn_layer_offset=1,
        mamba_d_state=8,
        num_experts=2,
        num_experts_per_tok=1,
        vocab_size=VOCAB,
    )
    return _made(JambaForCausalLM, config)


@case("pieces")
def zamba():
    from transformers import ZambaConfig, ZambaForCausalLM

    config = ZambaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=4,
        attn_layer_period=3,
        attn_layer_offset=1,
        mamba_d_state=8,
        mamba_dt_rank=4,
        n_mamba_heads=2,
        vocab_size=VOCAB,
    )
    return _made(ZambaForCausalLM, config)


def _stirred(model: Any) -> Any:
    """Biases, norms, skips and their like off the constants that they start from, so that the laws see them."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model


def _mamba2(**options: Any) -> Any:
    from transformers import Mamba2Config, Mamba2ForCausalLM

    config = Mamba2Config(
        hidden_size=32,
        initializer_range=0.2,
        num_hidden_layers=2,
        num_heads=8,
        head_dim=8,
        state_size=8,
        n_groups=2,
        chunk_size=8,
        vocab_size=VOCAB,
        **options,
    )
    return _stirred(_made(Mamba2ForCausalLM, config))


@case()
def mamba2():
    return _mamba2()


@case("padding")
def mamba2_biased():
    return _mamba2(use_bias=True, use_conv_bias=False, hidden_act="gelu")


@case("steps", alike=True)
def mamba2_limited():
    """Step sizes that the limit changes."""
    return _mamba2(time_step_limit=(0.02, 0.05))


@case("padding")
def bamba():
    from transformers import BambaConfig, BambaForCausalLM

    config = BambaConfig(
        hidden_size=32,
        initializer_range=0.2,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_layer_indices=[1],
        mamba_n_heads=8,
        mamba_n_groups=2,
        mamba_d_state=8,
        mamba_chunk_size=8,
        mamba_proj_bias=True,
        vocab_size=VOCAB,
    )
    return _stirred(_made(BambaForCausalLM, config))


@case("steps")
def zamba2():
    from transformers import Zamba2Config, Zamba2ForCausalLM

    config = Zamba2Config(
        hidden_size=32,
        initializer_range=0.2,
        intermediate_size=48,
        num_hidden_layers=3,
        layers_block_type=["linear_attention", "hybrid", "linear_attention"],
        num_attention_heads=4,
        n_mamba_heads=8,
        mamba_ngroups=2,
        mamba_d_state=8,
        chunk_size=8,
        vocab_size=VOCAB,
    )
    return _stirred(_made(Zamba2ForCausalLM, config))


def _falcon_h1(**options: Any) -> Any:
    from transformers import FalconH1Config, FalconH1ForCausalLM

    config = FalconH1Config(
        hidden_size=32,
        initializer_range=0.2,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        mamba_d_ssm=48,
        mamba_n_heads=6,
        mamba_n_groups=2,
        mamba_d_state=8,
        mamba_chunk_size=8,
        ssm_in_multiplier=0.7,
        ssm_multipliers=[0.5, 1.5, 0.8, 1.2, 2.0],
        ssm_out_multiplier=1.3,
        vocab_size=VOCAB,
        **options,
    )
    return _stirred(_made(FalconH1ForCausalLM, config))


@case()
def falcon_h1():
    return _falcon_h1()


@case()
def falcon_h1_norm_first():
    return _falcon_h1(mamba_rms_norm=True, mamba_norm_before_gate=True)


@case(alike=True)
def falcon_h1_gate_first():
    return _falcon_h1(mamba_rms_norm=True, mamba_norm_before_gate=False)


@case("steps")
def nemotron_h():
    from transformers import NemotronHConfig, NemotronHForCausalLM

    config = NemotronHConfig(
        hidden_size=32,
        initializer_range=0.2,
        layers_block_type=["linear_attention", "mlp", "full_attention", "linear_attention"],
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        mamba_num_heads=8,
        mamba_head_dim=8,
        n_groups=2,
        ssm_state_size=8,
        chunk_size=8,
        vocab_size=VOCAB,
    )
    return _stirred(_made(NemotronHForCausalLM, config))


@case()
def granitemoehybrid():
    from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

    config = GraniteMoeHybridConfig(
        hidden_size=32,
        initializer_range=0.2,
        intermediate_size=48,
        shared_intermediate_size=48,
        num_hidden_layers=3,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=2,
        num_experts_per_tok=1,
        mamba_n_heads=8,
        mamba_d_state=8,
        mamba_chunk_size=8,
        vocab_size=VOCAB,
    )
    return _stirred(_made(GraniteMoeHybridForCausalLM, config))


def _random(model: Any) -> Any:
    """Biases, which begin at zero, and norms, at one, so that both count."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data = noise if name.endswith("bias") else 1 + 0.3 * noise
    return model


def _minimax(*layers: str, **options: Any) -> Any:
    from transformers import MiniMaxConfig, MiniMaxForCausalLM

    config = MiniMaxConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=len(layers),
        layer_types=[f"{layer}_attention" for layer in layers],
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=2,
        num_experts_per_tok=1,
        block_size=4,
        initializer_range=0.2,
        vocab_size=VOCAB,
        **options,
    )
    return _random(_made(MiniMaxForCausalLM, config))


@case("generate")
def minimax():
    return _minimax("full", "linear", "full", "linear")


@case("generate", "pieces", alike=True)
def minimax_linear_first():
    return _minimax("linear", "full", "linear", head_dim=6, hidden_act="gelu")


@case("generate", alike=True)
def minimax_without_attention():
    return _minimax("linear", "linear")


def _lfm2(**options: Any) -> Any:
    from transformers import Lfm2Config, Lfm2ForCausalLM

    config = Lfm2Config(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        layer_types=["conv", "full_attention", "conv"],
        num_attention_heads=4,
        num_key_value_heads=2,
        block_multiple_of=8,
        initializer_range=0.2,
        vocab_size=VOCAB,
        **options,
    )
    return _random(_made(Lfm2ForCausalLM, config))


@case()
def lfm2():
    return _lfm2()


@case("padding")
def lfm2_biased():
    """What the projection adds at padding enters the original's convolution."""
    return _lfm2(conv_bias=True, conv_L_cache=5)


@case()
def lfm2_moe():
    from transformers import Lfm2MoeConfig, Lfm2MoeForCausalLM

    config = Lfm2MoeConfig(
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=24,
        num_hidden_layers=3,
        layer_types=["conv", "full_attention", "conv"],
        num_attention_heads=4,
        num_key_value_heads=2,
        num_dense_layers=1,
        num_experts=2,
        num_experts_per_tok=1,
        initializer_range=0.2,
        vocab_size=VOCAB,
    )
    return _random(_made(Lfm2MoeForCausalLM, config))


@case()
def lfm3():
    from transformers import Lfm3Config, Lfm3ForCausalLM

    config = Lfm3Config(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        layer_types=["conv", "full_attention", "sliding_attention", "conv"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=8,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.2,
        vocab_size=VOCAB,
    )
    return _random(_made(Lfm3ForCausalLM, config))


@case()
def inkling():
    from transformers import InklingForCausalLM, InklingTextConfig

    config = InklingTextConfig(
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=24,
        num_hidden_layers=2,
        layer_types=["hybrid_sliding", "hybrid"],
        mlp_layer_types=["dense", "sparse"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        swa_num_attention_heads=4,
        swa_num_key_value_heads=2,
        swa_head_dim=8,
        sliding_window_size=8,
        d_rel=4,
        rel_extent=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
        initializer_range=0.2,
        vocab_size=VOCAB,
    )
    return _random(_made(InklingForCausalLM, config))


@case("static")
def inkling2():
    """Without full attention, whose keys and values have convolutions of another kind, which are left alone."""
    from transformers import Inkling2ForCausalLM, Inkling2TextConfig

    config = Inkling2TextConfig(
        hidden_size=32,
        moe_intermediate_size=24,
        num_hidden_layers=2,
        layer_types=["hybrid_sliding"] * 2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        swa_num_attention_heads=4,
        swa_num_key_value_heads=2,
        swa_head_dim=8,
        sliding_window_size=8,
        d_rel=4,
        rel_extent=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        initializer_range=0.2,
        unpadded_vocab_size=VOCAB,
        eos_token_id=2,
        vocab_size=VOCAB,
    )
    return _random(_made(Inkling2ForCausalLM, config))


def _delta(model: type, config: Any) -> Any:
    """With transformers' own code for the CPU: it takes flash-linear-attention's kernels, where installed, anywhere."""
    modeling = inspect.getmodule(model)
    for name, function in vars(modeling).copy().items():
        if "delta" in name and inspect.isfunction(function):
            setattr(modeling, name, inspect.unwrap(function))
    made = _random(_made(model, config))
    for name, parameter in made.named_parameters():
        if name.endswith("A_log"):
            parameter.data = torch.linspace(-3, 0, parameter.numel()).view_as(parameter)  # slow enough to remember
    return made


_DELTA = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "pad_token_id": 0,
    "eos_token_id": None,
    "initializer_range": 0.2,
    "rms_norm_eps": 0.01,  # an output near zero is no blown up rounding then
    "vocab_size": VOCAB,
}
_HEADS = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_EXPERTS = {"moe_intermediate_size": 24, "num_experts_per_tok": 1}
_LATENT = {
    **_EXPERTS,
    "intermediate_size": 48,
    "num_key_value_heads": 4,
    "num_local_experts": 2,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "n_group": 1,
    "topk_group": 1,
    "mlp_layer_types": ["dense", "sparse", "dense"],
}


@case()
def qwen3_next():
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    config = Qwen3NextConfig(**_DELTA, **_HEADS, head_dim=8, intermediate_size=48, num_experts=0)
    return _delta(Qwen3NextForCausalLM, config)


@case(alike=True)
def qwen3_next_gelu():
    """Another activation after the convolution, and a window of 3."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    more = {"head_dim": 8, "intermediate_size": 48, "num_experts": 0, "linear_conv_kernel_dim": 3}
    return _delta(Qwen3NextForCausalLM, Qwen3NextConfig(**_DELTA, **_HEADS, **more, hidden_act="gelu"))


@case()
def qwen3_5():
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    return _delta(Qwen3_5ForCausalLM, Qwen3_5TextConfig(**_DELTA, **_HEADS, head_dim=8, intermediate_size=48))


@case()
def qwen3_5_moe():
    from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig

    more = {"head_dim": 8, "num_experts": 2, "shared_expert_intermediate_size": 24}
    return _delta(Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig(**_DELTA, **_HEADS, **_EXPERTS, **more))


def _qwen4(**options: Any) -> Any:
    from transformers import Qwen4ExpForCausalLM, Qwen4ExpTextConfig

    more = {"head_dim": 8, "num_experts": 2, "shared_expert_intermediate_size": 24, "hc_count": 2, "hc_lowrank": 8}
    indexer = {"n_heads": 2, "kv_heads": 1, "head_dim": 8, "budget": 32, "compress_ratio": 2}
    more |= {f"indexer_{name}": value for name, value in indexer.items()}
    return _delta(Qwen4ExpForCausalLM, Qwen4ExpTextConfig(**{**_DELTA, **_HEADS, **_EXPERTS, **more, **options}))


@case()
def qwen4_exp():
    return _qwen4()


@case(alike=True)
def qwen4_exp_sigmoid():
    return _qwen4(output_gate_type="sigmoid")


def _olmo(**options: Any) -> Any:
    from transformers import OlmoHybridConfig, OlmoHybridForCausalLM

    config = OlmoHybridConfig(**_DELTA, **_HEADS, intermediate_size=48, **options)
    return _delta(OlmoHybridForCausalLM, config)


@case()
def olmo_hybrid():
    return _olmo()


@case(alike=True)
def olmo_hybrid_positive():
    return _olmo(linear_allow_neg_eigval=False)


@case()
def kimi_linear():
    from transformers import KimiLinearConfig, KimiLinearForCausalLM

    config = KimiLinearConfig(**{**_DELTA, **_LATENT}, linear_head_dim=8, linear_num_heads=4)
    return _delta(KimiLinearForCausalLM, config)


def _bailing(**options: Any) -> Any:
    from transformers import BailingHybridConfig, BailingHybridForCausalLM

    config = BailingHybridConfig(**{**_DELTA, **_LATENT}, head_dim=8, **options)
    return _delta(BailingHybridForCausalLM, config)


@case()
def bailing_hybrid():
    return _bailing()


@case(alike=True)
def bailing_hybrid_unbounded():
    return _bailing(kda_safe_gate=False)


def _glm5(bound: float | None) -> Any:
    from transformers import Glm5NextConfig, Glm5NextForConditionalGeneration

    text = {**_DELTA, **_LATENT, "qk_rope_head_dim": 0, "n_routed_experts": 2, "q_lora_rank": 8, "hc_mult": 2}
    index = {"index_topk": 32, "index_head_dim": 8, "index_n_heads": 2, "index_kpool": 2}
    linear = {"linear_head_dim": 8, "linear_num_heads": 4, "linear_lower_bound": bound}
    del text["num_local_experts"]
    vision = {"depth": 0, "hidden_size": 8, "num_heads": 2, "intermediate_size": 8, "out_hidden_size": 32}
    config = Glm5NextConfig(text_config={**text, **index, **linear}, vision_config=vision)
    return _delta(Glm5NextForConditionalGeneration, config)


@case("masks")
def glm5_next():
    return _glm5(-5.0)


@case("masks", alike=True)
def glm5_next_unbounded():
    return _glm5(None)


def _rwkv(**options: Any) -> Any:
    from transformers import RwkvConfig, RwkvForCausalLM

    config = RwkvConfig(
        hidden_size=32,
        num_hidden_layers=3,
        context_length=64,
        bos_token_id=1,
        eos_token_id=2,
        vocab_size=VOCAB,
        **options,
    )
    return _noisy(_made(RwkvForCausalLM, config))


@case("padding", "generate")
def rwkv():
    return _rwkv()


@case("padding", "generate")
def rwkv_rescaled():
    """Weights that are halved with every layer while the model is not trained."""
    return _rwkv(rescale_every=1, intermediate_size=40)


def _noisy(model: Any) -> Any:
    """All weights off what they start from: gates that begin as constants, and embeddings too small to tell apart."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    return model


def _recurrent_gemma(**options: Any) -> Any:
    from transformers import RecurrentGemmaConfig, RecurrentGemmaForCausalLM

    config = RecurrentGemmaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=1,
        vocab_size=VOCAB,
        **options,
    )
    return _noisy(_made(RecurrentGemmaForCausalLM, config))


@case("pieces", "padding", "beams")
def recurrent_gemma():
    return _recurrent_gemma()


@case("pieces", "padding", "beams", alike=True)
def recurrent_gemma_wide():
    """A recurrence wider than the model, a longer convolution, a window shorter than the prompt."""
    return _recurrent_gemma(
        lru_width=48,
        conv1d_width=5,
        attention_window_size=8,
        hidden_activation="silu",
        block_types=("recurrent", "attention"),
    )


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


@case("padding", "order")
def xlstm():
    return _xlstm()


@case("padding", "order")
def xlstm_fused():
    return _xlstm(weight_mode="fused", use_bias=True, gate_soft_cap=5.0, eps=1e-3)
