"""Programs without kernels of scanl, against the models."""

import pytest
import torch

from scanl.errors import ConfigError
from scanl.export.flat import Flat, exported
from scanl.export.lowering import lowered
from scanl.layers import build
from scanl.models import Stack

COVERS = ["export/flat"]


def test_a_program_of_scans_equals_its_model():
    torch.manual_seed(0)
    flat = Flat(Stack(8, 3, ["gru", "hawk", "gla"], layer_options={"gla": {"num_heads": 2}}), torch.randn(2, 5, 8))
    program = lowered(exported(flat), {})
    assert not [node for node in program.graph.nodes if str(node.target).startswith("scanl")]
    run, x = program.module(), torch.randn(3, 9, 8)
    with torch.no_grad():
        for actual, expected in zip(run(x, *flat.start(3)), flat(x, *flat.start(3)), strict=True):
            torch.testing.assert_close(actual, expected)


def test_what_goes_not_step_by_step_is_refused():
    with pytest.raises(ConfigError, match=r"the model uses scanl\.\w+\.default, expected ops that go step by step"):
        lowered(exported(Flat(build("mlstm", 8, num_heads=2))), {})


def test_refusals():
    with pytest.raises(ConfigError, match="example is None for a Linear"):
        Flat(torch.nn.Linear(2, 2))
