"""The mixing matrix beside its formula, and the law that an op is linear in what it declares as values."""

import pytest
import torch

from scanl.errors import ConfigError
from scanl.inspect import MixingMatrix, mixing_matrix
from scanl.inspect.base import noise
from scanl.layers import GLA, GRU, HiPPO, LinRNNLTI, WindowAttention, build
from scanl.ops import op_calls, registry


def test_that_of_a_gated_linear_attention_is_queries_keys_and_decays():
    """M[t, s] = scale Σ_k q_tk e^{g_{s+1,k} + ... + g_tk} k_sk."""
    torch.manual_seed(0)
    layer, x = GLA(8, num_heads=2).double(), noise(1, 7, 8)
    with torch.no_grad(), op_calls() as calls:
        layer(x)
    (call,) = [call for call in calls if call.op.name == "linear_attention"]
    q, k, v, g = (call.operands[name][0] for name in ("q", "k", "v", "g"))
    scale = call.options["scale"] or q.shape[-1] ** -0.5
    total = g.cumsum(0)
    expected = scale * torch.einsum("thk,tshk,shk->hts", q, (total[:, None] - total[None]).exp(), k).tril()
    inspection = mixing_matrix(layer, x)
    assert inspection.op == "linear_attention"
    torch.testing.assert_close(inspection.matrix[0], expected)
    y = call.op(**call.operands, **call.options)[0][0]
    torch.testing.assert_close(torch.einsum("hts,shv->thv", inspection.matrix[0], v), y)


def test_the_state_before_the_first_step_is_not_in_it():
    class Begun(LinRNNLTI):
        def forward(self, x, state=None, **others):
            return super().forward(x, torch.ones_like(self.init_state(len(x))) if state is None else state, **others)

    torch.manual_seed(0)
    layer, x = Begun(4, 3), noise(1, 5, 4)
    plain = LinRNNLTI(4, 3)
    plain.load_state_dict(layer.state_dict())
    torch.testing.assert_close(mixing_matrix(layer, x).matrix, mixing_matrix(plain, x).matrix)


def test_its_figures_are_means_over_heads_of_shares():
    """Signs do not cancel, and a head that reads nothing has no share."""
    matrix = torch.tensor([[[[1.0, 0.0], [3.0, -4.0]], [[0.0, 0.0], [2.0, 0.0]], [[0.0, 0.0], [0.0, 0.0]]]])
    figures = MixingMatrix(matrix, "op").figures()
    assert list(figures.values()) == pytest.approx([3, 5 / 8 / 3, (3 / 8 + 1) / 3])


def test_that_of_attention_is_the_softmax():
    torch.manual_seed(0)
    layer, x = WindowAttention(8, num_heads=2, num_kv_heads=2, window=3, rope_fraction=0.0), noise(1, 6, 8)
    matrix = mixing_matrix(layer, x).matrix[0]
    q, k = (project(x[0].float()).unflatten(-1, (2, -1)).double() for project in (layer.q_proj, layer.k_proj))
    distance = torch.arange(6)[:, None] - torch.arange(6)
    scores = (torch.einsum("thk,shk->hts", q, k) / 2).masked_fill((distance < 0) | (distance >= 3), -torch.inf)
    torch.testing.assert_close(matrix, scores.softmax(-1).detach(), rtol=1e-5, atol=1e-6)
    assert not mixing_matrix(layer, x).matrix.requires_grad


@pytest.mark.parametrize("name", ["mamba", "deltanet", "rwkv7", "rwkv4", "s4d"])
def test_other_ops_are_their_matrix_times_their_values(name):
    torch.manual_seed(0)
    options = {"rwkv7": {"head_dim": 4}, "deltanet": {"num_heads": 2}}.get(name, {})
    layer, x = build(name, 8, **options).double().eval(), noise(1, 6, 8)
    inspection = mixing_matrix(layer, x)
    with torch.no_grad(), op_calls() as calls:
        layer(x)
    call = next(call for call in calls if call.op.name == inspection.op)
    operands = {**call.operands, call.op.state: None}
    y = call.op(**operands, **call.options)[0][0]
    values = call.operands[call.op.values][0]
    if "H" in call.op.output:
        y, values = y[..., 0], values[..., 0]
    heads = inspection.matrix.shape[1]
    product = torch.einsum("hts,sh->th", inspection.matrix[0], values.flatten(1)[:, :heads].to(inspection.matrix.dtype))
    torch.testing.assert_close(product, y.flatten(1)[:, :heads].to(product.dtype))


@pytest.mark.parametrize("op", [op for op in registry.declared() if op.values], ids=str)
def test_an_op_is_linear_in_its_values(op):
    """From an empty state: twice the values, twice the output; and the output is not 0."""
    sample = next(iter(op.samples))
    operands = {name: value for name, value in sample.operands.items() if name != op.state}
    y, _ = op(**operands, **sample.options)
    double, _ = op(**operands | {op.values: 2 * operands[op.values]}, **sample.options)
    torch.testing.assert_close(double, 2 * y)
    assert y.abs().max() > 0


def test_layers_that_mix_by_no_such_op_are_refused():
    for layer, ops in ((GRU(4), "gru"), (HiPPO(4, 4), "linear_scan")):
        with pytest.raises(ConfigError, match=rf"mixing_matrix: the ops that \w+ calls are {ops}.*, expected one over"):
            mixing_matrix(layer)


def test_a_record_of_ops_belongs_to_its_context():
    layer, x = GRU(4), torch.zeros(1, 2, 4)
    with op_calls() as outer:
        layer(x)
        with op_calls() as inner:
            layer(x)
        layer(x)
    layer(x)
    assert [len(outer), len(inner)] == [2, 1]
