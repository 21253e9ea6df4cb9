"""Generation by a compiled step in kept memory draws the tokens of the ordinary step, and has its states."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import scanl
from scanl.errors import DivergenceError, ShapeError
from scanl.layers.state import leaves
from scanl.models import LanguageModel, Stack
from scanl.models.decoding import compiled_step
from scanl.models.decoding.carried_step import CarriedStep
from scanl.models.decoding.generation import Generation

VOCABULARY = 11


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(compiled_step, "MIN_TOKENS", 1)
    with torch.no_grad():
        yield


@pytest.fixture
def carried(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What steps in kept memory return."""
    calls, call = list[Any](), CarriedStep.__call__
    monkeypatch.setattr(CarriedStep, "__call__", lambda step, *args: (calls.append(call(step, *args)), calls[-1])[1])
    return calls


def model_of() -> LanguageModel:
    torch.manual_seed(0)
    model = LanguageModel(VOCABULARY, Stack(8, 1, "gru", channel_mixer="none")).eval()
    assert model.head is not None
    model.head.weight.mul_(20)
    return model


def ordinary(monkeypatch: pytest.MonkeyPatch, model: LanguageModel, prompt: Tensor, **options: Any) -> Generation:
    with monkeypatch.context() as patch:
        patch.setattr(compiled_step, "MIN_TOKENS", 1 << 40)
        generation = copy.deepcopy(model).generate(prompt, **options)
        generation.tokens = list(generation)  # pyright: ignore[reportAttributeAccessIssue]
    return generation


def check_states(generation: Generation, other: Generation) -> None:
    for (path, leaf), (_, expected) in zip(leaves(generation.state), leaves(other.state), strict=True):
        torch.testing.assert_close(leaf, expected, rtol=1e-4, atol=1e-5, msg=path)


@pytest.mark.parametrize("options", [{"seed": 1}, {"temperature": 0}, {"seed": 2, "top_k": 3, "temperature": 0.7}])
def test_tokens_and_states_are_those_of_the_ordinary_step(
    monkeypatch: pytest.MonkeyPatch, carried: list[Any], options: dict[str, Any]
) -> None:
    model, prompt = model_of(), torch.randint(VOCABULARY, (3, 4))
    expected = ordinary(monkeypatch, model, prompt, max_new_tokens=9, **options)
    generation = model.generate(prompt, max_new_tokens=9, **options)
    begun = [next(generation) for _ in range(4)]
    kept = generation.state, generation.pending
    assert torch.equal(torch.stack([*begun, *generation]), torch.stack(expected.tokens))  # pyright: ignore
    check_states(generation, expected)
    assert len(carried) == 8  # the prompt is read at once
    other = model.generate(kept[1], state=kept[0], max_new_tokens=5, temperature=0)
    assert len(list(other)) == 5
    if "seed" not in options:
        assert torch.equal(torch.stack([*begun, *model.generate(kept[1], kept[0], max_new_tokens=5, temperature=0)]),
                           torch.stack(expected.tokens))  # pyright: ignore  # fmt: skip


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_copy_goes_on_by_itself(copied: Any) -> None:
    generation = model_of().generate(torch.tensor([[1, 2]]), max_new_tokens=8, temperature=0)
    for _ in range(3):
        next(generation)
    other = copied(generation)
    turns = [(int(next(generation)), int(next(other))) for _ in range(5)]
    assert [one for one, _ in turns] == [one for _, one in turns]
    check_states(generation, other)


def test_a_change_between_tokens_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompt = model_of(), torch.tensor([[1, 2]])
    generation = model.generate(prompt, temperature=0)
    for _ in range(3):
        next(generation)
    assert model.head is not None
    for change in (lambda: model.head.weight.neg_(), lambda: setattr(model, "embedding_scale", -3.0)):  # pyright: ignore
        state, pending = generation.state, generation.pending
        change()
        expected = ordinary(monkeypatch, model, pending, state=state, max_new_tokens=4, temperature=0)
        assert [next(generation) for _ in range(4)] == expected.tokens  # pyright: ignore
        check_states(generation, expected)
    handle, calls = model.stack.register_forward_hook(lambda *call: calls.append(call)), list[Any]()
    next(generation)
    handle.remove()
    with scanl.exact():
        next(generation)
    assert len(calls) == 1


def test_a_step_that_fails_is_taken_again() -> None:
    model, prompt = model_of(), torch.tensor([[1, 2]])
    generation, expected = (model.generate(prompt, seed=3) for _ in range(2))
    for _ in range(3):
        assert torch.equal(next(generation), next(expected))
    assert model.head is not None
    weight = model.head.weight.clone()
    model.head.weight.fill_(torch.nan)
    with pytest.raises(DivergenceError, match="the largest logit of the next token is nan"):
        next(generation)
    model.head.weight.copy_(weight)
    torch.empty(1, VOCABULARY).exponential_(generator=expected.generator)  # those that the failed draw took
    assert [int(next(generation)) for _ in range(5)] == [int(next(expected)) for _ in range(5)]


@pytest.mark.parametrize("layer", ["attention", "aft_local"])
def test_a_text_that_is_too_long_is_refused_as_by_the_ordinary_step(carried: list[Any], layer: str) -> None:
    stack = Stack(16, 1, layer, channel_mixer="none", layer_options={"max_length": 6})
    model, tokens = LanguageModel(VOCABULARY, stack).eval(), torch.randint(VOCABULARY, (9, 1))
    generation = model.generate(tokens[:2].T, temperature=0)
    drawn = [next(generation) for _ in range(5)]
    state = generation.state
    for step in (lambda: next(generation), lambda: model.compile_step()(drawn[-1], state)):
        with pytest.raises(ShapeError, match=r"7.*, expected at most max_length=6; build the layer with a"):
            step()
    assert [one is None for one in carried] == [False] * 3 + [True]  # the first one is ordinary
    assert model._step().reason is None
    logits, _ = model(torch.cat([tokens[:2], torch.stack(drawn[:4])]).T)
    assert [int(token) for token in drawn] == logits[0, 1:].argmax(-1).tolist()
