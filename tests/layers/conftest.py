import pytest
import torch


@pytest.fixture
def double():
    """float64 wherever no dtype is said."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
