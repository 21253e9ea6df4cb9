"""TimestepNorm does not drift over a million steps."""

import torch

from scanl.layers.parts.timestep_norm import TimestepNorm


def test_the_timestep_norm_does_not_drift():
    """A million steps read before: the sums of float64 keep what float32 would round away."""
    norm, steps = TimestepNorm(4, 2), 1_000_000
    x = torch.randn(1, 100, 4) + 3
    _, state = norm(x, None, None)
    state = state._replace(
        steps=state.steps * (steps // 100), sums=state.sums * (steps // 100), rest=state.rest * (steps // 100)
    )
    y = norm(x, state, None)[0]
    values = torch.cat([x.double().expand(steps // 100, 100, 4).flatten(0, 1), x[0].double()]).unflatten(1, (2, 2))
    mean, var = values.mean((0, 2)), values.var((0, 2), correction=0)
    expected = ((x[0, -1].view(2, 2) - mean[:, None]) / torch.sqrt(var[:, None] + 1e-5)).flatten()
    torch.testing.assert_close(y[0, -1].double(), expected, rtol=1e-5, atol=1e-6)
