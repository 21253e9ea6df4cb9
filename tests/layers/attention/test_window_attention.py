"""WindowAttention: its equation step by step, what only it knows, and what it refuses."""

import pytest
import torch

from by_hand import DIM, T
from scanl.layers import WindowAttention
from tests.layers.attention.equations import attention

EQUATIONS = {
    "window_attention": (lambda: WindowAttention(DIM, 2, window=3), attention),
    "window_attention_shared": (lambda: WindowAttention(DIM, 6, 2, head_dim=4, window=4, bias=True), attention),
}

WRONG = [
    ("window_attention", {"window": 0}, "window is 0, expected at least 1"),
    ("window_attention", {"num_heads": 3}, "num_heads is 3, expected a divisor of dim=8"),
    ("window_attention", {"rope_fraction": 1.5}, "rope_fraction is 1.5, expected 0 to 1"),
]


@pytest.mark.usefixtures("double")
def test_rotary_positions_are_relative_a_million_steps_on():
    layer, x = WindowAttention(DIM, 2, window=4), torch.randn(1, T, DIM)
    y, _ = layer(x)
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-4)):
        far = layer.to(dtype).init_state(1)._replace(position=torch.tensor([1_000_000]))
        _, memory = layer(torch.randn(1, 4, DIM, dtype=dtype), far)
        _, memory = layer(x[:, :3].to(dtype), memory)
        after, _ = layer(x[:, 3:].to(dtype), memory)
        torch.testing.assert_close(after.double(), y[:, 3:], rtol=0, atol=tolerance)
