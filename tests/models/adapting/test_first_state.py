"""The first state of a model: rows of a batch, a file, and what is refused."""

import pytest
import torch

from scanl.errors import CheckpointError, ShapeError
from scanl.layers.state import leaves, save
from scanl.models import FirstState, LanguageModel, Stack

TOKENS = torch.tensor([[1, 2, 3], [4, 5, 6]])


def made(layer="lru", seed=0):
    torch.manual_seed(seed)
    return LanguageModel(11, Stack(8, 2, layer)).eval()


@pytest.mark.parametrize("layer", ["lru", "gru", "rwkv4"])  # complex; real; with a running maximum of -inf
def test_a_file_holds_the_state_after_a_text(layer, tmp_path):
    model = made(layer)
    _, state = model(TOKENS[:1])
    first = FirstState(state)
    first.save(tmp_path / "a.safetensors", model)
    loaded = FirstState.load(tmp_path / "a.safetensors", model)
    expected = model(TOKENS[1:], state)[0]
    assert torch.equal(model(TOKENS[1:], loaded(1))[0], expected)
    torch.testing.assert_close(model(TOKENS[[1, 1]], loaded(2))[0], expected.expand(2, -1, -1))
    assert next(model.generate(TOKENS[1:], state=loaded(1), temperature=0)) == expected[0, -1].argmax()


def test_numbers_are_learned_and_others_are_not():
    model = made("rwkv4")
    first, state = FirstState(model.init_state(1)), dict(leaves(model.init_state(1)))
    infinite = [leaf for leaf in state.values() if not leaf.isfinite().all()]
    assert infinite
    assert len(list(first.buffers())) == len(infinite)
    assert len(first.numbers) == len(state) - len(infinite)
    with torch.no_grad():
        first.numbers[0].add_(1)
    assert not state["state.0.mixer.shift"].any(), "the state was not copied"


def test_a_file_of_anything_else_is_refused(tmp_path):
    model, path = made(), tmp_path / "a.safetensors"
    with pytest.raises(CheckpointError, match=r"first state: .*a\.safetensors cannot be read"):
        FirstState.load(path, model)
    save(model.init_state(1), path)
    with pytest.raises(CheckpointError, match=r"a\.safetensors holds none, expected a file that `FirstState\.save`"):
        FirstState.load(path, model)
    FirstState(model.init_state(1)).save(path, model)
    with pytest.raises(CheckpointError, match="was learned for other weights, expected those of this model"):
        FirstState.load(path, made(seed=1))
    with pytest.raises(CheckpointError, match=r"expected .* they differ in"):
        FirstState.load(path, made("gla"))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="is damaged: its bytes do not fit its digest"):
        FirstState.load(path, model)


def test_a_state_of_a_batch_is_refused():
    with pytest.raises(ShapeError, match=r"first state: state\.0\.mixer has shape \(2, 8\), expected one row"):
        FirstState(made("gru").init_state(2))
