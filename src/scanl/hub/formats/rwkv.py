"""RwkvForCausalLM: RWKV-4."""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from scanl import layers
from scanl.hub.formats.base import Format, blocks, register
from scanl.layers.channel.rwkv_channel_mix import RWKV4ChannelMix
from scanl.models import LanguageModel


@register("rwkv")
class RwkvFormat(Format):
    """RWKV-4. Nothing is rescaled here, as in training with transformers.

    At inference transformers halves the residual stream after every `rescale_every` blocks. The norms' epsilon then
    has a larger effect.
    """

    architecture: ClassVar = "RwkvForCausalLM"
    defaults: ClassVar = {
        "vocab_size": 50277,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "attention_hidden_size": None,
        "intermediate_size": None,
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": False,
    }
    only: ClassVar = {"layer_norm_epsilon": (1e-5,)}  # transformers fixes it for the last norm
    new: ClassVar = {"bos_token_id": None, "eos_token_id": None, "rescale_every": 0}
    weights: ClassVar = {
        "embedding.": "rwkv.embeddings.",
        "embedding_norm.": "rwkv.blocks.0.pre_ln.",
        "stack.blocks.*.mixer_norm.": "rwkv.blocks.*.ln1.",
        "stack.blocks.*.mixer.": "rwkv.blocks.*.attention.",
        "stack.blocks.*.channel_norm.": "rwkv.blocks.*.ln2.",
        "stack.blocks.*.channel.": "rwkv.blocks.*.feed_forward.",
        "stack.norm.": "rwkv.ln_out.",
        "head.": "head.",
    }
    mixers: ClassVar = (layers.RWKV4,)
    channel: ClassVar = RWKV4ChannelMix
    norm: ClassVar = nn.LayerNorm

    @classmethod
    def arguments(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        stack = {
            "dim": config["hidden_size"],
            "depth": config["num_hidden_layers"],
            "layer": "rwkv4",
            "layer_options": {"width": config["attention_hidden_size"]},
            "channel_mixer": "rwkv4",
            "channel_options": {"hidden_dim": config["intermediate_size"]},
            "norm": "layernorm",
            "norm_eps": config["layer_norm_epsilon"],
        }
        return {
            "vocab_size": config["vocab_size"],
            "stack": stack,
            "embedding_norm": True,
            "tie_embeddings": config["tie_word_embeddings"],
        }

    @classmethod
    def sizes(cls, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        dim = config["hidden_size"]
        return {
            "rwkv.embeddings.weight": (config["vocab_size"], dim),
            "rwkv.blocks.0.attention.key.weight": (config["attention_hidden_size"] or dim, dim),
            "rwkv.blocks.0.feed_forward.key.weight": (config["intermediate_size"] or 4 * dim, dim),
        }

    @staticmethod
    def entries(model: LanguageModel) -> dict[str, Any]:
        block = blocks(model)[0]
        assert isinstance(block.mixer, layers.RWKV4)
        assert isinstance(block.channel, RWKV4ChannelMix)
        return {
            "vocab_size": model.vocab_size,
            "hidden_size": block.mixer.dim,
            "num_hidden_layers": len(blocks(model)),
            "attention_hidden_size": block.mixer.width,
            "intermediate_size": block.channel.key.out_features,
            "layer_norm_epsilon": block.mixer_norm.eps,
            "tie_word_embeddings": model.head is None,
        }
