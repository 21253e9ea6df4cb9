"""RWKV-6 and RWKV-7 of flash-linear-attention."""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from scanl.errors import ConfigError
from scanl.hub.formats.base import TRANSPOSED_TURN, VECTOR, Turn
from scanl.hub.originals.base import register
from scanl.hub.originals.fla import FLA, rounded_up

LN_X_EPS = 64e-5  # the epsilon of the heads' norm in RWKV-LM


class FlaRWKV(FLA):
    """Base of both versions: the channel mixer of the layer's name, LayerNorm, and a norm of the embedding."""

    defaults: ClassVar = {**FLA.defaults, "norm_eps": 1e-5}
    only: ClassVar = {"hidden_act": ("sqrelu",), "attn": (None,), "norm_first": (True,), "norm_bias": (True,)}
    weights: ClassVar = {
        "embedding_norm.": "model.layers.0.pre_norm.",
        "stack.blocks.*.mixer.output.": "model.layers.*.attn.o_proj.",
        "stack.blocks.*.mixer.ln_x.": "model.layers.*.attn.g_norm.",
        "stack.blocks.*.channel_norm.": "model.layers.*.ffn_norm.",
        "stack.blocks.*.channel.": "model.layers.*.ffn.",
        **{ours: name for ours, name in FLA.weights.items() if ".channel" not in ours},
    }

    @staticmethod
    def hidden(config: Mapping[str, Any]) -> int:
        return config["intermediate_size"] or rounded_up(config["hidden_size"] * config["hidden_ratio"], 32)

    @classmethod
    def arguments(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        arguments = super().arguments(config)
        stack = {**arguments["stack"], "channel_mixer": cls.layer, "norm": "layernorm"}
        return {**arguments, "stack": stack, "embedding_norm": True}


SHIFTS = "rwkvg"  # the order of the token shifts in fla
ORDER = [SHIFTS.index(letter) for letter in "wkvrg"]  # that of our slices


@register("rwkv6")
class FlaRWKV6(FlaRWKV):
    """RWKV-6 with keys as wide as values.

    fla norms the heads with norm_eps. RWKV-LM norms them with 64e-5, which is the same over 8 times the receptance
    where norm_eps is 1e-5.
    """

    layer: ClassVar = "rwkv6"
    first: ClassVar = "ffn.key.linear.weight"
    defaults: ClassVar = {
        **FlaRWKV.defaults,
        "hidden_ratio": 3.5,
        "num_heads": 4,
        "proj_low_rank_dim": 32,
        "gate_low_rank_dim": 64,
    }
    only: ClassVar = {**FlaRWKV.only, "expand_k": (1.0,), "expand_v": (1.0,), "norm_eps": (1e-5,)}
    renamed: ClassVar = {"mix_rank": "proj_low_rank_dim", "decay_rank": "gate_low_rank_dim"}
    weights: ClassVar = {
        "stack.blocks.*.mixer.time_maa_x": "model.layers.*.attn.x_proj.0.mu",
        "stack.blocks.*.mixer.time_maa_w1": "model.layers.*.attn.x_proj.0.linear.weight",
        "stack.blocks.*.mixer.time_maa_w2": "model.layers.*.attn.x_proj.2.weight",
        **{f"stack.blocks.*.mixer.time_maa_{letter}": "model.layers.*.attn.x_bias" for letter in SHIFTS},
        "stack.blocks.*.mixer.time_decay_w1": "model.layers.*.attn.w_proj.linear.lora.0.weight",
        "stack.blocks.*.mixer.time_decay_w2": "model.layers.*.attn.w_proj.linear.lora.2.weight",
        "stack.blocks.*.mixer.time_decay": "model.layers.*.attn.w_proj.linear.lora.2.bias",
        "stack.blocks.*.mixer.time_faaaa": "model.layers.*.attn.bonus",
        **{
            f"stack.blocks.*.mixer.{name}.": f"model.layers.*.attn.{name[0]}_proj.linear."
            for name in ("receptance", "key", "value", "gate")
        },
        "stack.blocks.*.channel.time_maa_k": "model.layers.*.ffn.key.mu",
        "stack.blocks.*.channel.time_maa_r": "model.layers.*.ffn.receptance.mu",
        "stack.blocks.*.channel.key.": "model.layers.*.ffn.key.linear.",
        "stack.blocks.*.channel.receptance.": "model.layers.*.ffn.receptance.linear.",
        **FlaRWKV.weights,
    }
    turned: ClassVar = {
        "mixer.time_maa_w1": Turn(
            TRANSPOSED_TURN.shape, lambda tensor: tensor.unflatten(0, (5, -1))[ORDER].flatten(0, 1).T.contiguous()
        ),
        "mixer.time_maa_w2": Turn(
            lambda shape: (shape[2], shape[0] * shape[1]),
            lambda tensor: tensor.unflatten(1, (5, -1))[:, ORDER].permute(1, 2, 0).contiguous(),
        ),
        **{
            f"mixer.time_maa_{letter}": Turn(lambda shape: (5, shape[2]), lambda tensor, at=at: tensor[None, [at]])
            for at, letter in enumerate(SHIFTS)
        },
        **{f"mixer.time_decay_w{place}": TRANSPOSED_TURN for place in (1, 2)},
        **dict.fromkeys(("time_maa_x", "time_decay", "channel.time_maa_k", "channel.time_maa_r"), VECTOR),
        "mixer.receptance.weight": Turn(lambda shape: shape, lambda tensor: 8 * tensor),
    }

    @classmethod
    def options(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        return {**super().options(config), "head_dim": config["hidden_size"] // config["num_heads"]}

    @staticmethod
    def widths(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        dim, heads = config["hidden_size"], config["num_heads"]
        return {
            "bonus": (heads, dim // heads),
            "x_proj.2.weight": (dim, 5 * config["proj_low_rank_dim"]),
            "w_proj.linear.lora.0.weight": (config["gate_low_rank_dim"], dim),
        }


ADAPTERS = {"w": "w_lora", "a": "a_lora", "v": "v_lora"}  # RWKV-LM's letter -> fla's name


@register("rwkv7")
class FlaRWKV7(FlaRWKV):
    """RWKV-7. The official folders on the Hugging Face hub have this form too.

    fla norms the heads with head_dim * norm_eps. Older folders have the six token shifts as one tensor, `x_x`.
    """

    layer: ClassVar = "rwkv7"
    first: ClassVar = "ffn.key.weight"
    defaults: ClassVar = {
        **FlaRWKV.defaults,
        "head_dim": 64,
        "decay_low_rank_dim": 64,
        "gate_low_rank_dim": 128,
        "a_low_rank_dim": 64,
        "v_low_rank_dim": 16,
    }
    divided: ClassVar = {"attn.x_x": tuple(f"attn.x_{letter}" for letter in "rwkvag")}
    same_names: ClassVar = ("head_dim",)
    renamed: ClassVar = {
        "decay_rank": "decay_low_rank_dim",
        "a_rank": "a_low_rank_dim",
        "v_rank": "v_low_rank_dim",
        "gate_rank": "gate_low_rank_dim",
    }
    weights: ClassVar = {
        **{f"stack.blocks.*.mixer.{to}0": f"model.layers.*.attn.{name}.lora.2.bias" for to, name in ADAPTERS.items()},
        **{
            f"stack.blocks.*.mixer.{to}{place}": f"model.layers.*.attn.{name}.lora.{at}.weight"
            for to, name in {**ADAPTERS, "g": "g_lora"}.items()
            for place, at in ((1, 0), (2, 2))
        },
        "stack.blocks.*.mixer.receptance.": "model.layers.*.attn.r_proj.",
        "stack.blocks.*.mixer.key.": "model.layers.*.attn.k_proj.",
        "stack.blocks.*.mixer.value.": "model.layers.*.attn.v_proj.",
        **FlaRWKV.weights,
    }
    turned: ClassVar = {
        **{f"mixer.{letter}{place}": TRANSPOSED_TURN for letter in "wavg" for place in (1, 2)},
        **{f"mixer.{name}": VECTOR for name in ("w0", "a0", "v0", "k_k", "k_a")},
        "channel.x_k": VECTOR,
    }

    @classmethod
    def arguments(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        eps = LN_X_EPS / config["head_dim"]
        if not math.isclose(config["norm_eps"], eps):
            raise ConfigError(f"norm_eps is {config['norm_eps']}, expected {eps} because of head_dim, as in RWKV-LM")
        return super().arguments(config)

    @staticmethod
    def widths(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        dim = config["hidden_size"]
        ranks = {"w_lora": "decay_low_rank_dim", "a_lora": "a_low_rank_dim", "g_lora": "gate_low_rank_dim"}
        sizes = {f"{name}.lora.0.weight": (config[rank], dim) for name, rank in ranks.items()}
        return {**sizes, "r_k": (dim // config["head_dim"], config["head_dim"])}

    @classmethod
    def sizes(cls, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        upper = (config["v_low_rank_dim"], config["hidden_size"])  # the lowest layer has none
        more = {"model.layers.1.attn.v_lora.lora.0.weight": upper} if config["num_hidden_layers"] > 1 else {}
        return {**super().sizes(config), **more}
