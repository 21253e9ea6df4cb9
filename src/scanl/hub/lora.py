r"""LoRA by peft: beside each projection of a frozen model, the product of two thin matrices is learned.

.. math:: y = W x + \tfrac{\alpha}{r} B A x, \quad A \in R^{r \times d}, \quad B \in R^{e \times r}

Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", arXiv:2106.09685, eq. (3).
"""

from typing import TYPE_CHECKING, Any

from torch import nn

from scanl.errors import ConfigError
from scanl.hub.accelerate import read_modules
from scanl.layers.base import Layer
from scanl.whole import whole_number

if TYPE_CHECKING:
    from peft import LoraConfig  # pyright: ignore[reportMissingImports]

# peft refuses these in models of these types, because the fast path of transformers reads their weights.
REFUSED_MODULES = {("mamba", "mamba2", "falcon_mamba", "falcon_h1", "nemotron_h"): ("out_proj",)}
OUTPUTS = ("head", "lm_head", "embed_out")  # maps to the logits: of scanl.models, and of transformers


def projections(model: nn.Module) -> list[str]:
    """Return the paths of the linear maps inside a model that are called, so that an adapter has its effect.

    A layer, or a patch of `accelerate`, that reads the weights of a map declares it; an adapter of that map would be
    refused. The map to the logits is left out, as by peft's own `all-linear`, and what peft refuses: `out_proj` of
    transformers' Mamba models.
    """
    kind = getattr(getattr(model, "config", None), "model_type", None)
    refused = {name for types, names in REFUSED_MODULES.items() if kind in types for name in names}
    layers = [module for module in model.modules() if isinstance(module, Layer)]
    uncalled = read_modules(model).union(*(layer.read_modules() for layer in layers))
    return [
        path
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and module not in uncalled
        and path not in OUTPUTS
        and path.rpartition(".")[2] not in refused
    ]


def unreached(model: nn.Module) -> list[str]:
    """Return the paths of the matrices that LoRA of all `projections` leaves as they are: a layer's own parameters of
    two or more axes, weights that a layer reads, and weights of convolutions and embeddings."""
    reached = {f"{path}.weight" for path in projections(model)}
    return [path for path, weight in model.named_parameters() if weight.ndim > 1 and path not in reached]


def lora_config(model: nn.Module, rank: int, **options: Any) -> "LoraConfig":
    """Return the configuration with which peft adds LoRA to every projection of a model.

        adapted = peft.get_peft_model(model, lora_config(model, 8))     # train adapted.parameters()
        adapted.save_pretrained("adapter")
        model = PeftModel.from_pretrained(model, "adapter").merge_and_unload()

    model: one of `scanl.models`, or a model of transformers; accelerate it before or after.
    rank: r.   options: of `peft.LoraConfig`, such as lora_alpha, or target_modules in place of all projections.
    Raises ConfigError without peft, and for a model without projections.
    """
    whole_number("lora_config", "rank", rank, 1)
    try:
        from peft import LoraConfig  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError("lora_config: peft is not installed; pip install 'scanl[lora]'") from error
    paths = projections(model)
    if not paths:
        raise ConfigError(f"lora_config: {type(model).__name__} has no projection, expected a model with some")
    return LoraConfig(**{"r": rank, "lora_alpha": rank, "target_modules": paths, **options})
