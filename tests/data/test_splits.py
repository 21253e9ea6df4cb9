"""Samples of places that are in step with no season."""

import numpy as np
import pytest

from scanl.data.splits import sampled


def test_no_more_than_the_limit_is_all():
    assert sampled(5, 5).tolist() == sampled(5, 9).tolist() == [0, 1, 2, 3, 4]
    assert sampled(0, 3).tolist() == []


@pytest.mark.parametrize("count", [9_410, 34_504, 62_737])
def test_a_sample_has_each_hour_of_the_day(count):
    """Also the sample of a sample: a stride of 8 in one of 3 saw midnight alone."""
    for places in (sampled(count, 400), sampled(count, 3000)[sampled(3000, 400)]):
        assert len(places) == 400
        assert (np.diff(places) > 0).all()
        assert places.max() < count
        for season in (7, 24):
            counts = np.bincount(places % season, minlength=season)
            assert abs(counts - 400 / season).max() < 5 * (400 / season) ** 0.5  # five deviations of a draw
