"""RecurrentGemmaForCausalLM: Griffin."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from scanl import layers
from scanl.errors import ConfigError
from scanl.hub.formats.base import Format, blocks, padding_of, register
from scanl.hub.formats.rotary import checked, gathered
from scanl.layers.parts.norm import ZeroCenteredRMSNorm
from scanl.models import GatedMLP, LanguageModel

LAYERS = {"recurrent": "hawk", "attention": "window_attention"}
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}


@register("recurrent_gemma")
class RecurrentGemmaFormat(Format):
    architecture: ClassVar = "RecurrentGemmaForCausalLM"
    defaults: ClassVar = {
        "vocab_size": 256000,
        "hidden_size": 2560,
        "num_hidden_layers": 26,
        "intermediate_size": 7680,
        "num_attention_heads": 10,
        "num_key_value_heads": None,
        "head_dim": None,
        "lru_width": None,
        "conv1d_width": 4,
        "attention_window_size": 2048,
        "attention_bias": False,
        "block_types": ("recurrent", "recurrent", "attention"),
        "rope_parameters": None,
        "rms_norm_eps": 1e-6,
        "logits_soft_cap": 30.0,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
    }
    unchecked: ClassVar = ("block_types", "rope_parameters", "pad_token_id")
    only: ClassVar = {"hidden_activation": ("gelu_pytorch_tanh",), "attention_dropout": (0.0,)}
    new: ClassVar = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    weights: ClassVar = {
        "embedding.": "model.embed_tokens.",
        "stack.blocks.*.mixer_norm.": "model.layers.*.temporal_pre_norm.",
        "stack.blocks.*.mixer.conv_1d.conv.": "model.layers.*.temporal_block.conv_1d.",
        "stack.blocks.*.mixer.rg_lru.a_param": "model.layers.*.temporal_block.rg_lru.recurrent_param",
        "stack.blocks.*.mixer.rg_lru.a_gate.w": "model.layers.*.temporal_block.rg_lru.recurrent_gate_weight",
        "stack.blocks.*.mixer.rg_lru.a_gate.b": "model.layers.*.temporal_block.rg_lru.recurrent_gate_bias",
        "stack.blocks.*.mixer.rg_lru.input_gate.w": "model.layers.*.temporal_block.rg_lru.input_gate_weight",
        "stack.blocks.*.mixer.rg_lru.input_gate.b": "model.layers.*.temporal_block.rg_lru.input_gate_bias",
        "stack.blocks.*.mixer.": "model.layers.*.temporal_block.",
        "stack.blocks.*.channel_norm.": "model.layers.*.channel_pre_norm.",
        "stack.blocks.*.channel.gate.": "model.layers.*.mlp_block.gate_proj.",
        "stack.blocks.*.channel.up.": "model.layers.*.mlp_block.up_proj.",
        "stack.blocks.*.channel.down.": "model.layers.*.mlp_block.down_proj.",
        "stack.norm.": "model.final_norm.",
        "head.": "lm_head.",
    }
    mixers: ClassVar = (layers.Hawk, layers.WindowAttention)
    channel: ClassVar = GatedMLP
    norm: ClassVar = ZeroCenteredRMSNorm

    @classmethod
    def read(cls, config: Mapping[str, Any], who: str) -> dict[str, Any]:
        """See `Format.read`. Before transformers 5 the entries of rope_parameters were at the top level; reads both."""
        return super().read(gathered(config, ROPE), who)

    @classmethod
    def arguments(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        dim, heads, types = config["hidden_size"], config["num_attention_heads"], config["block_types"]
        if not isinstance(types, list | tuple) or not types or any(kind not in list(LAYERS) for kind in types):
            raise ConfigError(f"block_types is {types!r}, expected a list of 'recurrent' and 'attention'")
        rope = checked(config["rope_parameters"], ROPE)
        options = {
            "recurrent": {
                "num_heads": heads,
                "width": config["lru_width"] or dim,
                "conv_size": config["conv1d_width"],
            },
            "attention": {
                "num_heads": heads,
                "num_kv_heads": config["num_key_value_heads"] or heads,
                "head_dim": config["head_dim"] or dim // heads,
                "window": config["attention_window_size"],
                "rope_base": rope["rope_theta"],
                "rope_fraction": rope["partial_rotary_factor"],
                "bias": config["attention_bias"],
            },
        }
        stack = {
            "dim": dim,
            "depth": config["num_hidden_layers"],
            "layer": [LAYERS[kind] for kind in types],
            "layer_options": {LAYERS[kind]: options[kind] for kind in types},
            "channel_mixer": "gated_mlp",
            "channel_options": {
                "hidden_dim": config["intermediate_size"] // 2,
                "bias": True,
                "activation": "gelu_tanh",
            },
            "norm": "zero_centered_rmsnorm",
            "norm_eps": config["rms_norm_eps"],
        }
        return {
            "vocab_size": config["vocab_size"],
            "stack": stack,
            "embedding_scale": torch.tensor(
                dim**0.5, dtype=torch.bfloat16, device="cpu"
            ).item(),  # transformers rounds it too
            "logit_cap": config["logits_soft_cap"],
            "tie_embeddings": config["tie_word_embeddings"],
            "padding_idx": padding_of(config),
        }

    @classmethod
    def sizes(cls, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        dim, heads, types = config["hidden_size"], config["num_attention_heads"], config["block_types"]
        width, head = config["lru_width"] or dim, config["head_dim"] or dim // heads
        queries, keys = heads * head, (config["num_key_value_heads"] or heads) * head
        sizes = {
            "model.embed_tokens.weight": (config["vocab_size"], dim),
            "model.layers.0.mlp_block.gate_proj.weight": (config["intermediate_size"] // 2, dim),
        }
        options: dict[str, dict[str, tuple[int, ...]]] = {
            "recurrent": {
                "linear_x.weight": (width, dim),
                "conv_1d.weight": (width, 1, config["conv1d_width"]),
                "rg_lru.input_gate_bias": (heads, width // heads),
            },
            "attention": {"q_proj.weight": (queries, dim), "k_proj.weight": (keys, dim)},
        }
        for index, kind in list(enumerate(types))[: config["num_hidden_layers"]]:
            begin = f"model.layers.{index}.temporal_block."
            sizes |= {begin + name: shape for name, shape in options[kind].items()}
        return sizes

    @staticmethod
    def entries(model: LanguageModel) -> dict[str, Any]:
        mixers, channel = [block.mixer for block in blocks(model)], blocks(model)[0].channel
        assert isinstance(channel, GatedMLP)
        entries = {
            **RecurrentGemmaFormat.defaults,
            "vocab_size": model.vocab_size,
            "hidden_size": model.stack.dim,
            "num_hidden_layers": len(mixers),
            "intermediate_size": 2 * channel.gate.out_features,
            "block_types": _period(
                ["recurrent" if isinstance(mixer, layers.Hawk) else "attention" for mixer in mixers]
            ),
            "rms_norm_eps": blocks(model)[0].mixer_norm.eps,
            "logits_soft_cap": model.logit_cap,
            "tie_word_embeddings": model.head is None,
            "pad_token_id": model.embedding.padding_idx,
        }
        heads = set()
        for mixer in reversed(mixers):  # reversed, so that the first layer of each kind decides
            if isinstance(mixer, layers.Hawk):
                heads.add(mixer.rg_lru.a_gate.w.shape[0])
                entries |= {"lru_width": mixer.width, "conv1d_width": mixer.conv_1d.kernel_size}
            elif isinstance(mixer, layers.WindowAttention):
                heads.add(mixer.num_heads)
                entries |= {
                    "num_key_value_heads": mixer.num_kv_heads,
                    "head_dim": mixer.head_dim,
                    "attention_window_size": mixer.reach,
                    "attention_bias": mixer.q_proj.bias is not None,
                    "rope_parameters": {
                        **ROPE,
                        "rope_theta": mixer.rope_base,
                        "partial_rotary_factor": mixer.config["rope_fraction"],
                    },
                }
        if len(heads) > 1:
            numbers = " and ".join(map(str, sorted(heads)))
            raise ConfigError(
                f"num_heads of the layers is {numbers}, expected one number: transformers has one for both kinds"
            )
        return {**entries, "num_attention_heads": heads.pop()}


def _period(kinds: list[str]) -> list[str]:
    """Return the shortest list whose repetition gives `kinds`."""
    return next(kinds[:length] for length in range(1, len(kinds) + 1) if kinds[length:] == kinds[: len(kinds) - length])
