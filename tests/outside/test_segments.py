"""Attention with a memory of earlier segments against its authors' programs: figures that those gave.

Each program was run once in float64, segment by segment, with the weights and the inputs of `waves`. The figures are
its output y, and of the sum of y times cos(0.3 n), n counting the numbers of y, the gradient by the input, and of the
gradient by each parameter its inner product with sin(n + 1).

transformer_xl: `RelPartialLearnableMultiHeadAttn` of transformers 4.57.1 with the masks of `TransfoXLModel`, from an
empty memory, without the sum and the norm after it; scores stayed in float64.
compressive_transformer: `SelfAttention` of compressive-transformer-pytorch 0.4.0, in evaluation, with the codes of
distances as its `pos_emb`; u and v, which it has not, are 0.
rmt: `MemoryCell` of booydar/recurrent-memory-transformer (commit 9d0ebe1) around `LlamaForCausalLM` of transformers
4.57.1, whose norms and softmax stayed in float64.
infini_attention: `CausalAttention` of infini-transformer-pytorch 0.2.1 without its norm, from a memory of zeros, with
its gate at -beta and the channels of queries and keys in its order of pairs.
block_recurrent: `TransformerLayer` of google-research/meliad, transformer/memory, in float64 with jax 0.10.2, from the
start of a sequence, without the norm, the sum and the network of the tokens; the biases of `out`, which it has not, are
0.
"""

import json
from pathlib import Path

import pytest

from tests.outside.test_memories import assert_agrees

FIGURES = json.loads(Path(__file__).with_name("segments.json").read_text())


@pytest.mark.parametrize("case", FIGURES, ids=lambda case: case["case"])
def test_authors_program(case):
    assert_agrees(case)
