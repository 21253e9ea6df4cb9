import pytest

from scanl.errors import ConfigError
from scanl.learning.forecasting.answer_columns import INTERVALS, bounds, check_levels, refuse_twice


def test_levels_and_their_columns():
    assert check_levels("forecast", "quantiles", None) == INTERVALS
    assert check_levels("forecast", "points", None) == ()
    levels = check_levels("forecast", "quantiles", [50, 80, 50])
    assert bounds("y", levels) == [
        "y-lo-50",
        "y-hi-50",
        "y-lo-80",
        "y-hi-80",
    ]
    with pytest.raises(ConfigError, match=r"levels is \[100\], expected per cents above 0 and below 100"):
        check_levels("forecast", "quantiles", [100])
    with pytest.raises(ConfigError, match="expected none because the distribution is points"):
        check_levels("forecast", "points", [80])


def test_two_columns_of_one_name():
    refuse_twice("forecast", ["ds", "y"])
    with pytest.raises(ConfigError, match="two columns called 'y'; rename one in the table"):
        refuse_twice("forecast", ["ds", "y", "y"])
