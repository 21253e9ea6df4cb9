"""The inputs of a forecast."""

import numpy as np

from scanl.models import SeriesColumns


def test_steps_reach_as_far_ahead_as_the_whole():
    """T = 5 steps, H = 3 ahead; columns that are not there stay away, and static ones are not cut."""
    target, future, spans = np.arange(10).reshape(2, 5, 1), np.arange(16).reshape(2, 8, 1), np.arange(16).reshape(2, 8)
    columns = SeriesColumns(target, static=np.ones((2, 4)), future=future, timespans=spans)
    part = columns.steps(2, 4)
    assert part.past is None
    assert part.static is columns.static
    assert (part.target[0, :, 0].tolist(), part.future[1, :, 0].tolist()) == ([2, 3], [10, 11, 12, 13, 14])
    assert part.timespans[0].tolist() == [2, 3, 4, 5, 6]
    assert columns.steps(4, 9).target[0, :, 0].tolist() == [4]
    assert columns.steps(4, 9).timespans[0].tolist() == [4, 5, 6, 7]
