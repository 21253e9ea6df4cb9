"""Modules whose weight is whole numbers of 8 or 4 bits, in the place of a linear map or an embedding."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.errors import ConfigError
from scanl.layers.adapters import has_hooks
from scanl.layers.module import Module
from scanl.ops.products.quantized_linear import GROUP, PackedWeight, quantized_linear

BITS = {"int8": 8, "int4": 4}  # by the name of a kind of weights


class QuantizedWeight(Module):
    """A module whose weight W is whole numbers: `packed`, `scale` and `groups`, which are `PackedWeight`.

    It is made of a module in place, by `turn`. It cannot be trained.
    """

    packed: Tensor
    scale: Tensor
    groups: Tensor | None
    bits: int
    shape: torch.Size  # of W
    dtype: torch.dtype  # of the weight that it stands for

    @property
    def weight(self) -> Tensor:
        """NaN in the shape and dtype of the weight, and on its device: programs ask for these, and none may read it."""
        return torch.full((), torch.nan, dtype=self.dtype, device=self.packed.device).expand(self.shape)

    def train(self, mode: bool = True) -> Any:
        if mode:
            raise ConfigError(
                "train: the model has weights of whole numbers, which are not trained; train the float model, then "
                "quantize it"
            )
        return super().train(mode)

    def extra_repr(self) -> str:
        return f"{', '.join(map(str, reversed(self.shape)))}, bits={self.bits}"


class QuantizedLinear(QuantizedWeight):
    """y = x Wᵀ + b."""

    bias: nn.Parameter | None

    def forward(self, input: Tensor) -> Tensor:
        return quantized_linear(input, self.packed, self.scale, self.groups, self.bias)


class QuantizedEmbedding(QuantizedWeight):
    """Rows of W, of 8 bits, and the linear map by W that shares it."""

    def forward(self, input: Tensor) -> Tensor:
        return (F.embedding(input, self.packed) * F.embedding(input, self.scale[:, None])).to(self.dtype)

    def read_out(self, hidden: Tensor) -> Tensor:
        """Return hidden Wᵀ."""
        return quantized_linear(hidden, self.packed, self.scale)


def fits(module: nn.Module) -> bool:
    """Return whether `turn` can quantize a module: one whose class and forward are torch's own."""
    return (
        isinstance(module, nn.Linear | nn.Embedding)
        and type(module) in (nn.Linear, nn.Embedding)
        and module.weight.shape[1] % GROUP == 0
        and "forward" not in vars(module)
        and not (isinstance(module, nn.Embedding) and module.max_norm is not None)  # which changes the weight in a call
        and not has_hooks(module)
    )


def turn(model: nn.Module, paths: Mapping[str, int], numbers: Callable[[Tensor, int], PackedWeight]) -> None:
    """Quantize the modules at these paths, for which `fits` holds, in place. paths: their bits.

    numbers: makes whole numbers of a weight. Modules that have one weight have the same whole numbers, which are in the
    `state_dict` by the first of these modules.
    """
    modules, known = dict(model.named_modules()), dict[int, tuple[Tensor, PackedWeight]]()
    for path, bits in paths.items():
        module = modules[path]
        assert isinstance(module, nn.Linear | nn.Embedding)
        weight, is_first = module.weight, id(module.weight) not in known
        if is_first:
            known[id(weight)] = weight, numbers(weight, bits)
        del module._parameters["weight"]
        kind: Any = QuantizedLinear if isinstance(module, nn.Linear) else QuantizedEmbedding
        module.__class__ = kind
        vars(module).update(bits=bits, shape=weight.shape, dtype=weight.dtype)
        for name, value in known[id(weight)][1]._asdict().items():
            module.register_buffer(name, value, persistent=is_first)
    model.requires_grad_(False)


def quantized_paths(model: nn.Module) -> dict[str, int]:
    """Return the bits of a model's quantized modules by their paths, for a file; `prepare` reads it."""
    return {path: module.bits for path, module in model.named_modules() if isinstance(module, QuantizedWeight)}


def prepare(model: nn.Module, paths: Any) -> None:
    """Give the modules at the paths of a file memory for whole numbers, which `load_state_dict` fills.

    Raises ConfigError for paths at which nothing can be quantized.
    """
    if not paths:
        return
    modules = dict(model.named_modules())
    for path, bits in paths.items() if isinstance(paths, dict) else [(paths, None)]:
        if path not in modules or not fits(modules[path]) or bits not in BITS.values():
            raise ConfigError(f"the weight of {path} has {bits} bits, expected 4 or 8 of a linear map or an embedding")
    turn(model, paths, _blank)


def _blank(weight: Tensor, bits: int) -> PackedWeight:
    rows, terms = weight.shape
    packed = torch.empty(rows, terms * bits // 8, dtype=torch.int8, device=weight.device)
    groups = None if bits == 8 else torch.empty(rows, terms // GROUP, dtype=torch.int8, device=weight.device)
    return PackedWeight(packed, torch.empty(rows, device=weight.device), groups)
