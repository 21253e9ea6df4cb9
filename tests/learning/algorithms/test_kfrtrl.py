"""Kronecker-factored learning: its mean is the exact gradient, and its steps are those of the paper."""

import numpy as np
import pytest
import torch

from gradients import QUESTION, by_bptt, learned, numbers, parts, tiny
from scanl.errors import ConfigError
from scanl.learning.algorithms import KFRTRL

pytestmark = pytest.mark.cells_by_loop
WEIGHTS = [f"stack.blocks.0.mixer.{name}" for name in ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0")]


@pytest.mark.parametrize("layer", ["elman", "lstm"])
def test_the_mean_over_many_draws_is_the_exact_gradient(layer):
    torch.manual_seed(0)
    model, batch = tiny(layer, dim=3, channel_mixer="none"), numbers(5, rows=1)
    exact = by_bptt(model, batch)
    together = batch.rows(np.zeros(8, dtype=np.int64))
    means = [learned(KFRTRL(QUESTION.loss), model, [together])[0] for _ in range(16)]
    for name in WEIGHTS:
        estimates = torch.stack([mean[name] for mean in means])
        error = estimates.std(0) / 16**0.5
        assert (error > 0).all()
        assert ((estimates.mean(0) - exact[name]).abs() < 4.5 * error).all()


def test_the_first_two_steps_are_those_of_the_paper():
    """After one step u ⊗ A is the influence itself, and a second step adds to it with random signs."""
    model, batch = tiny("elman", dim=3, channel_mixer="none"), numbers(2, rows=1)
    layer = model.stack.blocks[0].mixer
    algorithm = KFRTRL(QUESTION.loss)
    x = model.stack.blocks[0].mixer_norm(model.input(batch.inputs))[0].detach()
    first, second = parts(batch, 1)
    _, one = algorithm.update(model, algorithm.init(model, 1), first)
    h = torch.tanh(layer.weight_ih_l0 @ x[0] + layer.bias_ih_l0 + layer.bias_hh_l0).detach()
    source, factor = torch.cat([torch.zeros(3), x[0], torch.ones(1)]), torch.diag(1 - h**2)
    torch.testing.assert_close(
        torch.outer(one.sources[0][0], one.factors[0].flatten()), torch.outer(source, factor.flatten())
    )
    _, two = algorithm.update(model, one, second)
    after = torch.tanh(
        layer.weight_ih_l0 @ x[1] + layer.weight_hh_l0 @ h + layer.bias_ih_l0 + layer.bias_hh_l0
    ).detach()
    slope = torch.diag(1 - after**2)
    pushed, joined = slope @ layer.weight_hh_l0.detach() @ one.factors[0][0], torch.cat([h, x[1], torch.ones(1)])
    p_1, p_2 = (pushed.norm() / one.sources[0].norm()).sqrt(), (slope.norm() / joined.norm()).sqrt()
    for c_1, c_2 in ((1, 1), (1, -1), (-1, 1), (-1, -1)):
        u = c_1 * p_1 * one.sources[0][0] + c_2 * p_2 * joined
        a = c_1 / p_1 * pushed + c_2 / p_2 * slope
        if torch.allclose(u, two.sources[0][0]) and torch.allclose(a, two.factors[0][0]):
            return
    pytest.fail("no signs give the factors after the second step")


def test_the_state_of_a_channel_mixer_is_none_of_a_layer():
    """After one step u ⊗ A of each layer is its own influence, though channel mixers have states between them."""
    model, batch = tiny("elman", "elman", dim=3, channel_mixer="rwkv4"), numbers(1, rows=1)
    seen = []
    hooks = [layer.register_forward_pre_hook(lambda _, given: seen.append(given[0])) for layer in model.stack.mixers()]
    model(batch.inputs)
    for hook in hooks:
        hook.remove()
    algorithm = KFRTRL(QUESTION.loss)
    _, learner = algorithm.update(model, algorithm.init(model, 1), batch)
    for x, layer, u, a in zip(seen, model.stack.mixers(), learner.sources, learner.factors, strict=True):
        h = torch.tanh(layer.weight_ih_l0 @ x[0, 0] + layer.bias_ih_l0 + layer.bias_hh_l0).detach()
        source = torch.cat([torch.zeros(3), x[0, 0].detach(), torch.ones(1)])
        torch.testing.assert_close(
            torch.outer(u[0], a[0].flatten()), torch.outer(source, torch.diag(1 - h**2).flatten())
        )


def test_memory_is_as_declared():
    learner = KFRTRL(QUESTION.loss).init(tiny("elman"), 2)
    numbers_kept = sum(
        leaf.numel() for leaf in (learner.state[0].mixer, *learner.sources, *learner.factors, learner.seeds)
    )
    assert numbers_kept == eval(KFRTRL.memory, {"B": 2, "e": 4})


def test_layers_whose_weights_enter_by_several_products_are_refused():
    with pytest.raises(ConfigError, match="kfrtrl: the stack has a layer 'gru', expected elman or lstm with bias"):
        KFRTRL(QUESTION.loss).init(tiny("gru"), 1)
