"""Soft prompts: vectors that are learned, and read in the place of embedded tokens before a text."""

import torch
from torch import nn

from scanl.layers.module import Module
from scanl.layers.state import State
from scanl.models.heads.language_model import LanguageModel
from scanl.options import Positive, checked


class SoftPrompt(Module):
    """Vectors that a language model reads before a text, learned while the model's weights stay as they are.

    The model keeps what it has read in its state, so the prompt is read once, and the state is what it gives:

        prompt = SoftPrompt(model, 32)                        # train prompt.parameters() alone
        logits, _ = model(tokens, prompt(model, tokens.shape[0]))

    Args:
        model: whose embedding the vectors replace; it is not kept.
        count: number of vectors.

    Parameters: vectors (count, D).   Initialisation: embeddings of tokens drawn at random, as in Lester et al.
    Source: Lester et al., "The Power of Scale for Parameter-Efficient Prompt Tuning", arXiv:2104.08691, sec. 2; in
    HyenaDNA, arXiv:2306.15794, sec. 3.2.
    """

    @checked("soft prompt")
    def __init__(self, model: LanguageModel, count: Positive) -> None:
        super().__init__()
        rows = torch.randint(model.vocab_size, (count,), device=model.device)
        self.vectors = nn.Parameter(model.embedding(rows).detach())

    def forward(self, model: LanguageModel, batch_size: int) -> State:
        """Return the model's state after the prompt, for a batch."""
        x = self.vectors if model.embedding_scale is None else self.vectors * model.embedding_scale
        x = x if model.embedding_norm is None else model.embedding_norm(x)
        return model.stack(x.expand(batch_size, -1, -1))[1]
