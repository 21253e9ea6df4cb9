"""Whole numbers of any kind: which values stand for one, and what is refused."""

import numpy as np
import pytest
import torch

from scanl.errors import ConfigError
from scanl.whole import SEEDS, is_whole, whole_number


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3), torch.tensor(3), torch.tensor([3])])
def test_a_whole_number_of_any_kind_becomes_an_int(value):
    assert is_whole(value)
    number = whole_number("run", "seed", value)
    assert (type(number), number) == (int, 3)


@pytest.mark.parametrize("value", [3.0, "3", None, np.float32(3), torch.tensor(3.0), torch.tensor([1, 2]), [3]])
def test_what_is_no_whole_number_is_refused(value):
    assert not is_whole(value)
    with pytest.raises(ConfigError, match=r"^run: seed is .*, expected a whole number of at least 1$"):
        whole_number("run", "seed", value, least=1)


def test_a_number_out_of_range_is_refused():
    assert (whole_number("run", "seed", 0), whole_number("run", "seed", SEEDS - 1)) == (0, 2**64 - 1)
    with pytest.raises(ConfigError, match=r"^run: steps is 0, expected at least 1$"):
        whole_number("run", "steps", 0, least=1)
    with pytest.raises(ConfigError, match=rf"^run: seed is {2**64}, expected below {2**64}$"):
        whole_number("run", "seed", SEEDS)
