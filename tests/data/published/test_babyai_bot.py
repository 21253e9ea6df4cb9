"""The bot's demonstrations are read as BabyAI's own, and a model plays with the inputs that it was trained on."""

import numpy as np
import pytest
import torch

pytest.importorskip("minigrid", reason="minigrid is not installed: pip install 'scanl[babyai]'")
pytest.importorskip("blosc", reason="blosc is not installed: pip install 'scanl[babyai]'")

from scanl.cli import main
from scanl.data import BabyAIDemonstrations
from scanl.data.published import babyai_bot


class Replay(torch.nn.Module):
    """Take the actions of the demonstrations, and keep the inputs of each of their episodes."""

    def __init__(self, source):
        super().__init__()
        self.unit = torch.nn.Parameter(torch.zeros(()))
        self.source, self.read = source, []

    def forward(self, x, state=None):
        if state is None:
            self.read.append([])
        self.read[-1].append(x[0])
        actions = self.source.demonstrations[1].episodes[len(self.read) - 1][3]
        number = 0 if state is None else state
        return torch.nn.functional.one_hot(torch.tensor([[actions[number]]]), 7), number + 1


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(babyai_bot, "TRAINING", 12)
    monkeypatch.setattr(babyai_bot, "EPISODES", 4)
    monkeypatch.setenv("SCANL_DATA", str(tmp_path))
    assert main(["data", "get", "babyai"]) == 0
    return tmp_path / "babyai"


def test_a_model_plays_with_the_inputs_of_training(folder):
    source = BabyAIDemonstrations(0)
    model = Replay(source)
    assert babyai_bot.fulfilled(model, source, 4) == 1
    rows = source.form([source.demonstrations[1][k] for k in range(4)])
    for played, row in zip(model.read, rows, strict=True):
        expected = row[~np.isnan(row[:, 0])]
        np.testing.assert_array_equal(torch.cat(played).numpy(), expected)
    assert babyai_bot.fulfilled(Turning(), source, 4) == 0


class Turning(torch.nn.Module):
    """Turn to the left for ever."""

    def __init__(self):
        super().__init__()
        self.unit = torch.nn.Parameter(torch.zeros(()))

    def forward(self, x, state=None):
        return torch.tensor([[[1.0, 0, 0, 0, 0, 0, 0]]]), state


def test_a_run_is_played(folder, tmp_path, capfd):
    words = ["--layer", "lru", "--dim", "8", "--depth", "1", "--steps", "1", "--accelerator", "cpu"]
    assert main(["train", "--data", "babyai", *words, "--out", str(tmp_path / "run")]) == 0
    capfd.readouterr()
    assert main(["eval", str(tmp_path / "run")]) == 0
    assert capfd.readouterr().out.splitlines()[-1].startswith("missions fulfilled: ")
