"""SaShiMi as a model of samples: an embedding, the network of several resolutions, and a linear map to logits."""

from collections.abc import Mapping
from typing import Annotated, Any

from torch import Tensor, nn

from scanl.layers.base import Layer
from scanl.layers.designation import make_layer
from scanl.layers.state import Device, DType, State
from scanl.models.block import check_timed
from scanl.models.heads.language_model import LanguageModel
from scanl.models.presets import whole
from scanl.models.stack import Backbone
from scanl.options import at_least


class SashimiStack(Backbone):
    """One `Sashimi` as the layers of a model. It has residual connections and norms of its own.

    State: that of `Sashimi`.
    """

    def __init__(
        self,
        dim: Annotated[int, at_least(1), "D, width of the fastest tier"],
        *,
        layer_options: Annotated[Mapping[str, Any] | None, "options of `sashimi`"] = None,
    ) -> None:
        super().__init__()
        self.dim = dim
        self.layer = make_layer("sashimi", dim, layer_options or {})

    def mixers(self) -> list[Layer]:
        return [self.layer]

    def make_norm(self) -> nn.LayerNorm:
        return nn.LayerNorm(self.dim)

    def init_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> State:
        return self.layer.init_state(batch_size, device=device, dtype=dtype)

    def forward(
        self,
        x: Tensor,
        state: State = None,
        *,
        cu_seqlens: Tensor | None = None,
        timespans: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        if timespans is not None:
            check_timed(self.layer)
        return self.layer(x, state, cu_seqlens=cu_seqlens)


@whole("sashimi")
def sashimi(vocab_size: int = 256, dim: int = 64, **options: Any) -> LanguageModel:
    """Return SaShiMi: the next sample of a waveform, sample by sample.

    A `LanguageModel` over a `SashimiStack`. It generates in constant memory: `generate`.   State: that of `Sashimi`.

    Args:
        vocab_size: V, values of a sample; 256 for audio of 8 bits (mu-law, or linear).
        dim: D, width of the fastest tier.
        options: options of `sashimi`. The defaults are the published ones: pool (4, 4), expand 2, depth 8, ff 2.

    Source: Goel, Gu, Donahue and Ré, "It's Raw! Audio Generation with State-Space Models", arXiv:2202.09729, sec. 4.
    Initialisation: embedding and head N(0, 0.02²), as in `LanguageModel`. Differs: in the authors' program the
    embedding is N(0, 1), and the head has a bias and starts as in PyTorch.
    """
    published = {"pool": (4, 4), "expand": 2, "depth": 8, "ff": 2}
    return LanguageModel(vocab_size, SashimiStack(dim, layer_options={**published, **options}))
