"""MEGA and Megalodon as language models: their stacks, their norms and their initial values."""

import math
from collections.abc import Mapping
from typing import Annotated, Any, cast

from torch import Tensor, nn

from scanl.layers.packing import restarted
from scanl.layers.parts.timestep_norm import TimestepNorm
from scanl.layers.ssm.megalodon import Megalodon
from scanl.layers.state import Device, DType, State
from scanl.models.heads.language_model import LanguageModel
from scanl.models.presets import whole
from scanl.models.stack import Stack
from scanl.options import above, at_least


@whole("mega")
def mega(
    vocab_size: int = 256,
    dim: int = 512,
    depth: int = 12,
    expand: float = 2.0,
    layer_options: Mapping[str, Any] | None = None,
    tie_embeddings: bool = True,
) -> LanguageModel:
    """Return MEGA: the next token, by gated attention over a moving average, and a feed-forward network.

    A `LanguageModel` of blocks `mega`, each with an `mlp` with SiLU. A LayerNorm stands before both, and after the last
    block. The embedding is multiplied by sqrt(D). Its matrix is the output's matrix, too.

    Differs: there is no dropout. The last norm has gains and biases; in the released language models it has none.
    The moving average is not cut off after `truncation-length` steps.

    Args:
        vocab_size: V; 256 for bytes.
        dim: D, width.
        depth: L, blocks.
        expand: the network between has int(expand D) features.
        layer_options: options of `mega`; the defaults are z_dim D / 4, chunk_size 2048 and position_bias "rotary".
        tie_embeddings: use the embedding matrix for the output too.

    The defaults are the authors' base model of enwik8; their large one has dim 1024, depth 24, expand 1.5, hidden_dim
    1536, z_dim 128, and their model of wikitext-103 dim 1024, depth 16, z_dim 256, chunk_size 1024.
    Source: Ma et al., "Mega: Moving Average Equipped Gated Attention", arXiv:2209.10655, sec. 3, and its code.
    Initialisation as in its code: linear weights N(0, 0.02²), biases 0; the embedding and a separate head N(0, 1/D);
    blocks as in `mega`.
    """
    options = {"z_dim": max(1, dim // 8) * 2, "chunk_size": 2048, "position_bias": "rotary"} | dict(layer_options or {})
    stack = Stack(
        dim, depth, "mega", layer_options=options, channel_mixer="mlp",
        channel_options={"expand": expand, "activation": "silu"}, norm="layernorm", norm_eps=1e-5,
    )  # fmt: skip
    model = LanguageModel(vocab_size, stack, embedding_scale=math.sqrt(dim), tie_embeddings=tie_embeddings)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
    for matrix in (model.embedding, model.head):
        if matrix is not None:
            nn.init.normal_(matrix.weight, std=dim**-0.5)
    return model


class MegalodonStack(Stack):
    """Blocks of `megalodon`, and a timestep norm after the last.

    Each block has a feed-forward network that reads the LayerNorm of x + y and is added to x, the block's input: the
    two-hop residual.   State: the states of the blocks, then the last norm's.

    Initialisation: linear weights normal with deviation 1/sqrt(3 fan_in); all else as in `megalodon`.
    """

    def __init__(
        self,
        dim: Annotated[int, at_least(1), "D, width"],
        depth: Annotated[int, at_least(1), "L, blocks"],
        *,
        expand: Annotated[float, above(0), "the network has int(expand D) features"] = 2.5,
        swiglu: Annotated[
            bool,
            "a gated network, W_2 (SiLU(W_1 x) * W_3 x), rather than W_2 SiLU(W_1 x). Neither has biases",
        ] = False,
        layer_options: Annotated[Mapping[str, Any] | None, "options of `megalodon`"] = None,
    ) -> None:
        super().__init__(
            dim, depth, "megalodon", layer_options=layer_options, channel_mixer="gated_mlp" if swiglu else "mlp",
            channel_options={"expand": expand, "bias": False, "activation": "silu"}, norm="layernorm", norm_eps=1e-5,
            own_norm=True, two_hop=True,
        )  # fmt: skip
        self.norm = TimestepNorm(dim, cast(Megalodon, self.mixers()[0]).timenorm.groups)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.kaiming_normal_(module.weight, a=math.sqrt(5))

    def init_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> State:
        blocks = super().init_state(batch_size, device=device, dtype=dtype)
        return (*blocks, blocks[0].mixer.norm)

    def forward(
        self,
        x: Tensor,
        state: State = None,
        *,
        cu_seqlens: Tensor | None = None,
        starts: Tensor | None = None,
        timespans: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        if starts is not None:
            more = {"cu_seqlens": cu_seqlens, "starts": starts, "timespans": timespans}
            return restarted(self.name, self.forward, self.init_state, x, state, **more)
        blocks, norm = (None, None) if state is None else (state[:-1], state[-1])
        x, blocks = self.run_blocks(x, blocks, cu_seqlens=cu_seqlens, timespans=timespans)
        y, norm = self.norm(x, norm, cu_seqlens)
        return y.to(x.dtype), (*blocks, norm)


@whole("megalodon")
def megalodon(
    vocab_size: int = 256,
    dim: int = 1024,
    depth: int = 12,
    *,
    scale_embedding: bool = False,
    tie_embeddings: bool = False,
    **options: Any,
) -> LanguageModel:
    """Return Megalodon: the next token, by attention within chunks over a complex moving average, for texts of any
    length.

    A `LanguageModel` over a `MegalodonStack`.

    Differs: there is no dropout, and no `rescale_nffn`, which the released models switch off. The parameters of the
    LayerNorms are the gains themselves, not the gains minus 1.

    Args:
        vocab_size: V.
        dim: D, width.
        depth: L, blocks.
        scale_embedding: factor sqrt(D) on the embedding.
        tie_embeddings: use the embedding matrix for the output too.
        options: further arguments of `MegalodonStack`.

    Sizes of the authors: 200M, dim 1024, depth 12, expand 2.5, num_groups 32. 1.3B, dim 2048, depth 24, expand 2.375,
    num_heads 2, num_groups 64; for PG-19 expand 1.75, with swiglu, scale_embedding and tie_embeddings. 7B, dim 4096,
    depth 32, expand 2 with swiglu, num_heads 4, num_groups 64. num_groups and num_heads are options of the layer.
    Source: Ma et al., "Megalodon: Efficient LLM Pretraining and Inference with Unlimited Context Length",
    arXiv:2404.08801, sec. 3, and its code.
    Initialisation as in its code: embedding and head normal with deviation 1/sqrt(D), cut off at three deviations; the
    stack as in `MegalodonStack`.
    """
    scale = math.sqrt(dim) if scale_embedding else None
    stack = MegalodonStack(dim, depth, **options)
    model = LanguageModel(vocab_size, stack, embedding_scale=scale, tie_embeddings=tie_embeddings)
    for matrix in (model.embedding, model.head):
        if matrix is not None:
            deviation = dim**-0.5
            nn.init.trunc_normal_(matrix.weight, std=deviation, a=-3 * deviation, b=3 * deviation)
    return model
