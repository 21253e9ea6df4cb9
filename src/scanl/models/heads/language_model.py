"""A language model that can use any layer."""

import math
from collections.abc import Callable
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn

from scanl.errors import ConfigError, ShapeError
from scanl.layers.packing import pack, restarted, unpack
from scanl.layers.parts.soft_cap import soft_cap
from scanl.layers.state import Device, DType, State
from scanl.models.decoding.carried_step import TokenDraw
from scanl.models.decoding.compiled_step import CompiledStep
from scanl.models.decoding.cursor import Cursor, as_text, continued
from scanl.models.decoding.drafts import Draft, ModelDraft
from scanl.models.decoding.generation import Generation
from scanl.models.decoding.sampling import Choice, as_generator, as_limit, check_options
from scanl.models.decoding.session import Session
from scanl.models.embedding import check_range, check_step, check_tensor, check_tokens, embedded, read_out
from scanl.models.inputs import Tokens
from scanl.models.saving import Saved
from scanl.models.stack import Backbone, check_causal
from scanl.ops.offsets import check_starts
from scanl.ops.products.functions import large_products
from scanl.options import above, at_least


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
        self._compiled: CompiledStep | None = None
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

    @property
    def device(self) -> torch.device:
        """The device of the embedding, on which tokens are read."""
        return self.embedding.weight.device

    def init_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> State:
        return self.stack.init_state(batch_size, device=device, dtype=dtype)

    def forward(
        self,
        tokens: Tensor,
        state: State | None = None,
        *,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        starts: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        """Map tokens (B, T) to logits (B, T, V) and the state.

        mask: (B, T) bool, True at valid tokens. Padding may be left or right; logits are zero there.
        cu_seqlens: (N+1,) offsets of N sequences packed over B == 1.
        starts: (B, T) bool, True at steps before which the state begins anew.
        """
        hidden, state, mask = self._hidden(tokens, state, mask, cu_seqlens, starts)
        logits = self._read_out(hidden)
        return (logits if mask is None else unpack(logits, mask)), state

    def next_logits(
        self,
        tokens: Tensor,
        state: State | None = None,
        *,
        mask: Tensor | None = None,
        starts: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        """Read tokens (B, T), T at least 1. Return logits (B, V) after the last valid token of each row."""
        hidden, state, mask = self._hidden(tokens, state, mask, None, starts)
        last = hidden[:, -1] if mask is None else hidden[0, mask.sum(1).cumsum(0) - 1]
        return self._read_out(last), state

    def decode_logits(self, tokens: Tensor, state: State | None, *, mask: Tensor | None = None) -> tuple[Tensor, State]:
        """Compute `next_logits`, by the compiled step where it pays and each row has one token."""
        rows, count = tokens.shape
        if mask is None and count == 1:
            step = self._step()
            if step.pays(rows):
                return step(tokens.squeeze(1), state)
        return self.next_logits(tokens, state, mask=mask)

    def step(self, tokens: Tensor, state: State | None, *, starts: Tensor | None = None) -> tuple[Tensor, State]:
        """Read one token (B,) of each row. Return logits (B, V) and the state.

        starts: (B,) bool, True for rows whose state begins anew before the token.
        """
        check_step("language model", tokens)
        return self.next_logits(tokens[:, None], state, starts=None if starts is None else starts[:, None])

    def compile_step(self, batch_size: int = 1) -> CompiledStep:
        """Return `step` as a kernel of the CPU, compiled for `batch_size` rows.

        `generate`, `Session`, `Streams` and drafts by this model use it from now on. Without this call they do so once
        they have decoded 64 tokens, or at once if so many are asked for.

        It takes what `step` takes and returns what that returns, within rounding. A model that no kernel can run takes
        the ordinary step; `explain` says why.
        """
        self._step().compile(batch_size)
        return self._step()

    def _step(self) -> CompiledStep:
        if self._compiled is None:
            self._compiled = CompiledStep(self, self._readable, self._unchecked_step, self._first_tokens)
        return self._compiled

    def explain(self) -> str:
        """Return one line on each way of a step: that it can run, or why not. Decoding takes the first that can."""
        return f"compiled: {self._step().refusal() or 'can run'}\nordinary: can run"

    def logits_at(self, tokens: Tensor, places: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Read tokens (B, T). Return logits (n, V) where the mask `places` (B, T) is True, in row-major order."""
        hidden, state, _ = self._hidden(tokens, state, None, None, None)
        return self._read_out(hidden[places]), state

    def generate(
        self,
        prompt: Tensor,
        state: State | None = None,
        *,
        session: Session | None = None,
        draft: "Draft | LanguageModel | None" = None,
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
        session: the text that the prompt (1, T) is added to; only what the session has not read is read. T may be 0.
        draft: what proposes tokens, which are then read in one piece: `PromptLookup()`, or a smaller model of the same
        tokens. It makes generation faster and changes no token, up to rounding; within `exact`, none at all.

        The step is compiled where that pays: see `compile_step`.
        """
        check_options("generate", temperature, top_k, top_p)
        check_tensor("generate", "prompt", prompt, "(B, T)")
        max_steps = as_limit("generate", "max_new_tokens", max_new_tokens)
        continues = session is not None and len(session) > 0
        if prompt.ndim != 2 or (prompt.shape[1] == 0 and not continues):
            raise ShapeError(f"generate: prompt has shape {tuple(prompt.shape)}, expected (B, T) with T at least 1")
        if mask is not None and not bool(mask.any(1).all()):
            raise ShapeError("generate: mask has a row without a token, expected at least one each")
        if max_steps is not None:
            self._step().expect(prompt.shape[0], max_steps)
        choice = Choice(temperature, top_k, top_p, as_generator("generate", seed, prompt.device))
        if session is not None or draft is not None:
            proposing = self._as_draft(draft)
            return continued(self._cursor(prompt, state, session, mask), choice, proposing, max_steps, stop)

        draw = TokenDraw(self._step(), self.next_logits, choice)
        return Generation(draw, prompt, state, max_steps=max_steps, seed=choice.generator, mask=mask, stop=stop)

    def _cursor(self, prompt: Tensor, state: State | None, session: Session | None, mask: Tensor | None) -> Cursor:
        """Return the text that `generate` continues with a session or a draft: of one row."""
        name = "draft" if session is None else "session"
        if mask is not None:
            raise ShapeError(f"generate: mask is given, expected none because of {name}, which takes one text")
        text = as_text(self, "generate", "prompt", prompt)
        if session is None:
            return Cursor(self, text, state)
        if state is not None:
            raise ConfigError("generate: state and session are both given, expected one of them")
        if session.model is not self:
            raise ConfigError("generate: session is of another model, expected Session(model) of this one")
        session.keep()
        session.append(text)
        return session

    def _as_draft(self, draft: "Draft | LanguageModel | None") -> Draft | None:
        proposing = draft.model if isinstance(draft, ModelDraft) else draft
        if isinstance(proposing, LanguageModel) and proposing.vocab_size != self.vocab_size:
            raise ConfigError(
                f"generate: draft has vocab_size={proposing.vocab_size}, expected {self.vocab_size} of the model"
            )
        if isinstance(draft, LanguageModel):
            return ModelDraft(draft)
        if draft is not None and not isinstance(draft, Draft):
            kind = f"a {type(draft).__name__}"
            raise ConfigError(f"generate: draft is {kind}, expected PromptLookup(), a LanguageModel or ModelDraft")
        return draft

    def _hidden(
        self,
        tokens: Tensor,
        state: State | None,
        mask: Tensor | None,
        cu_seqlens: Tensor | None,
        starts: Tensor | None,
    ) -> tuple[Tensor, State, Tensor | None]:
        check_tokens("language model", "tokens", tokens)
        check_starts("language model", starts, tokens)
        if mask is not None:
            if cu_seqlens is not None:
                raise ShapeError("language model: mask and cu_seqlens are both given, expected one of them")
            starts = None if starts is None else pack(starts, mask)[0]
            tokens, cu_seqlens = pack(tokens, mask)
        x = embedded("language model", self.embedding, tokens)
        if starts is None:
            hidden, after = self._read(x, state, cu_seqlens)
        else:
            hidden, after = restarted("language model", self._read, self.stack.init_state, x, state, cu_seqlens, starts)
        return hidden, after, mask

    def _read(self, x: Tensor, state: State | None, cu_seqlens: Tensor | None) -> tuple[Tensor, State]:
        """Map rows of the embedding (B, T, D) to features and the state."""
        x = x if self.embedding_scale is None else x * self.embedding_scale
        x = x if self.embedding_norm is None else self.embedding_norm(x)
        return self.stack(x, state, cu_seqlens=cu_seqlens)

    def _readable(self, tokens: Tensor) -> Tensor:
        """Return the tokens (B,) of a step as int64. Raises ShapeError for others, and for those out of range."""
        check_step("language model", tokens)
        if tokens.is_cpu:  # of another device they would have to be waited for
            check_range("language model", tokens, len(self.embedding.weight))
        return tokens.long()

    def _first_tokens(self, rows: int) -> Tensor:
        return torch.zeros(rows, dtype=torch.int64, device=self.device)

    def _unchecked_step(self, tokens: Tensor, state: State | None) -> tuple[Tensor, State]:
        hidden, after = self._read(self.embedding(tokens)[:, None], state, None)
        return self._read_out(hidden[:, 0]), after

    def _read_out(self, hidden: Tensor) -> Tensor:
        with large_products(math.prod(hidden.shape[:-1])):
            logits = read_out(self.embedding, hidden) if self.head is None else self.head(hidden)
        return logits if self.logit_cap is None else soft_cap(logits, self.logit_cap).to(logits.dtype)
