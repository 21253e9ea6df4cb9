"""Tokens as text: bytes, numbers, and what stops a text."""

import random

import pytest

from scanl.errors import ConfigError
from scanl.serve.texts import NEIGHBORS, ByteText, Characters, NumberText, TokenizerText, Writing

SEVEN = "é\N{EURO SIGN}!"  # of two, three and one byte


def written(tokens, *stops, ends=frozenset()):
    """The text of each token, whether it ends there, and what is left."""
    writing = Writing(ByteText().decoder([]), stops, ends)
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
    assert NumberText().encode("") == []
    assert NumberText().decoder([]).add(5) == NumberText().decoder([]).end() == ""
    with pytest.raises(ConfigError, match="prompt is a text, expected a list of tokens because the model has no token"):
        NumberText().encode("a")


@pytest.fixture(scope="module")
def llama():
    """A tokenizer as SentencePiece makes them: <s> and a space before a text, bytes for what is no word, </s> after."""
    pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")
    from tokenizers import Tokenizer, decoders, models, normalizers, processors
    from transformers import PreTrainedTokenizerFast

    words = ["<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"\u2581abcXY"]
    made = Tokenizer(models.BPE({word: n for n, word in enumerate(words)}, [], byte_fallback=True))
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(parts)
    made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    made.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")


def pieces_of(decoder, tokens):
    return [decoder.add(token) for token in tokens], decoder.end()


def test_a_tokenizer_begins_a_text_once(llama):
    texts = TokenizerText(llama)
    assert (texts.start, texts.ends) == ([0], {1})
    begun, more = texts.encode("ab"), texts.encode("ca b", begins=False)
    assert begun[0] == 0
    assert 0 not in more
    assert llama.decode([*begun, *more], skip_special_tokens=True) == "abca b"
    assert [*begun, *more] == llama("abca b")["input_ids"]


@pytest.mark.parametrize("seed", range(4))
def test_pieces_of_a_tokenizer_are_its_text(llama, seed):
    """The whole text, as the tokenizer decodes it at once, is what comes piece by piece, also from the middle on."""
    draw = random.Random(seed)
    text = "".join(draw.choice(["a", " ", "b", "\u20ac", "\U0001f600", "\u00e9"]) for _ in range(60))
    tokens = TokenizerText(llama).encode(text)
    for begin in (1, 2, len(tokens) // 2, len(tokens) - 3):
        pieces, rest = pieces_of(TokenizerText(llama).decoder(tokens[:begin]), tokens[begin:])
        known = llama.decode(tokens[:begin], skip_special_tokens=True).rstrip("\ufffd")
        assert known + "".join(pieces) + rest == text
        assert "\ufffd" not in "".join(pieces)


def test_a_letter_begun_in_the_prompt_comes_with_its_last_byte():
    tokens = "x\U0001f600y".encode()
    for begin in (2, 3, 4):
        pieces = [""] * (4 - begin) + ["\U0001f600", "y"]
        assert pieces_of(ByteText().decoder(tokens[:begin]), tokens[begin:]) == (pieces, "")
    # a letter that is not completed is the prompt's, and so is one that stands for an error
    assert pieces_of(ByteText().decoder(b"x\xe2\x82"), b"yz") == (["y", "z"], "")
    assert pieces_of(ByteText().decoder("x\ufffd".encode()), b"yz") == (["y", "z"], "")


def test_wrong_bytes_come_as_soon_as_they_cannot_be_a_letter():
    wrong = bytes(random.Random(0).choices(range(128, 256), k=200)) + b"!"
    pieces, rest = pieces_of(ByteText().decoder(b""), wrong)
    assert pieces[-1].endswith("!")
    assert not rest
    assert max(windows(bytes([255]) * 200)) <= 4 * NEIGHBORS
    assert len(pieces_of(ByteText().decoder(b""), bytes([255]) * 200)[1]) <= 4 * NEIGHBORS
    assert "".join(pieces).replace("\ufffd", "") == wrong.decode(errors="ignore")


def windows(tokens):
    """How many tokens are decoded at once, each time."""
    sizes = []

    def decode(tokens, **_):
        sizes.append(len(tokens))
        return bytes(tokens).decode(errors="replace")

    pieces_of(Characters(decode, b""), tokens)
    return sizes


def test_letters_before_an_incomplete_one_come_at_once():
    """A token that ends a word and begins a letter: its word is shown, and a stop in it is seen."""
    words = [b"a", b"bc\xe2\x82", b"\xac!"]

    def decode(tokens, **_):
        return b"".join(words[token] for token in tokens).decode(errors="replace")

    assert pieces_of(Characters(decode, []), [0, 1, 2]) == (["a", "bc", "\u20ac!"], "")
    for stop, shown, kept in (("c", "ab", (1, "b")), ("!", "abc\u20ac", (1, "bc\u20ac")), ("bc", "a", (1, ""))):
        writing = Writing(Characters(decode, []), [stop], frozenset())
        text = ""
        for token in (0, 1, 2):
            text += writing.add(token)[0]
            if writing.is_stopped:
                break
        assert (text, writing.is_stopped) == (shown, True)
        assert writing.kept(3) == kept


def test_a_stop_in_what_is_left_at_the_end():
    writing = Writing(ByteText().decoder([]), ["\ufffd"], frozenset({0}))
    assert [writing.add(token) for token in b"a\xe2\x00"] == [("a", False), ("", False), ("", True)]
    assert writing.is_stopped
    assert writing.kept(3) == (1, "")
    writing = Writing(ByteText().decoder([]), [], frozenset({0}))
    assert [writing.add(token) for token in b"a\xe2\x00"][-1] == ("\ufffd", True)
    assert not writing.is_stopped
    assert writing.kept(3) == (2, "")


def test_two_stops_in_one_token():
    words = ["xcdab", "y"]
    for stops in (["ab", "cd"], ["cd", "ab"]):
        writing = Writing(Characters(lambda tokens, **_: "".join(words[t] for t in tokens), []), stops, frozenset())
        assert writing.add(0) == ("x", True)
        assert writing.kept(1) == (0, "x")


@pytest.mark.parametrize("seed", range(40))
def test_what_is_kept_is_what_was_shown(seed):
    """A plain search: the text before the first stop, and tokens that have these letters and no others."""
    draw = random.Random(seed)
    tokens = b"".join(draw.choices([b"a", b"a", b"b", b"X", "\N{EURO SIGN}".encode(), b"\xe2\x82", b"\xff"], k=30))
    letters = draw.choice(["ab", "aX", "ab\N{EURO SIGN}"])
    stops = ["".join(draw.choices(letters, k=draw.randrange(2, 5))) for _ in range(2)]
    whole = tokens.decode(errors="replace")
    begun = [whole[:n] for n in range(len(whole) + 1)]
    first = next((text for text in begun if any(stop in text for stop in stops)), None)
    shown = whole if first is None else first[: min(first.find(stop) for stop in stops if stop in first)]
    writing, text, given = Writing(ByteText().decoder([]), stops, frozenset()), "", [""]
    for token in tokens:
        text += writing.add(token)[0]
        given.append(text)
        if writing.is_stopped:
            break
    else:
        text += writing.end()
    assert text == shown
    count = len(given) - 1
    kept, rest = writing.kept(count)
    assert rest == ""
    assert tokens[:kept].decode(errors="replace") == shown
    for seen in range(count):
        kept, rest = writing.kept(seen)
        assert kept <= seen
        assert tokens[:kept].decode(errors="replace") + rest == given[seen]
