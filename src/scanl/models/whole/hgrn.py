"""HGRN as a language model: its stack, its norms and its initial values."""

import math
from collections.abc import Mapping
from typing import Any

from torch import nn

from scanl.models.heads.language_model import LanguageModel
from scanl.models.presets import whole
from scanl.models.stack import Stack


@whole("hgrn", "hierarchically_gated_recurrent_neural_network")
def hgrn(
    vocab_size: int = 256,
    dim: int = 512,
    depth: int = 6,
    expand: float = 2.0,
    activation: str = "identity",
    layer_options: Mapping[str, Any] | None = None,
    tie_embeddings: bool = False,
) -> LanguageModel:
    """Return HGRN: the next token, by gated complex recurrences whose lower bounds of the forget gate rise with depth.

    A `LanguageModel` of blocks `hgrn`, each with a gated linear unit W_3 (f(W_1 x) * W_2 x) with biases. A LayerNorm
    stands before both, and after the last block. There are no positions. The embedding is multiplied by sqrt(D).

    Differs: there is no dropout.

    Args:
        vocab_size: V; 256 for bytes.
        dim: D, width.
        depth: L, blocks.
        expand: the gated linear unit has int(expand D) features.
        activation: f. The paper has "silu"; the released language model leaves f out, which is "identity".
        layer_options: options of `hgrn`.
        tie_embeddings: use the embedding matrix for the output too.

    Source: Qin, Yang and Zhong, "Hierarchically Gated Recurrent Neural Network for Sequence Modeling",
    arXiv:2311.04823, sec. 3, and its code.
    Initialisation as in its code: linear maps as in PyTorch; the embedding and the head N(0, 1/D); blocks as in `hgrn`.
    """
    stack = Stack(
        dim, depth, "hgrn", layer_options=layer_options, channel_mixer="gated_mlp",
        channel_options={"expand": expand, "bias": True, "activation": activation}, norm="layernorm", norm_eps=1e-5,
    )  # fmt: skip
    for module in stack.modules():
        if isinstance(module, nn.Linear):
            module.reset_parameters()
    model = LanguageModel(vocab_size, stack, embedding_scale=math.sqrt(dim), tie_embeddings=tie_embeddings)
    for matrix in (model.embedding, model.head):
        if matrix is not None:
            nn.init.normal_(matrix.weight, std=dim**-0.5)
    return model
