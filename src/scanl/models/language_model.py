"""A language model that can use any layer."""

from collections.abc import Callable
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.configured import above, at_least
from scanl.errors import ConfigError, ShapeError
from scanl.layers.packing import pack, unpack
from scanl.layers.parts.soft_cap import soft_cap
from scanl.layers.state import Device, DType, State
from scanl.models.embedding import check_tensor, check_tokens, embedded
from scanl.models.generation import Generation
from scanl.models.inputs import Tokens
from scanl.models.sampling import as_limit, check_options, sample
from scanl.models.saving import Saved
from scanl.models.stack import Backbone, check_causal


class LanguageModel(Saved):
    """Predict the next token: an embedding, a stack of blocks, and a linear map to logits.

    tokens: (B, T) of any integer dtype.   logits: (B, T, V).   State: one BlockState for each block, of constant size.
    config: the constructor arguments by name; `save` writes them with the weights.
    Initialisation: embedding and head N(0, 0.02²). Layers initialise themselves; `Stack` scales the projections into
    the residual stream by depth.
    """

    name: ClassVar[str] = "language model"

    def __init__(
        self,
        vocab_size: Annotated[int, at_least(1), "V; 256 for bytes"],
        stack: Annotated[Backbone, 'the causal layers between embedding and logits: `Stack(256, 6, "hawk")`'],
        *,
        embedding_norm: Annotated[bool, "add a norm between the embedding and the first block, as in RWKV"] = False,
        embedding_scale: Annotated[float | None, "factor on the embedding, as in RecurrentGemma; None for 1"] = None,
        logit_cap: Annotated[
            float | None, above(0), "c; the logits become c tanh(logits / c), in (-c, c). None for no cap"
        ] = None,
        tie_embeddings: Annotated[bool, "use the embedding matrix for the output too"] = False,
        padding_idx: Annotated[
            int | None,
            "token whose row of the embedding is 0 at first and gets no gradient from the input; None for none",
        ] = None,
    ) -> None:
        super().__init__()
        if padding_idx is not None and not -vocab_size <= padding_idx < vocab_size:
            expected = f"{-vocab_size} to {vocab_size - 1} because of vocab_size"
            raise ConfigError(f"language model: padding_idx is {padding_idx}, expected {expected}")
        check_causal(self._who(), stack)
        self.stack = stack
        self.inputs, self.vocab_size = Tokens(vocab_size), vocab_size
        self.embedding_scale = embedding_scale
        self.logit_cap = logit_cap
        self.embedding = nn.Embedding(vocab_size, stack.dim, padding_idx)
        self.embedding_norm = stack.make_norm() if embedding_norm else None
        self.head = None if tie_embeddings else nn.Linear(stack.dim, vocab_size, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        if padding_idx is not None:
            nn.init.zeros_(self.embedding.weight[padding_idx])
        if self.head is not None:
            nn.init.normal_(self.head.weight, std=0.02)

    def extra_repr(self) -> str:
        """Show the options that the weights do not reveal."""
        options = {"embedding_scale": self.embedding_scale, "logit_cap": self.logit_cap}
        return ", ".join(f"{name}={value}" for name, value in options.items() if value is not None)

    def init_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> State:
        return self.stack.init_state(batch_size, device=device, dtype=dtype)

    def forward(
        self,
        tokens: Tensor,
        state: State | None = None,
        *,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        """Map tokens (B, T) to logits (B, T, V) and the state.

        mask: (B, T) bool, True at valid tokens. Padding may be left or right; logits are zero there.
        cu_seqlens: (N+1,) offsets of N sequences packed over B == 1.
        """
        hidden, state, mask = self._hidden(tokens, state, mask, cu_seqlens)
        logits = self._read_out(hidden)
        return (logits if mask is None else unpack(logits, mask)), state

    def next_logits(
        self, tokens: Tensor, state: State | None = None, *, mask: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """Read tokens (B, T), T at least 1. Return logits (B, V) after the last valid token of each row."""
        hidden, state, mask = self._hidden(tokens, state, mask, None)
        last = hidden[:, -1] if mask is None else hidden[0, mask.sum(1).cumsum(0) - 1]
        return self._read_out(last), state

    def logits_at(self, tokens: Tensor, places: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Read tokens (B, T). Return logits (n, V) where the mask `places` (B, T) is True, in row-major order."""
        hidden, state, _ = self._hidden(tokens, state, None, None)
        return self._read_out(hidden[places]), state

    def generate(
        self,
        prompt: Tensor,
        state: State | None = None,
        *,
        max_new_tokens: int | None = None,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | torch.Generator | None = None,
        mask: Tensor | None = None,
        stop: Callable[[Tensor, int], bool] | None = None,
    ) -> Generation:
        """Continue the prompt (B, T), one token (B,) at a time, in constant memory.

        state: the state before the prompt.   max_new_tokens: None for no limit.   temperature: 0 is greedy.
        top_k, top_p: see `sampling.distribution`.   seed: a whole number, or a generator to draw from.
        mask: (B, T) bool for a padded prompt.
        stop: called as stop(token, n) after the n-th token; generation ends when it returns True.
        """
        check_options("generate", temperature, top_k, top_p)
        check_tensor("generate", "prompt", prompt, "(B, T)")
        max_steps = as_limit("generate", "max_new_tokens", max_new_tokens)
        if prompt.ndim != 2 or prompt.shape[1] == 0:
            raise ShapeError(f"generate: prompt has shape {tuple(prompt.shape)}, expected (B, T) with T at least 1")
        if mask is not None and not bool(mask.any(1).all()):
            raise ShapeError("generate: mask has a row without a token, expected at least one each")

        def draw(pending: Tensor, state: Any, valid: Tensor | None, generator: torch.Generator | None) -> Any:
            logits, after = self.next_logits(pending, state, mask=valid)
            token = sample(logits, temperature, top_k, top_p, generator)
            return token, token[:, None], after

        return Generation(draw, prompt, state, max_steps=max_steps, seed=seed, mask=mask, stop=stop)

    def _hidden(
        self, tokens: Tensor, state: State | None, mask: Tensor | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, State, Tensor | None]:
        check_tokens("language model", "tokens", tokens)
        if mask is not None:
            if cu_seqlens is not None:
                raise ShapeError("language model: mask and cu_seqlens are both given, expected one of them")
            tokens, cu_seqlens = pack(tokens, mask)
        x = embedded("language model", self.embedding, tokens)
        x = x if self.embedding_scale is None else x * self.embedding_scale
        x = x if self.embedding_norm is None else self.embedding_norm(x)
        hidden, after = self.stack(x, state, cu_seqlens=cu_seqlens)
        return hidden, after, mask

    def _read_out(self, hidden: Tensor) -> Tensor:
        logits = F.linear(hidden, self.embedding.weight) if self.head is None else self.head(hidden)
        return logits if self.logit_cap is None else soft_cap(logits, self.logit_cap).to(logits.dtype)
