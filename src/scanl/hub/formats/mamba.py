"""MambaForCausalLM."""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from scanl import layers
from scanl.hub.formats.base import Format, blocks, in_float32, register, whole_ratio
from scanl.models import LanguageModel


@register("mamba")
class MambaFormat(Format):
    architecture: ClassVar = "MambaForCausalLM"
    defaults: ClassVar = {
        "vocab_size": 50280,
        "hidden_size": 768,
        "num_hidden_layers": 32,
        "state_size": 16,
        "conv_kernel": 4,
        "expand": 2,
        "time_step_rank": "auto",
        "use_bias": False,
        "use_conv_bias": True,
        "layer_norm_epsilon": 1e-5,
        "residual_in_fp32": True,
        "tie_word_embeddings": True,
    }
    only: ClassVar = {"hidden_act": ("silu", "swish")}
    new: ClassVar = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    weights: ClassVar = {
        "embedding.": "backbone.embeddings.",
        "stack.blocks.*.mixer_norm.": "backbone.layers.*.norm.",
        "stack.blocks.*.mixer.": "backbone.layers.*.mixer.",
        "stack.norm.": "backbone.norm_f.",
        "head.": "lm_head.",
    }
    mixers: ClassVar = (layers.Mamba,)

    @classmethod
    def arguments(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        stack = {
            "dim": config["hidden_size"],
            "depth": config["num_hidden_layers"],
            "layer": "mamba",
            "layer_options": {
                "state_dim": config["state_size"],
                "conv_size": config["conv_kernel"],
                "expand": config["expand"],
                "rank": None if config["time_step_rank"] == "auto" else config["time_step_rank"],
                "bias": config["use_bias"],
                "conv_bias": config["use_conv_bias"],
            },
            "channel_mixer": "none",
            "norm_eps": config["layer_norm_epsilon"],
            "residual_in_float32": config["residual_in_fp32"],
        }
        return {
            "vocab_size": config["vocab_size"],
            "stack": stack,
            "tie_embeddings": config["tie_word_embeddings"],
        }

    @classmethod
    def sizes(cls, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        dim, rank = config["hidden_size"], config["time_step_rank"]
        inner, rank = config["expand"] * dim, math.ceil(dim / 16) if rank == "auto" else rank
        return {
            "backbone.embeddings.weight": (config["vocab_size"], dim),
            "backbone.layers.0.mixer.A_log": (inner, config["state_size"]),
            "backbone.layers.0.mixer.conv1d.weight": (inner, 1, config["conv_kernel"]),
            "backbone.layers.0.mixer.dt_proj.weight": (inner, rank),
        }

    @staticmethod
    def entries(model: LanguageModel) -> dict[str, Any]:
        block = blocks(model)[0]
        mixer = block.mixer
        assert isinstance(mixer, layers.Mamba)
        return {
            "vocab_size": model.vocab_size,
            "hidden_size": mixer.dim,
            "num_hidden_layers": len(blocks(model)),
            "state_size": mixer.state_dim,
            "conv_kernel": mixer.conv_size,
            "expand": whole_ratio(mixer.width, mixer.dim),
            "time_step_rank": mixer.rank,
            "use_bias": mixer.in_proj.bias is not None,
            "use_conv_bias": mixer.conv1d.bias is not None,
            "layer_norm_epsilon": block.mixer_norm.eps,
            "residual_in_fp32": in_float32(model),
            "tie_word_embeddings": model.head is None,
        }

    @classmethod
    def holds(cls, model: LanguageModel) -> bool:
        return super().holds(model) and not cls.normed(model)

    @staticmethod
    def normed(model: LanguageModel) -> bool:
        """Whether the model has norms over δ, B and C, as Falcon-Mamba has."""
        mixers = [block.mixer for block in blocks(model)]
        return all(isinstance(mixer, layers.Mamba) and mixer.norm_eps is not None for mixer in mixers)
