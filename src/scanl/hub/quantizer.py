"""Weights of whole numbers in folders of transformers, which `save_pretrained` writes and `from_pretrained` reads."""

import functools
from collections.abc import Mapping
from typing import Any

from torch import nn

from scanl.errors import ConfigError
from scanl.hub.checkpoints import METHOD
from scanl.layers.parts.quantized import PackedWeight, QuantizedWeight, prepare, quantized_paths
from scanl.models import QuantizedReport
from scanl.models import quantize as quantize_model


def quantize(model: nn.Module, weights: str = "int8") -> QuantizedReport:
    """Quantize a model of transformers, or of scanl, in place, as `scanl.models.quantize` does. Returns what was done.

    `model.save_pretrained(folder)` then writes whole numbers. After `enable_quantized()`, `from_pretrained(folder)` of
    transformers reads them. Accelerate the model before it is quantized, also one that was read.
    """
    report = quantize_model(model, weights)
    if type(model).__module__.startswith("transformers.models."):
        config, quantizer = enable_quantized()
        _mark(model, quantizer(config(modules=quantized_paths(model))))
    return report


@functools.cache
def enable_quantized() -> tuple[Any, Any]:
    """Let `from_pretrained` of transformers read folders of quantized models. Returns the classes that do so."""
    try:
        from transformers.quantizers.auto import register_quantization_config, register_quantizer
        from transformers.quantizers.base import HfQuantizer
        from transformers.utils.quantization_config import QuantizationConfigMixin
    except ImportError as error:
        raise ConfigError("enable_quantized: transformers is not installed; pip install transformers") from error

    @register_quantization_config(METHOD)
    class WholeNumbersConfig(QuantizationConfigMixin):
        """modules: the bits of the weights, by the paths of their modules."""

        def __init__(self, modules: Mapping[str, int], **_: Any) -> None:
            self.quant_method: Any = METHOD
            self.modules = dict(modules)

    @register_quantizer(METHOD)
    class WholeNumbers(HfQuantizer):
        @property
        def is_trainable(self) -> Any:
            return False

        def is_serializable(self) -> Any:
            return True

        def _process_model_before_weight_loading(self, model: Any, **_: Any) -> Any:
            prepare(model, self.quantization_config.modules)  # pyright: ignore[reportAttributeAccessIssue]
            for module in model.modules():
                if any(isinstance(child, QuantizedWeight) for child in module.children()):
                    module._is_hf_initialized = True  # transformers would initialise weights of the children
            _share(model)

        def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
            model.requires_grad_(False)
            _share(model)
            return model

    return WholeNumbersConfig, WholeNumbers


def _mark(model: Any, quantizer: Any) -> None:
    """Let `save_pretrained` write what `from_pretrained` needs."""
    model.hf_quantizer, model.config.quantization_config = quantizer, quantizer.quantization_config
    _share(model)


def _share(model: Any) -> None:
    """Let the map to the logits have the embedding's whole numbers, where they are tied. Names of weights are gone."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if (
        isinstance(embedding, QuantizedWeight)
        and isinstance(head, QuantizedWeight)
        and model.config.tie_word_embeddings
    ):
        for name in PackedWeight._fields:
            head.register_buffer(name, getattr(embedding, name), persistent=False)
    names, paths = model.all_tied_weights_keys.items(), quantized_paths(model).keys()
    model.all_tied_weights_keys = {a: b for a, b in names if paths.isdisjoint((_module(a), _module(b)))}


def _module(name: str) -> str:
    return name.rpartition(".")[0]
