"""Programs of complex numbers, made of pairs of real ones."""

import pytest
import torch
from torch import nn

from scanl.errors import ConfigError
from scanl.export.pairs import rewrite


class Operations(nn.Module):
    """Operations of complex numbers that layers use."""

    def forward(self, x, truth):
        z, w = torch.complex(x, 1 - x), torch.polar(x.abs(), x)
        sums = [z + w, z - w, z + x, x - z, 2 * z, -z, z + 1]
        products = [z * w, z * x, x * z, z @ w.mT]
        quotients = [z / w, z / x, x / z, z / 2, z.reciprocal()]
        views = [z.mT, z.transpose(-2, 0), z.unsqueeze(-1), z[:, None].squeeze(1), z[1:, -2:], z[..., -1],
                 z.reshape(-1), z.expand(2, 3, 3), torch.cat([z, w], -1), z.flip(-1)]  # fmt: skip
        others = [z.exp(), z.conj(), z.sum(0), torch.where(truth, z, w), z.to(torch.complex128), x.to(torch.complex64),
                  torch.full_like(z, 2), torch.where(truth, z, 0)]  # fmt: skip
        reals = [z.real, z.imag, z.abs()]
        parts = [*sums, *products, *quotients, *views, *others]
        return [*(torch.view_as_real(part.resolve_conj()) for part in parts), *reals]


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")  # of torch, about itself
def test_pairs_compute_what_complex_numbers_do():
    x = torch.tensor([[0.3, -0.5, 1.2], [2.0, 0.1, -0.7], [0.4, 0.9, -1.5]])
    program = torch.export.export(Operations(), (x, x > 0), strict=False).run_decompositions({})
    rewrite(program.graph)
    program.graph_module.recompile()
    for actual, expected in zip(program.graph_module(x, x > 0), Operations()(x, x > 0), strict=True):
        assert not actual.is_complex()
        torch.testing.assert_close(actual, expected)


def test_an_operation_without_a_rule_is_named():
    program = torch.export.export(Sine(), (torch.ones(2, 2),), strict=False)
    with pytest.raises(ConfigError, match=r"the model uses aten\.sin\.default of complex numbers, which ONNX does not"):
        rewrite(program.graph)


class Sine(nn.Module):
    def forward(self, x):
        return torch.view_as_real(torch.view_as_complex(x).sin())
