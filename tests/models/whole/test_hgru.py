"""The horizontal GRU: its step written out, its gradient where it settles, and what the penalty does."""

import pytest
import torch
from torch.nn import functional as F

from scanl.data.batch import Batch
from scanl.errors import ConfigError, ShapeError
from scanl.learning.algorithms import BPTT, CGRBP, RBP, NeumannRBP
from scanl.models import HorizontalGRU
from scanl.models.whole.graph_network import node_loss


def made(size=(3, 4), scale=1.0):
    torch.manual_seed(0)
    model = HorizontalGRU(size, 2, 2, 2, kernel=3).double()
    with torch.no_grad():
        for parameter in model.parameters():  # none is as at the start, where an error would not show
            parameter += 0.1 * torch.randn_like(parameter)
        model.u2.bias.fill_(1.0)  # with the first biases it takes hundreds of steps to settle
        for norm in model.norms:
            norm.weight.mul_(scale)
    return model


def across(conv, x):
    """A convolution as a sum over the pixels in reach."""
    reach = conv.kernel_size[0] // 2
    padded, total = F.pad(x, [reach] * 4), 0
    for dy in range(2 * reach + 1):
        for dx in range(2 * reach + 1):
            part = padded[:, :, dy : dy + x.shape[2], dx : dx + x.shape[3]]
            total = total + torch.einsum("oi,biyx->boyx", conv.weight[:, :, dy, dx], part)
    return total if conv.bias is None else total + conv.bias[:, None, None]


def normed(norm, x):
    off = x - x.mean((1, 2, 3), keepdim=True)
    scaled = off / (off.square().mean((1, 2, 3), keepdim=True) + 1e-3).sqrt()
    return norm.weight[:, None, None] * scaled + norm.bias[:, None, None]


def plus(x):
    return torch.log(1 + torch.exp(x))


def test_a_step_is_that_of_the_equations():
    model, x, h = made(), torch.randn(2, 1, 2, 3, 4).double(), torch.rand(2, 2, 3, 4).double()
    y, after = model(x, h)
    alpha, mu, kappa, gamma, omega = (model.mix[name] for name in ("alpha", "mu", "kappa", "gamma", "omega"))
    drive = across(model.input, x[:, 0]) ** 2
    inhibition = normed(model.norms[0], across(model.inhibition, torch.sigmoid(across(model.u1, h)) * h))
    z = plus(drive - plus((alpha * h + mu) * inhibition))
    excitation = normed(model.norms[1], across(model.excitation, z))
    gate = torch.sigmoid(across(model.u2, z))
    expected = plus((1 - gate) * h + gate * plus(kappa * z + gamma * excitation + omega * z * excitation))
    torch.testing.assert_close(after, expected)
    read = normed(model.output_norm, expected).movedim(1, 3) @ model.output.weight.T + model.output.bias
    torch.testing.assert_close(y[:, 0], read)


def test_the_first_numbers_are_those_of_the_authors():
    model = HorizontalGRU((3, 3), 1, 3, 1, kernel=3)
    assert {name: value.unique().tolist() for name, value in model.mix.items()} == {
        "alpha": [pytest.approx(0.1)], "mu": [1.0], "kappa": [0.5], "gamma": [1.0], "omega": [0.5],
    }  # fmt: skip
    assert torch.equal(model.u2.bias, -model.u1.bias)
    assert model.u1.bias.min() >= 1
    torch.testing.assert_close(model.excitation.weight.flatten(1) @ model.excitation.weight.flatten(1).T, torch.eye(3))


@pytest.mark.parametrize("kind", [RBP, CGRBP, NeumannRBP])
def test_the_gradient_where_it_settles_is_the_unrolled_one(kind):
    model, image = made(), torch.randn(2, 1, 2, 3, 4).double()
    targets = torch.randint(-1, 2, (2, 1, 3, 4))
    steps = 60
    held = Batch(image.expand(2, steps, 2, 3, 4), torch.cat([-torch.ones(2, steps - 1, 3, 4).long(), targets], 1))
    BPTT(node_loss).update(model, model.init_state(2), held)[0].backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    algorithm = kind(node_loss, tolerance=1e-13, **({"terms": steps} if kind is NeumannRBP else {}))
    algorithm.update(model, algorithm.init(model, 2), Batch(image, targets))[0].backward()
    for parameter, value in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, value, rtol=1e-7, atol=1e-9)


def test_with_the_penalty_the_map_comes_to_settle_faster():
    """The loss is 0, so the penalty alone changes the parameters."""
    image, targets, moves = torch.randn(2, 1, 2, 3, 4).double(), torch.full((2, 1, 3, 4), -1), []
    model = made(scale=4.0)
    algorithm = NeumannRBP(node_loss, penalty=10.0, limit=0.2, tolerance=1e-6, terms=5)
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    for _ in range(10):
        with torch.no_grad():
            before = model(image.expand(2, 6, 2, 3, 4))[1]
            moves.append(((model(image, before)[1] - before).norm() / before.norm()).item())
        optimizer.zero_grad()
        algorithm.update(model, algorithm.init(model, 2), Batch(image, targets))[0].backward()
        optimizer.step()
    assert moves[-1] < moves[0] / 2


def test_wrong_sizes_are_refused():
    with pytest.raises(ConfigError, match="hgru: kernel is 4, expected an odd number of pixels"):
        HorizontalGRU((3, 3), 1, 2, 1, kernel=4)
    with pytest.raises(ShapeError, match=r"hgru: x has shape \(1, 2, 3, 4\), expected \(B, T, 2, 3, 4\)"):
        made()(torch.zeros(1, 2, 3, 4))
