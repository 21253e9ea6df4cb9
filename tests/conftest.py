"""Set before anything imports triton: without a GPU its kernels run in the interpreter."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import pytest
from hypothesis import settings

settings.register_profile("short", max_examples=30)
settings.register_profile("long", max_examples=1000)
settings.load_profile("short")
torch.utils.deterministic.fill_uninitialized_memory = True


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
