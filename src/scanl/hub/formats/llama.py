"""LlamaForCausalLM."""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from scanl.errors import CheckpointError
from scanl.hub.formats.base import Format, blocks, padding_of, register
from scanl.hub.formats.rotary import checked, gathered
from scanl.layers.attention.attention import Attention
from scanl.layers.channel.gated_mlp import GatedMLP
from scanl.models import LanguageModel

ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}


@register("llama")
class LlamaFormat(Format):
    architecture: ClassVar = "LlamaForCausalLM"
    defaults: ClassVar = {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": None,
        "head_dim": None,
        "max_position_embeddings": 2048,
        "rope_parameters": None,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "pad_token_id": None,
    }
    only: ClassVar = {
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "pretraining_tp": (1,),
    }
    unchecked: ClassVar = ("rope_parameters", "pad_token_id")
    weights: ClassVar = {
        "embedding.": "model.embed_tokens.",
        "stack.blocks.*.mixer_norm.": "model.layers.*.input_layernorm.",
        "stack.blocks.*.mixer.": "model.layers.*.self_attn.",
        "stack.blocks.*.channel_norm.": "model.layers.*.post_attention_layernorm.",
        "stack.blocks.*.channel.gate.": "model.layers.*.mlp.gate_proj.",
        "stack.blocks.*.channel.up.": "model.layers.*.mlp.up_proj.",
        "stack.blocks.*.channel.down.": "model.layers.*.mlp.down_proj.",
        "stack.norm.": "model.norm.",
        "head.": "lm_head.",
    }
    mixers: ClassVar = (Attention,)
    channel: ClassVar = GatedMLP

    @classmethod
    def read(cls, config: Mapping[str, Any], who: str) -> dict[str, Any]:
        """See `Format.read`. Before transformers 5 the entries of rope_parameters were at the top level; reads both."""
        scaling = config.get("rope_scaling")
        if scaling is not None:
            raise CheckpointError(f"{who}: rope_scaling is {scaling!r}, expected null: scanl has no other option")
        return super().read(gathered(config, ROPE), who)

    @classmethod
    def arguments(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        heads, rope = config["num_attention_heads"], checked(config["rope_parameters"] or {}, ROPE)
        stack = {
            "dim": config["hidden_size"],
            "depth": config["num_hidden_layers"],
            "layer": "attention",
            "layer_options": {
                "num_heads": heads,
                "num_kv_heads": config["num_key_value_heads"] or heads,
                "head_dim": config["head_dim"] or config["hidden_size"] // heads,
                "max_length": config["max_position_embeddings"],
                "rope_base": float(rope["rope_theta"]),
                "rope_fraction": float(rope["partial_rotary_factor"]),
            },
            "channel_mixer": "gated_mlp",
            "channel_options": {"hidden_dim": config["intermediate_size"]},
            "norm_eps": config["rms_norm_eps"],
        }
        return {
            "vocab_size": config["vocab_size"],
            "stack": stack,
            "tie_embeddings": config["tie_word_embeddings"],
            "padding_idx": padding_of(config),
        }

    @classmethod
    def sizes(cls, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        dim, heads = config["hidden_size"], config["num_attention_heads"]
        width = config["head_dim"] or dim // heads
        return {
            "model.embed_tokens.weight": (config["vocab_size"], dim),
            "model.layers.0.self_attn.q_proj.weight": (heads * width, dim),
            "model.layers.0.self_attn.k_proj.weight": ((config["num_key_value_heads"] or heads) * width, dim),
            "model.layers.0.mlp.gate_proj.weight": (config["intermediate_size"], dim),
        }

    @staticmethod
    def entries(model: LanguageModel) -> dict[str, Any]:
        block = blocks(model)[0]
        mixer, channel = block.mixer, block.channel
        assert isinstance(mixer, Attention)
        assert isinstance(channel, GatedMLP)
        assert isinstance(block.mixer_norm, nn.RMSNorm)
        rotated = mixer.rotated / mixer.head_dim
        fraction = {} if rotated == 1 else {"partial_rotary_factor": rotated}
        return {
            "vocab_size": model.vocab_size,
            "hidden_size": mixer.dim,
            "intermediate_size": channel.gate.out_features,
            "num_hidden_layers": len(blocks(model)),
            "num_attention_heads": mixer.num_heads,
            "num_key_value_heads": mixer.num_kv_heads,
            "head_dim": mixer.head_dim,
            "max_position_embeddings": mixer.reach,
            "rope_parameters": {"rope_type": "default", "rope_theta": mixer.rope_base, **fraction},
            "rms_norm_eps": block.mixer_norm.eps,
            "tie_word_embeddings": model.head is None,
            "pad_token_id": model.embedding.padding_idx,
        }
