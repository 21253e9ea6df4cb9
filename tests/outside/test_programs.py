"""Layers against the programs of their authors, or of others where there are none: figures that those gave.

Each program ran once in float64; the figures are those of test_memories.py. RWKV-5 is `att_seq_v5_2` of PyPI's rwkv
0.8.32, without the norm before it and without the sum with its input.
"""

import json
from pathlib import Path

import pytest

from tests.outside.test_memories import assert_agrees

FIGURES = json.loads(Path(__file__).with_name("programs.json").read_text())


@pytest.mark.parametrize("case", FIGURES, ids=lambda case: case["case"])
def test_authors_program(case):
    assert_agrees(case)
