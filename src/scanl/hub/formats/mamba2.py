"""Mamba2ForCausalLM."""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from scanl import layers
from scanl.errors import ConfigError
from scanl.hub.formats.base import Format, blocks, in_float32, register, whole_ratio
from scanl.hub.formats.mamba import MambaFormat
from scanl.models import LanguageModel


@register("mamba2")
class Mamba2Format(Format):
    architecture: ClassVar = "Mamba2ForCausalLM"
    defaults: ClassVar = {
        "vocab_size": 32768,
        "hidden_size": 4096,
        "num_hidden_layers": 64,
        "state_size": 128,
        "conv_kernel": 4,
        "expand": 2,
        "num_heads": 128,
        "head_dim": 64,
        "n_groups": 8,
        "use_bias": False,
        "use_conv_bias": True,
        "layer_norm_epsilon": 1e-5,
        "residual_in_fp32": True,
        "tie_word_embeddings": False,
    }
    only: ClassVar = {**MambaFormat.only, "time_step_limit": ((0.0, math.inf),)}
    new: ClassVar = MambaFormat.new
    weights: ClassVar = MambaFormat.weights
    mixers: ClassVar = (layers.Mamba2,)

    @classmethod
    def arguments(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        inner, split = config["expand"] * config["hidden_size"], config["num_heads"] * config["head_dim"]
        if inner != split:
            raise ConfigError(f"num_heads * head_dim is {split}, expected {inner} because of expand * hidden_size")
        stack = {
            "dim": config["hidden_size"],
            "depth": config["num_hidden_layers"],
            "layer": "mamba2",
            "layer_options": {
                "state_dim": config["state_size"],
                "conv_size": config["conv_kernel"],
                "expand": config["expand"],
                "head_dim": config["head_dim"],
                "num_groups": config["n_groups"],
                "bias": config["use_bias"],
                "conv_bias": config["use_conv_bias"],
                "norm_eps": config["layer_norm_epsilon"],
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
        inner, keys = config["num_heads"] * config["head_dim"], config["n_groups"] * config["state_size"]
        return {
            "backbone.embeddings.weight": (config["vocab_size"], config["hidden_size"]),
            "backbone.layers.0.mixer.A_log": (config["num_heads"],),
            "backbone.layers.0.mixer.norm.weight": (inner,),
            "backbone.layers.0.mixer.conv1d.weight": (inner + 2 * keys, 1, config["conv_kernel"]),
        }

    @staticmethod
    def entries(model: LanguageModel) -> dict[str, Any]:
        block = blocks(model)[0]
        mixer = block.mixer
        assert isinstance(mixer, layers.Mamba2)
        if mixer.norm.eps != block.mixer_norm.eps:
            raise ConfigError(
                f"norm_eps of the layers is {mixer.norm.eps}, expected {block.mixer_norm.eps} because of the model's: "
                "transformers has one norm_eps for both"
            )
        return {
            "vocab_size": model.vocab_size,
            "hidden_size": mixer.dim,
            "num_hidden_layers": len(blocks(model)),
            "state_size": mixer.state_dim,
            "conv_kernel": mixer.conv_size,
            "expand": whole_ratio(mixer.width, mixer.dim),
            "num_heads": mixer.num_heads,
            "head_dim": mixer.head_dim,
            "n_groups": mixer.num_groups,
            "use_bias": mixer.in_proj.bias is not None,
            "use_conv_bias": mixer.conv1d.bias is not None,
            "layer_norm_epsilon": block.mixer_norm.eps,
            "residual_in_fp32": in_float32(model),
            "tie_word_embeddings": model.head is None,
        }
