"""Sessions of models of transformers: each turn costs its own tokens, and drafted tokens are read in one piece."""

import copy
import inspect
from array import array
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from scanl.errors import ConfigError, ShapeError
from scanl.hub import forwards
from scanl.hub.cached_tensors import CACHES
from scanl.models.decoding.drafts import ROWS, Drafting, PromptLookup
from scanl.models.decoding.prefix_tree import Text
from scanl.models.decoding.sampling import Choice
from scanl.whole import whole_number

OWN_CACHES = ("transformers.models.minimax.", "transformers.models.xlstm.")  # whose caches have classes of their own
UNSEEN_OPTIONS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


class CacheSession:
    """A text of an accelerated model of transformers, which its own `generate` continues:

        hub.accelerate(model)
        session = CacheSession(model, draft=PromptLookup())
        ids = model.generate(ids, custom_generate=session, max_new_tokens=50)
        ids = model.generate(torch.cat([ids, answer], 1), custom_generate=session, max_new_tokens=50)

    As usual there, `ids` is the whole text; only what follows its longest known beginning is read. The processors and
    criteria of `generate` apply; a streamer does not, for `generate` does not hand it on. It takes one text,
    greedily or by sampling, and no beams.

    A cache is written in place, so it is copied at the end of each turn, and before tokens of a draft are read. If some
    of these were wrong, the copy takes its place. With attention in the model a copy grows with the text.

    Args:
        model: with a `Cache` of transformers, accelerated: some originals read a text in pieces wrongly.
        draft: proposes tokens from the text; None for none. It changes no token, up to rounding.
        turns: number of earlier turns that can be gone back to: a text that leaves the last one goes on from there.
    """

    def __init__(self, model: nn.Module, *, draft: PromptLookup | None = None, turns: int = 4) -> None:
        parameters = inspect.signature(type(model).forward).parameters
        name = next((name for name in CACHES if name in parameters), None)
        if name is None or type(model).__module__.startswith(OWN_CACHES):
            kind = f"a {type(model).__name__}, which keeps its states in no Cache of transformers"
            raise ConfigError(f"cache session: model is {kind}, expected one that does, such as MambaForCausalLM")
        if not any(map(forwards.replaced, model.modules())):
            raise ConfigError(
                f"cache session: model is a {type(model).__name__}, expected one after hub.accelerate(model)"
            )
        self.model: Any = model
        self.draft = draft
        self.turns = whole_number("cache session", "turns", turns)
        self._name = name
        self._has_positions = "position_ids" in parameters
        self._keeps_logits = "logits_to_keep" in parameters
        self._text = array("i")  # what the cache has read
        self._cache: Any = None
        self._ends: list[tuple[Text, Any]] = []  # what was read at the ends of turns, and copies of the cache

    def fork(self) -> Self:
        """Return another session of the same text, which goes on by itself."""
        other = copy.copy(self)
        other._text, other._cache = self._text[:], copy.deepcopy(self._cache)
        other._ends = list(self._ends)
        return other

    def __call__(
        self,
        model: nn.Module,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **others: Any,
    ) -> Any:
        """Decode a text. This is the signature that `generate` calls `custom_generate` with."""
        self._check(model, input_ids, others.get("attention_mask"), generation_config)
        drafting = None if self.draft is None else Drafting(self.draft)
        ended = False
        try:
            self._go_to(array("i", input_ids[0].tolist()), others.get(self._name))
            while not ended:
                input_ids, ended = self._piece(
                    input_ids, drafting, logits_processor, stopping_criteria, generation_config.do_sample
                )
        except BaseException:  # a cache that was written in part fits no text
            self._text, self._cache = array("i"), None
            raise
        if not generation_config.return_dict_in_generate:
            return input_ids
        from transformers.generation.utils import GenerateDecoderOnlyOutput

        return GenerateDecoderOnlyOutput(sequences=cast(Any, input_ids))

    def _check(self, model: nn.Module, input_ids: Tensor, attention_mask: Tensor | None, config: Any) -> None:
        if model is not self.model:
            raise ConfigError("cache session: model is another one, expected the session's own")
        if input_ids.shape[0] != 1 or config.num_beams > 1:
            shape = f"{tuple(input_ids.shape)} with {config.num_beams} beams"
            raise ShapeError(f"cache session: input_ids has shape {shape}, expected (1, T) and one beam")
        if attention_mask is not None and not bool(attention_mask.bool().all()):
            raise ShapeError("cache session: attention_mask masks tokens, expected none of padding: it is one text")
        for name in UNSEEN_OPTIONS:
            if getattr(config, name, False):
                raise ConfigError(f"cache session: {name} is True, expected False: only tokens are returned")

    def _go_to(self, text: Text, fresh: Any) -> None:
        """Go back to the cache of the longest beginning of the text. fresh: an empty cache that `generate` has made."""
        if self._cache is not None and self.turns:
            self._ends = [*self._ends, (self._text[:], copy.deepcopy(self._cache))][-self.turns :]
        if self._cache is None or self._text != text[:-1][: len(self._text)]:
            self._ends = [(read, cache) for read, cache in self._ends if read == text[:-1][: len(read)]]
            read, cache = self._ends[-1] if self._ends else (array("i"), None)
            self._text, self._cache = read[:], copy.deepcopy(cache)
        if self._cache is None:
            from transformers import DynamicCache

            self._cache = DynamicCache(config=self.model.config) if fresh is None else fresh

    def _piece(
        self, ids: Tensor, drafting: Drafting | None, processor: Any, criteria: Any, sampled: bool
    ) -> tuple[Tensor, bool]:
        """Read the pending tokens and those of a draft. Return the text with the accepted ones, and whether it ends."""
        pending, drafted = ids[:, len(self._text) :], list[int]()
        if drafting is not None:
            drafted = drafting.propose(array("i", ids[0].tolist()), ROWS - pending.shape[1], Choice())
        undo = copy.deepcopy(self._cache) if drafted else None
        logits = self._read(
            torch.cat([pending, pending.new_tensor([drafted])], 1) if drafted else pending, len(drafted) + 1
        )
        for used in range(len(drafted) + 1):
            scores = processor(ids, logits[:, used].to(torch.float32, copy=True))
            token = torch.multinomial(scores.softmax(-1), 1)[:, 0] if sampled else scores.argmax(-1)
            ids = torch.cat([ids, token[:, None]], 1)
            ended = bool(criteria(ids, None).all())
            if used == len(drafted):
                self._text = array("i", ids[0, :-1].tolist())
            elif ended or int(token) != drafted[used]:
                self._cache = undo
            else:
                continue
            if drafting is not None and drafted and not ended:
                drafting.learn(len(drafted), used)
            return ids, ended
        raise AssertionError

    def _read(self, tokens: Tensor, rows: int) -> Tensor:
        """Read tokens (1, T) into the cache. Return logits (1, rows, V) after the last ones."""
        options: dict[str, Any] = {self._name: self._cache}
        if self._has_positions:
            first = len(self._text)
            options["position_ids"] = torch.arange(first, first + tokens.shape[1], device=tokens.device)[None]
        if self._keeps_logits:
            options["logits_to_keep"] = rows
        logits = self.model(tokens, use_cache=True, return_dict=True, **options).logits
        return logits[:, -rows:]
