"""The perplexity of a word, beside the nats of a loop over the text, divided by the words that Python counts."""

import math

import numpy as np
import pytest
import torch

import published
from scanl.data import sources
from scanl.learning.evaluation import measures
from scanl.learning.questions import answerer
from scanl.models import Stack

root = pytest.fixture(published.root)


@pytest.mark.parametrize("name", ["pg19", "ptb"])
def test_it_is_all_nats_over_all_words(name, root):
    folder = published.written(root, name)
    source = sources.get(name).open({"seed": 0, "sequence_length": 8, "carry_state": False, "eval_bytes": 64,
                                     "data_options": {}})  # fmt: skip
    torch.manual_seed(0)
    model = answerer(source.question).model(Stack(8, 1, "lru")).double()
    exam = source.exam()
    found = measures(model, source, exam.examples, chunk=7, question=exam.question)
    nats = 0.0
    for batch in exam.examples:
        inputs, targets, *_ = batch.tensors()
        for row, right in zip(inputs, targets, strict=True):
            likely = model(row[None])[0][0].detach().log_softmax(-1)
            nats -= sum(float(likely[t, token]) for t, token in enumerate(right.tolist()) if token >= 0)
    if name == "pg19":
        books = [(folder / "test" / f"{book}.txt").read_text() for book in (11, 5)]
        words = sum(len(book.split()) for book in books)
        assert words < len(source.test)
    else:
        text = (folder / "ptb.test.txt").read_text()
        words = len(text.split()) + text.count("\n")  # the end of a line is a word
    assert found["word perplexity"] == pytest.approx(math.exp(nats / words), rel=1e-6)
    assert list(found) == [source.metric, "word perplexity"]


def test_words_stand_between_white_space_and_ends_of_files():
    from scanl.data.text.text import _words

    for text in (b"", b" ", b"a", b" a  b\n\tcd", b"a\0b ", b"\0\0x"):
        assert _words(np.frombuffer(text, np.uint8)) == len(text.replace(b"\0", b" ").split())
