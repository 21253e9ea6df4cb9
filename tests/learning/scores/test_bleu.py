"""BLEU of what a model writes: the texts beside a plain greedy loop, and the score beside its definition."""

import importlib.util
import math
from collections import Counter

import pytest
import torch

import published
from scanl.cli import main
from scanl.data import sources
from scanl.errors import ConfigError
from scanl.learning import evaluation
from scanl.learning.questions import answerer
from scanl.learning.questions.base import means
from scanl.learning.scores import scores
from scanl.models import Stack

root = pytest.fixture(published.root)
HAS_SACREBLEU = importlib.util.find_spec("sacrebleu") is not None


def greedy(model, prompt, end, most):
    tokens, text = torch.tensor([prompt]), []
    while len(text) < most:
        token = int(model(tokens)[0][0, -1].argmax())
        if token == end:
            break
        text.append(token)
        tokens = torch.cat([tokens, torch.tensor([[token]])], 1)
    return bytes(text).decode(errors="replace")


def test_a_model_writes_in_the_place_of_the_answers(root, monkeypatch):
    """Rows of other lengths stand in one batch; each is what a loop over it alone writes."""
    published.written(root, "verses")
    source = sources.get("verses").open({"seed": 0, "eval_examples": 8, "data_options": {"max_length": 64}})
    torch.manual_seed(3)
    model = answerer(source.question).model(Stack(8, 1, "lru")).double().eval()
    seen = []

    def keep(question, answers, right):
        seen.extend(zip(answers, right, strict=True))
        return 1.0, 1

    monkeypatch.setattr(scores, "get", lambda name: keep)
    examples = list(source.exam().examples)
    assert evaluation.written(model, source, examples) == {"BLEU": 1.0}
    pairs = [pair for pair in source.pairs()[2] if len("\n\n".join(pair).encode()) <= 64]
    assert [right for _, right in seen] == [second for _, second in pairs]
    for (answer, _), (first, _) in zip(seen, pairs, strict=True):
        assert answer == greedy(model, list(f"{first}\n".encode()), 10, source.length)


def by_hand(answers, right):
    """Papineni et al.: the geometric mean of the clipped precisions over all texts, and the brevity penalty."""
    logs = 0.0
    for n in (1, 2, 3, 4):
        shared = pieces = 0
        for answer, wanted in zip(answers, right, strict=True):
            found, known = (
                Counter(tuple(text.split()[i : i + n]) for i in range(len(text.split()) - n + 1))
                for text in (answer, wanted)
            )
            shared += sum(min(count, known[piece]) for piece, count in found.items())
            pieces += found.total()
        logs += math.log(shared / pieces) / 4
    c, r = (sum(len(text.split()) for text in texts) for texts in (answers, right))
    return 100 * math.exp(min(0.0, 1 - r / c)) * math.exp(logs)


def test_it_is_of_all_texts_together():
    """In two parts, with a brevity penalty and a piece that the answer has more often."""
    answers = ["the dog bit the old man in the park", "nobody was surprised at all", "the the cat sat"]
    right = ["a dog bit the old man in the park today", "nobody there was surprised at all by it", "the cat sat still"]
    parts = [{"BLEU": scores.get("BLEU")(None, answers[rows], right[rows])} for rows in (slice(1), slice(1, 3))]
    if not HAS_SACREBLEU:
        with pytest.raises(ConfigError, match=r"BLEU: sacrebleu is not installed; pip install 'scanl\[bleu\]'"):
            means(parts)
        return
    assert means(parts)["BLEU"] == pytest.approx(by_hand(answers, right), rel=1e-9)


def test_a_run_is_scored_by_the_command_line(root, tmp_path, capfd):
    published.written(root, "verses")
    run = str(tmp_path / "run")
    options = "--accelerator cpu --layer lru --dim 8 --depth 1 --steps 1 --data verses --data-options.max_length 64"
    assert main(["train", *options.split(), "--out", run]) == 0
    capfd.readouterr()
    assert main(["eval", run, "--count", "1"]) == 0
    last = capfd.readouterr().out.splitlines()[-1]
    expected = "BLEU of what the model writes: 0.00" if HAS_SACREBLEU else "BLEU is not measured: sacrebleu is not"
    assert last.startswith(expected)
