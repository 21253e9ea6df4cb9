"""Filters whose readout is fitted in closed form."""

import numpy as np
import torch

from scanl.learning.series.examples import Examples
from scanl.learning.series.filters import fit_filters
from scanl.learning.series.readouts import ClassReadout
from scanl.models import Features

COVERS = ["learning/series/examples", "learning/series/readouts"]


def test_the_only_series_of_a_class_says_nothing_about_the_penalty():
    x = torch.randn(6, 30, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    examples, _ = Examples(x, torch.arange(6), np.ones(6)).distinct()
    found = fit_filters(examples, ClassReadout(6), Features(1), torch.ones(6, dtype=torch.float64), 0, {"filters": 16})
    assert found.fit.penalty == 1e-3
    assert torch.equal(found.model(examples.x)[0].argmax(1), examples.targets)
