"""Random filters: series in pieces and alone, missing steps, the start at rest, thresholds, and what is refused."""

import pytest
import torch

from scanl.errors import ConfigError, ShapeError
from scanl.models import Features, RandomFilters, SequenceClassifier, SequenceRegressor, Stack


def model(channels=2, **options):
    torch.manual_seed(0)
    return RandomFilters(3, Features(channels, [[1.0, 2.0]] * channels), 20, known=True, **options)


def series(channels=2):
    x = torch.randn(6, 15, channels, generator=torch.Generator().manual_seed(1)).cumsum(1)
    x[0, :4] = torch.nan
    x[1, 6, 0] = torch.nan
    return x


@pytest.mark.parametrize("leave_out", [False, True])
def test_pieces_and_rows_alone_are_the_whole(leave_out):
    filters, x = model(leave_out=leave_out), series()
    filters.prepare(x)
    whole, last = filters(x)
    state = None
    for piece in x.split(4, 1):  # the first piece of the first series is missing
        y, state = filters(piece, state)
    for found, expected in zip((y, *state), (whole, *last), strict=True):
        assert torch.equal(found, expected)
    assert last.steps.tolist() == [11 if leave_out else 15, *[15] * 5]
    torch.testing.assert_close(torch.cat([filters(row[None])[0] for row in x]), whole)


def test_steps_that_are_left_out_are_not_there():
    filters, x = model(leave_out=True), series()
    filters.prepare(x)
    assert torch.equal(filters.features(x[:1])[0], filters.features(x[:1, 4:])[0])
    mask = torch.ones(1, 15, dtype=torch.bool)
    mask[:, 12:] = False
    assert torch.equal(filters.features(x[2:3], mask=mask)[0], filters.features(x[2:3, :12])[0])


def test_a_constant_leaves_the_filters_at_rest():
    filters, x = model(channels=1), series(1)
    filters.prepare(x)
    constant = torch.full((1, 9, 1), 3.0)
    (_, once), (_, again) = filters(constant[:, :1]), filters(constant)
    torch.testing.assert_close(once.filters, again.filters, rtol=1e-4, atol=1e-4)
    y = (filters.weight * again.filters[0, 2:]).sum((0, 1)) + torch.tensor([1.0, 1.0]) @ filters.direct
    scale = (filters.weight * again.filters[0, 2:]).sum((0, 1)).abs().clamp(min=1)
    assert (y / scale)[::2].abs().max() < 1e-3  # every other filter does not respond
    assert (y / scale)[1::2].abs().min() > 1e-3


def test_half_of_the_filters_read_changes():
    """At rest they are 0, in a series that rises evenly they become constant."""
    filters, x = model(channels=1), series(1)
    filters.prepare(x)
    rise = torch.arange(400.0)[None, :, None]
    _, state = filters(rise)
    _, after = filters(rise[:, :1] + 400, state)
    change = (after.past - state.past)[0]
    _, later = filters(rise[:, :1] + 401, after)
    torch.testing.assert_close((later.past - after.past)[0], change, rtol=1e-3, atol=1e-2)
    above = later.tallies[0, 0] > after.tallies[0, 0]
    assert torch.equal(above[:, filters.change > 0], (change > filters.thresholds)[:, filters.change > 0])
    assert torch.equal(above[:, filters.change == 0], (later.past[0] > filters.thresholds)[:, filters.change == 0])


def test_thresholds_lie_among_the_outputs():
    filters, x = model(), series()
    filters.prepare(x)
    features = filters.features(x)[0].reshape(6, 3, 4, 20)
    assert features.min() >= 0
    assert features.max() <= 1
    shares = features[:, 0].mean(0)
    assert (shares[:-1] >= shares[1:]).all()
    assert 0.6 < shares[0].mean() < 1
    assert 0 < shares[-1].mean() < 0.4
    empty = model(leave_out=True)
    empty.prepare(torch.full((2, 5, 2), torch.nan))
    assert torch.isfinite(empty(torch.full((2, 5, 2), torch.nan))[0]).all()


@pytest.mark.parametrize("kind", [SequenceClassifier, SequenceRegressor])
def test_filters_beside_a_stack_add_their_answers(kind, tmp_path):
    x, inputs = series(), Features(2, [[1.0, 2.0]] * 2, missing=True)
    filters, stack = model(), Stack(8, 1, "lru")
    filters.prepare(x)
    one = kind(3, stack, inputs, pool="mean", filters=filters).eval()
    alone = kind(3, stack, inputs, pool="mean").eval()
    alone.head, alone.input = one.head, one.input
    beside = filters(x)[0]
    whole, _ = one(x)
    torch.testing.assert_close(whole, alone(x)[0].double() + beside.reshape(whole.shape), rtol=1e-5, atol=1e-5)
    state = None
    for piece in x.split(4, 1):
        y, state = one(piece, state)
    torch.testing.assert_close(y, whole, rtol=1e-5, atol=1e-5)
    packed, offsets = torch.cat([x[2, :5], x[3]])[None], torch.tensor([0, 5, 20])
    torch.testing.assert_close(one(packed, cu_seqlens=offsets)[0][1], whole[3], rtol=1e-5, atol=1e-5)
    one.save(tmp_path)
    torch.testing.assert_close(kind.load(tmp_path)(x)[0], whole)
    with pytest.raises(ConfigError, match="filters map 2 channels to 3 outputs, expected 4 outputs of Features"):
        kind(4, stack, inputs, filters=filters)


def test_what_is_refused():
    with pytest.raises(ConfigError, match=r"random_filters: longest is 0\.1, expected more than 0\.4"):
        RandomFilters(3, Features(2), longest=0.1)
    with pytest.raises(ShapeError, match=r"random_filters: x has shape \(6, 15, 2\), expected \(B, T, 3\)"):
        model(3)(series())
