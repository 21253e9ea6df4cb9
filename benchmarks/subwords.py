"""Subwords: tokens of one or more bytes, learned from texts by byte pair encoding."""

import functools
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush
from itertools import pairwise

from scanl.errors import ConfigError

Pair = tuple[int, int]
WORDS = re.compile(rb" ?[^ \n]+|[ \n]")


class Subwords:
    """A vocabulary of the 256 bytes and of pairs of tokens that are often side by side in a word.

    A word has the blank before it. Any text has tokens, and `decode` returns it as it was.
    Source: Sennrich, Haddow and Birch, "Neural Machine Translation of Rare Words with Subword Units",
    arXiv:1508.07909, algorithm 1. Differs: bytes in the place of characters, and no sign for the end of a word.

    merges: the pairs; pair i is the token 256 + i.
    """

    def __init__(self, merges: Sequence[Pair]) -> None:
        self.merges = [(int(first), int(second)) for first, second in merges]
        self._order = {pair: i for i, pair in enumerate(self.merges)}
        self._bytes = [bytes([byte]) for byte in range(256)]
        for first, second in self.merges:
            self._bytes.append(self._bytes[first] + self._bytes[second])
        self._of_word = functools.lru_cache(maxsize=2**16)(self._tokens)

    def __len__(self) -> int:
        return len(self._bytes)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text.

        >>> Subwords([(101, 115), (256, 116)]).encode("test")  # es, then est
        [116, 257]
        """
        return [token for word in WORDS.findall(text.encode()) for token in self._of_word(word)]

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens. Bytes that are no UTF-8 become the sign of replacement."""
        return b"".join(self._bytes[token] for token in tokens).decode(errors="replace")

    def _tokens(self, word: bytes) -> tuple[int, ...]:
        tokens = tuple(word)
        while known := [pair for pair in pairwise(tokens) if pair in self._order]:
            pair = min(known, key=self._order.__getitem__)
            tokens = joined(tokens, pair, 256 + self._order[pair])
        return tokens


def learn_subwords(texts: Iterable[str], size: int) -> Subwords:
    """Learn a vocabulary of `size` tokens, of fewer if no pair occurs twice. Of pairs of one count the lowest is first.

    Raises ConfigError for a size below 256.
    """
    if size < 256:
        raise ConfigError(f"subwords: size is {size}, expected at least 256, the bytes")
    counts = Counter(word for text in texts for word in WORDS.findall(text.encode()))
    words, often = [tuple(word) for word in counts], list(counts.values())
    pairs: Counter[Pair] = Counter()
    places: defaultdict[Pair, set[int]] = defaultdict(set)  # words that have a pair, or had it
    for i, word in enumerate(words):
        for pair in pairwise(word):
            pairs[pair] += often[i]
            places[pair].add(i)
    merges: list[Pair] = []
    queue = [(-count, pair) for pair, count in pairs.items()]
    heapify(queue)
    while len(merges) < size - 256 and queue:
        count, best = heappop(queue)
        if -count != pairs[best]:  # it was counted before other merges
            continue
        if -count < 2:
            break
        changed: set[Pair] = set()
        for i in places.pop(best):
            old = words[i]
            words[i] = joined(old, best, 256 + len(merges))
            for word, sign in ((old, -1), (words[i], 1)):
                for pair in pairwise(word):
                    pairs[pair] += sign * often[i]
                    changed.add(pair)
            for pair in pairwise(words[i]):
                places[pair].add(i)
        merges.append(best)
        for pair in changed:
            heappush(queue, (-pairs[pair], pair))
    return Subwords(merges)


def joined(tokens: tuple[int, ...], pair: Pair, new: int) -> tuple[int, ...]:
    """Return the tokens with `new` in the place of each occurrence of a pair, from the left."""
    result, i = [], 0
    while i < len(tokens):
        if tokens[i : i + 2] == pair:
            result.append(new)
            i += 2
        else:
            result.append(tokens[i])
            i += 1
    return tuple(result)
