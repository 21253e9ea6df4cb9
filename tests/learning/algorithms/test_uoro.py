"""Unbiased online recurrent optimization: its mean is the exact gradient, and its steps are those of the paper."""

import copy

import numpy as np
import pytest
import torch

from gradients import QUESTION, by_bptt, learned, numbers, parts, tiny
from scanl.learning.algorithms import RTRL, UORO
from scanl.learning.algorithms._signs import new_seeds, signs

pytestmark = pytest.mark.cells_by_loop


def test_signs_are_even_independent_and_a_function_of_the_seeds():
    seeds = new_seeds(300, torch.device("cpu"))
    first, after = signs(seeds, 300, torch.float64)
    assert set(first.unique().tolist()) == {-1.0, 1.0}
    second, _ = signs(after, 300, torch.float64)
    for product in (first, second, first * second, first * first.roll(1, 0), first * first.roll(1, 1)):
        assert abs(product.mean().item()) < 4 / 300  # 4 standard errors of 90,000 signs
    assert torch.equal(signs(seeds[5:6], 300, torch.float64)[0], first[5:6])


def test_the_mean_over_many_draws_is_the_exact_gradient():
    """Rows that repeat one sequence differ in their signs alone, and their gradient is the mean of their estimates."""
    torch.manual_seed(0)
    model, batch = tiny("elman", dim=3, channel_mixer="none"), numbers(5, rows=1)
    exact, algorithm = by_bptt(model, batch), UORO(QUESTION.loss)
    together = parts(batch.rows(np.zeros(8, dtype=np.int64)), 1)
    means = [learned(algorithm, model, together)[0] for _ in range(16)]
    for name in ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0"):
        name = f"stack.blocks.0.mixer.{name}"
        estimates = torch.stack([mean[name] for mean in means])
        assert (estimates.std(0) > 0).all()
        assert ((estimates.mean(0) - exact[name]).abs() < 4 * estimates.std(0) / 16**0.5).all()


def test_an_update_is_that_of_the_paper_with_exact_matrices():
    model, batch = tiny("gru"), numbers(6)
    first, second = parts(batch, 3)
    algorithm, exact = UORO(QUESTION.loss, epsilon=1e-3), RTRL(QUESTION.loss)
    learner = algorithm.init(model, 2)
    _, learner = algorithm.update(model, learner, first)
    start = exact.init(model, 2)._replace(state=learner.state)
    zero = [torch.zeros_like(leaf) for leaf in start.influence]
    _, after = exact.update(model, start._replace(influence=tuple(zero)), second)
    groups = exact._influences[model].groups
    fresh = _dense(groups, after.influence, learner)  # ds/dtheta of three steps
    found = []
    for rank_one in (learner, learner._replace(by_state=torch.zeros_like(learner.by_state))):
        net = copy.deepcopy(model)
        loss, new = algorithm.update(net, rank_one, second)
        loss.backward()
        found.append((new, torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])))
    (new, gradient), (cut, truncated) = found
    nu, _ = signs(learner.seeds, 4, torch.float64)
    pushed = torch.einsum("be,bep->bp", nu, fresh)
    norm = lambda x: x.norm(dim=1, keepdim=True) + 1e-3  # noqa: E731
    rho = (norm(pushed) / norm(nu)).sqrt()
    torch.testing.assert_close(cut.by_state, rho * nu)
    rho_0 = (norm(learner.by_parameter) / 1e-3).sqrt()  # J A is 0 here
    torch.testing.assert_close(cut.by_parameter, learner.by_parameter / rho_0 + pushed / rho)
    forward = new.by_state - rho * nu
    assert forward.abs().max() > 0
    assert not torch.equal(gradient, truncated)


def _dense(groups, influence, learner):
    rows, numbers = learner.by_state.shape
    dense = torch.zeros(rows, numbers, learner.by_parameter.shape[1], dtype=torch.float64)
    for group, carried in zip(groups, influence, strict=True):
        dense[:, group.units[:, :, None], group.columns[:, None]] = carried
    return dense
