"""Recurrent cells against the authors' programs: what those gave for the same numbers, recorded here.

Parameters are cosines in the order of their names, and the input is a sine, so each case is a few numbers: the output
of the last step.
"""

import pytest
import torch
from torch import nn

from scanl import layers
from scanl.layers.rnn.esn import ESN
from scanl.learning.forecasting.readout import Ridge

pytestmark = pytest.mark.cells_by_loop

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
    "ligru with layernorm": ("ligru", {"variant": "layernorm"}, [
        0.3787516734336, 0.1482064299392, 0.0, 0.0928973040391, 0.1740713005207, 0.4783986266151,
        0.5256026763782, 0.4681273157722, 0.0, 0.0588672397883, 0.1810713720154, 0.4149366407646,
    ]),
    # Sunnydreamrain/IndRNN_pytorch, IndRNNCell_onlyrecurrent after a Linear
    "indrnn": ("indrnn", {}, [
        2.0862014714811, 0.0, 0.8098051826013, 0.0, 0.0, 1.9148593415586,
        0.8896634803181, 0.0, 1.0817697896372, 0.0, 0.7932848124702, 0.9577865933165,
    ]),
    # PyPI's sru 2.6.0, SRUCell, its loop in Python
    "sru": ("sru", {}, [
        -0.1330481864229, -1.0472816715409, 0.466482093352, 1.3496724539854, -0.1764844113989, -0.3344757788847,
        -0.2045253695846, -0.8505621489973, 0.6818005174689, 0.8117717471808, -0.9673445038277, 0.2323727833144,
    ]),
    "sru with layer norm": ("sru", {"layer_norm": True, "highway_bias": -3.0}, [
        -0.0356040588667, -0.798441638308, 0.1329141112007, 0.6582973228774, 0.1002544803485, -0.1812914829044,
        -0.2470620192933, -0.4790867448423, 0.5338045137081, 0.3149641762646, -0.3057244459451, 0.1376409332514,
    ]),
    "sru_v1": ("sru_v1", {}, [
        -0.0997791812217, -0.9625517422085, 0.4708197725325, 1.3564523014645, -0.0357722257912, -0.445550897352,
        -0.1372665699169, -0.7810108574752, 0.7398515234656, 0.8323699707403, -0.9369248858977, 0.064579842497,
    ]),
    # salesforce/pytorch-qrnn, QRNNLayer on a CPU
    "qrnn f of one step": ("qrnn", {"pooling": "f", "conv_size": 1, "variant": "new"}, [
        -0.4155044728981, -0.6713615758086, -0.3910398835481, -0.7657840020248, -0.2521381196198, -0.463643454445,
        -0.2379400245628, -0.5863849175924, -0.5336035469623, -0.8186147079148, 0.3423727742255, -0.2274260794172,
    ]),
    "qrnn fo of one step": ("qrnn", {"pooling": "fo", "conv_size": 1, "variant": "new"}, [
        -0.3040592777512, -0.1530231800332, -0.246211896574, -0.6128569784931, -0.03628098249, -0.3459232086957,
        -0.1645187933181, -0.0798430189275, -0.4557226340811, -0.4029033571092, 0.1159934566724, -0.1494964040273,
    ]),
    "qrnn f": ("qrnn", {"pooling": "f", "variant": "new"}, [
        0.7642884834897, 0.8401550377136, 0.6545027619486, -0.3258552375333, 0.7685767307962, 0.915254064151,
        0.9295042342852, 0.4143915897499, 0.7508828276017, 0.0687053338651, -0.4147840185534, 0.9119452154556,
    ]),
    "qrnn fo": ("qrnn", {"pooling": "fo", "variant": "new"}, [
        0.1276299329977, 0.035922308979, 0.2237603894609, -0.3016589957318, 0.7063454142971, 0.3091432138282,
        0.5731732600702, 0.0566424331549, 0.106717919616, 0.0412830610613, -0.3654467241502, 0.6882459583859,
    ]),
}  # fmt: skip


def cosines(index, shape):
    steps = torch.arange(shape.numel(), dtype=torch.float64)
    return (0.6 * torch.cos(steps * (1.3 + 0.37 * index) + index)).view(shape)


def filled(layer):
    with torch.no_grad():
        for index, (_, parameter) in enumerate(sorted(layer.named_parameters())):
            parameter.copy_(cosines(index, parameter.shape))
    return layer


def close(found, expected):
    torch.testing.assert_close(found.flatten(), torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("case", RECORDED)
def test_the_authors_program_gave_this(case):
    name, options, expected = RECORDED[case]
    layer = filled(layers.build(name, D, **options).double())
    if case == "ligru":
        layer(X)  # one step of training: the statistics
        layer.eval()
    y, _ = layer(X)
    close(y[:, -1], expected)


def reservoir():
    layer = ESN(D, width=8, leak=0.3).double()
    for index, buffer in enumerate((layer.W, layer.Win, layer.bias)):
        buffer.copy_(cosines(index, buffer.shape))
    layer.readout = nn.Linear(8, 8, bias=False).double()  # what the layer gives are its states
    nn.init.eye_(layer.readout.weight)
    return layer


def test_reservoirpy_gave_these_states_and_this_readout():
    """PyPI's reservoirpy 0.4.2, Reservoir and Ridge."""
    states = reservoir()(X)[0].detach()
    close(states[:, -1], [
        0.0771953803497, -0.2548485772621, 0.3834158720362, -0.245917804935, -0.1441901963349, 0.2348615016003,
        -0.1816631567751, -0.0600627983267, -0.1952624841169, -0.1821923725218, 0.2912556541625, -0.1967401403971,
        0.09347116915, 0.0910058747043, -0.0692770467486, 0.0269277374763,
    ])  # fmt: skip
    fit, targets = Ridge(0.01), torch.linspace(-1, 1, B * T * 2, dtype=torch.float64).view(B, T, 2) ** 3
    for row, target in zip(states, targets, strict=True):
        fit.add(row, target)
    weight, bias = fit.solve()
    close(weight, [
        -3.7585369488221, -0.5085742975116, 2.0585373936674, 0.68845531241, -0.6320587818205, 3.1358093771613,
        0.5836449358243, -0.453804215337, -4.0523268092611, -0.3411016082304, 2.063787707731, 1.0630345563445,
        -0.5830037970344, 2.5727369782275, -0.0421008490491, -0.1061955277883,
    ])  # fmt: skip
    close(bias, [-1.1397921084635, -0.9324380423803])


def test_a_reservoir_beside_reservoirpy():
    nodes = pytest.importorskip("reservoirpy.nodes", reason="needs reservoirpy")
    layer = reservoir()
    states = layer(X)[0].detach()
    for row, expected in zip(X, states, strict=True):
        theirs = nodes.Reservoir(W=layer.W.numpy(), Win=layer.Win.numpy(), bias=layer.bias.numpy(), lr=layer.leak)
        close(expected, theirs.run(row.numpy()).ravel().tolist())


@pytest.mark.parametrize("options", [{}, {"variant": "v1"}, {"layer_norm": True, "highway_bias": -3.0}])
def test_sru_beside_pypi_s(options):
    theirs = pytest.importorskip("sru", reason="needs sru").SRUCell(D, D, **options)
    layer = layers.build("sru", D, **options)
    layer.load_state_dict(theirs.state_dict())
    with torch.no_grad():
        expected, _ = theirs(X.float().transpose(0, 1))
        torch.testing.assert_close(layer(X.float())[0], expected.transpose(0, 1))


def test_ligru_beside_speechbrain_s():
    rnn = pytest.importorskip("speechbrain.nnet.RNN", reason="needs speechbrain")
    theirs, layer = rnn.LiGRU_Layer(D, D, 1, B), layers.build("ligru", D)
    layer.load_state_dict(theirs.state_dict(), strict=False)
    torch.testing.assert_close(layer(X.float())[0], theirs(X.float()))
