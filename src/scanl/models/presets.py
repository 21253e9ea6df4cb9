"""Whole models by name: published ones that repeat a pattern of layers, and the functions and classes that make others.

A stack accepts the name of a pattern in place of its layers: `Stack(512, 6, "griffin")`. A pattern is registered by
name, as a layer is, so it is listed, shown and tested like one.
"""

from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

from scanl.layers.registry import layers
from scanl.registry import Registry


class Preset:
    """Layers of one period, lowest first, and the text that `scanl show` prints about the model."""

    name: ClassVar[str] = ""  # set by `presets.add`
    aliases: ClassVar[tuple[str, ...]] = ()  # other names of the literature
    id: ClassVar[str] = ""  # a short name by which maintainers find a published model; it is never printed
    equation: ClassVar[str] = ""
    source: ClassVar[str] = ""
    layers: ClassVar[tuple[str, ...]] = ()  # registered names


presets: Registry[Preset] = Registry(
    "whole model", beside=layers, use="Stack(dim, depth, '{name}')", listed="`scanl list`"
)


class WholeModel:
    """A function or a class of `scanl.models` that makes a whole model."""

    name: ClassVar[str] = ""  # set by `whole`; it may be a layer's too: `scanl.models.whole.mega` stacks layers `mega`
    aliases: ClassVar[tuple[str, ...]] = ()
    make: ClassVar[Callable[..., Any]]


wholes: Registry[WholeModel] = Registry("whole model", use="scanl.models.{cls}", listed="`scanl list`")

W = TypeVar("W", bound=Callable[..., Any])


def whole(name: str, *aliases: str) -> Callable[[W], W]:
    """Decorator: list and show what makes a whole model. aliases: its other names in the literature."""

    def add(make: W) -> W:
        wholes.add(name)(type(make.__name__, (WholeModel,), {"make": staticmethod(make), "aliases": aliases}))
        return make

    return add


@presets.add("griffin")
class Griffin(Preset):
    """Griffin: two recurrent blocks of Hawk, then one of local attention, repeated over depth.

    The published models have an RMSNorm times 1 + weight (`norm="zero_centered_rmsnorm"`) and a GEGLU of width 3 D with
    biases (`channel_options={"expand": 3, "bias": True, "activation": "gelu_tanh"}`). RecurrentGemma is Griffin with
    D recurrent channels, tied embeddings (`tie_embeddings=True`), `embedding_scale` sqrt(D) and `logit_cap` 30.
    """

    id = "S-griffin"
    aliases = ("recurrent_gemma",)
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
    aliases = ("extended_long_short_term_memory",)
    equation = "seven blocks of mlstm, then one of slstm, each x + mixer(norm(x)), then x + mlp(norm(x))"
    source = 'Beck et al., "xLSTM: Extended Long Short-Term Memory", arXiv:2405.04517, sec. 2.4 and 4'
    layers = ("mlstm",) * 7 + ("slstm",)
