"""The engine: its answers are those of `generate`, whatever others there are; its limits; what happens at an error."""

import queue

import pytest
import torch

from scanl.errors import ConfigError, DivergenceError
from scanl.models import LanguageModel, Stack
from scanl.ops import exact
from scanl.serve import Engine, Limits
from scanl.serve.engine import AnswerPiece, BusyError, SessionBusyError, Wish
from scanl.serve.texts import ByteText, Characters, NumberText

COVERS = ["serve/limits"]

LONG = 2000  # tokens, more than a test waits for


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return LanguageModel(7, Stack(8, 1, "lru")).eval()


@pytest.fixture
def engine(model):
    engine = Engine(model, NumberText(), Limits(streams=3, tokens=LONG, context=2 * LONG, sessions=1))
    yield engine
    engine.close()


class Heard:
    """What an answer has delivered."""

    def __init__(self, engine: Engine, *tokens: int, length: int = 4, **options):
        self.pieces: queue.SimpleQueue[AnswerPiece] = queue.SimpleQueue()
        self.wish = Wish(tokens, length, **options)
        self.answer = engine.submit(self.wish, self.pieces.put)

    def piece(self) -> AnswerPiece:
        return self.pieces.get(timeout=600)


def tokens_of(heard: Heard) -> tuple[list[int], str]:
    tokens, finish = [], None
    while finish is None:
        piece = heard.piece()
        tokens.extend(piece.tokens)
        finish = piece.finish
    return tokens, finish


def expected(model, prompt, **options):
    with exact():
        return [int(token) for token in model.generate(torch.tensor([prompt]), **options)]


def settled(engine):
    """Wait until the commands so far are obeyed."""
    done = queue.SimpleQueue()
    engine._commands.put(lambda: done.put(None))
    done.get(timeout=600)


def test_answers_are_those_of_generate(model, engine):
    first = Heard(engine, 1, 2, 3, length=9, seed=5)
    first.piece()
    others = [Heard(engine, 4, length=3, temperature=0.0), Heard(engine, *[6] * 300, length=5, seed=5, top_k=3)]
    assert tokens_of(others[0]) == (expected(model, [4], max_new_tokens=3, temperature=0), "length")
    assert tokens_of(others[1])[0] == expected(model, [6] * 300, max_new_tokens=5, seed=5, top_k=3)
    assert tokens_of(first)[0] == expected(model, [1, 2, 3], max_new_tokens=9, seed=5)[1:]


def test_a_session_goes_on_and_the_oldest_is_forgotten(model, engine):
    begun, _ = tokens_of(Heard(engine, 1, 2, temperature=0.0, session="a"))
    settled(engine)
    followed, _ = tokens_of(Heard(engine, 3, temperature=0.0, session="a"))
    assert followed == expected(model, [1, 2, *begun, 3], max_new_tokens=4, temperature=0)
    settled(engine)
    tokens_of(Heard(engine, 5, session="b"))  # the limit is one session
    settled(engine)
    forgotten, _ = tokens_of(Heard(engine, 3, temperature=0.0, session="a"))
    assert forgotten == expected(model, [3], max_new_tokens=4, temperature=0)


def test_beyond_the_limits(engine):
    open_ones = [Heard(engine, 1, length=LONG, session="a"), *(Heard(engine, 1, length=LONG) for _ in range(2))]
    with pytest.raises(BusyError, match="3 answers are being written, expected fewer than 3; try again later"):
        Heard(engine, 1)
    engine.cancel(open_ones[1].answer)
    settled(engine)
    assert engine.active == 2
    with pytest.raises(SessionBusyError, match="session 'a' has an answer that has not ended"):
        Heard(engine, 1, session="a")
    for heard in open_ones:
        engine.cancel(heard.answer)
    with pytest.raises(ConfigError, match="max_tokens is 2001, expected at most 2000"):
        Heard(engine, 1, length=LONG + 1)
    with pytest.raises(ConfigError, match="session, prompt and max_tokens are 4001 tokens, expected at most 4000"):
        Heard(engine, *[1] * (LONG + 1), length=LONG)
    with pytest.raises(ConfigError, match="prompt has token 7, expected 0 to 6 because of the model"):
        Heard(engine, 7)
    with pytest.raises(ConfigError, match="prompt is empty, expected at least one token"):
        Heard(engine)
    settled(engine)
    assert engine.active == 0


def test_time_ends_an_answer(model):
    engine = Engine(model, NumberText(), Limits(seconds=0.01))
    assert tokens_of(Heard(engine, 1, length=LONG))[1] == "time"
    engine.close()


def test_an_answer_has_one_last_piece(model):
    engine = Engine(model, NumberText(), Limits(seconds=1e-9))
    heard = Heard(engine, 1, length=1)
    assert heard.piece().finish == "length"
    engine.close()
    assert heard.pieces.empty()


def test_an_error_in_a_step_ends_the_answers_and_not_the_engine(model, engine, monkeypatch):
    def fail():
        raise RuntimeError("for this test")

    heard = Heard(engine, 1, length=LONG)
    heard.piece()
    monkeypatch.setattr(engine._streams, "step", fail)
    assert tokens_of(heard)[1] == "error"
    assert tokens_of(Heard(engine, 1, temperature=0.0))[0] == expected(model, [1], max_new_tokens=4, temperature=0)


def test_close_writes_what_has_begun_and_takes_no_more(model):
    engine = Engine(model, NumberText(), Limits())
    heard = [Heard(engine, 1, 2, length=20, temperature=0.0) for _ in range(3)]
    engine.close()
    assert all(tokens_of(each)[0] == expected(model, [1, 2], max_new_tokens=20, temperature=0) for each in heard)
    with pytest.raises(BusyError, match="the server is ending"):
        Heard(engine, 1)


@pytest.fixture(scope="module")
def broken():
    """A model whose logits are NaN after token 6."""
    torch.manual_seed(0)
    model = LanguageModel(7, Stack(8, 1, "lru")).eval()
    model.embedding.weight.data[6] = torch.nan
    return model


def made(model, texts=None, **limits):
    return Engine(model, texts or NumberText(), Limits(**{"tokens": LONG, "context": 2 * LONG} | limits))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_end_one_answer_alone(broken, temperature):
    engine = made(broken)
    begun = tokens_of(Heard(engine, 1, 2, temperature=0.0, session="a"))[0]
    other = Heard(engine, 1, 2, 3, length=60, top_k=1)
    failing = Heard(engine, 3, 6, temperature=temperature, session="a")
    last = failing.piece()
    assert (last.text, last.tokens, last.finish) == ("", (), "error")
    assert isinstance(last.error, DivergenceError)
    assert "the largest logit of the next token is nan, expected a finite number" in str(last.error)
    assert tokens_of(other) == (expected(broken, [1, 2, 3], max_new_tokens=60, top_k=1), "length")
    assert tokens_of(Heard(engine, 4, temperature=0.0, session="a"))[0] == expected(
        broken, [1, 2, *begun, 4], max_new_tokens=4, temperature=0
    )
    engine.close()


@pytest.mark.parametrize("is_whole", [False, True])
def test_an_error_in_the_middle_leaves_what_was_seen(model, is_whole, monkeypatch):
    """The second row of the batch gets NaN at the third step: its session has the tokens before, or nothing."""
    spoiled, steps = LanguageModel(7, Stack(8, 1, "lru")).eval(), []
    spoiled.load_state_dict(model.state_dict())
    engine, decode = made(spoiled), spoiled.decode_logits

    def decode_logits(tokens, state, **options):
        logits, after = decode(tokens, state, **options)
        if len(tokens) == 2:
            steps.append(None)
            logits[1] = torch.where(torch.tensor(len(steps) < 3), logits[1], torch.nan)
        return logits, after

    monkeypatch.setattr(spoiled, "decode_logits", decode_logits)
    first = Heard(engine, 1, length=900, temperature=0.0)
    first.piece()
    failing = Heard(engine, 2, 3, length=900, temperature=0.0, session="a", is_whole=is_whole)
    seen, finish = tokens_of(failing)
    assert (finish, seen) == ("error", expected(model, [2, 3], max_new_tokens=3, temperature=0))
    monkeypatch.setattr(spoiled, "decode_logits", decode)
    before = [] if is_whole else [2, 3, *seen]
    assert tokens_of(Heard(engine, 5, temperature=0.0, session="a"))[0] == expected(
        model, [*before, 5], max_new_tokens=4, temperature=0
    )
    engine.cancel(first.answer)
    engine.close()


@pytest.mark.parametrize(
    "options", [{"temperature": 1e-40}, {"temperature": 1e-300}, {"top_p": 1e-46}, {"top_p": 5e-324}]
)
def test_the_smallest_options_take_the_likeliest_token(model, engine, options):
    assert tokens_of(Heard(engine, 1, 2, length=9, **options)) == (
        expected(model, [1, 2], max_new_tokens=9, temperature=0),
        "length",
    )


@pytest.mark.parametrize("limits", [{}, {"seconds": 1e-9}])
def test_the_session_is_free_when_the_last_piece_comes(model, limits):
    engine, errors, done = made(model, streams=1, **limits), [], queue.SimpleQueue()

    def next_turn(piece):
        if piece.finish is not None:
            try:
                engine.submit(Wish([2], 3, session="a"), done.put)
            except Exception as error:
                errors.append(error)
                done.put(AnswerPiece("", (), "error"))

    engine.submit(Wish([1], 3, session="a"), next_turn)
    while done.get(timeout=600).finish is None:
        pass
    assert not errors
    engine.close()


def test_a_session_keeps_the_text_before_a_stop():
    torch.manual_seed(0)
    model = LanguageModel(256, Stack(8, 1, "lru")).eval()
    engine = made(model, ByteText())
    drawn = bytes(expected(model, [*b"ab"], max_new_tokens=60, seed=3))
    at = next(n for n in range(20, 60) if chr(drawn[n]).isascii() and drawn.index(drawn[n]) == n)
    heard = Heard(engine, *b"ab", length=60, seed=3, stops=[chr(drawn[at])], session="a")
    assert tokens_of(heard) == (list(drawn[: at + 1]), "stop")
    assert tokens_of(Heard(engine, 99, temperature=0.0, session="a"))[0] == expected(
        model, [*b"ab", *drawn[:at], 99], max_new_tokens=4, temperature=0
    )
    engine.close()


class Words(NumberText):
    """Tokens that are words; 0 begins a text, and 6 ends one."""

    start, ends = (0,), frozenset({6})
    words = ("", "a", "b", "ab", "ba", "c", "")

    def encode(self, text, begins=True):
        return [0] * begins + [self.words.index(letter) for letter in text]

    def decoder(self, prompt):
        return Characters(lambda tokens, **_: "".join(self.words[token] for token in tokens), prompt)


def scripted(monkeypatch, engine, tokens):
    """Let the streams draw these tokens, whatever the model says."""
    coming = iter(tokens)
    monkeypatch.setattr(
        "scanl.models.decoding.streams.Choice.__call__", lambda self, logits: torch.tensor([next(coming)])
    )


def test_a_stop_within_a_token_and_a_token_that_ends(model, monkeypatch):
    engine = made(model, Words())

    def turn(prompt, tokens, **options):
        scripted(monkeypatch, engine, tokens)
        pieces, finish = queue.SimpleQueue(), None
        wish = Wish(prompt, 9, session="a", **options)
        engine.submit(wish, pieces.put)
        text = ""
        while finish is None:
            piece = pieces.get(timeout=600)
            text, finish = text + piece.text, piece.finish
        return text, finish, engine._sessions["a"].tokens.tolist()

    assert turn("a", [5, 3], stops=["b"]) == ("ca", "stop", [0, 1, 5, 1])
    assert turn("b", [5, 6]) == ("c", "stop", [0, 1, 5, 1, 2, 5])
    assert turn("", [1, 2, 5], stops=["ac", "bc"]) == ("a", "stop", [0, 1, 5, 1, 2, 5, 1])
    assert turn([2], [3, 6], stops=["bc"]) == ("ab", "stop", [0, 1, 5, 1, 2, 5, 1, 2, 3])
    engine.close()


@pytest.mark.parametrize("seen", [None, 0, 3])
def test_a_client_that_goes_has_its_session_as_it_saw_it(model, engine, seen):
    begun = tokens_of(Heard(engine, 1, 2, temperature=0.0, session="a"))[0]
    heard = Heard(engine, 3, length=LONG, temperature=0.0, session="a")
    got = [heard.piece().tokens[0] for _ in range(8)]
    engine.cancel(heard.answer, seen)
    settled(engine)
    assert engine.active == 0
    before = [1, 2, *begun] + ([] if seen is None else [3, *got[:seen]])
    assert tokens_of(Heard(engine, 5, temperature=0.0, session="a"))[0] == expected(
        model, [*before, 5], max_new_tokens=4, temperature=0
    )
    # it has ended, and the session has gone on: nothing is taken back
    whole = engine._sessions["a"].tokens.tolist()
    engine.cancel(heard.answer, 1)
    settled(engine)
    assert engine._sessions["a"].tokens.tolist() == whole


def test_a_client_that_goes_at_the_end(model, engine):
    heard = Heard(engine, 1, length=6, temperature=0.0, session="a")
    tokens = tokens_of(heard)[0]
    engine.cancel(heard.answer, 4)
    assert engine._sessions["a"].tokens.tolist() == [1, *tokens[:4]]
    engine.cancel(heard.answer)
    assert "a" not in engine._sessions
    alone = Heard(engine, 1, length=2)
    tokens_of(alone)
    engine.cancel(alone.answer)
    assert engine.active == 0


def test_an_error_of_a_step_leaves_the_sessions(model, engine, monkeypatch):
    def fail():
        raise RuntimeError("for this test")

    begun = tokens_of(Heard(engine, 1, temperature=0.0, session="a"))[0]
    heard = Heard(engine, 2, length=LONG, temperature=0.0, session="a")
    monkeypatch.setattr(engine._streams, "step", fail)
    seen, finish = tokens_of(heard)
    assert finish == "error"
    before = [1, *begun] + ([2, *seen] if seen else [])
    assert tokens_of(Heard(engine, 3, temperature=0.0, session="a"))[0] == expected(
        model, [*before, 3], max_new_tokens=4, temperature=0
    )


def test_the_session_that_was_idle_for_longest_goes_first(model):
    engine = made(model, sessions=2, context=40)
    for name in "aba":
        tokens_of(Heard(engine, 1, length=2, session=name))
    for refused in ({"length": 39}, {"length": LONG + 1}):
        with pytest.raises(ConfigError):
            Heard(engine, 1, session="b", **refused)
    assert list(engine._sessions) == ["b", "a"]
    running = Heard(engine, 1, length=30, session="b")
    tokens_of(Heard(engine, 1, length=2, session="c"))
    tokens_of(running)
    assert set(engine._sessions) in ({"b", "c"}, {"a", "b"})
    tokens_of(Heard(engine, 1, length=2, session="d"))
    assert len(engine._sessions) == 2
    assert "d" in engine._sessions
    engine.close()


def test_the_limit_of_a_context_counts_all_turns(model):
    engine = made(model, context=20)
    tokens_of(Heard(engine, 1, 2, length=8, session="a"))
    with pytest.raises(ConfigError, match="session, prompt and max_tokens are 21 tokens, expected at most 20"):
        Heard(engine, 1, 2, 3, length=8, session="a")
    assert len(tokens_of(Heard(engine, 1, 2, 3, length=7, session="a"))[0]) == 7
    with pytest.raises(ConfigError, match="are 21 tokens"):
        Heard(engine, length=1, session="a")
    engine.close()


def test_a_full_server_takes_the_next_request_when_an_answer_has_ended(model):
    engine = made(model, streams=1)
    for _ in range(20):
        tokens_of(Heard(engine, 1, length=1))
    with pytest.raises(ConfigError, match="prompt has token 9"):
        Heard(engine, 9, session="a")
    assert engine.active == 0
    assert not engine._taken
    engine.close()


def test_a_letter_goes_on_in_the_next_turn_and_a_stop_may_be_its_sign(monkeypatch):
    torch.manual_seed(0)
    engine = made(LanguageModel(256, Stack(8, 1, "lru")).eval(), ByteText())

    def turn(prompt, tokens, **options):
        scripted(monkeypatch, engine, tokens)
        pieces = queue.SimpleQueue()
        engine.submit(Wish(prompt, len(tokens), session="a", **options), pieces.put)
        got = [pieces.get(timeout=600) for _ in tokens]
        return "".join(piece.text for piece in got), got[-1].finish

    euro = "\N{EURO SIGN}".encode()
    assert turn("a", euro[:2]) == ("\N{REPLACEMENT CHARACTER}", "length")
    assert turn("", euro[2:] + b"b") == ("\N{EURO SIGN}b", "length")
    assert turn("c", b"d" + euro[:1], stops=["\N{REPLACEMENT CHARACTER}"]) == ("d", "stop")
    assert bytes(engine._sessions["a"].tokens.tolist()) == b"a" + euro + b"bcd"
    engine.close()
