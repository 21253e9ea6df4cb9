"""Turn a trained language model of Hyena into one that streams with a small state."""

from typing import cast

import torch
from torch import nn

from scanl.errors import ConfigError
from scanl.layers.base import Layer
from scanl.layers.designation import label, layer_class
from scanl.layers.ssm.hyena import Hyena
from scanl.layers.ssm.laughing_hyena import ModalFit, distil
from scanl.models.block import Block
from scanl.models.heads.language_model import LanguageModel
from scanl.models.stack import Stack


@torch.no_grad()
def distil_model(
    model: LanguageModel, *, tolerance: float = 1e-4, largest: int = 64
) -> tuple[LanguageModel, list[ModalFit]]:
    """Return a model with `laughing_hyena` for each `hyena` of `model`, and how well the filters are fitted.

    All else is copied.
    tolerance, largest: as in `scanl.layers.ssm.laughing_hyena.fit_modes`.
    Raises ConfigError if the model has no Hyena.
    """
    stack = model.stack
    blocks = [cast(Block, block) for block in stack.blocks] if isinstance(stack, Stack) else []
    distilled = {i: distil(b.mixer, tolerance=tolerance, largest=largest) for i, b in enumerate(blocks)
            if isinstance(b.mixer, Hyena)}  # fmt: skip
    if not distilled:
        names = [mixer.name for mixer in stack.mixers()]
        raise ConfigError(f"distil_model: layers are {names}, expected a model with hyena")
    modes = max(layer.state_dim for layer, _ in distilled.values())
    first = next(iter(distilled.values()))[0]
    options = {"state_dim": modes, "order": first.order, "conv_size": first.conv_size}
    config = dict(stack.config)
    layer = config["layer"]
    if isinstance(layer, str | type | Layer):
        config |= {"layer": "laughing_hyena", "layer_options": options}
    else:
        hyena_labels = {label(item) for item in layer if issubclass(layer_class(item), Hyena)}
        others = {name: value for name, value in (config["layer_options"] or {}).items() if name not in hyena_labels}
        pattern = ["laughing_hyena" if label(item) in hyena_labels else item for item in layer]
        config |= {"layer": pattern, "layer_options": {**others, "laughing_hyena": options}}
    result = type(model)(**{**model.config, "stack": type(stack)(**config)})
    result = result.to(model.embedding.weight).train(model.training)
    state = {name: value for name, value in model.state_dict().items()
             if not any(name.startswith(f"stack.blocks.{i}.mixer.") for i in distilled)}  # fmt: skip
    for i, (layer, _) in distilled.items():
        for name, value in layer.state_dict().items():
            if name in ("log_decay", "angle", "residue"):  # layers of fewer modes get further ones of weight 0
                value = nn.functional.pad(value, (0, 0) * (name == "residue") + (0, modes - layer.state_dim))
            state[f"stack.blocks.{i}.mixer.{name}"] = value
    result.load_state_dict(state)
    return result, [fit for _, fit in distilled.values()]
