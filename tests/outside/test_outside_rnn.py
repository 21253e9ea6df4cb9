"""Recurrent cells against the authors' programs: what those gave for the same numbers, recorded here.

Parameters are cosines in the order of their names, and the input is a sine, so each case is a few numbers: the output
of the last step.
"""

import pytest
import torch

from scanl import layers

B, T, D = 2, 5, 6
X = torch.sin(1.7 * torch.arange(B * T * D, dtype=torch.float64)).view(B, T, D)

# name: (layer, its options, output of the last step by the program named above it)
RECORDED = {
    # yikangshen/Ordered-Neurons, ONLSTMCell
    "onlstm": ("onlstm", {"chunk_size": 2}, [
        0.0195063239705, -0.1239310282756, 0.2409829324733, 0.2610070652101, 0.0, 0.0,
        0.1181095332464, -0.0948821865712, 0.1516038609422, 0.3408301706121, 0.0, 0.0,
    ]),
    # pytorch/benchmarks/fastrnns/custom_lstms.py, LayerNormLSTMCell
    "layernorm_lstm": ("layernorm_lstm", {"carry_normed": True}, [
        0.4975299731846, 0.3043568980557, -0.1688800265283, -0.6488396970481, 0.1135999703461, -0.0970752997242,
        0.4878129621706, 0.1986767273998, -0.1371299000308, -0.6650394992102, 0.1252900642089, 0.0184282685634,
    ]),
    # speechbrain 1.1.2, LiGRU_Layer: in training; after one such step in evaluation mode; with layer norm
    "ligru in training": ("ligru", {}, [
        0.3692102469776, 0.1417779518183, 0.0, 0.084910495629, 0.1744943482457, 0.5013984236589,
        0.5195129740204, 0.4340721737407, 0.0, 0.0365609458995, 0.1807558365795, 0.389569781551,
    ]),
    "ligru": ("ligru", {}, [
        0.489023642805, 0.1206841532021, 0.0, 0.0040761439687, 0.1989756365936, 0.4234562574377,
        0.5567981286121, 0.3207174527158, 0.0, 0.0, 0.2114357224879, 0.4530843708785,
    ]),
    "ligru with layernorm": ("ligru", {"normalization": "layernorm"}, [
        0.3787516734336, 0.1482064299392, 0.0, 0.0928973040391, 0.1740713005207, 0.4783986266151,
        0.5256026763782, 0.4681273157722, 0.0, 0.0588672397883, 0.1810713720154, 0.4149366407646,
    ]),
}  # fmt: skip


def filled(layer):
    with torch.no_grad():
        for index, (_, parameter) in enumerate(sorted(layer.named_parameters())):
            steps = torch.arange(parameter.numel(), dtype=torch.float64)
            parameter.copy_((0.6 * torch.cos(steps * (1.3 + 0.37 * index) + index)).view(parameter.shape))
    return layer


@pytest.mark.parametrize("case", RECORDED)
def test_the_authors_program_gave_this(case):
    name, options, expected = RECORDED[case]
    layer = filled(layers.build(name, D, **options).double())
    if case == "ligru":
        layer(X)  # one step of training: the statistics
        layer.eval()
    y, _ = layer(X)
    torch.testing.assert_close(y[:, -1].flatten(), torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-11)
