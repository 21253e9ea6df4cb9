"""Tensors that never have other numbers, in the recording of a function whose file has them.

Source: Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers",
arXiv:2210.17323, section 3 (how a weight is rounded for its inputs). Differs: each input has a factor too.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from scanl.ops.products.quantized_linear import GROUP, MIN_ROWS, PackedWeight, pack, quantized_linear

MIN_NUMBERS = 1 << 9  # numbers of a weight: fewer gain less than their factors and the rounding of their input take
MAX_MATRICES = 64  # matrices of one weight, each of which has a product of its own
MAX_TERMS = 2048  # terms of a product whose inputs count: their moments are a matrix of so many rows
DAMPING = 0.1  # of the mean square of inputs: how much they may differ from those of the example
aten = torch.ops.aten
_WEIGHTS = {  # which argument of an operation is its weight
    aten.mm.default: 1, aten.addmm.default: 2, aten.bmm.default: 1, aten.baddbmm.default: 2, aten.embedding.default: 0,
}  # fmt: skip


class Constants:
    """What becomes of constants. What depends on them alone is computed once.

    whole_numbers: whether weights of products and embeddings become whole numbers of 8 bits, with a factor a channel.
    Otherwise the rows of a weight are what one number of the input is multiplied by: each of its results is a sum in
    order, and the loop over them runs in vectors of any length.
    """

    def __init__(self, *, whole_numbers: bool = False) -> None:
        self._whole_numbers, self._observes = whole_numbers, False
        self._results: dict[Any, tuple[Any, Any]] = {}  # by the operation, and what it is of; and its arguments
        self._weights: dict[Any, tuple[Tensor, Any]] = {}  # by where the numbers lie; and the weight
        self._moments: dict[Any, Tensor] = {}  # sums of products of inputs, by the weight
        self._rows = set[int]()  # storages of weights from which rows are read

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Observe the inputs of weights in a recording, for which they are rounded afterwards."""
        self._observes = True
        try:
            yield
        finally:
            self._observes = False

    def result(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of an operation of constants, in the same memory each time."""
        leaves, form = pytree.tree_flatten((args, kwargs))
        key = func, form, tuple(_place(leaf) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves)
        if key not in self._results:
            self._results[key] = func(*args, **kwargs), leaves  # which keeps the storages
        # A view of the same numbers: autograd takes each result of a view for a tensor that it has not seen.
        return pytree.tree_map_only(Tensor, Tensor.detach, self._results[key][0])

    def replaced(self, func: Any, args: Any, variable: type[Tensor]) -> Tensor | None:
        """Return the result of an operation by another one that the constant among its arguments allows, if there is.

        variable: class of tensors that are no constants.
        """
        if func is aten.pow.Tensor_Tensor and not isinstance(args[1], variable) and args[1].numel() == 1:
            with _disable_current_modes():
                exponent = args[1].item()
            return torch.pow(args[0], exponent)
        at = _WEIGHTS.get(func)
        if at is None or isinstance(weight := args[at], variable) or weight.dtype != torch.float32:
            return None
        if self._observes:
            matrices, inputs = (weight, args[at - 1]) if weight.ndim == 3 else ([weight], [args[at - 1]])
            for matrix, x in zip(matrices, inputs, strict=True) if at else ():
                self._observe(matrix.t(), x)
            return None
        if at == 0:
            return self._embedded(weight, *args[1:2])
        if weight.ndim == 3 and self._whole_numbers and len(weight) <= MAX_MATRICES:
            return self._of_matrices(func, args, weight)
        if weight.ndim == 2 and self._fits(weight.t()):
            return self._multiplied(args[at - 1], weight.t(), args[0] if at == 2 else None)
        if weight.is_contiguous() or weight.untyped_storage()._cdata in self._rows:
            return None
        return func(*args[:at], self.result(aten.clone.default, (weight,), {"memory_format": torch.contiguous_format}))

    def _observe(self, weight: Tensor, x: Any) -> None:
        """Add up products of the inputs x (M, K) of a weight."""
        with _disable_current_modes():
            if self._fits(weight) and weight.shape[1] <= MAX_TERMS:
                rows = x.plain.detach().double()
                key = _place(weight)
                self._moments[key] = self._moments.get(key, 0.0) + rows.t() @ rows

    def _multiplied(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return x Wᵀ + bias by whole numbers."""
        factors, (packed, scale, _) = self._packed(weight)
        x = x * factors
        if x.shape[1] % GROUP:
            x = aten.constant_pad_nd(x, [0, -x.shape[1] % GROUP])
        if bias is None or bias.ndim == 1:
            return quantized_linear(x, packed, scale, None, bias)
        return quantized_linear(x, packed, scale) + bias

    def _of_matrices(self, func: Any, args: Any, weight: Tensor) -> Tensor | None:
        """Return the products of several matrices, one by one."""
        if not self._fits(weight[0].t()):
            return None
        bias, x = ([None] * len(weight), args[0]) if func is aten.bmm.default else (args[0], args[1])
        products = [torch.mm(row, each) for row, each in zip(x, weight, strict=True)]
        return torch.stack([y if b is None else y + b for y, b in zip(products, bias, strict=True)])

    def _embedded(self, weight: Tensor, index: Tensor) -> Tensor | None:
        """Return rows of a weight."""
        if not self._fits(weight):
            self._rows.add(weight.untyped_storage()._cdata)
            return None
        factors, (packed, scale, _) = self._packed(weight)
        rows = aten.embedding(packed, index) * aten.embedding(scale[:, None], index)
        return rows.narrow(-1, 0, weight.shape[1]) * factors

    def _fits(self, weight: Tensor) -> bool:
        """Return whether a weight (N, K) becomes whole numbers."""
        return self._whole_numbers and weight.shape[0] >= MIN_ROWS and weight.numel() >= MIN_NUMBERS

    def _packed(self, weight: Tensor) -> tuple[Tensor, PackedWeight]:
        """Return a weight (N, K) of whole numbers: factors of the input (K,), and its columns over them.

        Columns of small numbers have small factors, so that they keep as many digits.
        """
        key = _place(weight)
        if key not in self._weights:
            with _disable_current_modes():
                known = weight.detach()
                rows = known / _positive(known.square().mean(1, keepdim=True).sqrt())
                factors = _positive(rows.square().mean(0).sqrt())
                moments = self._moments.get(key)
                moments = None if moments is None else moments * factors[:, None] * factors
                self._weights[key] = weight, (factors, _rounded(known / factors, moments))
        return self._weights[key][1]


def _rounded(weight: Tensor, moments: Tensor | None) -> PackedWeight:
    """Return whole numbers of 8 bits for a weight (N, K), with zeros up to a whole number of groups.

    moments: sums of products of the inputs. The error of a column is made up for by those behind it, so that the
    products of inputs such as these change least.
    """
    padding = [0, -weight.shape[1] % GROUP]
    mean = 0.0 if moments is None else float(moments.diagonal().mean())
    if moments is None or not 0 < mean < torch.inf:
        return pack(torch.constant_pad_nd(weight, padding), 8)
    damped = moments + DAMPING * mean * torch.eye(len(moments), dtype=moments.dtype)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    shares = torch.linalg.cholesky(inverse, upper=True).float()
    scale = weight.abs().amax(1) / 127
    left, numbers = weight / _positive(scale)[:, None], torch.zeros_like(weight)
    for k in range(weight.shape[1]):
        numbers[:, k] = left[:, k].round().clamp(-127, 127)
        error = (left[:, k] - numbers[:, k]) / shares[k, k]
        left[:, k + 1 :] -= error[:, None] * shares[k, k + 1 :]
    return PackedWeight(torch.constant_pad_nd(numbers.to(torch.int8), padding), scale, None)


def _positive(numbers: Tensor) -> Tensor:
    return torch.where(numbers > 0, numbers, 1.0)


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """Return where the numbers of a tensor lie: equal for equal tensors alone, as long as their memory is kept."""
    memory = tensor.untyped_storage()._cdata
    return memory, tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
