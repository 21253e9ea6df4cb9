"""The modules of mamba-ssm against our layers, which read the same weights, and against their own steps."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from scanl import layers
from scanl.compat.mamba_ssm import Mamba, Mamba2, mamba_inner_fn
from scanl.errors import ConfigError, ShapeError

COVERS = ["compat/mamba_ssm/decoding", "compat/mamba_ssm/mamba2"]

DIM, T = 8, 7
VARIANTS = [
    {},
    {"rmsnorm": False, "D_has_hdim": True},
    {"d_ssm": 8, "norm_before_gate": True, "ngroups": 2, "dt_limit": (0.01, 0.05), "bias": True},
]


def mamba2(**options):
    return Mamba2(DIM, d_state=4, headdim=4, layer_idx=1, **options)


MAKERS = [lambda: Mamba(DIM, layer_idx=1), *(lambda options=options: mamba2(**options) for options in VARIANTS)]


def shaken(module):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) / 4)
    return module


def parameters_of_mamba2(d_ssm, ngroups, norm, channels_of_D, gated):
    """The original's names and shapes, for d_inner = 16, d_state = 4, headdim = 4 and d_conv = 4."""
    heads, convolved = d_ssm // 4, d_ssm + 8 * ngroups
    shapes = {
        "dt_bias": (heads,), "A_log": (heads,), "D": (channels_of_D,),
        "in_proj.weight": (32 + 8 * ngroups + heads, DIM),
        "conv1d.weight": (convolved, 1, 4), "conv1d.bias": (convolved,), "out_proj.weight": (DIM, 16),
    }  # fmt: skip
    return shapes | ({"norm.weight": (d_ssm,)} if norm else {}) | gated


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        (VARIANTS[0], (16, 1, True, 4, {})),
        (VARIANTS[1], (16, 1, False, 16, {})),
        (VARIANTS[2], (8, 2, True, 2, {"in_proj.bias": (50,), "out_proj.bias": (DIM,)})),
    ],
)
def test_parameters_of_mamba2(options, sizes):
    named = {name: tuple(value.shape) for name, value in mamba2(**options).state_dict().items()}
    assert named == parameters_of_mamba2(*sizes)


@pytest.mark.parametrize(
    ("maker", "layer"), [(MAKERS[0], layers.Mamba(DIM)), (MAKERS[1], layers.Mamba2(DIM, 4, head_dim=4))]
)
def test_equals_our_layer(maker, layer):
    module, x = shaken(maker()), torch.randn(2, T, DIM)
    layer.load_state_dict(module.state_dict())
    torch.testing.assert_close(module(x), layer(x)[0])
    half = maker().to(torch.bfloat16)
    half.load_state_dict(module.state_dict())
    y = half(x.bfloat16())
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), module(x), rtol=0.1, atol=0.05)


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("first", [1, 5])
def test_steps_are_the_sequence(maker, first):
    module, x = shaken(maker()), torch.randn(2, T, DIM)
    inference = SimpleNamespace(key_value_memory_dict={}, seqlen_offset=0, max_seqlen=T)
    with torch.no_grad():
        expected, ys = module(x), [module(x[:, :first], inference_params=inference)]
        conv_state, ssm_state = inference.key_value_memory_dict[1]
        for inference.seqlen_offset in range(first, T):
            at = inference.seqlen_offset
            ys.append(module(x[:, at : at + 1], inference_params=inference))
    torch.testing.assert_close(torch.cat(ys, 1), expected)
    assert inference.key_value_memory_dict[1][1] is ssm_state
    empty = module.allocate_inference_cache(3, 100, torch.float64)
    assert [part.shape[1:] for part in empty] == [conv_state.shape[1:], ssm_state.shape[1:]]
    assert {part.dtype for part in empty} == {torch.float64}
    with pytest.raises(ShapeError, match=r"\.step: hidden_states has shape \(2, 7, 8\), expected \(B, 1, D\)"):
        module.step(x, conv_state, ssm_state)
    module.layer_idx = None
    with pytest.raises(ConfigError, match="layer_idx is None, expected a number because of inference_params"):
        module(x, inference_params=inference)


@pytest.mark.parametrize("options", VARIANTS)
def test_mamba2_of_several_sequences(options):
    module, x = shaken(mamba2(**options)), torch.randn(1, T, DIM)
    seq_idx, cu_seqlens = torch.tensor([[0, 0, 0, 0, 1, 2, 2]]), torch.tensor([0, 4, 5, 7])
    expected = torch.cat([module(piece) for piece in x.split([4, 1, 2], 1)], 1)
    torch.testing.assert_close(module(x, seq_idx=seq_idx), expected)
    torch.testing.assert_close(module(x.expand(2, -1, -1).flatten(0, 1), T), module(x).expand(2, -1, -1).flatten(0, 1))
    inference = SimpleNamespace(key_value_memory_dict={}, seqlen_offset=0, max_seqlen=T)
    packed = {"seq_idx": seq_idx, "cu_seqlens": cu_seqlens}
    torch.testing.assert_close(module(x, **packed, inference_params=inference), expected)
    inference.seqlen_offset, more = 1, torch.randn(3, 1, DIM)
    y = module(more, inference_params=inference)
    for row, piece in enumerate(x.split([4, 1, 2], 1)):
        whole = module(torch.cat([piece, more[row : row + 1]], 1))
        torch.testing.assert_close(y[row : row + 1], whole[:, -1:])
    with pytest.raises(ConfigError, match="cu_seqlens is given, expected seq_idx with it"):
        module(x, cu_seqlens=cu_seqlens)


def test_inner_function_with_complex_states_and_norms():
    xz, width, rank, N = torch.randn(2, 12, T), 6, 2, 3
    conv, bias = torch.randn(width, 1, 4), torch.randn(width)
    project, delta, out = torch.randn(rank + 4 * N, width), torch.randn(width, rank), torch.randn(5, width)
    A, D = torch.complex(-torch.rand(width, N), torch.randn(width, N)), torch.randn(width)
    y = mamba_inner_fn(
        xz, conv, bias, project, delta, out, None, A, D=D, delta_bias=bias, dt_rms_weight=torch.ones(rank)
    )
    u = F.silu(F.conv1d(xz[:, :width], conv, bias, padding=3, groups=width)[..., :T])
    low, B, C = (project @ u).split([rank, 2 * N, 2 * N], 1)
    low = low * (low.square().mean(1, keepdim=True) + 1e-6).rsqrt()
    B, C = (torch.view_as_complex(each.unflatten(1, (N, 2)).movedim(2, -1).contiguous()) for each in (B, C))
    h, step, expected = torch.zeros(2, width, N), F.softplus(delta @ low + bias[:, None]), []
    for t in range(T):
        h = (step[..., t, None] * A).exp() * h + step[..., t, None] * u[..., t, None] * B[:, None, :, t]
        expected.append((2 * (h * C[:, None, :, t]).sum(-1).real + D * u[..., t]) * F.silu(xz[:, width:, t]))
    torch.testing.assert_close(y, torch.stack(expected, 1) @ out.T, rtol=1e-4, atol=1e-4)


def test_initialization_and_refusals():
    module = Mamba(DIM, dt_rank=3, dt_init="constant", dt_scale=2.0, dtype=torch.bfloat16, device="meta")
    assert module.in_proj.weight.dtype == torch.bfloat16
    assert module.A_log.dtype == torch.float32
    assert module.A_log.device.type == "meta"
    assert module.A_log._no_weight_decay
    module = Mamba(DIM, dt_rank=3, dt_init="constant", dt_scale=2.0)
    torch.testing.assert_close(module.dt_proj.weight, torch.full((16, 3), 2 * 3**-0.5))
    module = mamba2(conv_init=1e-3, A_init_range=(2, 3))
    assert module.conv1d.weight.abs().max() <= 1e-3
    assert 2 <= module.A_log.exp().min() <= module.A_log.exp().max() <= 3
    with pytest.raises(ConfigError, match="Mamba2: process_group is 1, expected None: scanl splits no layer"):
        mamba2(process_group=1)
    with pytest.raises(ConfigError, match="Mamba2: d_ssm is 6, expected a multiple of headdim=4, at most 16"):
        mamba2(d_ssm=6)
