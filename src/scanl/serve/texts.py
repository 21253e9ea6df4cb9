"""How a model's tokens are written as text: bytes, the tokens of a tokenizer, or only their numbers."""

import codecs
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from scanl.errors import ConfigError

NEIGHBORS = 8  # tokens with which a token is decoded, because its text may depend on those before it
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # it stands for an incomplete character


class Decoder(Protocol):
    """The text of tokens that come one after another."""

    def add(self, token: int) -> str:
        """Return the text that is complete with this token; it may be empty."""
        ...

    def end(self) -> str:
        """Return what is left of the text when no token follows."""
        ...


class Texts(Protocol):
    """The texts of a vocabulary. start: the prompt in place of an empty one.   ends: tokens after which a text ends."""

    start: Sequence[int]
    ends: frozenset[int]

    def encode(self, text: str) -> list[int]: ...

    def decoder(self, prompt: Sequence[int]) -> Decoder:
        """Return the decoder of the tokens that follow a prompt."""
        ...


class Bytes:
    """UTF-8, a token for each byte. A text begins after a zero byte, as in `scanl train`."""

    start: Sequence[int] = (0,)
    ends: frozenset[int] = frozenset()

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decoder(self, prompt: Sequence[int]) -> Decoder:
        return _OfBytes()


class _OfBytes:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: int) -> str:
        return self._decoder.decode(bytes([token]))

    def end(self) -> str:
        return self._decoder.decode(b"", final=True)


class Numbers:
    """Tokens without a text: a prompt is a list of their numbers."""

    start: Sequence[int] = ()
    ends: frozenset[int] = frozenset()

    def encode(self, text: str) -> list[int]:
        if not text:
            return []
        raise ConfigError("completions: prompt is a text, expected a list of tokens because the model has no tokenizer")

    def decoder(self, prompt: Sequence[int]) -> Decoder:
        return _OfNumbers()


class _OfNumbers:
    def add(self, token: int) -> str:
        return ""

    def end(self) -> str:
        return ""


class Tokenized:
    """The texts of a tokenizer of transformers."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        special = [token for token in (tokenizer.bos_token_id, tokenizer.eos_token_id) if token is not None]
        self.start: Sequence[int] = special[:1]
        self.ends = frozenset(special[-1:] if tokenizer.eos_token_id is not None else ())

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text)["input_ids"])

    def decoder(self, prompt: Sequence[int]) -> Decoder:
        return Characters(self._tokenizer.decode, prompt)


class Characters:
    """The decoder of a tokenizer. Text is complete when its characters are.

    Each token is decoded together with a few tokens before it, because its text may depend on its neighbours.

    decode: of a tokenizer of transformers.   prompt: the tokens before the first one.
    """

    def __init__(self, decode: Callable[..., str], prompt: Sequence[int]) -> None:
        self._decode = decode
        self._window = list(prompt)[-NEIGHBORS:]
        self._prefix = self._text()

    def add(self, token: int) -> str:
        self._window.append(token)
        text = self._text()
        if text.endswith(INCOMPLETE):
            return ""
        new = text[len(self._prefix) :]
        self._window = self._window[-NEIGHBORS:]
        self._prefix = self._text()
        return new

    def end(self) -> str:
        return self._text()[len(self._prefix) :]

    def _text(self) -> str:
        return self._decode(self._window, skip_special_tokens=True, clean_up_tokenization_spaces=False)


class Writing:
    """A text that is written token by token, and ends before the first of some stops.

    Text that may be the beginning of a stop is held back until that is known.
    """

    def __init__(self, decoder: Decoder, stops: Sequence[str], ends: frozenset[int]) -> None:
        self._decoder, self._stops, self._ends = decoder, stops, ends
        self._held = ""

    def add(self, token: int) -> tuple[str, bool]:
        """Return the text that this token completes, and whether the text ends with it."""
        if token in self._ends:
            return self.end(), True
        self._held += self._decoder.add(token)
        places = [place for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if places:
            return self._held[: min(places)], True
        length = max((self._beginning(stop) for stop in self._stops), default=0)
        text, self._held = self._held[: len(self._held) - length], self._held[len(self._held) - length :]
        return text, False

    def end(self) -> str:
        """Return the text that was held back."""
        return self._held + self._decoder.end()

    def _beginning(self, stop: str) -> int:
        """Return how many letters at the end of the held text are the beginning of a stop."""
        longest = min(len(stop) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(stop[:n])), 0)
