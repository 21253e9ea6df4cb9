"""The blog's programs as printed there. Replaced are the device, the import of mamba-ssm by ours, and two sizes.

einops is not a package that the tests need, so what the programs take from it stands here in torch, by pattern.
"""

import hashlib
import re
from pathlib import Path

import pytest
import torch

from scanl.ops import linear_scan

BLOG = Path(__file__).with_name("blog.md").read_text("utf-8")

BLOCKS = re.findall(r"{% highlight python %}\n(.*?){% endhighlight %}", BLOG, re.DOTALL)
REPLACED = {
    "from mamba_ssm.ops.selective_scan_interface import": "from scanl.compat.mamba_ssm import",
    "torch.device('cuda:0')": "torch.device('cpu')",
    "d_model = 1024": "d_model = 8",
    "seqlen = 1, 2**10": "seqlen = 1, 2**5",
    "from einops import rearrange, repeat, einsum": "",
}
REARRANGED = {
    "B L (G N) -> B G N L": lambda x, G, N: x.unflatten(-1, (G, N)).permute(0, 2, 3, 1),
    "B L D -> B D L": lambda x: x.mT,
}
REPEATED = {
    "D N -> B D N L": lambda x, B, L: x[None, :, :, None].expand(B, *x.shape, L),
    "B G N L -> B (G x) N L": lambda t, x: t.repeat_interleave(x, 1),
    "B D L -> B D N L": lambda x, N: x[:, :, None].expand(-1, -1, N, -1),
}


@pytest.fixture
def blog():
    """The names that the programs leave. The sketch of two threads alone is left out, as it has no values."""
    scope = {
        "rearrange": lambda t, pattern, /, **sizes: REARRANGED[pattern](t, **sizes),
        "repeat": lambda t, pattern, /, **sizes: REPEATED[pattern](t, **sizes),
        "einsum": lambda x, y, pattern: torch.einsum(pattern.replace(" ", ""), x, y),
    }
    replaced = set()
    for block in BLOCKS:
        if "# thread 1" not in block:
            for printed in REPLACED:
                replaced |= {printed} if printed in block else set()
                block = block.replace(printed, REPLACED[printed])
            exec(compile(block, "the blog", "exec"), scope)
    assert replaced == REPLACED.keys()
    return scope


def test_the_blog_stands_here_word_for_word():
    assert len(BLOCKS) == 9
    assert (
        hashlib.sha256(BLOG.encode()).hexdigest() == "da999d43404c26304e16f39b4128cdbf9fc0b19e3f6ccac486e14d7332bfeb32"
    )


def test_mamba_by_a_linear_recursion_is_the_selective_scan(blog):
    for name in ("y_sol", "y_ref"):
        torch.testing.assert_close(blog[name], blog["y_linrec"], atol=1e-4, rtol=1e-5)


def test_linrec_is_linear_scan(blog):
    x, c = torch.randn(2, 3, 9), torch.rand(2, 3, 9)
    expected = linear_scan(x.movedim(-1, 1), c.movedim(-1, 1))[0].movedim(1, -1)
    torch.testing.assert_close(blog["linrec"](inputs=x, coeffs=c), expected)
    torch.testing.assert_close(blog["linrec_ref_fwd"](x, c), expected)


@pytest.mark.parametrize("reverse", [False, True])
def test_linrec_ref_bwd_has_the_gradients_of_linear_scan(blog, reverse):
    x, c, g = torch.randn(2, 9, 3), torch.rand(2, 9, 3), torch.randn(2, 9, 3)
    x.requires_grad_(), c.requires_grad_()
    y, _ = linear_scan(x, c, reverse=reverse)
    expected = torch.autograd.grad(y, (x, c), g)
    d_x, d_c = blog["linrec_ref_bwd"](g.mT, c.detach().mT, y.detach().mT, reverse=reverse)
    torch.testing.assert_close((d_x.mT, d_c.mT), expected)


def test_two_threads_join_by_the_product_of_coefficients(blog):
    (sketch,) = (block for block in BLOCKS if "# thread 1" in block)
    x, c = torch.randn(9), torch.rand(9)
    scope = {"linrec": blog["linrec"], "torch": torch, "x": x, "c": c, "y": torch.zeros(9), "Lp": 4}
    exec(sketch, scope)
    torch.testing.assert_close(scope["y"], linear_scan(x[None, :, None], c[None, :, None])[0].flatten())
