"""Export a layer whose loop depends on the sequence's length as one operator of torch.

A trace of the layer is valid for one length only. The operator makes the layer anew, from its class and its options,
and calls it with the exported parameters. In an exported program it has no gradient.
"""

import functools
import json
from collections.abc import Sequence

import torch
from torch import Tensor

from scanl.errors import ConfigError
from scanl.layers.base import Layer
from scanl.layers.designation import layer_class, recorded
from scanl.layers.initial_state import initial
from scanl.layers.state import State, leaves, map_leaves
from scanl.options import who


@functools.lru_cache(maxsize=64)
def _skeleton(layer: str, config: str, dtype: torch.dtype) -> Layer:
    with torch.device("meta"):
        return layer_class(layer)(**json.loads(config)).to(dtype)


def _state(like: State, tensors: Sequence[Tensor]) -> State:
    remaining = iter(tensors)
    return map_leaves(lambda _: next(remaining), like)


def _run(
    layer: str, config: str, form: str, names: str, parameters: list[Tensor], x: Tensor, state: list[Tensor]
) -> list[Tensor]:
    skeleton = _skeleton(layer, config, x.dtype)
    values = dict(zip(json.loads(names), parameters, strict=True))
    past = _state(skeleton.init_state(1), state) if state else None
    y, after = torch.func.functional_call(skeleton, values, (x, past))
    return [y.clone(), *(leaf.clone() for _, leaf in leaves(after))]  # results must not alias inputs


def _shapes(
    layer: str, config: str, form: str, names: str, parameters: list[Tensor], x: Tensor, state: list[Tensor]
) -> list[Tensor]:
    tensors = [x.new_empty((x.shape[0], *sizes), dtype=getattr(torch, kind)) for sizes, kind in json.loads(form)]
    return [torch.empty_like(x), *tensors]


_operator = torch.library.custom_op(
    "scanl::layer",
    _run,
    mutates_args=(),
    schema="(str layer, str config, str form, str names, Tensor[] parameters, Tensor x, Tensor[] state) -> Tensor[]",
)
_operator.register_fake(_shapes)


def exported(layer: Layer, x: Tensor, state: State) -> tuple[Tensor, State]:
    """Compute `layer(x, state)` as one operator. The class declares its state.

    Raises ConfigError if the names of the parameters differ from a new layer's.
    """
    designation = recorded(type(layer))
    with torch.device("meta"):
        usual = layer_class(designation)(**layer.config)
    names, expected = ([name for name, _ in each_layer.named_parameters()] for each_layer in (layer, usual))
    if names != expected:
        raise ConfigError(
            f"{who(type(layer))}: its parameters differ from those of a new one in {sorted({*names} ^ {*expected})}, "
            "expected the same because the export makes the layer from its options; merge adapters and remove "
            "parametrizations first"
        )
    assert layer.state is not None
    past = initial(layer, layer.state, 1, "meta", x.dtype)  # as declared; `init_state` may read parameters
    form = [(leaf.shape[1:], str(leaf.dtype).removeprefix("torch.")) for _, leaf in leaves(past)]
    tensors = [] if state is None else [leaf for _, leaf in leaves(state)]
    texts = [json.dumps(value) for value in (layer.config, form, names)]
    y, *after = _operator(designation, *texts, list(layer.parameters()), x, tensors)
    return y, _state(past, after)
