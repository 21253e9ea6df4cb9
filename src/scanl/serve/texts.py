"""A model's tokens as text: bytes, the tokens of a tokenizer, or only their numbers."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from scanl.errors import ConfigError

NEIGHBORS = 8  # tokens with which a token is decoded, because its text may depend on those before it
INCOMPLETE_SIGN = "\N{REPLACEMENT CHARACTER}"  # it stands for a byte, or for bytes, of an incomplete character
MAX_BYTES = 3  # bytes of an incomplete character
CONTEXT = NEIGHBORS + MAX_BYTES  # tokens of a prompt that a decoder needs


class Decoder(Protocol):
    """The text of tokens that come one after another. held: the signs of incomplete characters at its end."""

    held: str

    def add(self, token: int) -> str:
        """Return the text that is complete with this token; it may be empty."""
        ...

    def end(self) -> str:
        """Return the rest of the text when no token follows."""
        ...


class VocabularyText(Protocol):
    """The texts of a vocabulary. start: the prompt in place of an empty one.   ends: tokens after which a text ends."""

    start: Sequence[int]
    ends: frozenset[int]

    def encode(self, text: str, begins: bool = True) -> list[int]:
        """Return the tokens of a text. begins: whether it is the beginning of one, and does not continue another."""
        ...

    def decoder(self, prompt: Sequence[int]) -> Decoder:
        """Return the decoder of the tokens that follow a prompt."""
        ...


class ByteText:
    """UTF-8, a token for each byte. A text begins after a zero byte, as in `scanl train`."""

    start: Sequence[int] = (0,)
    ends: frozenset[int] = frozenset()

    def encode(self, text: str, begins: bool = True) -> list[int]:
        return list(text.encode())

    def decoder(self, prompt: Sequence[int]) -> Decoder:
        return Characters(lambda tokens, **_: bytes(tokens).decode(errors="replace"), prompt)


class NumberText:
    """Tokens without a text: a prompt is a list of their numbers."""

    start: Sequence[int] = ()
    ends: frozenset[int] = frozenset()

    def encode(self, text: str, begins: bool = True) -> list[int]:
        if not text:
            return []
        raise ConfigError("completions: prompt is a text, expected a list of tokens because the model has no tokenizer")

    def decoder(self, prompt: Sequence[int]) -> Decoder:
        return _OfNumbers()


class _OfNumbers:
    held = ""

    def add(self, token: int) -> str:
        return ""

    def end(self) -> str:
        return ""


class TokenizerText:
    """The texts of a tokenizer of transformers."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        special = [token for token in (tokenizer.bos_token_id, tokenizer.eos_token_id) if token is not None]
        self.start: Sequence[int] = special[:1]
        self.ends = frozenset(special[-1:] if tokenizer.eos_token_id is not None else ())

    def encode(self, text: str, begins: bool = True) -> list[int]:
        if begins:
            return list(self._tokenizer(text)["input_ids"])
        line, both = self._plain("\n"), self._plain(f"\n{text}")
        # A tokenizer that puts a space before every text does so before the line alone.
        return both[len(line) :] if both[: len(line)] == line else self._plain(text)

    def _plain(self, text: str) -> list[int]:
        """Return the tokens of a text without special ones before and after it."""
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def decoder(self, prompt: Sequence[int]) -> Decoder:
        return Characters(self._tokenizer.decode, prompt)


class Characters:
    """The decoder of a tokenizer. It gives a character when all its bytes are there, those in the prompt too.

    Each token is decoded together with a few tokens before it, because its text may depend on its neighbors.

    decode: of a tokenizer of transformers.   prompt: the tokens before the first one.
    """

    def __init__(self, decode: Callable[..., str], prompt: Sequence[int]) -> None:
        self._decode = decode
        self._window = self._last(prompt)
        self._past = self._text(self._window)  # of the window's text, what the prompt and the pieces so far have
        self.held = ""

    def add(self, token: int) -> str:
        self._window.append(token)
        text = self._text(self._window)
        complete = text.rstrip(INCOMPLETE_SIGN)
        if len(self._window) > 3 * NEIGHBORS:  # no character has so many bytes: they are wrong ones
            complete = text
        new = self._beyond(complete)
        self.held = self._beyond(text)[len(new) :]
        if new:
            self._past = complete
        if len(self._window) > 2 * NEIGHBORS and not self.held:
            self._window = self._last(self._window)
            self._past = self._text(self._window)
        return new

    def end(self) -> str:
        return self._beyond(self._text(self._window))

    def _beyond(self, text: str) -> str:
        """Return the new part of a text, with a character that the prompt has begun: its sign there was another one."""
        pairs = enumerate(zip(text, self._past, strict=False))
        return text[next((n for n, (new, past) in pairs if new != past), min(len(text), len(self._past))) :]

    def _last(self, tokens: Sequence[int]) -> list[int]:
        """Return the last few tokens; a few more if they would begin within a character."""
        windows = [list(tokens[-n:]) for n in range(NEIGHBORS, CONTEXT + 1)]
        return next((window for window in windows if not self._text(window).startswith(INCOMPLETE_SIGN)), windows[0])

    def _text(self, tokens: list[int]) -> str:
        return self._decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


class TextPlace(NamedTuple):
    """Progress of a text after a token: its letters, the number of shown ones, and signs of incomplete characters."""

    letters: int = 0
    shown: int = 0
    held: str = ""


class Writing:
    """A text that is written token by token, and ends before the first of some stops.

    Text that may be the beginning of a stop is held back until that is known. is_stopped: whether a stop has come.
    """

    def __init__(self, decoder: Decoder, stops: Sequence[str], ends: frozenset[int]) -> None:
        self._decoder, self._stops, self._ends = decoder, stops, ends
        self._held = ""
        self._texts: list[str] = []  # of each token, and of the end
        self._letters = 0  # of all these
        self._marks = [TextPlace()]  # before the first token, and after each
        self.is_stopped = False

    def add(self, token: int) -> tuple[str, bool]:
        """Return the text that this token completes, and whether the text ends with it."""
        if token in self._ends:
            return self.end(), True
        text = self._take(self._decoder.add(token))
        shown = self._marks[-1].shown
        self._marks.append(TextPlace(self._letters, shown + len(text), self._decoder.held))
        return text, self.is_stopped

    def end(self) -> str:
        """Return the text that was held back."""
        text = self._take(self._decoder.end(), is_last=True)
        self._marks[-1] = self._marks[-1]._replace(shown=self._marks[-1].shown + len(text))
        return text

    def kept(self, count: int) -> tuple[int, str]:
        """Return the number of tokens whose text is shown after `count` of them, and the shown text beyond these."""
        last = min(count, len(self._marks) - 1)
        shown = self._marks[last].shown
        n = next((n for n in range(last, 0, -1) if self._marks[n].letters <= shown and not self._marks[n].held), 0)
        return n, "".join(self._texts)[self._marks[n].letters : shown]

    def _take(self, new: str, is_last: bool = False) -> str:
        """Take new text, and return what can be shown."""
        for n in range(len(self._marks) - 1, 0, -1):
            letters, shown, held = self._marks[n]
            if not held:
                break
            if new.startswith(held):  # they were wrong bytes, and no character that is completed now
                self._marks[n] = TextPlace(letters + len(held), shown)
        self._texts.append(new)
        self._letters += len(new)
        return self._show(new, is_last)

    def _show(self, new: str, is_last: bool) -> str:
        """Return the part of the held and the new text that can be shown."""
        self._held += new
        places = [place for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if places:
            self.is_stopped = True
            text, self._held = self._held[: min(places)], ""
            return text
        length = 0 if is_last else max((self._beginning(stop) for stop in self._stops), default=0)
        text, self._held = self._held[: len(self._held) - length], self._held[len(self._held) - length :]
        return text

    def _beginning(self, stop: str) -> int:
        """Return the number of letters at the end of the held text that begin a stop."""
        longest = min(len(stop) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(stop[:n])), 0)
