"""SpaceTime: its equation step by step, how it starts, and what only it knows."""

import pytest
import torch

from by_hand import DIM, assert_normal, shaken
from scanl.errors import ConfigError
from scanl.layers import SpaceTime
from scanl.layers.parts import dense_ssm


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


A = [[0.5, -1.0, 0.25], [1.0, 0.3, -0.7]]

C = [[0.3, 0.9, -0.6], [1.0, -0.5, 0.25]]


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
    monkeypatch.setattr(dense_ssm, "MAX_RECURRENT_STEPS", 100)
    torch.testing.assert_close(layer(x), (y, last))


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
