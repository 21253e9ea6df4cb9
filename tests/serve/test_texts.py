"""Tokens as text: bytes, numbers, and what stops a text."""

import pytest

from scanl.errors import ConfigError
from scanl.serve.texts import Bytes, Numbers, Writing

SEVEN = "é\N{EURO SIGN}!"  # of two, three and one byte


def written(tokens, *stops, ends=frozenset()):
    """The text of each token, whether it ends there, and what is left."""
    writing = Writing(Bytes().decoder([]), stops, ends)
    pieces = []
    for token in tokens:
        pieces.append(writing.add(token))
        if pieces[-1][1]:
            return pieces, ""
    return pieces, writing.end()


def test_characters_come_when_they_are_complete():
    pieces, rest = written(SEVEN.encode())
    assert [text for text, _ in pieces] == ["", "é", "", "", "\N{EURO SIGN}", "!"]
    assert rest == ""
    assert written(SEVEN.encode()[:1])[1] == "\N{REPLACEMENT CHARACTER}"


def test_a_text_ends_before_a_stop_and_its_beginning_is_held_back():
    pieces, _ = written(b"abXaXY-", "XY", "Q")
    assert pieces == [("a", False), ("b", False), ("", False), ("Xa", False), ("", False), ("", True)]
    assert written(b"abX", "XY") == ([("a", False), ("b", False), ("", False)], "X")


def test_the_first_of_several_stops_counts():
    assert written(b"abcd", "cd", "b")[0][-1] == ("", True)
    assert [text for text, _ in written(b"aXbc", "Xbcd", "bc")[0]] == ["a", "", "", "X"]


def test_a_token_ends_a_text():
    pieces, _ = written([97, 0, 98], ends=frozenset({0}))
    assert pieces == [("a", False), ("", True)]


def test_numbers_have_no_text():
    assert Numbers().encode("") == []
    assert Numbers().decoder([]).add(5) == Numbers().decoder([]).end() == ""
    with pytest.raises(ConfigError, match="prompt is a text, expected a list of tokens because the model has no token"):
        Numbers().encode("a")
