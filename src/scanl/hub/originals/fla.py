"""Language models of flash-linear-attention."""

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from scanl.errors import ConfigError
from scanl.hub.formats.base import TRANSPOSED, VECTOR
from scanl.hub.originals.base import Original, register


class FLA(Original):
    """What the models share: a layer and a gated MLP in each block. A subclass declares the layer and its options."""

    program: ClassVar = "flash-linear-attention"
    defaults: ClassVar = {
        "vocab_size": 32000,
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "hidden_ratio": 4.0,
        "intermediate_size": None,
        "norm_eps": 1e-6,
        "tie_word_embeddings": False,
    }
    only: ClassVar = {"hidden_act": ("swish", "silu"), "attn": (None,), "attnres_block_size": (None,)}
    weights: ClassVar = {
        "embedding.": "model.embeddings.",
        "stack.blocks.*.mixer_norm.": "model.layers.*.attn_norm.",
        "stack.blocks.*.mixer.": "model.layers.*.attn.",
        "stack.blocks.*.channel_norm.": "model.layers.*.mlp_norm.",
        "stack.blocks.*.channel.gate.": "model.layers.*.mlp.gate_proj.",
        "stack.blocks.*.channel.up.": "model.layers.*.mlp.up_proj.",
        "stack.blocks.*.channel.down.": "model.layers.*.mlp.down_proj.",
        "stack.norm.": "model.norm.",
        "head.": "lm_head.",
    }
    layer: ClassVar[str]
    same_names: ClassVar[tuple[str, ...]] = ()  # entries that are options of the layer under their own names
    renamed: ClassVar[Mapping[str, str]] = {}  # its other options -> their entries
    first: ClassVar[str] = "mlp.gate_proj.weight"  # the first weight of the channel mixer

    @classmethod
    def options(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of the layer."""
        options = {name: config[name] for name in cls.same_names}
        options |= {option: config[entry] for option, entry in cls.renamed.items()}
        return options if config.get("use_short_conv", True) else {**options, "conv_size": None}

    @staticmethod
    def hidden(config: Mapping[str, Any]) -> int:
        """Return the number of hidden features of the channel mixer."""
        return config["intermediate_size"] or _rounded_up(config["hidden_size"] * config["hidden_ratio"] * 2 / 3, 256)

    @classmethod
    def arguments(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        stack = {
            "dim": config["hidden_size"],
            "depth": config["num_hidden_layers"],
            "layer": cls.layer,
            "layer_options": cls.options(config),
            "channel_options": {"hidden_dim": cls.hidden(config)},
            "norm_eps": config["norm_eps"],
        }
        return {"vocab_size": config["vocab_size"], "stack": stack, "tie_embeddings": config["tie_word_embeddings"]}

    @staticmethod
    @abstractmethod
    def widths(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        """Return shapes of weights of a layer, which cover its sizes."""

    @classmethod
    def sizes(cls, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        dim = config["hidden_size"]
        return {
            "model.embeddings.weight": (config["vocab_size"], dim),
            f"model.layers.0.{cls.first}": (cls.hidden(config), dim),
            **{f"model.layers.0.attn.{name}": shape for name, shape in cls.widths(config).items()},
        }


def _memory(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return shapes of weights of a layer with `expand_k`, `expand_v`, `num_heads` and a short convolution."""
    dim, heads = config["hidden_size"], config["num_heads"]
    keys, values = (round(dim * config[name]) // heads for name in ("expand_k", "expand_v"))
    sizes: dict[str, tuple[int, ...]] = {"q_proj.weight": (heads * keys, dim), "v_proj.weight": (heads * values, dim)}
    if config["use_short_conv"]:
        sizes["q_conv1d.weight"] = (heads * keys, 1, config["conv_size"])
    return sizes


@register("gla")
class GLA(FLA):
    layer: ClassVar = "gla"
    defaults: ClassVar = {
        **FLA.defaults,
        "expand_k": 0.5,
        "expand_v": 1.0,
        "num_heads": 4,
        "use_short_conv": False,
        "conv_size": 4,
        "use_output_gate": True,
    }
    only: ClassVar = {
        **FLA.only,
        "num_kv_heads": (None,),
        "feature_map": (None,),
        "clamp_min": (None,),
        "elementwise_affine": (True,),
    }
    same_names: ClassVar = ("expand_k", "expand_v", "num_heads", "conv_size", "norm_eps")
    renamed: ClassVar = {"output_gate": "use_output_gate"}

    @staticmethod
    def widths(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        norm = "g_norm_swish_gate" if config["use_output_gate"] else "g_norm"
        head = round(config["hidden_size"] * config["expand_v"]) // config["num_heads"]
        return {**_memory(config), f"{norm}.weight": (head,)}


@register("delta_net")
class DeltaNet(FLA):
    layer: ClassVar = "deltanet"
    defaults: ClassVar = {
        **FLA.defaults,
        "expand_k": 1.0,
        "expand_v": 1.0,
        "num_heads": 16,
        "use_gate": False,
        "use_short_conv": True,
        "conv_size": 4,
        "use_beta": True,
        "allow_neg_eigval": False,
        "qk_norm": "l2",
        "qk_activation": "silu",
    }
    only: ClassVar = {
        **FLA.only,
        "use_output_norm": (True,),
        "qk_norm": ("l2", "sum"),
        "qk_activation": ("silu", "relu", "elu", "identity"),
    }
    unchecked: ClassVar = ("qk_norm", "qk_activation")  # `only` checks them
    same_names: ClassVar = (
        "expand_k",
        "expand_v",
        "num_heads",
        "conv_size",
        "use_beta",
        "allow_neg_eigval",
        "qk_norm",
        "norm_eps",
    )
    renamed: ClassVar = {"output_gate": "use_gate", "activation": "qk_activation"}

    @staticmethod
    def widths(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        head = round(config["hidden_size"] * config["expand_v"]) // config["num_heads"]
        return {**_memory(config), "o_norm.weight": (head,)}


@register("gated_deltanet")
class GatedDeltaNet(FLA):
    layer: ClassVar = "gated_deltanet"
    defaults: ClassVar = {
        **FLA.defaults,
        "num_hidden_layers": 21,
        "expand_v": 2.0,
        "head_dim": 256,
        "num_heads": 6,
        "num_v_heads": None,
        "use_gate": True,
        "conv_size": 4,
        "allow_neg_eigval": False,
    }
    only: ClassVar = {**FLA.only, "use_short_conv": (True,), "output_gate_activation": ("swish", "silu")}
    same_names: ClassVar = (
        "expand_v",
        "head_dim",
        "num_heads",
        "num_v_heads",
        "conv_size",
        "allow_neg_eigval",
        "norm_eps",
    )
    renamed: ClassVar = {"output_gate": "use_gate"}

    @staticmethod
    def widths(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        dim, keys, heads = config["hidden_size"], config["num_heads"] * config["head_dim"], config["num_v_heads"]
        return {
            "q_conv1d.weight": (keys, 1, config["conv_size"]),
            "a_proj.weight": (heads or config["num_heads"], dim),
            "o_norm.weight": (int(config["head_dim"] * config["expand_v"]),),
        }


@register("hgrn2")
class HGRN2(FLA):
    layer: ClassVar = "hgrn2"
    defaults: ClassVar = {**FLA.defaults, "expand_ratio": 128}
    only: ClassVar = {
        **FLA.only,
        "use_short_conv": (False,),
        "use_lower_bound": (True,),
        "elementwise_affine": (True,),
    }
    weights: ClassVar = {"stack.blocks.*.mixer.gamma": "model.lower_bounds", **FLA.weights}

    @staticmethod
    def widths(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        return {"q_proj.weight": (config["hidden_size"], config["hidden_size"])}

    @classmethod
    def options(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        return {"head_dim": config["expand_ratio"], "norm_eps": 1e-5}  # their layer norms with it, whatever norm_eps is


LN_X_EPS = 64e-5  # the epsilon of the heads' norm in RWKV-LM; here it is head_dim * norm_eps
ADAPTERS = {"w": "w_lora", "a": "a_lora", "v": "v_lora"}  # RWKV-LM's letter -> fla's name


@register("rwkv7")
class RWKV7(FLA):
    """RWKV-7, in which the official folders on the Hugging Face hub are stored too."""

    layer: ClassVar = "rwkv7"
    first: ClassVar = "ffn.key.weight"
    defaults: ClassVar = {
        **FLA.defaults,
        "head_dim": 64,
        "decay_low_rank_dim": 64,
        "gate_low_rank_dim": 128,
        "a_low_rank_dim": 64,
        "v_low_rank_dim": 16,
        "norm_eps": 1e-5,
    }
    only: ClassVar = {"hidden_act": ("sqrelu",), "attn": (None,), "norm_first": (True,), "norm_bias": (True,)}
    same_names: ClassVar = ("head_dim",)
    renamed: ClassVar = {
        "decay_rank": "decay_low_rank_dim",
        "a_rank": "a_low_rank_dim",
        "v_rank": "v_low_rank_dim",
        "gate_rank": "gate_low_rank_dim",
    }
    weights: ClassVar = {
        "embedding_norm.": "model.layers.0.pre_norm.",
        **{f"stack.blocks.*.mixer.{to}0": f"model.layers.*.attn.{name}.lora.2.bias" for to, name in ADAPTERS.items()},
        **{
            f"stack.blocks.*.mixer.{to}{place}": f"model.layers.*.attn.{name}.lora.{at}.weight"
            for to, name in {**ADAPTERS, "g": "g_lora"}.items()
            for place, at in ((1, 0), (2, 2))
        },
        "stack.blocks.*.mixer.receptance.": "model.layers.*.attn.r_proj.",
        "stack.blocks.*.mixer.key.": "model.layers.*.attn.k_proj.",
        "stack.blocks.*.mixer.value.": "model.layers.*.attn.v_proj.",
        "stack.blocks.*.mixer.output.": "model.layers.*.attn.o_proj.",
        "stack.blocks.*.mixer.ln_x.": "model.layers.*.attn.g_norm.",
        "stack.blocks.*.channel_norm.": "model.layers.*.ffn_norm.",
        "stack.blocks.*.channel.": "model.layers.*.ffn.",
        **{ours: name for ours, name in FLA.weights.items() if ".channel" not in ours},
    }
    turned: ClassVar = {
        **{f"mixer.{letter}{place}": TRANSPOSED for letter in "wavg" for place in (1, 2)},
        **{f"mixer.{name}": VECTOR for name in ("w0", "a0", "v0", "k_k", "k_a")},
        "channel.x_k": VECTOR,
    }

    @staticmethod
    def hidden(config: Mapping[str, Any]) -> int:
        return config["intermediate_size"] or _rounded_up(config["hidden_size"] * config["hidden_ratio"], 32)

    @classmethod
    def arguments(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        eps = LN_X_EPS / config["head_dim"]
        if not math.isclose(config["norm_eps"], eps):
            raise ConfigError(f"norm_eps is {config['norm_eps']}, expected {eps} because of head_dim, as in RWKV-LM")
        arguments = super().arguments(config)
        stack = {**arguments["stack"], "channel_mixer": "rwkv7", "norm": "layernorm"}
        return {**arguments, "stack": stack, "embedding_norm": True}

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


def _rounded_up(number: float, multiple: int) -> int:
    return -(-int(number) // multiple) * multiple
