"""Attention by a kernel equals attention by features of that kernel."""

import pytest
import torch

from scanl.layers.parts.feature_map import FeatureMap
from scanl.layers.parts.kernel_memory import attend_by_kernel
from scanl.ops import linear_attention as linear_attention_op

pytestmark = pytest.mark.cells_by_loop("name")


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize(
    ("name", "width", "steps"),
    [("taylor", 3, 150), ("quadratic", 2, 130), ("polynomial", 2, 64), ("polynomial", 9, 300)],
)
def test_attention_by_kernel_is_that_by_features(name, width, steps, begins):
    """Within a chunk, over chunks of a block, and over blocks: values, all gradients, and their gradients."""
    features = FeatureMap(name, 3, width)
    q, k = (torch.randn(2, steps, 3, width) for _ in range(2))
    v, state = torch.randn(2, steps, 3, 4), torch.randn(2, 3, features.width, 4)
    leaves = [leaf.requires_grad_() for leaf in (q, k, v, *([state] if begins else []))]
    results = []
    for o, S in (
        attend_by_kernel(features, q, k, v, state if begins else None),
        linear_attention_op(
            features(q, None), features(k, None), v, state=state if begins else None, scale=1.0, backend="reference"
        ),
    ):
        grads = torch.autograd.grad(o.sin().sum() + S.sin().sum(), leaves, create_graph=True)
        results.append([o, S, *grads, *torch.autograd.grad(sum(grad.square().sum() for grad in grads), leaves)])
    torch.testing.assert_close(*results)


def test_attention_by_kernel_keeps_what_is_not_finite_from_the_past():
    features, steps, bad = FeatureMap("quadratic", 1, 2), 150, 70
    q, k, v = torch.randn(1, steps, 1, 2), torch.randn(1, steps, 1, 2), torch.randn(1, steps, 1, 3)
    finite, _ = attend_by_kernel(features, q, k, v, None)
    for spoilt, channels in ((k, slice(0, 3)), (v, slice(1, 2))):
        kept, spoilt[0, bad, 0, 1] = spoilt[0, bad, 0, 1].clone(), torch.nan
        o, S = attend_by_kernel(features, q, k, v, None)
        assert torch.equal(o[:, :bad], finite[:, :bad])
        assert o[0, bad:, 0, channels].isnan().all()
        assert S[..., channels].isnan().all()
        spoilt[0, bad, 0, 1] = kept
    assert o[0, :, 0, ::2].isfinite().all()
