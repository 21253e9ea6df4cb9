"""SaShiMi as a model of samples: an embedding, the network of several resolutions, and a linear map to logits."""

from collections.abc import Sequence
from typing import cast

from torch import nn

from scanl.layers.ssm.sashimi import Sashimi
from scanl.models.language_model import LanguageModel
from scanl.models.saving import Saved
from scanl.models.stack import Stack


class SashimiModel(LanguageModel):
    """Predict the next sample of a waveform, sample by sample, with SaShiMi.

    A `LanguageModel` whose stack is one `Sashimi`, which has residual connections and norms of its own. It generates
    in constant memory: `generate`.   State: that of `Sashimi`.

    Args:
        vocab_size: V, values of a sample; 256 for audio of 8 bits (mu-law, or linear).
        dim, pool, expand, n_layers, ff, d_state, dropout, lr: passed to `Sashimi`.

    Source: Goel, Gu, Donahue and Ré, "It's Raw! Audio Generation with State-Space Models", arXiv:2202.09729, sec. 4.
    Initialisation: embedding and head N(0, 0.02²), as in `LanguageModel`. Differs: in the authors' program the
    embedding is N(0, 1), and the head has a bias and starts as in PyTorch.
    """

    def __init__(
        self,
        vocab_size: int = 256,
        dim: int = 64,
        pool: Sequence[int] = (4, 4),
        expand: int = 2,
        n_layers: int = 8,
        ff: int = 2,
        d_state: int = 64,
        dropout: float = 0.0,
        lr: float | None = 1e-3,
    ) -> None:
        Saved.__init__(self, locals())
        self.stack = cast(Stack, Sashimi(**self.options_of(Sashimi)))
        self.vocab_size, self.embedding_scale, self.logit_cap, self.embedding_norm = vocab_size, None, None, None
        self.embedding, self.head = nn.Embedding(vocab_size, dim), nn.Linear(dim, vocab_size, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.normal_(self.head.weight, std=0.02)
