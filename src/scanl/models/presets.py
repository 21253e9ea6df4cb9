"""Named presets for published models that repeat a pattern of layers.

A stack accepts the name in place of its layers: `Stack(512, 6, "griffin")`. A preset is registered by
name, as a layer is, so it is listed, shown and tested like one.
"""

from typing import ClassVar

from scanl.layers.registry import layers
from scanl.registry import Registry


class Preset:
    """Layers of one period, lowest first, and the text that `scanl show` prints about the model."""

    name: ClassVar[str] = ""  # set by `presets.add`
    id: ClassVar[str] = ""  # a short name by which maintainers find a published model; it is never printed
    equation: ClassVar[str] = ""
    source: ClassVar[str] = ""
    layers: ClassVar[tuple[str, ...]] = ()  # registered names


presets: Registry[Preset] = Registry("whole model", beside=layers, use="Stack(dim, depth, '{name}')")


@presets.add("griffin")
class Griffin(Preset):
    """Griffin: two recurrent blocks of Hawk, then one of local attention, repeated over depth.

    The published models have an RMSNorm times 1 + weight (`norm="zero_centered_rmsnorm"`) and a GEGLU of width 3 D with
    biases (`channel_options={"expand": 3, "bias": True, "activation": "gelu_tanh"}`). RecurrentGemma is Griffin with
    D recurrent channels, tied embeddings (`tie_embeddings=True`), `embedding_scale` sqrt(D) and `logit_cap` 30.
    """

    id = "S-griffin"
    equation = "blocks hawk, hawk, window_attention in turn, each x + mixer(norm(x)), then x + mlp(norm(x))"
    source = (
        'De et al., "Griffin: Mixing Gated Linear Recurrences with Local Attention for Efficient Language Models", '
        "arXiv:2402.19427, sec. 2"
    )
    layers = ("hawk", "hawk", "window_attention")


@presets.add("xlstm")
class XLSTM(Preset):
    """xLSTM[7:1]: seven blocks of mLSTM, then one of sLSTM, repeated over depth.

    Differs: in the paper only a block of sLSTM has a gated MLP, and the norms are LayerNorms. Here every block has the
    channel mixer of its stack. With `channel_mixer="none", norm="layernorm"` no block has one.
    """

    id = "S-xlstm"
    equation = "seven blocks of mlstm, then one of slstm, each x + mixer(norm(x)), then x + mlp(norm(x))"
    source = 'Beck et al., "xLSTM: Extended Long Short-Term Memory", arXiv:2405.04517, sec. 2.4 and 4'
    layers = ("mlstm",) * 7 + ("slstm",)
