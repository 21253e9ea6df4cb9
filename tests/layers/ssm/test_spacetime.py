"""SpaceTime: companion systems against their equations and the authors' program, and the network that forecasts."""

import pytest
import torch

from by_hand import DIM, assert_normal, shaken
from scanl.errors import ConfigError, ShapeError
from scanl.layers import SpaceTime
from scanl.layers.parts import dense_ssm
from scanl.models import SpaceTimeNet


def spacetime(layer, xs):
    def normed(v):
        return v / v.abs().sum(-1, keepdim=True)

    heads = layer.dim // layer.num_groups
    b, c = (normed(layer.b), normed(layer.c)) if layer.closed_loop else (layer.b, layer.c)
    a, b, c = (part.repeat_interleave(heads, 0) for part in (normed(layer.a), b, c))
    s, ys = torch.zeros_like(a), []
    for x in xs:
        below = torch.cat([torch.zeros_like(s[:, :1]), s[:, :-1]], 1)
        s = below + a * s[:, -1:] + b * x[:, None]
        ys.append((c * s).sum(1) + (0 if layer.closed_loop else layer.skip * x))
    return ys


EQUATIONS = {
    "spacetime": (lambda: SpaceTime(DIM, 3, 4), spacetime),
    "spacetime_of_one_number": (lambda: SpaceTime(DIM, 1), spacetime),
}


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("closed_loop", [False, True])
def test_a_convolution_is_the_recurrence(closed_loop, monkeypatch):
    layer, x = shaken(SpaceTime(DIM, 3, 4, closed_loop)), torch.randn(2, 45, DIM)
    y, last = layer(x)
    torch.testing.assert_close(y[0], torch.stack(spacetime(layer, list(x[0]))))
    monkeypatch.setattr(dense_ssm, "FEW", 100)
    torch.testing.assert_close(layer(x), (y, last))


A = [[0.5, -1.0, 0.25], [1.0, 0.3, -0.7]]
C = [[0.3, 0.9, -0.6], [1.0, -0.5, 0.25]]


@pytest.mark.usefixtures("double")
def test_numbers_of_the_authors_program():
    """CompanionSSM and ClosedLoopCompanionSSM of HazyResearch/spacetime, with B and K of sum 1 where ours differs."""
    layer, x = SpaceTime(4, 3, 2), torch.sin(torch.arange(20.0)).view(1, 5, 4)
    values = {"a": A, "b": [[1.0, 0.5, -0.25], [0.2, -0.4, 0.6]], "c": C, "skip": [0.1, 0.2, 0.3, 0.4]}
    layer.load_state_dict({name: torch.tensor(value) for name, value in values.items()})
    last = [-1.4297165073622862, -0.25632046290265176, -0.7430757442454277, 0.649137564588742]
    torch.testing.assert_close(layer(x)[0][0, -1], torch.tensor(last))

    layer = SpaceTime(2, 3, closed_loop=True)
    values |= {"b": [[0.6, 0.2, -0.2], [0.2, -0.4, 0.4]], "k": [[0.2, 0.5, -0.3], [0.6, 0.1, 0.3]]}
    del values["skip"]
    layer.load_state_dict({name: torch.tensor(value) for name, value in values.items()})
    y, state = layer(x[:, :, :2])
    ahead = [[-0.442839346392379, -0.5992906928206185], [-0.34626263963447496, 0.05648936309084403]]
    ahead += [[0.17046593576864744, 0.2432841488835506]]
    inputs = [[-0.42681760231409765, -0.3431160563926645], [-0.3518634340446403, 0.04735784748120053]]
    inputs += [[0.13876417217323023, 0.06136694053789263]]
    torch.testing.assert_close(layer.forecast(state, 3), (torch.tensor(ahead)[None], torch.tensor(inputs)[None]))
    torch.testing.assert_close(y[:, -1], torch.tensor(ahead[:1]))  # the first is that of the open loop
    torch.testing.assert_close(layer.next_inputs(x[:, :, :2])[:, -1], torch.tensor(inputs[:1]))


@pytest.mark.usefixtures("double")
def test_it_contains_every_autoregression():
    """With a = 0, B = e_1 and K = C the closed loop continues x_t = Σ φ_i x_{t-i} exactly."""
    phi = torch.tensor([0.5, -0.3, 0.2])
    layer = SpaceTime(1, 3, closed_loop=True)
    values = {"a": torch.zeros(1, 3), "b": torch.eye(3)[:1], "c": phi[None], "k": phi[None]}
    layer.load_state_dict(values)
    series = [1.0, 2.0, -1.0]
    for _ in range(20):
        series.append(sum(p * x for p, x in zip(phi.tolist(), reversed(series[-3:]), strict=True)))
    _, state = layer(torch.tensor(series[:8])[None, :, None])
    torch.testing.assert_close(layer.forecast(state, 15)[0].flatten(), torch.tensor(series[8:]))


def test_init_and_eigenvalues():
    layer = SpaceTime(2000, 8)
    for part in (layer.a, layer.b, layer.c, layer.skip):
        assert_normal(part, 1.0)
    assert torch.linalg.eigvals(layer.system()[0][:200]).abs().max() < 1 + 1e-9
    assert_normal(SpaceTime(2000, 8, closed_loop=True).k, 1.0)


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"state_dim": 0}, "spacetime: state_dim is 0, expected at least 1"),
        ({"num_groups": 3}, "spacetime: num_groups is 3, expected a divisor of dim=4"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ConfigError, match=message):
        SpaceTime(4, **options)
    with pytest.raises(ConfigError, match="spacetime: closed_loop is False, expected True"):
        SpaceTime(4, 2).forecast(torch.zeros(1, 4, 2), 1)
