"""The blog's programs as printed there. Replaced are the device, the import of mamba-ssm by ours, and two sizes.

einops is not a package that the tests need, so what the programs take from it stands here in torch, by pattern.
"""

import hashlib
import re

import pytest
import torch

from scanl.ops import linear_scan

# ruff: noqa: W291, E501 (as it is printed)
BLOG = r"""
{% highlight python %}
import torch
from torch import nn
from einops import rearrange, repeat, einsum
{% endhighlight %}

{% highlight python %}
# linear recursion y_i = y_{i-1} * c_i + x_i
def linrec(inputs:torch.Tensor, coeffs:torch.Tensor):
    outputs = torch.zeros_like(inputs)
    prev = torch.zeros_like(outputs[..., 0])
    for i in range(0, inputs.shape[-1]):
        outputs[..., i] = prev * coeffs[..., i] + inputs[..., i]
        prev = outputs[..., i].clone()
    return outputs
{% endhighlight %}

{% highlight python %}
# model params from
# https://github.com/state-spaces/mamba/blob/main/mamba_ssm/modules/mamba_simple.py
d_model = 1024                          # W: width of u (default: d_model=1024 in mamba1-370m)
expand  = 2                             # expansion from d_state to d_inner
d_inner = expand * d_model              # D: width of x (default: expand=2 => d_inner=2048)
d_state = 64                            # N: width of one SSM-head  (default: d_state=64)
ngroups = 1                             # G: number heads that share B and C projection vectors
assert(d_inner % ngroups == 0)
{% endhighlight %}

{% highlight python %}
# prepare dummy data according to
# https://github.com/state-spaces/mamba/blob/main/mamba_ssm/modules/mamba_simple.py
device = torch.device('cuda:0')
dtype = torch.float32
batchsize, seqlen = 1, 2**10

# A is only input independent param
A = torch.rand((d_inner, d_state), device=device, dtype=dtype) * 15 + 1
A = A = -torch.exp(A.log().float()) # for completeness
in_proj = nn.Linear(d_model, d_inner + d_inner + ngroups*d_state + ngroups*d_state + d_inner, device=device, dtype=dtype)

# prepare input u and input-dependent params 
u = torch.randn((batchsize, seqlen, d_model), device=device, dtype=dtype)
_, x, B, C, dt = torch.split(in_proj(u), [d_inner, d_inner, ngroups*d_state, ngroups*d_state, d_inner], dim=-1)
B = rearrange(B, 'B L (G N) -> B G N L', G=ngroups, N=d_state)
C = rearrange(C, 'B L (G N) -> B G N L', G=ngroups, N=d_state)
x = rearrange(x, 'B L D -> B D L')
dt = rearrange(dt, 'B L D -> B D L')
dt = nn.functional.softplus(dt) # map to positive range
{% endhighlight %}

{% highlight python %}
# selective S6 scan based on linear recursion
def selective_scan_linrec(x:torch.Tensor, dt:torch.Tensor, A:torch.Tensor, B:torch.Tensor, C:torch.Tensor) -> torch.Tensor:
    # prepare A, B, dt of size (B=batch, D=d_inner, N=d_state, L=seqlen)
    A = repeat(A, 'D N -> B D N L', B=batchsize, L=seqlen)
    B = repeat(B, 'B G N L -> B (G x) N L', x=d_inner//ngroups)
    C = repeat(C, 'B G N L -> B (G x) N L', x=d_inner//ngroups)
    dt = repeat(dt, 'B D L -> B D N L', N=d_state)

    # reparameterize A, B
    A = torch.exp(A * dt)
    B = B * dt

    # expand scalars x with vectors B to vectors x in inner dimension
    x = einsum(x, B, 'B D L, B D N L -> B D N L')

    # compute linear recursion in inner dimension
    y = linrec(inputs=x, coeffs=A)

    # project vectors h in inner dimension with vectors C to scalars y
    y = einsum(C, y, 'B D N L, B D N L -> B D L')
    return y
{% endhighlight %}

{% highlight python %}
# selective scan reference implementations
from mamba_ssm.ops.selective_scan_interface import selective_scan_fn, selective_scan_ref
y_linrec = selective_scan_linrec(x, dt, A, B, C)          
y_sol = selective_scan_fn(u=x, delta=dt, A=A, B=B, C=C)   # error: 7.629e-06
y_ref = selective_scan_ref(u=x, delta=dt, A=A, B=B, C=C)  # error: 3.815e-06
{% endhighlight %}

{% highlight python %}
y[..., :Lp] = linrec(x[..., :Lp], c[..., :Lp]) # thread 1
y[..., Lp:] = linrec(x[..., Lp:], c[..., Lp:]) # thread 2
y[..., Lp:] += y[..., Lp-1] * torch.cumprod(c[..., Lp:], dim=-1) # thread 2
{% endhighlight %}

{% highlight python %}
def linrec_ref_fwd(inputs:torch.Tensor, coeffs:torch.Tensor, reverse=False):
    outputs = torch.zeros_like(inputs)
    prev = torch.zeros_like(outputs[..., 0])
    for i in range(0, inputs.shape[-1])[::-1 if reverse else 1]:
        outputs[..., i] = prev * coeffs[..., i] + inputs[..., i]
        prev = outputs[..., i].clone()
    return outputs

def shift(input, shifts, fillval=0): # torch.roll without the copy of the wrap-around section
    if shifts > 0:
        output = torch.cat([torch.full_like(input[..., :shifts], fillval), input[..., :-shifts]], dim=-1)
    if shifts < 0:
        output = torch.cat([input[..., -shifts:], torch.full_like(input[..., shifts:], fillval)], dim=-1)
    return output
{% endhighlight %}

{% highlight python %}
def linrec_ref_bwd(d_outputs:torch.Tensor, coeffs:torch.Tensor, outputs:torch.Tensor, reverse=False):
    coeffs = shift(coeffs, -1 if not reverse else 1, fillval=0)
    d_inputs = linrec_ref_fwd(inputs=d_outputs, coeffs=coeffs, reverse=(not reverse))
    d_coeffs =  d_inputs * shift(outputs, shifts=1 if not reverse else -1, fillval=0)
    return d_inputs, d_coeffs
{% endhighlight %}

"""

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
