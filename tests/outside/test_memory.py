"""Layers with a matrix memory against others' programs: weights copied by name, outputs and every gradient."""

import inspect
import sys
import warnings
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl import layers

pytest.importorskip("transformers", reason="needs the extra `outside`")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it warns of a missing GPU
    pytest.importorskip("fla", reason="needs the extra `outside`")
    import fla.layers
    from fla.modules import FusedRMSNormGated, RMSNorm
    from fla.modules import ShortConvolution as TheirConvolution
    from fla.ops.delta_rule.naive import delta_rule_recurrence
    from fla.ops.gla.naive import naive_recurrent_gla
    from fla.ops.linear_attn.naive import naive_recurrent_linear_attn
from transformers.models.mamba2 import configuration_mamba2, modeling_mamba2
from transformers.models.olmo_hybrid import configuration_olmo_hybrid, modeling_olmo_hybrid

XLSTM = "needs xlstm, which is not in the extra `outside`: transformers takes its classes in place of its own"
pytestmark = pytest.mark.filterwarnings("ignore")
B, T, DIM = 2, 70, 16


def shaken(layer: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return layer


def differences(layer: layers.Layer, theirs, parameters: dict[str, Tensor]) -> dict[str, float]:
    """Largest difference of the output and of each gradient, in units of the largest value.

    theirs: x -> y.   parameters: theirs, under our names.
    """
    x = torch.randn(B, T, DIM, generator=torch.Generator().manual_seed(1)).to(next(layer.parameters()).dtype)
    results = []
    for run, leaves in ((lambda x: layer(x)[0], dict(layer.named_parameters())), (theirs, parameters)):
        given = x.clone().requires_grad_()
        y = run(given)
        weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).cos().view(y.shape)
        grads = torch.autograd.grad(y, [given, *leaves.values()], weights)
        results.append({"y": y, "x": grads[0], **dict(zip(leaves, grads[1:], strict=True))})
    ours, others = results
    assert ours.keys() == others.keys()
    return {name: float((ours[name] - others[name]).abs().max() / others[name].abs().max()) for name in ours}


def agree(layer: layers.Layer, theirs, parameters: dict[str, Tensor], bound: float) -> None:
    found = differences(layer, theirs, parameters)
    assert max(found.values()) <= bound, found


@pytest.fixture
def without_kernels(monkeypatch):
    """transformers swaps fla's Triton kernels in, which need a GPU."""
    for module in (modeling_mamba2, modeling_olmo_hybrid):
        for name, value in vars(module).copy().items():
            if inspect.isfunction(value) and value.__module__.startswith("transformers."):
                monkeypatch.setattr(module, name, inspect.unwrap(value))


@pytest.mark.usefixtures("without_kernels")
@pytest.mark.parametrize("groups", [1, 2])
def test_mamba2_is_that_of_transformers(groups):
    config = configuration_mamba2.Mamba2Config(
        hidden_size=DIM, num_heads=8, head_dim=4, state_size=6, n_groups=groups, chunk_size=16, num_hidden_layers=1
    )
    theirs = shaken(modeling_mamba2.Mamba2Mixer(config, 0))
    layer = layers.build("mamba2", DIM, state_dim=6, head_dim=4, num_groups=groups)
    layer.load_state_dict(theirs.state_dict())
    agree(layer, theirs, dict(theirs.named_parameters()), 1e-5)  # it computes in float32


@pytest.mark.usefixtures("without_kernels")
@pytest.mark.parametrize(("value_heads", "reflecting"), [(2, False), (4, True)])
def test_gated_deltanet_is_that_of_transformers(value_heads, reflecting):
    config = configuration_olmo_hybrid.OlmoHybridConfig(
        hidden_size=DIM, linear_num_value_heads=value_heads, linear_num_key_heads=2, linear_key_head_dim=4,
        linear_value_head_dim=8, linear_allow_neg_eigval=reflecting, num_hidden_layers=4,
    )  # fmt: skip
    theirs = shaken(modeling_olmo_hybrid.OlmoHybridGatedDeltaNet(config, 0))
    layer = layers.build(
        "gated_deltanet", DIM, head_dim=4, num_heads=2, num_v_heads=value_heads, allow_neg_eigval=reflecting
    )
    # it holds the three convolutions in one
    parts = theirs.conv1d.weight.detach().split([8, 8, 8 * value_heads])
    theirs_split = {f"{name}_conv1d.weight": nn.Parameter(part) for name, part in zip("qkv", parts, strict=True)}
    parameters = dict(theirs.named_parameters())
    del parameters["conv1d.weight"]
    layer.load_state_dict({**parameters, **theirs_split})

    def run(x):
        weight = torch.cat(list(theirs_split.values()))
        return torch.func.functional_call(theirs, {"conv1d.weight": weight}, (x,))

    agree(layer, run, {**parameters, **theirs_split}, 1e-5)


@pytest.fixture
def plain_modules(monkeypatch):
    """fla's layers on a CPU: what their Triton kernels compute, said in torch."""

    def convolve(self, x, **_):
        y = F.conv1d(F.pad(x.mT, (self.kernel_size[0] - 1, 0)), self.weight, self.bias, groups=self.in_channels).mT
        return (F.silu(y) if self.activation == "silu" else y), None

    def norm(self, x):
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)

    monkeypatch.setattr(TheirConvolution, "forward", convolve)
    monkeypatch.setattr(RMSNorm, "forward", norm)
    monkeypatch.setattr(FusedRMSNormGated, "forward", lambda self, x, gate: norm(self, x) * F.silu(gate))


@pytest.mark.usefixtures("plain_modules")
@pytest.mark.parametrize(
    ("options", "ours"),
    [({}, {}), ({"use_short_conv": True, "use_output_gate": False}, {"conv_size": 4, "output_gate": False})],
    ids=str,
)
def test_gla_is_that_of_fla(monkeypatch, options, ours):
    monkeypatch.setattr("fla.layers.gla.chunk_gla", lambda q, k, v, g, **_: naive_recurrent_gla(q, k, v, g))
    theirs = shaken(fla.layers.GatedLinearAttention(hidden_size=DIM, num_heads=2, **options))
    layer = layers.build("gla", DIM, num_heads=2, **ours)
    layer.load_state_dict(theirs.state_dict())
    agree(layer, lambda x: theirs(x)[0], dict(theirs.named_parameters()), 1e-5)


@pytest.mark.usefixtures("plain_modules")
@pytest.mark.parametrize(
    ("options", "ours"),
    [
        ({}, {}),
        (
            {"use_gate": True, "allow_neg_eigval": True, "qk_activation": "identity"},
            {"output_gate": True, "allow_neg_eigval": True, "activation": "identity"},
        ),
        (
            {"use_beta": False, "qk_activation": "elu", "qk_norm": "sum", "use_short_conv": False, "expand_v": 2.0},
            {"use_beta": False, "activation": "elu", "qk_norm": "sum", "conv_size": None, "expand_v": 2.0},
        ),
    ],
    ids=str,
)
def test_deltanet_is_that_of_fla(monkeypatch, options, ours):
    def delta_rule(q, k, v, beta, use_qk_l2norm_in_kernel, **_):
        if use_qk_l2norm_in_kernel:
            q, k = (part * (part.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for part in (q, k))
        o, _ = delta_rule_recurrence(*(part.transpose(1, 2) for part in (q, k, v, beta)))
        return o.transpose(1, 2), None

    monkeypatch.setattr("fla.layers.delta_net.chunk_delta_rule", delta_rule)
    theirs = shaken(fla.layers.DeltaNet(hidden_size=DIM, num_heads=2, **options))
    layer = layers.build("deltanet", DIM, num_heads=2, **ours)
    layer.load_state_dict(theirs.state_dict())
    agree(layer, lambda x: theirs(x)[0], dict(theirs.named_parameters()), 1e-5)


@pytest.fixture
def torchscale(monkeypatch):
    """Their retention and its positions; what their file imports beside that, for blocks and experts, is left out."""
    retention = pytest.importorskip("torchscale.component.multiscale_retention", reason="needs the extra `outside`")
    for name in ("fairscale", "fairscale.nn", "timm", "timm.models", "timm.models.layers"):
        monkeypatch.setitem(sys.modules, name, MagicMock())
    from torchscale.architecture.retnet import RetNetRelPos

    def build(num_heads: int, value_dim: int, eps: float):
        """In float64, the norm and the decays too."""
        args = SimpleNamespace(
            layernorm_eps=eps, multiway=False, recurrent_chunk_size=14, decoder_embed_dim=DIM,
            decoder_retention_heads=num_heads,
        )  # fmt: skip
        theirs = shaken(retention.MultiScaleRetention(args, DIM, value_dim, num_heads)).double()
        theirs.group_norm.forward = theirs.group_norm._norm
        positions = RetNetRelPos(args).double()
        exponents = torch.linspace(0, 1, DIM // num_heads // 2, dtype=torch.float64)
        positions.angle = (10000**-exponents).repeat_interleave(2)
        positions.decay = torch.log(1 - 2 ** (-5 - torch.arange(num_heads).double()))
        return theirs, positions

    return build


RETENTIONS = [(4, 24), (2, 16), (8, 32)]  # heads, value_dim


@pytest.mark.parametrize(("heads", "value_dim"), RETENTIONS)
@pytest.mark.parametrize("form", ["parallel", "chunks", "steps"])
def test_retnet_is_that_of_torchscale(torchscale, form, heads, value_dim):
    """Each form scales in its own way what the norm makes one again, but for its epsilon: which is 0 here."""
    theirs, positions = torchscale(heads, value_dim, 0.0)
    layer = layers.build("retnet", DIM, num_heads=heads, expand_v=value_dim / DIM, norm_eps=0.0).double()
    layer.load_state_dict(theirs.state_dict())

    def run(x):
        if form != "steps":
            chunked = form == "chunks"
            return theirs(x, positions(T, chunkwise_recurrent=chunked), chunkwise_recurrent=chunked)
        cache, places = {}, (positions(t + 1, activate_recurrent=True) for t in range(T))
        return torch.cat([theirs(x[:, t : t + 1], place, False, cache) for t, place in enumerate(places)], 1)

    agree(layer, run, dict(theirs.named_parameters()), 1e-9)


@pytest.mark.parametrize(("heads", "value_dim"), RETENTIONS)
def test_retnet_is_that_of_torchscale_without_its_scales(torchscale, monkeypatch, heads, value_dim):
    """As in the paper's recurrence, so that the epsilon of the norm is the same too."""
    theirs, positions = torchscale(heads, value_dim, 1e-6)
    layer = layers.build("retnet", DIM, num_heads=heads, expand_v=value_dim / DIM).double()
    layer.load_state_dict(theirs.state_dict())
    turn, _ = positions(T)
    index = torch.arange(T).double()
    mask = ((index[:, None] - index) * positions.decay[:, None, None]).exp().tril()

    def retain(self, q, k, v, mask):
        return (q @ k.mT * mask @ v.view(B, T, heads, -1).transpose(1, 2)).transpose(1, 2)

    monkeypatch.setattr(type(theirs), "parallel_forward", retain)
    agree(layer, lambda x: theirs(x, (turn, mask)), dict(theirs.named_parameters()), 1e-9)


@pytest.mark.usefixtures("plain_modules")
@pytest.mark.parametrize(
    ("options", "theirs"),
    [
        ({"feature_map": "elu_plus_one"}, {"feature_map": "elu", "output_norm": "identity"}),
        ({"feature_map": "identity", "normalize": False, "output_norm": True}, {"feature_map": "identity"}),
        # not normalised: of features so sparse the denominator may be nearly 0, and float32 then tells nothing
        (
            {"feature_map": "dpfp", "nu": 4, "qk_norm": "sum", "normalize": False},
            {"feature_map": "dpfp", "norm_q": True, "norm_k": True, "output_norm": "identity"},
        ),
    ],
    ids=["elu", "identity", "dpfp"],
)
def test_linear_attention_is_that_of_fla(monkeypatch, options, theirs):
    normalize = options.get("normalize", True)

    def attend(q, k, v, normalize, **_):
        return naive_recurrent_linear_attn(q, k, v, scale=1.0, normalize=normalize)

    monkeypatch.setattr("fla.layers.linear_attn.chunk_linear_attn", attend)
    other = fla.layers.LinearAttention(hidden_size=DIM, num_heads=2, do_feature_map_norm=normalize, **theirs)
    shaken(other)
    layer = layers.build("linear_attention", DIM, num_heads=2, **options)
    layer.load_state_dict(other.state_dict())
    agree(layer, lambda x: other(x)[0], dict(other.named_parameters()), 1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"num_heads": 4, "bias": True},
        {"num_heads": 1, "conv1d_kernel_size": 2, "qkv_proj_blocksize": 8},
        {"num_heads": 8, "proj_factor": 1.5},
    ],
    ids=str,
)
def test_mlstm_is_that_of_xlstm(options):
    theirs = pytest.importorskip("xlstm.blocks.mlstm.layer", reason=XLSTM)
    from xlstm.blocks.mlstm.backends import recurrent_step_stabilized_simple

    names = {"proj_factor": "expand", "conv1d_kernel_size": "conv_size", "qkv_proj_blocksize": "block_size"}
    own = {"multiple_of": 8, **{names.get(name, name): value for name, value in options.items()}}
    options = {"round_proj_up_to_multiple_of": 8, **options}
    other = shaken(theirs.mLSTMLayer(theirs.mLSTMLayerConfig(embedding_dim=DIM, context_length=T, **options))).double()
    layer = layers.build("mlstm", DIM, **own).double()
    layer.load_state_dict(other.state_dict())
    # their whole sequence has no m before the first step, their steps have 0, as ours: the 1e-6 differs by e^m
    agree(layer, other, dict(other.named_parameters()), 1e-6)

    def step_by_step(queries, keys, values, igate_preact, fgate_preact, **_):
        head = queries.new_zeros(B, queries.shape[1], queries.shape[3], queries.shape[3])
        state, hs = (head, head[..., :1], head[..., :1, :1]), []
        for t in range(T):
            given = (part[:, :, t : t + 1].clone() for part in (queries, keys, values, igate_preact, fgate_preact))
            h, state = recurrent_step_stabilized_simple(*state, *given)
            hs.append(h)
        return torch.cat(hs, 2)

    other.mlstm_cell.backend_fn = step_by_step
    agree(layer, other, dict(other.named_parameters()), 1e-9)


@pytest.mark.parametrize(
    "options", [{"num_heads": 2}, {"num_heads": 4, "qk_dim_factor": 1.0, "v_dim_factor": 2.0}], ids=str
)
def test_mlstm_large_is_that_of_xlstm(options):
    theirs = pytest.importorskip("xlstm.xlstm_large.model", reason=XLSTM)
    backend = theirs.mLSTMBackendConfig(
        chunkwise_kernel="chunkwise--native_autograd", sequence_kernel="native_sequence__native", step_kernel="native",
        chunk_size=14, autocast_kernel_dtype="float64", return_last_states=True,
    )  # fmt: skip
    config = theirs.mLSTMLayerConfig(DIM, norm_reduction_force_float32=False, mlstm_backend=backend, **options)
    other = shaken(theirs.mLSTMLayer(config)).double()
    names = {"qk_dim_factor": "expand_k", "v_dim_factor": "expand_v"}
    own = {names.get(name, name): value for name, value in options.items()}
    layer = layers.build("mlstm_large", DIM, **own).double()
    layer.load_state_dict(other.state_dict())
    agree(layer, lambda x: other(x)[0], dict(other.named_parameters()), 1e-9)


@pytest.fixture
def gateloop():
    module = pytest.importorskip("gateloop_transformer.gateloop_transformer", reason="needs the extra `outside`")

    def build(**options) -> nn.Module:
        # the gradient as it is, of the transition too
        options |= {"checkpoint_gate_looped_attn": False, "frac_gradient_state_transition": 1.0}
        return shaken(module.GateLoopedAttention(DIM, **options)).double()

    return build


@pytest.mark.parametrize(
    ("sub_ln", "gating", "inner"), [(True, True, 24), (False, True, DIM), (True, False, 24), (False, False, 8)]
)
def test_gateloop_is_that_of_gateloop_transformer(gateloop, sub_ln, gating, inner):
    theirs = {"dim_inner": inner, "add_swish_gating": gating, "sub_ln": sub_ln}
    options = {"width": inner, "output_gate": gating, "output_norm": sub_ln}
    other = gateloop(**theirs)
    layer = layers.build("gateloop", DIM, polar=True, **options).double()
    layer.load_state_dict(other.state_dict())
    agree(layer, other, dict(other.named_parameters()), 1e-9)


@pytest.mark.parametrize("heads", [1, 2, 8])
def test_gateloop_of_larger_heads_is_that_of_gateloop_transformer(gateloop, heads):
    """Theirs has one transition a head; with one for each key channel, as in the paper, it is ours."""
    other = gateloop(heads=heads)
    layer = layers.build("gateloop", DIM, num_heads=heads, output_norm=False, polar=True).double()
    other.to_a[0] = nn.Linear(DIM, 2 * DIM).double()
    other.to_a[1].forward = lambda a: a.view(B, T, heads, -1, 1, 2).transpose(1, 2).flatten(0, 1)
    layer.load_state_dict(other.state_dict())
    agree(layer, other, dict(other.named_parameters()), 1e-9)
