"""RWKV-4, -5, -6 and -7 as RWKV-LM stores them: one file of weights."""

from collections.abc import Mapping
from typing import Any, ClassVar

from scanl.hub.originals.base import ShapedFile, register
from scanl.hub.weights import Weights


class RWKVLM(ShapedFile):
    """Base of all versions. Each declares its layer, whose options are the entries of its own."""

    program: ClassVar = "RWKV-LM"
    defaults: ClassVar = {"vocab_size": 65536, "dim": 2048, "depth": 24, "hidden_dim": 7168}
    weights: ClassVar = {
        "embedding.": "emb.",
        "embedding_norm.": "blocks.0.ln0.",
        "stack.blocks.*.mixer_norm.": "blocks.*.ln1.",
        "stack.blocks.*.mixer.": "blocks.*.att.",
        "stack.blocks.*.channel_norm.": "blocks.*.ln2.",
        "stack.blocks.*.channel.": "blocks.*.ffn.",
        "stack.norm.": "ln_out.",
        "head.": "head.",
    }
    depth_entry: ClassVar = "depth"
    layer: ClassVar[str]  # of the channel mixer too

    @staticmethod
    def shared(weights: Weights) -> dict[str, Any]:
        """Return the entries that every version has."""
        vocab_size, dim = weights.shape("emb.weight", 2)
        hidden_dim, _ = weights.shape("blocks.0.ffn.key.weight", 2)
        return {"vocab_size": vocab_size, "dim": dim, "depth": weights.depth("blocks."), "hidden_dim": hidden_dim}

    @classmethod
    def arguments(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        options = {key: config[key] for key in cls.defaults if key not in RWKVLM.defaults}
        stack = {
            "dim": config["dim"],
            "depth": config["depth"],
            "layer": cls.layer,
            "layer_options": options,
            "channel_mixer": cls.layer,
            "channel_options": {"hidden_dim": config["hidden_dim"]},
            "norm": "layernorm",
            "norm_eps": 1e-5,
        }
        return {"vocab_size": config["vocab_size"], "stack": stack, "embedding_norm": True}

    @classmethod
    def sizes(cls, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        return {
            "emb.weight": (config["vocab_size"], config["dim"]),
            "blocks.0.ffn.key.weight": (config["hidden_dim"], config["dim"]),
        }


@register("rwkv_lm_4")
class RWKV4LM(RWKVLM):
    mark: ClassVar = "blocks.0.att.time_mix_k"
    layer: ClassVar = "rwkv4"
    defaults: ClassVar = {**RWKVLM.defaults, "width": 2048}
    weights: ClassVar = {
        "stack.blocks.*.mixer.time_mix_key": "blocks.*.att.time_mix_k",
        "stack.blocks.*.mixer.time_mix_value": "blocks.*.att.time_mix_v",
        "stack.blocks.*.mixer.time_mix_receptance": "blocks.*.att.time_mix_r",
        "stack.blocks.*.channel.time_mix_key": "blocks.*.ffn.time_mix_k",
        "stack.blocks.*.channel.time_mix_receptance": "blocks.*.ffn.time_mix_r",
        **RWKVLM.weights,
    }

    @staticmethod
    def described(weights: Weights) -> dict[str, Any]:
        return {**RWKVLM.shared(weights), "width": weights.shape("blocks.0.att.time_decay", 1)[0]}


@register("rwkv_lm_5")
class RWKV5LM(RWKVLM):
    """RWKV-5.2. Earlier releases of RWKV-5 have one decay for each head."""

    mark: ClassVar = "blocks.0.att.ln_x.weight"
    layer: ClassVar = "rwkv5"
    defaults: ClassVar = {**RWKVLM.defaults, "head_dim": 64}
    weights: ClassVar = {
        "stack.blocks.*.channel.time_mix_key": "blocks.*.ffn.time_mix_k",
        "stack.blocks.*.channel.time_mix_receptance": "blocks.*.ffn.time_mix_r",
        **RWKVLM.weights,
    }

    @staticmethod
    def described(weights: Weights) -> dict[str, Any]:
        return {**RWKVLM.shared(weights), "head_dim": weights.shape("blocks.0.att.time_decay", 2)[1]}


@register("rwkv_lm_6")
class RWKV6LM(RWKVLM):
    mark: ClassVar = "blocks.0.att.time_maa_x"
    layer: ClassVar = "rwkv6"
    defaults: ClassVar = {**RWKVLM.defaults, "head_dim": 64, "mix_rank": 32, "decay_rank": 64}

    @staticmethod
    def described(weights: Weights) -> dict[str, Any]:
        return {
            **RWKVLM.shared(weights),
            "head_dim": weights.shape("blocks.0.att.time_faaaa", 2)[1],
            "mix_rank": weights.shape("blocks.0.att.time_maa_w2", 3)[1],
            "decay_rank": weights.shape("blocks.0.att.time_decay_w1", 2)[1],
        }


RANKS = {"decay_rank": "w1", "a_rank": "a1", "v_rank": "v1", "gate_rank": "g1"}  # options -> (dim, rank) weights


@register("rwkv_lm_7")
class RWKV7LM(RWKVLM):
    mark: ClassVar = "blocks.0.att.r_k"
    layer: ClassVar = "rwkv7"
    defaults: ClassVar = {**RWKVLM.defaults, "head_dim": 64, **dict.fromkeys(RANKS, 64)}
    ignored: ClassVar = tuple(f"blocks.0.att.{name}" for name in ("v0", "v1", "v2"))  # some releases store them

    @staticmethod
    def described(weights: Weights) -> dict[str, Any]:
        shared = RWKVLM.shared(weights)
        upper = min(1, shared["depth"] - 1)  # the lowest layer has no v1
        ranks = {
            option: weights.shape(f"blocks.{upper}.att.{name}", 2)[1]
            for option, name in RANKS.items()
            if upper or option != "v_rank"
        }
        return {**shared, "head_dim": weights.shape("blocks.0.att.r_k", 2)[1], "v_rank": 1, **ranks}
