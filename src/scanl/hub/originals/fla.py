"""Language models of flash-linear-attention."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from scanl.hub.formats.mamba import MambaFormat
from scanl.hub.originals.base import Original, register

RENAMED_OPTIONS = {
    "time_step_rank": "dt_rank",
    "layer_norm_epsilon": "norm_eps",
}  # options of Mamba: transformers' -> fla's


class FLA(Original):
    """Base of the models: a layer and a gated MLP in each block. A subclass declares the layer and its options."""

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
        return config["intermediate_size"] or rounded_up(config["hidden_size"] * config["hidden_ratio"] * 2 / 3, 256)

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
class FlaGLA(FLA):
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
class FlaDeltaNet(FLA):
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
class FlaGatedDeltaNet(FLA):
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
class FlaHGRN2(FLA):
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


@register("fla_mamba")
class FlaMamba(Original):
    """Mamba, whose weights have transformers' names. Two of its options do not."""

    program: ClassVar = FLA.program
    defaults: ClassVar = {
        **{name: value for name, value in MambaFormat.defaults.items() if name not in RENAMED_OPTIONS},
        "vocab_size": 32000,
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "residual_in_fp32": False,
        "tie_word_embeddings": False,
        **{stored: MambaFormat.defaults[name] for name, stored in RENAMED_OPTIONS.items()},
    }
    only: ClassVar = MambaFormat.only
    weights: ClassVar = MambaFormat.weights

    @classmethod
    def recognizes(cls, config: Mapping[str, Any]) -> bool:
        return config.get("model_type") == "mamba" and "norm_eps" in config and "layer_norm_epsilon" not in config

    @staticmethod
    def entries(config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options as transformers calls them."""
        return {**config, **{name: config[stored] for name, stored in RENAMED_OPTIONS.items()}}

    @classmethod
    def arguments(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        return MambaFormat.arguments(FlaMamba.entries(config))

    @classmethod
    def sizes(cls, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        return MambaFormat.sizes(FlaMamba.entries(config))


def rounded_up(number: float, multiple: int) -> int:
    """Return the smallest multiple that is not below a number."""
    return -(-int(number) // multiple) * multiple
