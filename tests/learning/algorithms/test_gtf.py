"""Generalized teacher forcing: its limits, its estimate by hand, and bounded gradients on chaotic data."""

import pytest
import torch
from torch.nn import functional as F

from scanl.data.batch import Batch
from scanl.errors import ConfigError
from scanl.learning.algorithms import BPTT, GTF
from scanl.learning.algorithms.gtf import growth
from scanl.models import Features, SequenceLabeler, Stack
from scanl.models.whole.dynamics import Dynamics, dynamics_loss


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Dynamics(2, 4, "shallow_plrnn", {"hidden_dim": 6}).double()


@pytest.fixture
def batch():
    orbit = torch.randn(3, 9, 2, dtype=torch.float64)
    return Batch(orbit[:, :-1], orbit[:, 1:])


def gradients(model, algorithm, batch):
    model.zero_grad()
    loss, learner = algorithm.update(model, algorithm.init(model, batch.size), batch)
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}, learner


def by_hand(model, batch, alpha):
    """The loss of the unforced states; the first step begins at the data."""
    z, total = torch.zeros(batch.size, 4, dtype=torch.float64), 0.0
    for t in range(batch.length):
        strength = 1.0 if t == 0 else alpha
        data = torch.cat([batch.inputs[:, t], z[:, 2:]], 1)
        z = (1 - strength) * z + strength * data
        layer = model.layer
        pull = z @ layer.W2.T
        z = layer.A * z + (torch.relu(pull + layer.h2) - torch.relu(pull)) @ layer.W1.T + layer.h1
        total = total + F.mse_loss(z[:, :2], batch.targets[:, t]) / batch.length
    return total


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_it_is_the_gradient_of_the_forced_orbit(model, batch, alpha):
    loss, grads, _ = gradients(model, GTF(dynamics_loss, forcing=alpha), batch)
    exact = by_hand(model, batch, alpha)
    torch.testing.assert_close(loss, exact.detach())
    names = list(grads)
    parameters = [model.get_parameter(name) for name in names]  # that of the map of the input, which is 0, among them
    expected = torch.autograd.grad(exact, parameters, materialize_grads=True)
    for name, value in zip(names, expected, strict=True):
        torch.testing.assert_close(grads[name], value)


def test_without_forcing_it_is_backpropagation_through_time(model, batch):
    learner = BPTT(dynamics_loss)
    loss, state = learner.update(model, None, batch)
    expected = torch.autograd.grad(loss, list(model.layer.parameters()), allow_unused=True)
    _, grads, after = gradients(model, GTF(dynamics_loss, forcing=0.0), batch)
    torch.testing.assert_close(after.state, state)
    for (name, _), value in zip(model.layer.named_parameters(), expected, strict=True):
        if value is not None:
            torch.testing.assert_close(grads[f"layer.{name}"], value)


def test_the_estimate_is_the_growth_of_the_jacobians(model, batch):
    layer, norms = model.layer, []
    for x in batch.inputs.flatten(0, 1):
        z = torch.cat([x, torch.zeros(2, dtype=torch.float64)])
        pull = layer.W2 @ z
        active = (pull + layer.h2 > 0).double() - (pull > 0).double()
        jacobian = torch.diag(layer.A) + layer.W1 @ torch.diag(active) @ layer.W2
        norms.append(torch.linalg.svdvals(jacobian)[0])
    expected = torch.stack(norms).view(3, 8).log().mean(1).exp().max()
    assert growth(model, batch.inputs) == pytest.approx(expected.item(), rel=1e-12)


def test_forcing_rises_at_once_and_falls_slowly(model, batch):
    algorithm = GTF(dynamics_loss, every=1, fade=0.9)
    learner = algorithm.init(model, 3)
    estimate = max(0.0, 1 - 1 / growth(model, batch.inputs))
    _, learner = algorithm.update(model, learner, batch)
    torch.testing.assert_close(learner.forcing, torch.full((3,), 0.9 + 0.1 * estimate))
    with torch.no_grad():
        model.layer.A.mul_(50)
    _, learner = algorithm.update(model, learner, batch)
    torch.testing.assert_close(learner.forcing, torch.full((3,), 1 - 1 / growth(model, batch.inputs)))


def test_gradients_of_an_expanding_system_stay_bounded(model):
    """Jacobians of norm about 2 over 200 steps: 2^200 without forcing."""
    with torch.no_grad():
        model.layer.A.fill_(2.0)
    orbit = torch.randn(2, 201, 2, dtype=torch.float64)
    batch = Batch(orbit[:, :-1], orbit[:, 1:])
    norms = {}
    for forcing in (0.0, 1 - 1 / growth(model, batch.inputs)):
        _, grads, _ = gradients(model, GTF(dynamics_loss, forcing=forcing), batch)
        norms[forcing] = max(grad.abs().max().item() for grad in grads.values())
    free, forced = norms.values()
    assert forced < 1e4 < 1e30 < free


def test_another_model_is_refused():
    message = "gtf: model is a SequenceLabeler, expected a scanl.models.Dynamics"
    with pytest.raises(ConfigError, match=message):
        GTF(dynamics_loss).init(SequenceLabeler(2, Stack(4, 1, "lru"), Features(1)), 1)


def test_new_orbits_begin_at_the_data_and_go_on_with_the_forcing(model, batch):
    algorithm = GTF(dynamics_loss, every=2, fade=0.9)
    first, learner = algorithm.update(model, algorithm.init(model, 3), batch)
    renewed = algorithm.renew(model, learner, 3)
    assert torch.equal(renewed.forcing, learner.forcing)
    assert renewed.updates.tolist() == [1, 1, 1]
    again, learner = algorithm.update(model, renewed, batch)
    torch.testing.assert_close(again, first)  # the same orbit, from its first observation, by the same α
    _, learner = algorithm.update(model, algorithm.renew(model, learner, 3), batch)
    assert learner.forcing[0] < renewed.forcing[0]


def test_forcing_fades_towards_its_estimate(model, batch):
    """A system of Jacobians near 2 I, in which α* is near 1/2."""
    with torch.no_grad():
        model.layer.A.fill_(2.0)
        model.layer.W1.mul_(0.01)
    estimate = 1 - 1 / growth(model, batch.inputs)
    assert 0.4 < estimate < 0.6
    algorithm = GTF(dynamics_loss, every=1, fade=0.9)
    learner = algorithm.init(model, 3)
    for update in (1, 2, 3):
        _, learner = algorithm.update(model, learner, batch)
        assert learner.forcing[0].item() == pytest.approx(estimate + 0.9**update * (1 - estimate), rel=1e-6)
