"""Models of DNA: the tokens of its bases, HyenaDNA, and Caduceus, which reads both strands."""

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn

from scanl.errors import ConfigError
from scanl.layers.packing import pack, turned, unpack
from scanl.models.embedding import check_tokens, embedded, read_out
from scanl.models.heads.language_model import LanguageModel
from scanl.models.presets import whole
from scanl.models.saving import Saved
from scanl.models.stack import Backbone, Stack
from scanl.options import Positive, at_least, checked

SPECIAL_TOKENS = ("[CLS]", "[SEP]", "[BOS]", "[MASK]", "[PAD]", "[RESERVED]", "[UNK]")
MASK, UNKNOWN, BASES = 3, len(SPECIAL_TOKENS) - 1, "ACGTN"
FIRST_BASE = len(SPECIAL_TOKENS)  # the token of A
VOCABULARY = 16  # the twelve tokens, up to a multiple of eight


def encode(text: str) -> Tensor:
    """Return the tokens (T,) int64 of bases: 7 to 11 for ACGTN in either case, 6 for another letter.

    Source: the tokenizer of HyenaDNA, arXiv:2306.15794; Caduceus has the same.

    >>> encode("AcGTNx").tolist()
    [7, 8, 9, 10, 11, 6]
    """
    return torch.tensor([FIRST_BASE + BASES.find(base) if base in BASES else UNKNOWN for base in text.upper()]).long()


def decode(tokens: Tensor) -> str:
    """Return the text of tokens (T,): bases as letters, others as [CLS], [SEP], ...; above 11 nothing.

    >>> decode(torch.tensor([2, 7, 10, 1]))
    '[BOS]AT[SEP]'
    """
    known = (*SPECIAL_TOKENS, *BASES)
    return "".join(known[token] for token in tokens.tolist() if token < len(known))


def complement(tokens: Tensor) -> Tensor:
    """Return the tokens of the bases on the other strand: A and T are exchanged, and so are C and G; others stay.

    >>> decode(complement(encode("AACGN")))
    'TTGCN'
    """
    return complements().to(tokens.device)[tokens.long()]


def complements(size: int = VOCABULARY) -> Tensor:
    """Return the complement of each token, (size,)."""
    a, c, g, t = range(FIRST_BASE, FIRST_BASE + 4)
    table = torch.arange(size)
    table[[a, t, c, g]] = torch.tensor([t, a, g, c])
    return table


@whole("hyena_dna")
@checked("hyena dna")
def hyena_dna(
    dim: int = 128, depth: int = 2, max_length: Positive = 1024, vocab_size: int = VOCABULARY
) -> LanguageModel:
    """Return HyenaDNA: the next base from up to a million before it, by Hyena.

    A `LanguageModel` of blocks `hyena_dna`, each with an MLP; tokens as `encode` returns them. Differs: there is no
    dropout of the embedding.

    Args:
        dim: D, width.
        depth: L, blocks.
        max_length: bases of a sequence; the filters have two lags more, as in the released models. A longer sequence
            may be read, but the filters do not reach older bases.
        vocab_size: V.

    The sizes of the released models: tiny 1k, dim 128, depth 2; small 32k, dim 256, depth 4; medium 160k and 450k, and
    large 1m, dim 256, depth 8.
    Source: Nguyen et al., "HyenaDNA: Long-Range Genomic Sequence Modeling at Single Nucleotide Resolution",
    arXiv:2306.15794, sec. 3.
    Initialisation: linear weights (the filters' too) and the embedding N(0, 0.02²); the maps into the residual
    stream divided by sqrt(2 L); biases of linear maps 0.
    """
    stack = Stack(
        dim, depth, "hyena_dna", layer_options={"max_length": max_length + 2}, channel_mixer="mlp",
        norm="layernorm", norm_eps=1e-5, residual_in_float32=True,
    )  # fmt: skip
    model = LanguageModel(vocab_size, stack, tie_embeddings=True)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    for name, parameter in model.named_parameters():
        if name.endswith(("out_proj.weight", "fc2.weight")):
            nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * depth))
    return model


class StrandModel(Saved):
    """Predict the base at each position of a strand of DNA, from both sides. `caduceus` makes one.

    With `both_strands` the same weights also read the reverse complement, and the logits of its positions are added at
    the opposite positions. So reversing and complementing the strand does the same to the logits. Without
    `both_strands`, average the logits of both strands yourself if the strand must not matter.

    Initialisation: embedding and head N(0, 0.02²), the head tied to the embedding.
    """

    name: ClassVar[str] = "strand model"

    def __init__(
        self,
        vocab_size: Annotated[int, at_least(FIRST_BASE + len(BASES)), "V; tokens as `encode` returns them"],
        stack: Annotated[Backbone, "bidirectional layers, of the width of one strand"],
        *,
        both_strands: Annotated[bool, "read the reverse complement too"] = True,
        swap_strands: Annotated[
            bool,
            "before each block, a strand takes the numbers of the other one, with positions and channels reversed. "
            "Needs `both_strands` and a `Stack`",
        ] = False,
    ) -> None:
        super().__init__()
        if swap_strands and not both_strands:
            raise ConfigError("strand model: swap_strands is True, expected False because of both_strands=False")
        if swap_strands and not isinstance(stack, Stack):
            kind = type(stack).__name__
            raise ConfigError(f"strand model: swap_strands is True, expected False because the stack is a {kind}")
        self.vocab_size, self.both_strands, self.swap_strands = vocab_size, both_strands, swap_strands
        self.embedding = nn.Embedding(vocab_size, stack.dim)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.stack = stack

    def forward(self, tokens: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """Map tokens (B, T) to logits (B, T, V). mask: (B, T) bool, True at valid tokens; elsewhere logits are 0."""
        hidden = self._strands(tokens, mask)
        logits = [read_out(self.embedding, strand) for strand in hidden]
        total = logits[0]
        if self.both_strands:
            total = total + logits[1][..., complements(self.vocab_size).to(total.device)]
        return total if mask is None else unpack(total, mask)

    def features(self, tokens: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """Return the mean over the positions and strands, (B, D), for a classifier. It is the same for both strands."""
        pooled = torch.stack(self._strands(tokens, mask)).mean(0)
        if mask is None:
            return pooled.mean(1)
        return unpack(pooled, mask).sum(1) / mask.sum(1, keepdim=True)

    def _strands(self, tokens: Tensor, mask: Tensor | None) -> list[Tensor]:
        """Return the hidden numbers at each place, of one strand or of both."""
        check_tokens("strand model", "tokens", tokens)
        tokens, cu_seqlens = tokens.long(), None  # a tensor of bytes as an index is a mask
        if mask is not None:
            tokens, cu_seqlens = pack(tokens, mask)
        one = self._read(tokens, cu_seqlens)
        if not self.both_strands:
            return [one]
        table = complements(self.vocab_size).to(tokens.device)
        other = self._read(turned(table[tokens], cu_seqlens), cu_seqlens)
        if self.swap_strands and len(self.stack.mixers()) % 2:  # each ends where the other began
            one, other = other, one
        return [one, turned(other, cu_seqlens)]

    def _read(self, tokens: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        x = embedded("strand model", self.embedding, tokens)
        if not self.swap_strands:
            return self.stack(x, cu_seqlens=cu_seqlens)[0]
        assert isinstance(self.stack, Stack)
        for block in self.stack.blocks:
            x, _ = block(turned(x, cu_seqlens).flip(-1), cu_seqlens=cu_seqlens)
        return self.stack.norm(x)


@whole("caduceus")
def caduceus(
    dim: int = 256,
    depth: int = 8,
    both_strands: bool = True,
    layer_options: Mapping[str, Any] | None = None,
    vocab_size: int = VOCABULARY,
    *,
    swap_strands: bool = False,
) -> StrandModel:
    """Return Caduceus: predict the base at each position of a strand of DNA, from both sides.

    A `StrandModel` of blocks `caduceus`, which read forwards and backwards: Caduceus-PS with `both_strands`, and
    without it Caduceus-Ph.

    The released model keeps both strands side by side, in 2 D channels. Each block acts on them as here. With its
    default, a fused norm, the two exchange their channels before each block: that is `swap_strands`. Its weights then
    need it; the model is equivariant with and without.

    Args:
        dim: D, width of one strand.
        depth: L, blocks.
        layer_options: options of `caduceus`.
        vocab_size, both_strands, swap_strands: as in `StrandModel`.

    Source: Schiff et al., "Caduceus: Bi-Directional Equivariant Long-Range DNA Sequence Modeling", arXiv:2403.03234,
    sec. 3 and 4. Train it on places whose token is [MASK], 15 % of them.
    Initialisation: embedding and head as in `StrandModel` and its source; blocks as in `Stack`.
    """
    stack = Stack(dim, depth, "caduceus", layer_options=layer_options, channel_mixer="none", norm_eps=1e-5)
    return StrandModel(vocab_size, stack, both_strands=both_strands, swap_strands=swap_strands)
