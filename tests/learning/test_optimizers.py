"""Optimizers: their steps by hand or by torch, whose parameters they change, and resuming with equal bits."""

import math
import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from scanl.cli import main
from scanl.layers import param_groups
from scanl.learning.optimizers import OPTIMIZERS, Lion, Muon, optimizer
from scanl.models import LanguageModel, Stack

COVERS = ["learning/optimizers/*"]

pytestmark = pytest.mark.usefixtures("empty_picture")

each_optimizer = pytest.mark.parametrize("name", sorted(OPTIMIZERS))
TINY = "--data parity --data-options.length 6 --layer s5 --dim 8 --depth 1 --batch-size 4 --accelerator cpu --lr 0.01"


def model() -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(5, Stack(8, 1, "s5"))  # its systems have a learning rate of their own


def steps(model: nn.Module, chosen: torch.optim.Optimizer, seeds: range) -> None:
    """Steps with gradients that are given by a seed each."""
    for seed in seeds:
        draw = torch.Generator().manual_seed(seed)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=draw, dtype=parameter.dtype)
        chosen.step()


def test_lion_by_hand():
    layer = nn.Linear(2, 1)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.0, -2.0]]))
        layer.bias.fill_(0.5)
    lion = Lion(layer, lr=0.1, weight_decay=0.5)
    for gradient in ([[4.0, -1.0]], [[-0.3, 0.05]]):
        layer.weight.grad, layer.bias.grad = torch.tensor(gradient), torch.zeros(1)
        lion.step()
    # m_1 = 0.01 g_1 = (0.04, -0.01); 0.9 m_1 + 0.1 g_2 = (0.006, -0.004). So the signs are (+, -) and (+, -).
    # 1 * 0.95 - 0.1 = 0.85, 0.85 * 0.95 - 0.1 = 0.7075; -2 * 0.95 + 0.1 = -1.8, -1.8 * 0.95 + 0.1 = -1.61.
    torch.testing.assert_close(layer.weight, torch.tensor([[0.7075, -1.61]]))
    torch.testing.assert_close(layer.bias, torch.tensor([0.5]))  # no gradient, and a bias has no decay
    # m_2 = 0.99 m_1 + 0.01 g_2
    torch.testing.assert_close(lion.state[layer.weight]["momentum"], torch.tensor([[0.0366, -0.0094]]))


def test_muon_changes_the_matrices_of_the_stack_and_adamw_the_rest():
    whole, apart = model(), model()
    steps(whole, Muon(whole, lr=0.01, weight_decay=0.1), range(3))
    named = dict(apart.named_parameters())
    linear = [name for name, module in apart.named_modules() if isinstance(module, nn.Linear)]
    matrices = [f"{name}.weight" for name in linear if name.startswith("stack.")]
    assert (len(matrices), "head" in linear) == (4, True)
    muon = torch.optim.Muon([named[name] for name in matrices], 0.01, 0.1, adjust_lr_fn="match_rms_adamw")
    steps(apart, muon, range(3))
    changed = dict(whole.named_parameters())
    for name in matrices:
        assert torch.equal(changed[name], named[name]), name
    rest = model()
    steps(rest, OPTIMIZERS["adamw"](rest, 0.01, 0.1), range(3))
    for name, parameter in rest.named_parameters():
        assert torch.equal(changed[name], parameter) == (name not in matrices), name


def test_a_step_of_muon_is_nearly_orthogonal():
    """Its singular values are in [0.68, 1.13] in the source; bfloat16 rounds them."""
    layer = model()
    matrix = next(parameter for name, parameter in layer.named_parameters() if name.endswith("down.weight"))
    before = matrix.detach().clone()
    steps(layer, Muon(layer, lr=0.01, weight_decay=0.0), range(1))
    values = torch.linalg.svdvals((before - matrix.detach()) / (0.01 * 0.2 * math.sqrt(max(matrix.shape))))
    assert values.min() > 0.5
    assert values.max() < 1.5


@each_optimizer
def test_rates_and_decays_that_layers_name_are_respected(name):
    layer = model()
    groups = OPTIMIZERS[name](layer, 0.01, 0.1).param_groups
    settings = {id(p): (group["lr"], group["weight_decay"]) for group in groups for p in group["params"]}
    assert len(settings) == len(list(layer.parameters()))
    for group in param_groups(layer):
        for parameter in group["params"]:
            assert settings[id(parameter)] == (group.get("lr", 0.01), group.get("weight_decay", 0.1))
    assert len({lr for lr, _ in settings.values()}) > 1


@each_optimizer
def test_a_saved_optimizer_goes_on_with_equal_bits(name):
    alone, cut, after = model(), model(), model()
    steps(alone, OPTIMIZERS[name](alone, 0.01, 0.1), range(5))
    first = OPTIMIZERS[name](cut, 0.01, 0.1)
    steps(cut, first, range(3))
    after.load_state_dict(cut.state_dict())
    second = OPTIMIZERS[name](after, 0.01, 0.1)
    second.load_state_dict(first.state_dict())
    steps(after, second, range(3, 5))
    for (parameter, value), expected in zip(after.named_parameters(), alone.parameters(), strict=True):
        assert torch.equal(value, expected), parameter


@pytest.mark.parametrize("name", ["lion", "muon"])
def test_a_run_resumes_with_equal_bits(name, tmp_path):
    from scanl.learning.run.module import Learning

    begin = ["train", *TINY.split(), "--steps", "6", "--optimizer", name]
    assert main([*begin, "--out", str(tmp_path / "alone")]) == 0
    step = Learning.training_step

    def interrupted(self, batch, batch_idx):
        if self.global_step == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return step(self, batch, batch_idx)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Learning, "training_step", interrupted)
        assert main([*begin, "--out", str(tmp_path / "cut")]) == 130
    assert main(["train", "--resume", str(tmp_path / "cut")]) == 0
    alone, cut = (load_file(tmp_path / run / "model.safetensors") for run in ("alone", "cut"))
    for parameter, value in alone.items():
        assert torch.equal(value, cut[parameter]), parameter


def test_a_new_optimizer_is_one_class(tmp_path):
    """The rule of signs, as its one file would hold it."""

    @optimizer("signs")
    class Signs(torch.optim.Optimizer):
        def __init__(self, model: nn.Module, lr: float, weight_decay: float) -> None:
            super().__init__(param_groups(model), {"lr": lr, "weight_decay": weight_decay})

        @torch.no_grad()
        def step(self, closure=None):
            loss = None if closure is None else torch.enable_grad()(closure)()
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.sub_(group["lr"] * parameter.grad.sign())
            return loss

    try:
        options = [*TINY.split(), "--steps", "2", "--optimizer", "signs"]
        assert main(["train", *options, "--out", str(tmp_path / "run")]) == 0
    finally:
        del OPTIMIZERS["signs"]
    assert Path(tmp_path / "run" / "model.safetensors").exists()


def test_an_unknown_optimizer_is_named(capfd):
    assert main(["train", "--optimizer", "adamv"]) == 2
    assert "unknown optimizer 'adamv'; did you mean 'adamw'?" in capfd.readouterr().err
