"""The engine: its answers are those of `generate`, whatever others there are; its limits; what happens at an error."""

import queue

import pytest
import torch

from scanl.errors import ConfigError
from scanl.models import LanguageModel, Stack
from scanl.ops import exact
from scanl.serve import Engine, Limits
from scanl.serve.engine import BusyError, Piece, SessionBusyError, Wish
from scanl.serve.texts import Numbers

COVERS = ["serve/limits"]

LONG = 2000  # tokens, more than a test waits for


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return LanguageModel(7, Stack(8, 1, "lru")).eval()


@pytest.fixture
def engine(model):
    engine = Engine(model, Numbers(), Limits(streams=3, tokens=LONG, context=2 * LONG, sessions=1))
    yield engine
    engine.close()


class Heard:
    """What an answer has delivered."""

    def __init__(self, engine: Engine, *tokens: int, length: int = 4, **options):
        self.pieces: queue.SimpleQueue[Piece] = queue.SimpleQueue()
        self.wish = Wish(tokens, length, **options)
        self.answer = engine.submit(self.wish, self.pieces.put)

    def piece(self) -> Piece:
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
    engine = Engine(model, Numbers(), Limits(seconds=0.01))
    assert tokens_of(Heard(engine, 1, length=LONG))[1] == "time"
    engine.close()


def test_an_error_in_a_step_ends_the_answers_and_not_the_engine(model, engine, monkeypatch):
    def fail():
        raise RuntimeError("for this test")

    heard = Heard(engine, 1, length=LONG)
    heard.piece()
    monkeypatch.setattr(engine._streams, "step", fail)
    assert tokens_of(heard)[1] == "error"
    assert tokens_of(Heard(engine, 1, temperature=0.0))[0] == expected(model, [1], max_new_tokens=4, temperature=0)


def test_close_writes_what_has_begun_and_takes_no_more(model):
    engine = Engine(model, Numbers(), Limits())
    heard = [Heard(engine, 1, 2, length=20, temperature=0.0) for _ in range(3)]
    engine.close()
    assert all(tokens_of(each)[0] == expected(model, [1, 2], max_new_tokens=20, temperature=0) for each in heard)
    with pytest.raises(BusyError, match="the server is ending"):
        Heard(engine, 1)
