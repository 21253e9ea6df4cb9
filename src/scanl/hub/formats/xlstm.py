"""xLSTMForCausalLM: xLSTM-7B."""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from scanl.errors import ConfigError
from scanl.hub.formats.base import Format, blocks, register
from scanl.layers.memory.mlstm_large import MLSTMLarge
from scanl.models import GatedMLP, LanguageModel


@register("xlstm")
class XLSTMFormat(Format):
    architecture: ClassVar = "xLSTMForCausalLM"
    defaults: ClassVar = {
        "vocab_size": 50304,
        "hidden_size": 4096,
        "embedding_dim": None,
        "num_hidden_layers": 32,
        "num_blocks": None,
        "num_heads": 8,
        "qk_dim_factor": 0.5,
        "v_dim_factor": 1.0,
        "gate_soft_cap": 15.0,
        "norm_eps": 1e-6,
        "eps": 1e-6,
        "ffn_proj_factor": 2.667,
        "ffn_round_up_to_multiple_of": 64,
        "output_logit_soft_cap": 30.0,
    }
    only: ClassVar = {
        "use_bias": (False,),
        "add_out_norm": (True,),
        "norm_reduction_force_float32": (True,),
        "inference_state_dtype": ("float32",),
        "tie_word_embeddings": (False,),
        "weight_mode": ("single",),
    }
    new: ClassVar = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    weights: ClassVar = {
        "embedding.": "backbone.embeddings.",
        "stack.blocks.*.mixer_norm.": "backbone.blocks.*.norm_mlstm.",
        "stack.blocks.*.mixer.": "backbone.blocks.*.mlstm_layer.",
        "stack.blocks.*.channel_norm.": "backbone.blocks.*.norm_ffn.",
        "stack.blocks.*.channel.gate.": "backbone.blocks.*.ffn.proj_up_gate.",
        "stack.blocks.*.channel.up.": "backbone.blocks.*.ffn.proj_up.",
        "stack.blocks.*.channel.down.": "backbone.blocks.*.ffn.proj_down.",
        "stack.norm.": "backbone.out_norm.",
        "head.": "lm_head.",
    }
    mixers: ClassVar = (MLSTMLarge,)
    channel: ClassVar = GatedMLP

    @classmethod
    def arguments(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        for key, same in (("embedding_dim", "hidden_size"), ("num_blocks", "num_hidden_layers")):
            if config[key] not in (None, config[same]):
                raise ConfigError(f"{key} is {config[key]}, expected {config[same]} because of {same}")
        stack = {
            "dim": config["hidden_size"],
            "depth": config["num_hidden_layers"],
            "layer": "mlstm_large",
            "layer_options": {
                "num_heads": config["num_heads"],
                "expand_k": int(config["hidden_size"] * config["qk_dim_factor"]) / config["hidden_size"],
                "expand_v": int(config["hidden_size"] * config["v_dim_factor"]) / config["hidden_size"],
                "gate_soft_cap": config["gate_soft_cap"],
                "norm_eps": config["norm_eps"],
                "eps": config["eps"],
            },
            "channel_mixer": "gated_mlp",
            "channel_options": {
                "expand": config["ffn_proj_factor"],
                "multiple_of": config["ffn_round_up_to_multiple_of"],
            },
            "norm_eps": config["norm_eps"],
        }
        return {
            "vocab_size": config["vocab_size"],
            "stack": stack,
            "logit_cap": config["output_logit_soft_cap"],
        }

    @classmethod
    def sizes(cls, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        dim, multiple = config["hidden_size"], config["ffn_round_up_to_multiple_of"]
        hidden = int((config["ffn_proj_factor"] * dim + multiple - 1) // multiple) * multiple
        return {
            "backbone.embeddings.weight": (config["vocab_size"], dim),
            "backbone.blocks.0.mlstm_layer.q.weight": (int(dim * config["qk_dim_factor"]), dim),
            "backbone.blocks.0.mlstm_layer.v.weight": (int(dim * config["v_dim_factor"]), dim),
            "backbone.blocks.0.mlstm_layer.igate_preact.weight": (config["num_heads"], dim),
            "backbone.blocks.0.ffn.proj_up.weight": (hidden, dim),
        }

    @staticmethod
    def entries(model: LanguageModel) -> dict[str, Any]:
        block = blocks(model)[0]
        mixer, channel = block.mixer, block.channel
        assert isinstance(mixer, MLSTMLarge)
        assert isinstance(channel, GatedMLP)
        return {
            "vocab_size": model.vocab_size,
            "hidden_size": mixer.dim,
            "embedding_dim": mixer.dim,
            "num_hidden_layers": len(blocks(model)),
            "num_blocks": len(blocks(model)),
            "num_heads": mixer.num_heads,
            "qk_dim_factor": _factor(mixer.q.out_features, mixer.dim),
            "v_dim_factor": _factor(mixer.v.out_features, mixer.dim),
            "gate_soft_cap": mixer.gate_soft_cap,
            "norm_eps": block.mixer_norm.eps,
            "eps": mixer.eps,
            "ffn_proj_factor": channel.config["expand"],
            "ffn_round_up_to_multiple_of": channel.config["multiple_of"],
            "output_logit_soft_cap": model.logit_cap,
        }


def _factor(channels: int, dim: int) -> float:
    """Return the factor with int(dim * factor) = channels, as the authors compute them."""
    factor = channels / dim
    return factor if int(dim * factor) == channels else math.nextafter(factor, math.inf)
