"""MambaLMHeadModel of mamba-ssm, with Mamba or Mamba-2."""

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from scanl.errors import CheckpointError
from scanl.hub.formats.base import Format
from scanl.hub.formats.mamba import MambaFormat
from scanl.hub.formats.mamba2 import Mamba2Format
from scanl.hub.originals.base import Original, register


class MambaLMHeadModel(Original):
    """Base of both layers. A subclass declares the format of transformers that has its layer, and its options.

    Options of the layer are in the entry ssm_cfg; here they stand beside the options of the model.
    """

    program: ClassVar = "mamba-ssm"
    defaults: ClassVar = {
        "d_model": 2560,
        "n_layer": 64,
        "vocab_size": 50277,
        "rms_norm": True,
        "residual_in_fp32": True,
        "pad_vocab_size_multiple": 8,
        "tie_embeddings": True,
        "d_conv": 4,
        "expand": 2,
        "bias": False,
        "conv_bias": True,
    }
    only: ClassVar = {"attn_layer_idx": ((),), "d_intermediate": (0,), "layer": ("Mamba1", "Mamba2")}
    weights: ClassVar = {**MambaFormat.weights, "embedding.": "backbone.embedding."}
    depth_entry: ClassVar = "n_layer"
    pickled: ClassVar = "pytorch_model.bin"
    format: ClassVar[type[Format]]

    @classmethod
    def recognizes(cls, config: Mapping[str, Any]) -> bool:
        if "model_type" in config or "d_model" not in config or "n_layer" not in config:
            return False  # transformers keeps these entries beside its own
        options = config.get("ssm_cfg")
        second = isinstance(options, dict) and options.get("layer") == "Mamba2"
        return cls.format is (Mamba2Format if second else MambaFormat)

    @classmethod
    def read(cls, config: Mapping[str, Any], who: str) -> dict[str, Any]:
        """See `CheckpointLayout.read`."""
        options = config.get("ssm_cfg") or {}
        if not isinstance(options, dict):
            raise CheckpointError(f"{who}: ssm_cfg is {options!r}, expected an object of options")
        return super().read({**config, **options}, who)

    @staticmethod
    @abstractmethod
    def options(config: Mapping[str, Any]) -> dict[str, Any]:
        """Return transformers' names of the options that the other layer does not have."""

    @classmethod
    def entries(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return transformers' names of the options."""
        multiple = config["pad_vocab_size_multiple"]
        return {
            "vocab_size": -(-config["vocab_size"] // multiple) * multiple,
            "hidden_size": config["d_model"],
            "num_hidden_layers": config["n_layer"],
            "state_size": config["d_state"],
            "conv_kernel": config["d_conv"],
            "expand": config["expand"],
            "use_bias": config["bias"],
            "use_conv_bias": config["conv_bias"],
            "layer_norm_epsilon": 1e-5,
            "residual_in_fp32": config["residual_in_fp32"],
            "tie_word_embeddings": config["tie_embeddings"],
            **cls.options(config),
        }

    @classmethod
    def arguments(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        arguments = cls.format.arguments(cls.entries(config))
        norm = "rmsnorm" if config["rms_norm"] else "layernorm"
        return {**arguments, "stack": {**arguments["stack"], "norm": norm}}

    @classmethod
    def sizes(cls, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        sizes = cls.format.sizes(cls.entries(config))
        return {name.replace(".embeddings.", ".embedding."): shape for name, shape in sizes.items()}


@register("mamba_ssm_1")
class MambaSSM(MambaLMHeadModel):
    defaults: ClassVar = {**MambaLMHeadModel.defaults, "d_state": 16, "dt_rank": "auto"}
    format: ClassVar = MambaFormat

    @staticmethod
    def options(config: Mapping[str, Any]) -> dict[str, Any]:
        return {"time_step_rank": config["dt_rank"]}


@register("mamba_ssm_2")
class Mamba2SSM(MambaLMHeadModel):
    defaults: ClassVar = {**MambaLMHeadModel.defaults, "d_state": 128, "headdim": 64, "ngroups": 1}
    only: ClassVar = {
        **MambaLMHeadModel.only,
        "d_ssm": (None,),
        "D_has_hdim": (False,),
        "rmsnorm": (True,),
        "norm_before_gate": (False,),
        "dt_limit": ((0.0, math.inf),),
    }
    format: ClassVar = Mamba2Format

    @staticmethod
    def options(config: Mapping[str, Any]) -> dict[str, Any]:
        heads = config["expand"] * config["d_model"] // config["headdim"]
        return {"num_heads": heads, "head_dim": config["headdim"], "n_groups": config["ngroups"]}
