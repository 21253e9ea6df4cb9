"""Measures of polynomial memories that do not exist are refused."""

import pytest
import torch

from scanl.errors import ConfigError
from scanl.layers.parts.polynomial_memory import reconstruct, transition

pytestmark = pytest.mark.cells_by_loop("name")


def test_wrong_measures_are_refused():
    for call in (lambda: transition("legz", 4), lambda: reconstruct(torch.ones(4), torch.ones(1), "legz")):
        with pytest.raises(ConfigError, match="unknown measure 'legz'"):
            call()
