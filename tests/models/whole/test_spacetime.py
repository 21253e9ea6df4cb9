"""The network of SpaceTime that forecasts, against the authors' program."""

import pytest
import torch

from scanl.errors import ConfigError, ShapeError
from scanl.models import SpaceTimeNet


@pytest.mark.usefixtures("double")
def test_the_network_is_that_of_the_authors():
    """HazyResearch/spacetime, its filters given and the B and K of its decoder of sum 1: forecasts and the loss."""
    net = SpaceTimeNet(16, 2, 6, 4, dropout=0.0)
    differences = [[1, 0, 0, 0, 0, 0], [1, -1, 0, 0, 0, 0], [1, -2, 1, 0, 0, 0], [1, -3, 3, -1, 0, 0]]
    four, five = [0.75, -0.25, -0.25, -0.25, 0, 0], [0.8, -0.2, -0.2, -0.2, -0.2, 0]
    filters = torch.tensor([*differences, four, five, five, four, *differences, five, four, four, five])
    net.blocks[0].filters.weight.copy_(filters)
    with torch.no_grad():
        for index, (name, parameter) in enumerate(sorted(net.named_parameters())):
            values = torch.sin(1.3 * torch.arange(parameter.numel()) + index).view(parameter.shape) / 2
            if name in ("decoder.b", "decoder.k"):
                values = values / values.abs().sum(-1, keepdim=True)
            parameter.copy_(values)
    series = torch.cos(0.7 * torch.arange(34)).view(2, 17, 1) + torch.arange(2).view(2, 1, 1)
    x, future = series[:, :14], series[:, 14:]
    closed = [0.0117695863406677, 0.369672772292458, 0.301141574024119]
    closed += [0.905221487281467, 1.18230779050876, 1.26763620757573]
    torch.testing.assert_close(net.predict(x, 3).flatten(), torch.tensor(closed))
    opened = [-0.533195743069281, -0.254538797714249, 0.0117695863406679]
    opened += [0.818708804418968, 0.690395655606436, 0.905221487281467]
    torch.testing.assert_close(net(x)[:, -3:].flatten(), torch.tensor(opened))
    torch.testing.assert_close(net.loss(x, future), torch.tensor(3.08712158018606))


def test_the_dropout_of_the_network_is_before_its_last_map_too():
    net = SpaceTimeNet(4, 1, 5, 4, dropout=1.0)
    torch.testing.assert_close(net(torch.zeros(1, 6, 1)), net.head.bias.expand(1, 6, 1))
    net.blocks[0].dropout.p = 0.0
    torch.testing.assert_close(net(torch.ones(1, 6, 1)) - 1, net.head.bias.expand(1, 6, 1))


@pytest.mark.usefixtures("double")
def test_the_network():
    """Its fixed filters by hand, its closed loop as a linear system, its loss, and what it refuses."""
    torch.manual_seed(0)
    net, x = SpaceTimeNet(16, 2, 5, 16, dropout=0.0).eval(), torch.randn(2, 30, 1)
    filters = net.blocks[0].filters.weight
    assert filters[:4, :4].tolist() == [[1, 0, 0, 0], [1, -1, 0, 0], [1, -2, 1, 0], [1, -3, 3, -1]]
    torch.testing.assert_close(filters[4:8].sum(1), torch.zeros(4))
    torch.testing.assert_close(filters[:4], filters[8:12])  # channel c has filter c mod 8
    first = net(x)[:, -1]
    ahead = net.predict(x, 6)
    torch.testing.assert_close(ahead[:, 0], first)
    torch.testing.assert_close(net.predict(x + 3, 6), ahead + 3)  # the mean of the window comes off and goes on
    opened = net.predict(x, 6, closed_loop=False)
    torch.testing.assert_close(opened[:, 0], first)
    torch.testing.assert_close(opened[:, 1], net(torch.cat([x, opened[:, :1]], 1))[:, -1])
    future = torch.randn(2, 6, 1)
    y, u = net(x), net._hidden(x)[0]
    opened = y[:, 4:] - torch.cat([x[:, 5:], future[:, :1]], 1)
    parts = [(ahead - future), opened, (net.decoder.next_inputs(u)[:, 4:-1] - u[:, 5:])]
    parts = [part.square().mean().sqrt() for part in parts]
    torch.testing.assert_close(net.loss(x, future), sum(parts))
    torch.testing.assert_close(net.loss(x, future, closed_loop=False), parts[1])
    net.loss(x, future).backward()
    assert [name for name, parameter in net.named_parameters() if not parameter.grad.any()] == []
    with pytest.raises(ShapeError, match=r"spacetime: x has shape \(2, 30\), expected \(B, T, 1\)"):
        net(x[..., 0])
    with pytest.raises(ConfigError, match="spacetime: depth is 0, expected at least 1"):
        SpaceTimeNet(depth=0)
