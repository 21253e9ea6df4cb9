"""State tuning: the first state is learned, by the loss of the question, and nothing else changes."""

import pytest
import torch

from scanl import learning
from scanl.data import questions
from scanl.data.batch import Batch
from scanl.errors import ConfigError
from scanl.learning import tune_state
from scanl.models import LanguageModel, SequenceClassifier, Stack, Tokens

TOKENS = torch.tensor([[0, 1, 2, 3, 4, 5], [0, 5, 4, 3, 2, 1]])
BATCH = Batch(TOKENS[:, :-1], TOKENS[:, 1:])


def made(layer="gru", **options):
    torch.manual_seed(0)
    model = LanguageModel(7, Stack(8, 2, layer, **options))
    with torch.no_grad():
        model.head.weight.mul_(30)  # or else the state could not change much
    return model


def loss(model, first=None):
    logits, _ = model(BATCH.inputs, None if first is None else first(2))
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), BATCH.targets.flatten()).item()


@pytest.mark.parametrize("layer", ["gru", "gated_deltanet", "lru"])
def test_the_loss_falls_and_the_weights_stay(layer):
    options = {"layer_options": {"num_heads": 2}} if layer == "gated_deltanet" else {}
    model = made(layer, **options)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.head.weight.requires_grad_(False)
    first = tune_state(model, [BATCH] * 12, lr=0.3)
    assert loss(model, first) < 0.95 * loss(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.training
    assert [name for name, weight in model.named_parameters() if not weight.requires_grad] == ["head.weight"]
    assert not any(weight.grad is not None for weight in model.parameters())


def test_it_starts_from_a_state():
    model = made()
    state = model(TOKENS[:1])[1]
    first = tune_state(model, [BATCH], lr=1e-12, state=state)
    torch.testing.assert_close(first(1), state)


def test_a_question_gives_the_loss():
    torch.manual_seed(0)
    model = SequenceClassifier(3, Stack(8, 1, "gru"), Tokens(7))
    batch = Batch(TOKENS, torch.tensor([2, 2]))
    with pytest.raises(ConfigError, match=r"question is None, expected that of the data because .* SequenceClassifier"):
        tune_state(model, [batch])
    first = tune_state(model, [batch] * 10, question=questions.Class(questions.Vocabulary(7), 3), lr=0.3)
    assert model(TOKENS, first(2))[0].softmax(-1)[:, 2].min() > model(TOKENS)[0].softmax(-1)[:, 2].max()


def test_what_cannot_be_tuned_is_refused():
    with pytest.raises(ConfigError, match="batches has none, expected at least one"):
        tune_state(made(), [])
    with pytest.raises(ConfigError, match=r"no number of the state changes the loss.*state=model\(tokens\)\[1\]"):
        tune_state(made("rwkv4", channel_mixer="none"), [Batch(TOKENS[:, :1], TOKENS[:, 1:2])])
    model = SequenceClassifier(3, Stack(8, 1, "bidirectional", layer_options={"layer": "gru"}), Tokens(7))
    with pytest.raises(ConfigError, match="the model is bidirectional, expected a causal one"):
        tune_state(model, [BATCH])


def test_it_is_on_the_face_of_the_package():
    assert learning.tune_state is tune_state
