"""benchmarks/quality/translation.py: the published number of BLEU, naive answers, and its rows on small files."""

import sys
from pathlib import Path

import pytest
import torch

import published

pytest.importorskip("sacrebleu", reason="sacrebleu is not installed: pip install 'scanl[bleu]'")
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from quality import translation


def test_bleu_is_the_published_number():
    """The example of sacrebleu's README."""
    answers = ["The dog bit the man.", "It wasn't surprising.", "The man had just bitten him."]
    references = (
        ["The dog bit the man.", "It was not unexpected.", "The man bit him first."],
        ["The dog had bit the man.", "No one was surprised.", "The man had bitten the dog."],
    )
    assert round(translation.bleu(answers, *references), 2) == 48.53


def test_naive_answers():
    pairs = [("a b", "x"), ("c d e", "y"), ("c", "y")]
    assert translation.naive("copy", pairs, ["c d"]) == ["c d"]
    assert translation.naive("most frequent", pairs, ["a", "b"]) == ["y", "y"]
    assert translation.naive("nearest", pairs, ["B a", "d e"]) == ["x", "y"]


def test_rows_are_added_once(tmp_path, monkeypatch):
    published.written(published.root(tmp_path, monkeypatch), "verses")
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)  # it would hold for all later tests
    monkeypatch.setattr(sys, "argv", ["translation", "copy", "nearest", "arn", "--quick", "--results", str(tmp_path)])
    texts = []
    for _ in range(2):
        translation.main()
        texts.append((tmp_path / "quick" / "translation.csv").read_text(encoding="utf-8"))
    assert texts[0] == texts[1]
    assert texts[0].count("\n") == 4
