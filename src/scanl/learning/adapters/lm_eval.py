"""A language model as lm-eval has them. `pip install 'scanl[lm-eval]'`; nothing else of scanl imports lm-eval.

It reads each context once. States are values, so each continuation starts from the state that the context left.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Protocol

import torch
from lm_eval.api.model import TemplateLM  # pyright: ignore[reportMissingImports]
from lm_eval.models.utils import normalize_gen_kwargs  # pyright: ignore[reportMissingImports]
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from scanl.errors import ConfigError
from scanl.layers import state as states
from scanl.layers.state import State
from scanl.models import LanguageModel
from scanl.options import Positive, checked

PIECE = 1024  # tokens that are read at once, so that the logits of a long text need not lie in memory together


class Tokenizer(Protocol):
    """What the model needs of a tokenizer. Every tokenizer of transformers has it."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...


class ByteTokenizer:
    """The tokenizer of models over bytes: UTF-8."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token_ids).decode(errors="replace")


class LMEvalModel(TemplateLM):
    """Score and continue texts with a language model, as a model of lm-eval: `lm_eval.simple_evaluate(model=...)`.

    Args:
        model: the language model, on its device. It is put into evaluation mode.
        tokenizer: text to tokens and back, such as one of transformers; None for a model over bytes.
        end: the token that ends a text; by default that of the tokenizer. Over bytes nothing ends a text by default.
        begin: the token that stands before a text that has no context; by default the one with which the tokenizer
            begins texts, or else `end`, as in lm-eval's own models. Over bytes it is a newline.
        batch_size: continuations of one context that are read together.

    Nothing is cut off, since a state has no longest text. A text for `loglikelihood_rolling` is read in pieces, each
    from the state after the one before it.
    Raises ConfigError when the tokenizer has no token that ends a text, and for a token that the model does not have.

    >>> import lm_eval
    >>> from scanl.learning.adapters.lm_eval import LMEvalModel
    >>> lm_eval.simple_evaluate(model=LMEvalModel(model), tasks=["lambada_openai"])  # doctest: +SKIP
    """

    @checked("lm_eval")
    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Tokenizer | None = None,
        *,
        end: int | None = None,
        begin: int | None = None,
        batch_size: Positive = 16,
    ) -> None:
        super().__init__()
        self.model = model.eval()
        self.tokenizer = tokenizer or ByteTokenizer()
        self.batch_size = batch_size
        self._device = model.device
        if end is None and tokenizer is not None:
            end = getattr(tokenizer, "eos_token_id", None)
        self._stops = end is not None
        if end is None and tokenizer is None:
            end = ord("\n")
        if end is None or not 0 <= end < model.vocab_size:
            raise ConfigError(
                f"lm_eval: end is {end}, expected a token below {model.vocab_size} because of the model; name the "
                "token that ends a text"
            )
        self._end = end
        begin = getattr(tokenizer, "bos_token_id", None) if begin is None else begin
        self._begin = end if begin is None else begin
        if not 0 <= self._begin < model.vocab_size:
            raise ConfigError(f"lm_eval: begin is {begin}, expected a token below {model.vocab_size} of the model")

    @property
    def prefix_token_id(self) -> int:
        return self._begin

    @property
    def eot_token_id(self) -> int:
        return self._end

    @property
    def tokenizer_name(self) -> str:
        return getattr(self.tokenizer, "name_or_path", type(self.tokenizer).__name__)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Return the tokens of a text, by default without special ones, as lm-eval has it."""
        tokens = self.tokenizer.encode(string, add_special_tokens=bool(add_special_tokens))
        if tokens and max(tokens) >= self.model.vocab_size:
            raise ConfigError(
                f"lm_eval: the tokenizer gives token {max(tokens)}, expected less than {self.model.vocab_size} because "
                "of the model"
            )
        return tokens

    @torch.inference_mode()
    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Return for each (texts, context, continuation) the log-likelihood, and whether greedy decoding gives it."""
        scores: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        order = sorted(range(len(requests)), key=lambda i: requests[i][1])
        groups = [(context, list(same)) for context, same in groupby(order, key=lambda i: requests[i][1])]
        for context, same in tqdm(groups, "Scoring after each context", disable=disable_tqdm):
            logits, state = self._read(context or [self.prefix_token_id])  # a context of spaces has no tokens
            for start in range(0, len(same), self.batch_size):
                batch = same[start : start + self.batch_size]
                texts = [requests[i][2] for i in batch]
                for i, score in zip(batch, self._continued(logits, state, texts), strict=True):
                    scores[i] = score
                    self.cache_hook.add_partial("loglikelihood", requests[i][0], score)
        return scores

    def _read(self, context: list[int]) -> tuple[Tensor, State]:
        """Return the logits (1, V) after the context, and the state."""
        state = None
        for piece in self._pieces(context[:-1]):
            _, state = self.model.next_logits(piece, state)
        return self.model.next_logits(self._tokens([context[-1:]]), state)

    def _continued(self, logits: Tensor, state: State, texts: list[list[int]]) -> Iterator[tuple[float, bool]]:
        """Yield the score of each continuation of one context."""
        longest = max(map(len, texts))
        # Padding is on the right, where no token of a text reads it.
        tokens = self._tokens([text + [0] * (longest - len(text)) for text in texts])
        first = logits.expand(len(texts), -1)[:, None]
        later, _ = self.model(tokens[:, :-1], states.repeat(state, len(texts)))
        scores, greedy = _scored(torch.cat([first, later], 1)[:, :longest], tokens)
        for text, score, right in zip(texts, scores, greedy, strict=True):
            yield float(score[: len(text)].sum()), bool(right[: len(text)].all())

    @torch.inference_mode()
    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each text after the token that begins a text."""
        totals = []
        for (text,) in tqdm([request.args for request in requests], "Scoring texts", disable=disable_tqdm):
            targets, state, total = self.tok_encode(text, add_special_tokens=False), None, 0.0
            for inputs, answers in zip(
                self._pieces([self.prefix_token_id, *targets[:-1]]), self._pieces(targets), strict=False
            ):
                logits, state = self.model(inputs, state)
                total += float(_scored(logits, answers)[0].sum())
            totals.append(total)
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Continue each text up to one of its stop texts, the end of text, or `max_gen_toks` tokens, by default 256.

        Greedy unless `do_sample` is true or the temperature is above 0; then by temperature, top_k and top_p. The stop
        text is left out. `max_new_tokens` and `max_tokens` are other names of `max_gen_toks`, as everywhere in lm-eval.
        """
        results = []
        for context, options in tqdm([request.args for request in requests], "Generating", disable=disable_tqdm):
            text = self._generated(self.tok_encode(context) or [self.prefix_token_id], options)
            results.append(text)
            self.cache_hook.add_partial("generate_until", (context, options), text)
        return results

    def _generated(self, prompt: list[int], options: Mapping[str, Any]) -> str:
        options = normalize_gen_kwargs(dict(options))
        until = [stop for stop in options["until"] if stop]
        sampling: dict[str, Any] = {"temperature": options.get("temperature", 1.0) if options["do_sample"] else 0}
        sampling |= {name: options[name] for name in ("top_k", "top_p") if options.get(name)}  # 0 is none
        *pieces, last = self._pieces(prompt)
        state = None
        for piece in pieces:
            with torch.inference_mode():
                _, state = self.model.next_logits(piece, state)
        tokens: list[int] = []
        for token in self.model.generate(last, state, max_new_tokens=options["max_gen_toks"], **sampling):
            if self._stops and int(token) == self._end:
                break
            tokens.append(int(token))
            text = self.tokenizer.decode(tokens)
            ends = [text.index(stop) for stop in until if stop in text]
            if ends:
                return text[: min(ends)]
        return self.tokenizer.decode(tokens)

    def _pieces(self, tokens: list[int]) -> Iterator[Tensor]:
        """Yield the tokens as (1, T), with T at most `PIECE`."""
        for start in range(0, len(tokens), PIECE):
            yield self._tokens([tokens[start : start + PIECE]])

    def _tokens(self, rows: list[list[int]]) -> Tensor:
        return torch.tensor(rows, dtype=torch.long, device=self._device)


def _scored(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each token (B, T), and whether it is the likeliest. logits: (B, T, V)."""
    log_probabilities = F.log_softmax(logits.double(), -1)
    return log_probabilities.gather(-1, tokens[..., None])[..., 0], logits.argmax(-1) == tokens
