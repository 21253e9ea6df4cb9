"""Subwords: the published example, texts as they were, and what is refused."""

import sys
from pathlib import Path

import pytest

from scanl.errors import ConfigError

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from subwords import Subwords, learn_subwords

# Sennrich et al., arXiv:1508.07909, algorithm 1, without its sign for the end of a word.
WORDS = ["low"] * 5 + ["lower"] * 2 + ["newest"] * 6 + ["widest"] * 3


def test_the_published_example():
    subwords = learn_subwords(WORDS, 260)
    assert [subwords.decode([256 + i]) for i in range(4)] == ["es", "est", "lo", "low"]
    assert [subwords.decode([token]) for token in subwords.encode("lowest slow")] == ["low", "est", " ", "s", "low"]


def test_any_text_comes_back_and_the_vocabulary_is_made_again():
    subwords = learn_subwords(WORDS + ["aaaaa aaa"] * 2, 1000)
    assert len(subwords) < 1000  # no pair is left that occurs twice
    for text in ("", " ", "a  b\n\n c ", "aaaa", "Señor, ¿qué? €", "newest\nlowest"):
        assert subwords.decode(subwords.encode(text)) == text
        assert Subwords(subwords.merges).encode(text) == subwords.encode(text)
    assert Subwords([(97, 97)]).encode("aaaaa") == [256, 256, 97]
    assert subwords.decode([195]) == "�"


def test_a_size_below_the_bytes_is_refused():
    with pytest.raises(ConfigError, match="subwords: size is 255, expected at least 256, the bytes"):
        learn_subwords(WORDS, 255)
