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

from scanl.ops.products.quantized_linear import LARGEST_SCALE, bytes_of, numbers_of, quantized_linear

MIN_NUMBERS = 1 << 5  # numbers of a weight: fewer gain less than their factors and the rounding of their input take
MIN_BIAS = 16  # numbers of what is added: fewer stay as they are
MAX_BYTE = 127
UPPER_UNIT = 2 * MAX_BYTE  # of the upper byte of two: the lower one has the numbers between
MAX_MATRICES = 64  # matrices of one weight, each of which has a product of its own
MAX_TERMS = 2048  # terms of a product whose inputs count: their moments are a matrix of so many rows
DAMPING = 0.1  # of the mean square of inputs: how much they may differ from those of the example
aten = torch.ops.aten
_WEIGHTS = {  # which argument of an operation is its weight
    aten.mm.default: 1, aten.addmm.default: 2, aten.bmm.default: 1, aten.baddbmm.default: 2, aten.embedding.default: 0,
}  # fmt: skip


class Constants:
    """What becomes of constants. What depends on them alone is computed once.

    whole_numbers: whether weights of products and embeddings become whole numbers of 8 bits, with a factor a channel
    and one an input, which have 8 bits too, and biases become whole numbers of 16 bits. Otherwise the rows of a weight
    are what one number of the input is multiplied by: each of its results is a sum in order, and the loop over them
    runs in vectors of any length.
    """

    def __init__(self, *, whole_numbers: bool = False) -> None:
        self._whole_numbers, self._observes = whole_numbers, False
        self._results: dict[Any, tuple[Any, Any]] = {}  # by the operation, and what it is of; and its arguments
        self._weights: dict[Any, tuple[Any, Any]] = {}  # by where the numbers lie; and what is kept
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
        if func is aten.add.Tensor and self._whole_numbers and not isinstance(args[1], variable):
            return self._with_bias(*args)
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
            y = self._multiplied(args[at - 1], weight.t())
            return y if at == 1 else y + args[0]
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

    def _multiplied(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return x Wᵀ by whole numbers."""
        factors, packed, scale = self._packed(weight)
        return quantized_linear(x * factors, packed, scale)

    def _with_bias(self, x: Tensor, bias: Any) -> Tensor | None:
        """Return x + bias, where the bias has two bytes a number. One byte is not enough where large numbers cancel."""
        if not isinstance(bias, Tensor) or bias.dtype != torch.float32 or bias.numel() < MIN_BIAS:
            return None
        key = _place(bias), "bias"
        if key not in self._weights:
            with _disable_current_modes():
                unit = float(bias.abs().amax()) / (2 * MAX_BYTE * MAX_BYTE)
                numbers = (bias.detach() / (unit or 1.0)).round()
                upper = (numbers / UPPER_UNIT).round()
                lower = numbers - UPPER_UNIT * upper
                self._weights[key] = bias, (upper.to(torch.int8), lower.to(torch.int8), unit)
        upper, lower, unit = self._weights[key][1]
        return torch.add(x, upper, alpha=UPPER_UNIT * unit).add(lower, alpha=unit) if unit < torch.inf else None

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
        factors, packed, roots = self._packed_rows(weight)
        rows, roots = aten.embedding(packed, index), aten.embedding(roots, index)
        return rows * factors * roots * roots

    def _fits(self, weight: Tensor) -> bool:
        """Return whether a weight (N, K) becomes whole numbers."""
        if not self._whole_numbers or weight.numel() < MIN_NUMBERS:
            return False
        with _disable_current_modes():
            return bool(weight.abs().amax() <= MAX_BYTE * LARGEST_SCALE)

    def _packed(self, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return a weight (N, K) of whole numbers: factors of the input (K,), its columns over them, and their scale.

        Columns of small numbers have small factors, so that they keep as many digits.
        """
        key = _place(weight)
        if key not in self._weights:
            with _disable_current_modes():
                known = weight.detach().contiguous()  # rows lie in a file one behind another
                rows = known / _positive(known.square().mean(1, keepdim=True).sqrt())
                sizes = rows.square().mean(0).sqrt()
                factors = (sizes / _positive(sizes.amax()) * MAX_BYTE).round().clamp(min=1)
                moments = self._moments.get(key)
                moments = None if moments is None else moments * factors[:, None] * factors
                self._weights[key] = weight, (factors.to(torch.int8), *_rounded(known / factors, moments))
        return self._weights[key][1]

    def _packed_rows(self, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return rows (N, K) of whole numbers: factors of columns (K,), numbers, roots of factors of rows (N, 1)."""
        key = _place(weight), "rows"
        if key not in self._weights:
            with _disable_current_modes():
                known = weight.detach().contiguous()
                factors = _positive(known.abs().amax(0)) / MAX_BYTE**3
                roots = (known / factors).abs().amax(1, keepdim=True).div(MAX_BYTE).sqrt().ceil().clamp(min=1)
                packed = (known / factors / roots.square()).round()
                self._weights[key] = weight, (factors, packed.to(torch.int8), roots.to(torch.int8))
        return self._weights[key][1]


def _rounded(weight: Tensor, moments: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return whole numbers of 8 bits for a weight (N, K), and the bytes of their scale.

    moments: sums of products of the inputs. The error of a column is made up for by those behind it, so that the
    products of inputs such as these change least.
    """
    scale = bytes_of(weight.abs().amax(1) / MAX_BYTE)
    left = weight / numbers_of(scale)[:, None]
    mean = 0.0 if moments is None else float(moments.diagonal().mean())
    if moments is None or not 0 < mean < torch.inf:
        return left.round().to(torch.int8), scale
    damped = moments + DAMPING * mean * torch.eye(len(moments), dtype=moments.dtype)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    shares = torch.linalg.cholesky(inverse, upper=True).float()
    numbers = torch.zeros_like(weight)
    for k in range(weight.shape[1]):
        numbers[:, k] = left[:, k].round().clamp(-MAX_BYTE, MAX_BYTE)
        error = (left[:, k] - numbers[:, k]) / shares[k, k]
        left[:, k + 1 :] -= error[:, None] * shares[k, k + 1 :]
    return numbers.to(torch.int8), scale


def _positive(numbers: Tensor) -> Tensor:
    return torch.where(numbers > 0, numbers, 1.0)


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """Return where the numbers of a tensor lie: equal for equal tensors alone, as long as their memory is kept."""
    memory = tensor.untyped_storage()._cdata
    return memory, tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
