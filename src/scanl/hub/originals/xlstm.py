"""xLSTMLarge of the package xlstm, as xLSTM-7B."""

from collections.abc import Mapping
from typing import Any, ClassVar

from scanl.hub.formats.xlstm import XLSTMFormat
from scanl.hub.originals.base import Original, register

SAME_OPTIONS = {
    "embedding_dim": "hidden_size",
    "num_blocks": "num_hidden_layers",
}  # names of xlstm -> names of transformers


@register("xlstm_large")
class LargeXLSTM(Original):
    program: ClassVar = "xlstm"
    defaults: ClassVar = {
        **{name: value for name, value in XLSTMFormat.defaults.items() if name not in SAME_OPTIONS.values()},
        "embedding_dim": 4096,
        "num_blocks": 32,
        "ffn_proj_factor": 2.6667,
    }
    only: ClassVar = {name: value for name, value in XLSTMFormat.only.items() if name != "tie_word_embeddings"}
    weights: ClassVar = {**XLSTMFormat.weights, "embedding.": "embedding."}
    depth_entry: ClassVar = "num_blocks"

    @classmethod
    def recognizes(cls, config: Mapping[str, Any]) -> bool:
        return "model_type" not in config and "embedding_dim" in config and "num_blocks" in config

    @staticmethod
    def entries(config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options as transformers calls them."""
        return {**config, **{name: config[stored] for stored, name in SAME_OPTIONS.items()}}

    @classmethod
    def arguments(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        return XLSTMFormat.arguments(LargeXLSTM.entries(config))

    @classmethod
    def sizes(cls, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        sizes = XLSTMFormat.sizes(LargeXLSTM.entries(config))
        return {name.replace("backbone.embeddings.", "embedding."): shape for name, shape in sizes.items()}
