"""Weights of whole numbers of 8 or 4 bits, for models of scanl and of other libraries."""

from typing import NamedTuple

from torch import nn

from scanl.errors import ConfigError, nearest
from scanl.layers.adapters import READS_ATTRIBUTE
from scanl.layers.base import Layer
from scanl.layers.parts.quantized import BITS, QuantizedWeight, fits, turn
from scanl.models.heads.language_model import LanguageModel
from scanl.ops.products.quantized_linear import MIN_ROWS, pack

MIN_NUMBERS = 1 << 12  # numbers of the weight of a linear map: a smaller one gains nothing
LARGE_SIZE = 1 << 20  # numbers of an embedding that is no map to the logits too: a smaller one gains nothing


class QuantizedReport(NamedTuple):
    """Result of `quantize`. maps: paths of the modules whose weights are whole numbers now, with their bits.

    unquantized: paths of linear maps and embeddings that stay float.   float_bytes, bytes: of all parameters and
    buffers, of the float model and now.
    """

    maps: dict[str, int]
    unquantized: tuple[str, ...]
    float_bytes: int
    bytes: int

    def __str__(self) -> str:
        counts = {bits: list(self.maps.values()).count(bits) for bits in sorted(set(self.maps.values()))}
        weights = " and ".join(f"{count} weights of {bits} bits" for bits, count in counts.items()) or "no weight"
        sizes = f"{self.float_bytes / 1e6:,.1f} MB before, {self.bytes / 1e6:,.1f} MB now"
        return f"{weights}, {len(self.unquantized)} left as they are: {sizes}"


def quantize(model: nn.Module, weights: str = "int8") -> QuantizedReport:
    """Turn the weights of a model's linear maps into whole numbers, in place. Returns what was done.

    model: one of `scanl.models`, a layer, or a model of transformers; accelerate that before.
    weights: "int8" has a factor for each row. "int4" has factors for groups of 32 too; embeddings have 8 bits there.

    States, gates, decays, norms, convolutions and biases stay as they are. So do weights that a layer, or a patch of
    `hub.accelerate`, reads and does not call, weights with fewer than 4,096 numbers or rows that are no multiple of 32,
    maps of classes of their own, and maps with hooks or parametrizations. An embedding is quantized if it is the map to
    the logits too, or has 2^20 numbers. `save` and `load` keep whole numbers. Nothing of the model is trained any more:
    its parameters need no gradient, and `model.train()` raises ConfigError.

    Raises ConfigError for an unknown kind of weights, for a model that is quantized already, and where nothing can be.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"quantize: model is a {type(model).__name__}, expected a torch.nn.Module")
    if weights not in BITS:
        raise nearest("weights of quantize", weights, list(BITS))
    if any(isinstance(module, QuantizedWeight) for module in model.modules()):
        raise ConfigError("quantize: the model is quantized already, expected a float model; load that again")
    chosen = _chosen(model, BITS[weights])
    if not chosen:
        raise ConfigError(
            f"quantize: {type(model).__name__} has no linear map that can be quantized, expected one that is called, "
            f"with {MIN_NUMBERS:,} numbers and rows of a multiple of 32"
        )
    maps = {path for path, module in model.named_modules() if isinstance(module, nn.Linear | nn.Embedding)}
    float_bytes = _bytes(model)
    turn(model, chosen, pack)
    model.eval()
    return QuantizedReport(chosen, tuple(sorted(maps - chosen.keys())), float_bytes, _bytes(model))


def _chosen(model: nn.Module, bits: int) -> dict[str, int]:
    """Return the bits of the modules that are quantized, by their paths, embeddings first."""
    uncalled = set[nn.Module]()
    for module in model.modules():
        if isinstance(module, Layer):
            uncalled |= module.read_modules()
        for path in vars(module).get(READS_ATTRIBUTE, ()):
            uncalled.update(module.get_submodule(path).modules())
    able = {path: module for path, module in model.named_modules() if fits(module) and module not in uncalled}
    maps = {path: module for path, module in able.items() if isinstance(module, nn.Linear)}
    read_out = {id(module.weight) for module in maps.values()}
    read_out |= {id(m.embedding.weight) for m in model.modules() if isinstance(m, LanguageModel) and m.head is None}
    chosen = {
        path: 8
        for path, module in able.items()
        if isinstance(module, nn.Embedding) and (id(module.weight) in read_out or module.weight.numel() >= LARGE_SIZE)
    }
    embedded = {id(able[path].weight) for path in chosen}
    for path, module in maps.items():
        if module.weight.numel() >= MIN_NUMBERS and module.out_features >= MIN_ROWS:
            chosen[path] = 8 if id(module.weight) in embedded else bits
    return chosen


def _bytes(model: nn.Module) -> int:
    tensors = {id(tensor): tensor.nbytes for tensor in (*model.parameters(), *model.buffers())}
    return sum(tensors.values())
