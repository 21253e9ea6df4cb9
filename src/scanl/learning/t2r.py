"""Turn a softmax transformer into a recurrent one: T2R.

Source: Kasai et al., "Finetuning Pretrained Transformers into RNNs", arXiv:2103.13076. Differs: the authors train the
whole model after the swap. Here the feature maps are learned first. Each layer learns to give the output of softmax
attention for the same input, as in Zhang et al., "The Hedgehog & the Porcupine", arXiv:2402.04347.
"""

from collections.abc import Iterable
from typing import TypeVar, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from scanl.errors import ConfigError
from scanl.layers.attention.attention import Attention
from scanl.layers.memory.t2r import T2R
from scanl.learning.descent import descend
from scanl.models import LanguageModel, Stack

L = TypeVar("L", Attention, T2R)


def convert(model: LanguageModel, num_features: int = 64) -> LanguageModel:
    """Return a T2R model with the weights of a transformer and random feature maps.

    model: a `LanguageModel` all of whose mixers are `attention`, as `scanl.load` makes from a Llama checkpoint.
    num_features: m, features of a head. Raises ConfigError for another mixer.

    >>> teacher = LanguageModel(50, Stack(16, 1, "attention", layer_options={"num_heads": 2}))
    >>> convert(teacher, num_features=4).stack.mixers()[0].phi_weight.shape
    torch.Size([2, 4, 8])
    """
    mixer = _mixers(model, Attention)[0]
    options = {
        "num_heads": mixer.num_heads,
        "num_kv_heads": mixer.num_kv_heads,
        "head_dim": mixer.head_dim,
        "num_features": num_features,
        "rope_base": mixer.rope_base,
        "rope_fraction": mixer.rotated / mixer.head_dim,
        "bias": mixer.q_proj.bias is not None,
    }
    stack = Stack(**{**model.stack.config, "layer": "t2r", "layer_options": options})
    converted = LanguageModel(**{**model.config, "stack": stack})
    weight = next(model.parameters())
    converted.to(weight.device, weight.dtype)
    missing = converted.load_state_dict(model.state_dict(), strict=False).missing_keys
    assert all(".phi_" in name for name in missing)
    return converted


def learn_feature_maps(
    model: LanguageModel, teacher: LanguageModel, batches: Iterable[Tensor], *, lr: float = 1e-2
) -> list[float]:
    """Learn the feature maps of a converted model, so that each layer's output is near the output of the teacher's
    attention.

    batches: tokens (B, T), one batch for each step of Adam.   lr: its rate, which falls to 0 as a cosine.
    Each step minimises a loss for each layer: the mean square of the difference of the outputs, divided by the mean
    square of the teacher's output. Both layers read the teacher's inputs. No other parameter changes. Returns the mean
    loss of every step. Raises DivergenceError for one that is not finite.
    """
    maps, attentions = _mixers(model, T2R), _mixers(teacher, Attention)
    tokens = list(batches)
    learnt = [parameter for layer in maps for parameter in (layer.phi_weight, layer.phi_bias)]
    optimizer = torch.optim.Adam(learnt, lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, len(tokens)))
    pairs: list[tuple[Tensor, Tensor]] = []
    handles = [
        attention.register_forward_hook(
            lambda _, inputs, result: pairs.append((inputs[0].detach(), result[0].detach()))
        )
        for attention in attentions
    ]

    def once(step: int) -> Tensor:
        pairs.clear()
        with torch.no_grad():
            teacher(tokens[step])
        parts = [F.mse_loss(layer(x)[0], y) / y.square().mean() for layer, (x, y) in zip(maps, pairs, strict=True)]
        return torch.stack(parts).mean()

    try:
        return descend(learnt, optimizer, schedule, len(tokens), once)
    finally:
        for handle in handles:
            handle.remove()


def _mixers(model: LanguageModel, kind: type[L]) -> list[L]:
    mixers = model.stack.mixers()
    for mixer in mixers:
        if type(mixer) is not kind:
            raise ConfigError(f"t2r: a mixer of the model is {mixer.name!r}, expected {kind.name!r} in every block")
    return cast(list[L], mixers)
