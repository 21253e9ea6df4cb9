"""Ops against programs that others wrote: values and every gradient. Needs the extra `outside`; skipped without it.

Most of these compute in float32 whatever they are given, so the bound is float32's: 1e-5 of the largest value.
"""

import inspect
import warnings

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from scanl import ops

pytest.importorskip("transformers", reason="needs the extra `outside`")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it warns of a missing GPU
    pytest.importorskip("fla", reason="needs the extra `outside`")
    from fla.ops.delta_rule.naive import delta_rule_recurrence
    from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule
    from fla.ops.generalized_delta_rule.dplr.naive import dplr_recurrence
    from fla.ops.gla.naive import naive_recurrent_gla
    from fla.ops.kda.naive import naive_recurrent_kda
    from fla.ops.rwkv6.recurrent_naive import naive_recurrent_rwkv6
    from fla.ops.simple_gla.naive import naive_chunk_simple_gla, naive_recurrent_simple_gla
from accelerated_scan.ref import scan as reference_scan
from transformers.models.mamba2 import modeling_mamba2
from transformers.models.qwen3_next import modeling_qwen3_next

# without what swaps fla's Triton kernels in, which need a GPU
mamba2_chunk_scan = inspect.unwrap(modeling_mamba2.mamba2_chunk_scan)
torch_chunk_gated_delta_rule = inspect.unwrap(modeling_qwen3_next.torch_chunk_gated_delta_rule)
pytestmark = pytest.mark.filterwarnings("ignore")
B, T, H, K, V = 2, 64, 2, 16, 8


def draw(*shape: int) -> Tensor:
    return torch.randn(shape)


def decay(*shape: int) -> Tensor:
    return F.logsigmoid(torch.randn(shape))


def agree(ours, theirs, *leaves: Tensor) -> None:
    """Both are functions of the leaves, each giving one tensor."""
    results = []
    for function in (ours, theirs):
        given = [leaf.clone().requires_grad_() for leaf in leaves]
        y = function(*given)
        weights = torch.linspace(-1, 1, y.numel()).cos().view(y.shape)
        results.append((y, *torch.autograd.grad(y, given, weights)))
    for mine, other in zip(*results, strict=True):
        assert (mine - other).abs().max() <= 1e-5 * other.abs().max().clamp(min=1)


def heads_first(function, *more):
    """A function of (B, H, T, ·) as one of (B, T, H, ·)."""
    return lambda *args: function(*[x.transpose(1, 2) for x in args], *more)[0].transpose(1, 2)


def test_accelerated_scan():
    agree(
        lambda a, x: ops.linear_scan(x, a)[0],
        lambda a, x: reference_scan(a.mT.contiguous(), x.mT.contiguous()).mT,
        torch.rand(B, T, K),
        draw(B, T, K),
    )


@pytest.mark.parametrize("backend", ["cpu", "parallel"])
@pytest.mark.parametrize("theirs", [naive_chunk_simple_gla, naive_recurrent_simple_gla], ids=lambda f: f.__name__)
def test_linear_attention_with_a_decay_a_head(backend, theirs):
    agree(
        lambda *args: ops.linear_attention(*args, backend=backend)[0],
        lambda *args: theirs(*args)[0],
        draw(B, T, H, K), draw(B, T, H, K), draw(B, T, H, V), decay(B, T, H),
    )  # fmt: skip


@pytest.mark.parametrize("backend", ["cpu", "parallel"])
def test_gated_linear_attention(backend):
    agree(
        lambda *args: ops.linear_attention(*args, backend=backend)[0],
        lambda *args: naive_recurrent_gla(*args)[0],
        draw(B, T, H, K), draw(B, T, H, K), draw(B, T, H, V), decay(B, T, H, K),
    )  # fmt: skip


@pytest.mark.parametrize("backend", ["cpu", "parallel"])
def test_rwkv6(backend):
    bonus = draw(H, K)
    agree(
        lambda q, k, v, g: ops.linear_attention(q, k, v, g, u=bonus, backend=backend)[0],
        lambda q, k, v, g: heads_first(lambda *args: naive_recurrent_rwkv6(*args, bonus, K**-0.5))(q, k, v, g),
        draw(B, T, H, K), draw(B, T, H, K), draw(B, T, H, V), decay(B, T, H, K),
    )  # fmt: skip


@pytest.mark.parametrize("backend", ["cpu", "parallel"])
def test_mamba2_with_shared_keys(backend):
    A = -torch.rand(H) - 0.5

    def ours(x, dt, B_, C):
        return ops.linear_attention(C, B_, x * dt[..., None], dt * A, scale=1.0, backend=backend)[0]

    def theirs(x, dt, B_, C):
        return mamba2_chunk_scan(x, dt, A, B_, C, 16)

    agree(ours, theirs, draw(B, T, H, V), torch.rand(B, T, H), draw(B, T, 1, K), draw(B, T, 1, K))


@pytest.mark.parametrize("backend", ["cpu", "parallel"])
def test_delta_rule(backend):
    k = F.normalize(draw(B, T, H, K), dim=-1)
    agree(
        lambda q, k, v, beta: ops.delta_rule(q, k, v, beta, backend=backend)[0],
        lambda q, k, v, beta: delta_rule_recurrence(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), beta.transpose(1, 2)
        )[0].transpose(1, 2),
        draw(B, T, H, K), k, draw(B, T, H, V), torch.rand(B, T, H),
    )  # fmt: skip


@pytest.mark.parametrize("backend", ["cpu", "parallel"])
def test_gated_delta_rule(backend):
    arguments = (draw(B, T, H, K), draw(B, T, H, K), draw(B, T, H, V), torch.rand(B, T, H), decay(B, T, H))
    agree(
        lambda q, k, v, beta, g: ops.delta_rule(q, k, v, beta, g, normalize_keys=True, backend=backend)[0],
        lambda q, k, v, beta, g: naive_recurrent_gated_delta_rule(
            q, k * (k.square().sum(-1, keepdim=True) + 1e-6).rsqrt(), v, beta, g
        )[0],
        *arguments,
    )

    def unit(x):
        return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()

    agree(
        lambda q, k, v, beta, g: ops.delta_rule(unit(q), k, v, beta, g, normalize_keys=True, backend=backend)[0],
        lambda q, k, v, beta, g: torch_chunk_gated_delta_rule(unit(q), unit(k), v, g, beta)[0],
        *arguments,
    )


@pytest.mark.parametrize("backend", ["cpu", "parallel"])
def test_kimi_delta_attention(backend):
    k = F.normalize(draw(B, T, H, K), dim=-1)
    agree(
        lambda q, k, v, beta, g: ops.delta_rule(q, k, v, beta, g, backend=backend)[0],
        lambda q, k, v, beta, g: naive_recurrent_kda(q, k, v, g, beta)[0],
        draw(B, T, H, K), k, draw(B, T, H, V), torch.rand(B, T, H), decay(B, T, H, K),
    )  # fmt: skip


@pytest.mark.parametrize("backend", ["cpu", "parallel"])
def test_generalised_delta_rule(backend):
    a = F.normalize(draw(B, T, H, K), dim=-1)
    agree(
        lambda q, k, v, a, g: ops.dplr_scan(q, k, v, -0.5 * a, a, g, backend=backend)[0],
        lambda q, k, v, a, g: heads_first(dplr_recurrence)(q, k, v, a, -0.5 * a, g),
        draw(B, T, H, K), draw(B, T, H, K), draw(B, T, H, V), a, decay(B, T, H, K),
    )  # fmt: skip
