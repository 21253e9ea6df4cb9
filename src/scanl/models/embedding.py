"""Tokens that a model reads: their checks and their embedding."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.errors import ShapeError
from scanl.layers.parts.quantized import QuantizedEmbedding

INTEGERS = {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64}


def check_tensor(who: str, name: str, value: Any, shape: str) -> None:
    """Raise ShapeError for a value that is no tensor, such as a list or an array of NumPy."""
    if not isinstance(value, Tensor):
        kind = "an array of NumPy" if type(value).__module__ == "numpy" else f"a {type(value).__name__}"
        raise ShapeError(f"{who}: {name} is {kind}, expected a tensor {shape}; make one with torch.as_tensor")


def check_tokens(who: str, name: str, tokens: Any, axes: str = "(B, T)") -> None:
    """Raise ShapeError unless tokens are integers with these axes."""
    check_tensor(who, name, tokens, f"{axes} of integers")
    if tokens.dtype not in INTEGERS or tokens.ndim != axes.count(",") + (axes[-2] != ","):
        raise ShapeError(f"{who}: {name} is {tokens.dtype} {tuple(tokens.shape)}, expected integers {axes}")


def check_step(who: str, tokens: Any) -> None:
    """Raise ShapeError unless tokens are integers (B,), one of each row."""
    check_tokens(who, "tokens", tokens, "(B,)")


def embedded(who: str, embedding: nn.Embedding, tokens: Tensor) -> Tensor:
    """Return embedding(tokens), for tokens of any integer dtype.

    A token out of range raises ShapeError on the CPU. On a GPU tokens are not checked.
    """
    tokens = tokens.long()
    if torch.compiler.is_compiling():
        return embedding(tokens)
    try:
        return embedding(tokens)
    except IndexError:
        check_range(who, tokens, embedding.num_embeddings)
        raise


def check_range(who: str, tokens: Tensor, size: int) -> None:
    """Raise ShapeError for a token that is not below `size`, or below 0."""
    odd = [token for token in tokens.flatten().tolist() if not 0 <= token < size]
    if odd:
        raise ShapeError(f"{who}: token {odd[0]} is out of range, expected 0 to {size - 1} of {size}")


def read_out(embedding: nn.Module, hidden: Tensor) -> Tensor:
    """Return the logits that the rows of an embedding give: the linear map by its matrix."""
    if isinstance(embedding, QuantizedEmbedding):
        return embedding.read_out(hidden)
    assert isinstance(embedding, nn.Embedding)
    return F.linear(hidden, embedding.weight)
