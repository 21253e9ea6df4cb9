"""Programs without kernels of scanl, against the models."""

import pytest
import torch

from scanl.errors import ConfigError
from scanl.export.flat import FlatModel, exported
from scanl.export.lowering import LoweredCall, _decomposition, lowered
from scanl.export.native import NATIVE
from scanl.layers import build
from scanl.models import Stack
from scanl.ops import linear_attention, linear_scan

COVERS = ["export/flat"]


def test_a_program_of_scans_equals_its_model():
    torch.manual_seed(0)
    flat = FlatModel(Stack(8, 3, ["gru", "hawk", "gla"], layer_options={"gla": {"num_heads": 2}}), torch.randn(2, 5, 8))
    program = lowered(exported(flat), {})
    assert not [node for node in program.graph.nodes if str(node.target).startswith("scanl")]
    run, x = program.module(), torch.randn(3, 9, 8)
    with torch.no_grad():
        for actual, expected in zip(run(x, *flat.start(3)), flat(x, *flat.start(3)), strict=True):
            torch.testing.assert_close(actual, expected)


def test_a_model_in_training_is_exported_as_it_decodes_and_stays_as_it_is():
    torch.manual_seed(0)
    model, x = Stack(4, 1, "gru", dropout=0.5).train(), torch.randn(2, 3, 4)
    flat = FlatModel(model, x)
    assert model.training
    y = flat(x, *flat.start(2))[0]
    torch.testing.assert_close(y, model.eval()(x)[0])
    for parameter in model.parameters():
        parameter.data.zero_()
    torch.testing.assert_close(flat(x, *flat.start(2))[0], y)


@pytest.mark.parametrize("reverse", [False, True])
def test_a_scan_is_the_op_from_either_end(reverse):
    x, a, state = torch.randn(2, 5, 3), torch.rand(2, 5, 3), torch.randn(2, 3)
    q, u, memory = torch.randn(2, 5, 2, 3), torch.randn(2, 3), torch.randn(2, 2, 3, 3)
    phases = torch.polar(a, x)
    for name, op, operands in (
        ("linear_scan_cpu", linear_scan, (x, a, state)),
        ("linear_scan_cpu", linear_scan, (phases, phases.flip(1), torch.polar(state, state))),
        ("linear_attention_cpu", linear_attention, (q, q.flip(1), q.cos(), -q.abs(), None, u, memory)),
    ):
        options = () if op is linear_scan else (0.5,)
        ours = _decomposition(getattr(torch.ops.scanl, name).default, {})(*operands, reverse, None, *options)
        named = dict(zip(op.options, options, strict=True))
        expected = op(*operands, reverse=reverse, backend="reference", **named)
        for mine, other in zip(ours[:2], expected, strict=True):
            torch.testing.assert_close(mine, other)


def test_an_operator_of_onnx_stands_for_what_it_computes_alone():
    """Decays of the values, a bonus of the present step, and wider numbers have none."""
    q, state = torch.randn(1, 3, 2, 4), torch.zeros(1, 2, 4, 4)
    for more, start in (({"gv": -q.abs()}, state), ({"u": q[0, 0]}, state), ({}, state.double())):
        call = LoweredCall(linear_attention, {"q": q, "k": q, "v": q, **more}, start, {"scale": None})
        assert NATIVE["linear_attention"](call) is None


def test_what_goes_not_step_by_step_is_refused():
    with pytest.raises(ConfigError, match=r"the model uses scanl\.\w+\.default, expected ops that go step by step"):
        lowered(exported(FlatModel(build("mlstm", 8, num_heads=2))), {})


def test_refusals():
    with pytest.raises(ConfigError, match="example is None for a Linear"):
        FlatModel(torch.nn.Linear(2, 2))
