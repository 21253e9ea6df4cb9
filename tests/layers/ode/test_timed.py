"""Cells that take a timespan: steps of no duration, and samples of each."""

import re

import pytest
import torch

from scanl import layers
from scanl.errors import ShapeError
from scanl.layers.ode._timed import TimedCell
from scanl.layers.ode.tarnn import tarnn_cell

pytestmark = pytest.mark.cells_by_loop


CELLS = {layers.get(name).cell for name in layers.names() if issubclass(layers.get(name), TimedCell)} | {tarnn_cell}


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", [name for name in layers.names() if "timespans" in layers.get(name).takes])
def test_steps_of_no_duration_give_numbers_and_gradients(name):
    """The first step, one in the middle, and all of them."""
    cls = layers.get(name)
    layer, x = layers.build(name, 12, **cls.sample), torch.randn(2, 4, 12, requires_grad=True)
    for without in ([0, 1], [2], [0, 1, 2, 3]):
        spans = torch.rand(2, 4) + 0.5
        spans[:, without] = 0
        y, _ = layer(x, timespans=spans.requires_grad_())
        learned = [parameter for parameter in layer.parameters() if parameter.requires_grad]
        gradients = torch.autograd.grad(y.cos().sum(), [x, spans, *learned], allow_unused=True)
        assert all(part.isfinite().all() for part in (y, *gradients) if part is not None)


@pytest.mark.parametrize("op", sorted(CELLS, key=lambda op: op.name), ids=lambda op: op.name)
def test_samples_of_a_cell(op):
    """Each sample runs; a state of None is zeros; its gradients are its derivatives; the wrong ones are refused."""
    for sample in op.samples:
        names = list(sample.operands)
        given = [sample.operands[name].requires_grad_() for name in names]

        def run(*values, names=names, options=sample.options):
            return op(**dict(zip(names, values, strict=True)), **options)

        assert torch.autograd.gradcheck(run, given, fast_mode=True)
        assert names[-1] == "state"
        torch.testing.assert_close(run(*given[:-1], None), run(*given[:-1], torch.zeros_like(given[-1])))
    assert any("cu_seqlens" in sample.options for sample in op.samples)
    assert any("cu_seqlens" not in sample.options for sample in op.samples)
    errors = list(op.errors)
    assert len(errors) >= 2
    for sample, message in errors:
        with pytest.raises(ShapeError, match=re.escape(f"{op.name}: {message}")):
            op(**sample.operands, **sample.options)
