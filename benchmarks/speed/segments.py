"""Time attention with a memory of earlier segments beside other programs of it, forward and backward.

    python benchmarks/speed/segments.py [transformer_xl] [rmt] [block_recurrent] [mega] [--rmt PATH] [--threads 2]

x is (4, 1024, 256) in float32, read in segments of 128 steps with 8 heads. The gradients are those of x, or of the
tokens' vectors, and of all parameters. The programs, segment by segment:

- transformer_xl: `RelPartialLearnableMultiHeadAttn` of transformers 4.57.1, with its norm; its memory has 128 steps.
- rmt: `RecurrentWrapper` of booydar/recurrent-memory-transformer (modeling_rmt/language_modeling.py, which --rmt names)
  around `LlamaForCausalLM` of transformers 4.57.1: 2 blocks, 8 memory tokens. Ours is the same language model.
- block_recurrent: `AttentionBlock` and `StateContainer` of block-recurrent-transformer-pytorch 0.4.4. Its heads share
  keys and values, ours have their own, as in the paper: it has less to compute.
- mega: `MegaMovingAverageGatedAttention` of transformers 4.57.1, with its norm, chunks of 128 steps.

transformers 5 has neither Transformer-XL nor MEGA: `pip install --target FOLDER --no-deps transformers==4.57.1
tokenizers==0.22.1 huggingface_hub==0.35.3 block-recurrent-transformer-pytorch==0.4.4 einops beartype`, and FOLDER in
PYTHONPATH. The rows are in benchmarks/results/segments.csv.
"""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from scanl import layers
from scanl.models import LanguageModel, Stack

sys.path.append(str(Path(__file__).parents[1]))
from harness import Contender, Results, of_module, parse, parser, race

SHAPE, QUICK, HEADS, SEGMENT = (4, 1024, 256), (1, 32, 16), 8, 128


class TransformerXL(nn.Module):
    """Their attention, segment by segment, with the inputs of the segment before as memory."""

    def __init__(self, dim: int, heads: int, segment: int) -> None:
        super().__init__()
        from transformers.models.deprecated.transfo_xl import modeling_transfo_xl as theirs  # pyright: ignore[reportMissingImports]

        self.positions = theirs.PositionalEmbedding(dim)
        self.attention = theirs.RelPartialLearnableMultiHeadAttn(heads, dim, dim // heads, 0.0)
        for bias in (self.attention.r_r_bias, self.attention.r_w_bias):
            nn.init.normal_(bias, std=0.02)  # they are not initialised outside its model
        self.segment = segment

    def forward(self, x: Tensor) -> Tensor:
        ys, memory = [], None
        for part in x.transpose(0, 1).split(self.segment):
            past = 0 if memory is None else len(memory)
            codes = self.positions(torch.arange(past + len(part) - 1, -1, -1.0))
            mask = torch.ones(len(part), past + len(part), dtype=torch.bool).triu(1 + past)[:, :, None]
            ys.append(self.attention(part, codes, attn_mask=mask, mems=memory)[0])
            memory = part.detach()
        return torch.cat(ys).transpose(0, 1)


class BlockRecurrent(nn.Module):
    """Their layer, block by block, with the keys of the block before and the states."""

    def __init__(self, dim: int, heads: int, segment: int) -> None:
        super().__init__()
        from block_recurrent_transformer_pytorch import block_recurrent_transformer_pytorch as theirs  # pyright: ignore[reportMissingImports]

        self.rotary = theirs.RotaryEmbedding(dim // heads, width=2 * segment)
        self.layer = theirs.AttentionBlock(
            dim, segment, dim_head=dim // heads, heads=heads, qk_rmsnorm=True, num_state_vectors=segment
        )
        self.segment = segment

    def forward(self, x: Tensor) -> Tensor:
        ys, memory, states = [], None, None
        positions, scale = self.rotary()
        for part in x.split(self.segment, 1):
            self.layer.state_container.set_next_read_state(states)
            y, memory, states = self.layer(part, rotary_pos_emb=positions, xpos_scale=scale, xl_memories=memory)
            ys.append(y)
        return torch.cat(ys, 1)


class Mega(nn.Module):
    """Their block; it takes the steps first."""

    def __init__(self, dim: int, segment: int) -> None:
        super().__init__()
        from transformers import MegaConfig  # pyright: ignore[reportAttributeAccessIssue]
        from transformers.models.deprecated.mega import modeling_mega as theirs  # pyright: ignore[reportMissingImports]

        self.block = theirs.MegaMovingAverageGatedAttention(
            MegaConfig(
                hidden_size=dim, bidirectional=False, use_chunking=True, chunk_size=segment,
                shared_representation_size=64, intermediate_size=2 * dim, ema_projection_size=16, truncation=None,
                use_normalized_ffn=False, dropout_prob=0.0, attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0,
                max_positions=2 * segment, is_decoder=True,
            )
        )  # fmt: skip
        self.segment = segment

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(self.segment, self.segment).tril()
        return self.block(x.transpose(0, 1), causal_mask=mask)[0].transpose(0, 1)


def language_models(path: Path, shape: tuple[int, int, int], segment: int) -> dict[str, Contender]:
    """Return both language models of rmt, which read tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    spec = importlib.util.spec_from_file_location("rmt", path)
    if spec is None or spec.loader is None or not path.exists():
        raise SystemExit(f"segments: rmt is {path}, expected the path of language_modeling.py")
    theirs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(theirs)
    batch, steps, dim = shape
    tokens = torch.randint(256, (batch, steps))
    config = LlamaConfig(
        vocab_size=256, hidden_size=dim, intermediate_size=2 * dim, num_hidden_layers=2, num_attention_heads=HEADS
    )
    wrapped: Any = theirs.RecurrentWrapper(
        theirs.MemoryCell(LlamaForCausalLM(config), 8), segment_size=segment, max_n_segments=steps // segment, k2=-1
    )
    options = {"num_heads": HEADS, "num_slots": 8, "chunk_size": segment, "depth": 2, "variant": "causal"}
    ours = LanguageModel(256, Stack(dim, 1, "rmt", layer_options=options, channel_mixer="none"))
    return {
        "scanl": of_tokens(ours, lambda: ours(tokens)[0]),
        "recurrent-memory-transformer": of_tokens(wrapped, lambda: wrapped(tokens).logits),
    }


def of_tokens(module: nn.Module, output: Callable[[], Tensor]) -> Contender:
    """Return both passes. The gradients are those of all parameters."""
    leaves = list(module.parameters())

    def both() -> Tensor:
        y = output()
        torch.autograd.grad(y.sum(), leaves, allow_unused=True)
        return y.detach()

    return Contender(torch.no_grad()(output), both)


def contenders(name: str, shape: tuple[int, int, int], segment: int, rmt: Path | None) -> dict[str, Contender]:
    """Return ours and the other program of a layer."""
    x, dim = torch.randn(shape), shape[-1]
    if name == "rmt":
        if rmt is None:
            raise SystemExit("segments: rmt is not given, expected the path of language_modeling.py: --rmt PATH")
        return language_models(rmt, shape, segment)
    if name == "mega":
        ours = layers.build(name, dim, chunk_size=segment)
        return {"scanl": of_module(ours, x), "transformers": of_module(Mega(dim, segment), x)}
    if name == "block_recurrent":
        ours = layers.build(name, dim, num_heads=HEADS, window=segment, num_slots=segment)
        who, theirs = "block-recurrent-transformer-pytorch", BlockRecurrent(dim, HEADS, segment)
    else:
        ours = layers.build(name, dim, num_heads=HEADS, window=segment, chunk_size=segment)
        who, theirs = "transformers", TransformerXL(dim, HEADS, segment)
    return {"scanl": of_module(ours, x), who: of_module(theirs, x)}


def main() -> None:
    made = parser(__doc__, ["transformer_xl", "rmt", "block_recurrent", "mega"], rounds=5, threads=2)
    made.add_argument("--rmt", type=Path, help="language_modeling.py of booydar/recurrent-memory-transformer")
    options = parse(made)
    results = Results("segments", options)
    shape, segment = (QUICK, 8) if options.quick else (SHAPE, SEGMENT)
    for name in options.names:
        if not results.timed(name=name, shape=str(shape)):
            torch.manual_seed(0)
            took = race(contenders(name, shape, segment, options.rmt), options.rounds)
            results.record(took, "scanl", name=name, shape=str(shape))


if __name__ == "__main__":
    main()
