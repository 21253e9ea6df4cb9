"""Layers against the programs of their authors, or of others where there are none: figures that those gave.

Each program ran once in float64; the figures are those of test_memories.py. Norms before a layer and the sum with its
input were left out, and torch's LayerNorm stood for a norm of theirs. RWKV-5 is `att_seq_v5_2` of PyPI's rwkv 0.8.32.
GAU and FLASH are of PyPI's FLASH-pytorch 0.1.9; its buckets of distances below 16 are single distances. R-Transformer
is the `Block` of DSE-MSU/R-transformer without its feed-forward network. NTM is of loudinthecloud/pytorch-ntm without
the sigmoid of its output. The Token Turing Machine is the `TokenTuringMachineUnit` of google-research/scenic, on JAX in
float64, with the mean over its output tokens.
"""

import json
from pathlib import Path

import pytest

from tests.outside.test_memories import assert_agrees

pytestmark = pytest.mark.cells_by_loop

FIGURES = json.loads(Path(__file__).with_name("programs.json").read_text())


@pytest.mark.parametrize("case", FIGURES, ids=lambda case: case["case"])
def test_authors_program(case):
    assert_agrees(case)
