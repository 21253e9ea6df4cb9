"""Ridge regression by leaving rows out: the closed form against fits without each row."""

import pytest
import torch

from scanl.learning.forecasting.leave_one_out import PENALTIES, fit_ridge


def by_hand(x, y, w, penalty):
    """Solve the normal equations with an intercept that has no penalty."""
    ones = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1)
    penalties = penalty * torch.eye(ones.shape[1], dtype=x.dtype)
    penalties[-1, -1] = 0
    return torch.linalg.solve(ones.T @ (w[:, None] * ones) + penalties, ones.T @ (w[:, None] * y))


@pytest.mark.parametrize("features", [4, 30])
def test_predictions_are_those_of_fits_without_a_row(features):
    draw = torch.Generator().manual_seed(0)
    x, y = (torch.randn(12, width, generator=draw, dtype=torch.float64) for width in (features, 2))
    w = 0.5 + torch.rand(12, generator=draw, dtype=torch.float64)
    w /= w.mean()
    x -= (w[:, None] * x).mean(0)
    x /= (w[:, None] * x.square()).mean(0).sqrt()  # so the fit changes no scale
    for penalty in (0.3, 40.0):
        fit = fit_ridge(x, y, w, [penalty])
        solution = by_hand(x, y, w, penalty)
        torch.testing.assert_close(torch.cat([fit.weight.T, fit.bias[None]]), solution)
        for row in (0, 7):
            others = torch.arange(12) != row
            solution = by_hand(x[others], y[others], w[others], penalty)
            torch.testing.assert_close(fit.predictions[row], x[row] @ solution[:-1] + solution[-1])


def test_the_penalty_with_the_smallest_error():
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(30, 50, generator=draw, dtype=torch.float64)
    noise, w = torch.randn(30, 1, generator=draw, dtype=torch.float64), torch.ones(30)
    y = x[:, :5].sum(1, keepdim=True) + noise
    errors = [(fit_ridge(x, y, w, [penalty]).predictions - y).square().sum().item() for penalty in PENALTIES]
    best = fit_ridge(x, y, w)
    assert best.penalty == PENALTIES[errors.index(min(errors))]
    assert PENALTIES[0] < best.penalty < PENALTIES[-1]


def test_a_constant_feature_has_no_weight():
    x = torch.tensor([[1.0, 5.0], [2.0, 5.0], [4.0, 5.0]])
    fit = fit_ridge(x, x[:, :1], torch.ones(3), [0.0])
    torch.testing.assert_close(fit.weight, torch.tensor([[1.0, 0.0]], dtype=torch.float64))
