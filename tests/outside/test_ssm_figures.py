"""State-space models against their authors' programs, which no package of this project has: figures that those gave.

Each program was run once in float64, with the weights and the inputs of `waves`. The figures are its output at the last
step of the second sequence. Where a program says float32, it was told float64. DSS and DLR are of ag1988's repository
of DLR, with torch's own einsum. GSS is of the package gated-state-spaces-pytorch, without its first norm and its sum
with the input. LinOSS ran with numpy in place of jax, its scan as a loop. LMU is of pytorch-lmu, and
HiPPO-RNN of hippo-code. SGConv is of ctlllll's repository. MEGA is the gated attention of transformers 4.57.1, without
its norm and its sum with the input. Megalodon and CEMA are of XuezheMax/megalodon, with plain torch in place of its
kernels for GPUs, and without the sum with the input. S7 is of TaylanSoydan/S7, whose package
has the name of its origin, `event_ssm`; it ran with numpy in place of jax; and
its full form that of lrnnx, without its first map and the sum with the input. Steps last 1 + sin(t)/2 where a case has
timespans.
"""

import json
from pathlib import Path

import pytest
import torch

from scanl import layers
from tests.outside.test_cells import waves

DIM, T = 4, 20
FIGURES = json.loads(Path(__file__).with_name("ssm.json").read_text())


@pytest.mark.parametrize("case", FIGURES, ids=lambda case: case["case"])
def test_authors_program(case):
    torch.set_default_dtype(torch.float64)  # some make fixed matrices, which `double` would only widen
    layer = layers.build(case["layer"], DIM, **case["options"])
    torch.set_default_dtype(torch.float32)
    x = waves(layer, T)
    for name, values in case.get("buffers", {}).items():
        layer.get_buffer(name).copy_(torch.tensor(values))
    spans = (
        {"timespans": 1 + torch.sin(torch.arange(2.0 * T, dtype=x.dtype)).view(2, T) / 2} if "timespans" in case else {}
    )
    y, _ = layer(x, **spans)
    torch.testing.assert_close(y[1, -1], torch.tensor(case["y"], dtype=torch.float64), rtol=1e-9, atol=1e-12)
