"""The model for lm-eval, by its own evaluation of a small task, and against probabilities computed at once."""

import math

import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'scanl[lm-eval]'")

import datasets
import lm_eval
from lm_eval.api.instance import Instance
from lm_eval.api.task import ConfigurableTask

from scanl.errors import ConfigError
from scanl.learning.adapters import lm_eval as adapter
from scanl.learning.adapters.lm_eval import LMEvalModel
from scanl.models import LanguageModel, Stack

pytestmark = pytest.mark.filterwarnings("ignore")  # of lm-eval and of the packages that it imports


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    model = LanguageModel(256, Stack(16, 2, "gla", layer_options={"num_heads": 2})).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def requests(kind, *arguments):
    return [Instance(kind, {}, each, i) for i, each in enumerate(arguments)]


def score(model, context, continuation):
    """The log-probability of bytes after bytes, read at once."""
    tokens = torch.tensor([list(context + continuation)])
    logits = model(tokens[:, :-1])[0][:, len(context) - 1 :]
    answers = tokens[:, len(context) :]
    log_probabilities = F.log_softmax(logits, -1).gather(-1, answers[..., None])
    return float(log_probabilities.sum()), bool((logits.argmax(-1) == answers).all())


@torch.no_grad()
@pytest.mark.parametrize("batch_size", [1, 2, 16])
def test_log_likelihoods(model, batch_size):
    greedy = bytes(map(int, model.generate(torch.tensor([list(b"to be")]), max_new_tokens=3, temperature=0)))
    pairs = [(b"to be", b" or not"), (b"a", b"b"), (b"to be", greedy), (b"to be", b" and"), (b"\n", b"alone")]
    texts = [(context.decode(), continuation.decode("latin-1")) for context, continuation in pairs]
    texts[-1] = ("", "alone")  # a newline stands before it
    pairs = [(context, text.encode()) for (context, _), (_, text) in zip(pairs, texts, strict=True)]
    found = LMEvalModel(model, batch_size=batch_size).loglikelihood(requests("loglikelihood", *texts), True)
    for (context, continuation), (value, is_greedy) in zip(pairs, found, strict=True):
        wanted = score(model, context, continuation)
        assert math.isclose(value, wanted[0], rel_tol=1e-9)
        assert is_greedy == wanted[1]


@torch.no_grad()
def test_a_context_is_read_once(model, monkeypatch):
    read = []
    whole = model.next_logits
    monkeypatch.setattr(model, "next_logits", lambda tokens, state=None: read.append(tokens) or whole(tokens, state))
    pairs = [("to be", " or"), ("to be", " and"), ("not", " to"), ("to be", " but")]
    LMEvalModel(model).loglikelihood(requests("loglikelihood", *pairs), True)
    assert sum(tokens.numel() for tokens in read) == len("to be") + len("not")


@torch.no_grad()
@pytest.mark.parametrize("piece", [1, 4, 1000])
def test_long_texts_are_read_in_pieces(model, monkeypatch, piece):
    monkeypatch.setattr(adapter, "PIECE", piece)
    text = "once upon a time"
    (rolling,) = LMEvalModel(model).loglikelihood_rolling(requests("loglikelihood_rolling", (text,)), True)
    assert math.isclose(rolling, score(model, b"\n", text.encode())[0], rel_tol=1e-9)
    ((value, _),) = LMEvalModel(model).loglikelihood(requests("loglikelihood", (text, " there")), True)
    assert math.isclose(value, score(model, text.encode(), b" there")[0], rel_tol=1e-9)


def test_generation_ends_at_a_stop_text(model):
    def generated(**options):
        (text,) = LMEvalModel(model).generate_until(requests("generate_until", ("to be", options)), True)
        return text

    tokens = model.generate(torch.tensor([list(b"to be")]), max_new_tokens=20, temperature=0)
    whole = bytes(map(int, tokens)).decode(errors="replace")
    assert generated(max_gen_toks=20) == whole
    stop = whole[5:7]
    assert generated(max_gen_toks=20, until=[stop, "no such text"]) == whole[: whole.index(stop)]
    assert generated(max_gen_toks=20, until=stop) == whole[: whole.index(stop)]
    assert generated(max_new_tokens=20, until=[None, ""], temperature=0.0) == whole
    assert len(generated(max_gen_toks=5, do_sample=True, temperature=0.5, top_k=3).encode()) >= 5
    assert len(generated(max_tokens=5, temperature=0.5, top_k=0, top_p=0.9).encode()) >= 5


def test_texts_without_tokens(model):
    """A context of spaces is read as none. A newline that stands before a text is no text of its own."""
    spaces, newline = LMEvalModel(model).loglikelihood(requests("loglikelihood", ("  ", "alone"), ("", "\n")), True)
    assert math.isclose(spaces[0], score(model, b"\n", b"  alone")[0], rel_tol=1e-9)
    assert newline == (0.0, True)
    assert LMEvalModel(model).loglikelihood_rolling(requests("loglikelihood_rolling", ("",)), True) == [0.0]


class Letters:
    """A tokenizer of small letters, with an end."""

    eos_token_id = 26

    def encode(self, text, *, add_special_tokens):
        return [ord(letter) - ord("a") for letter in text] + [26] * add_special_tokens

    def decode(self, token_ids):
        return "".join(chr(token + ord("a")) for token in token_ids)


class Begun(Letters):
    bos_token_id = 25


def test_a_text_without_context_follows_the_token_that_begins_texts(model):
    """As in lm-eval's HFLM: that of the tokenizer, or else the one that ends texts."""
    for tokenizer, options, begin in (
        (Begun(), {}, 25), (Letters(), {}, 26), (Begun(), {"end": 3}, 25), (Letters(), {"begin": 4}, 4),
    ):  # fmt: skip
        adapted = LMEvalModel(model, tokenizer, **options)
        (value,) = adapted.loglikelihood_rolling(requests("loglikelihood_rolling", ("de",)), True)
        assert math.isclose(value, score(model, bytes([begin]), bytes([3, 4]))[0], rel_tol=1e-9)
        ((value, _),) = adapted.loglikelihood(requests("loglikelihood", ("", "de")), True)
        assert math.isclose(value, score(model, bytes([begin]), bytes([3, 4]))[0], rel_tol=1e-9)
    with pytest.raises(ConfigError, match="begin is 256, expected a token below 256 of the model"):
        LMEvalModel(model, Letters(), begin=256)


def test_tokenizers(model):
    found = LMEvalModel(model, Letters())
    assert found.eot_token_id == 26
    ((value, _),) = found.loglikelihood(requests("loglikelihood", ("abc", "de")), True)
    assert math.isclose(value, score(model, bytes([0, 1, 2]), bytes([3, 4]))[0], rel_tol=1e-9)
    small = LanguageModel(20, Stack(8, 1, "lru"))
    with pytest.raises(ConfigError, match="end is 26, expected a token below 20 because of the model"):
        LMEvalModel(small, Letters())
    with pytest.raises(ConfigError, match="the tokenizer gives token 25, expected less than 20 because of the model"):
        LMEvalModel(small, Letters(), end=0).tok_encode("z")
    with pytest.raises(ConfigError, match="batch_size is 0, expected at least 1"):
        LMEvalModel(model, batch_size=0)


class Opposites(ConfigurableTask):
    """A small task in memory, with two choices."""

    VERSION = 0
    DOCUMENTS = ({"text": "hot", "answer": 0}, {"text": "cold", "answer": 1}, {"text": "low", "answer": 0})

    def __init__(self, config=None):
        super().__init__(
            config={
                "task": "opposites",
                "output_type": "multiple_choice",
                "test_split": "test",
                "custom_dataset": lambda **_: {"test": datasets.Dataset.from_list(list(self.DOCUMENTS))},
                "doc_to_text": "The opposite of {{text}} is",
                "doc_to_choice": ["cold", "hot"],
                "doc_to_target": "answer",
                "metric_list": [{"metric": "acc"}],
            }
        )


@torch.no_grad()
def test_a_task_of_lm_eval(model):
    results = lm_eval.simple_evaluate(model=LMEvalModel(model), tasks=[Opposites()], bootstrap_iters=0)
    right = 0
    for document in Opposites.DOCUMENTS:
        context = f"The opposite of {document['text']} is".encode()
        scores = [score(model, context, choice)[0] for choice in (b" cold", b" hot")]
        right += scores.index(max(scores)) == document["answer"]
    assert results["results"]["opposites"]["acc,none"] == pytest.approx(right / 3)
