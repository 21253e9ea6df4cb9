"""One residual block: a layer mixes over time, then a channel mixer mixes over features. Each has a norm before it."""

from typing import Any, NamedTuple

from torch import Tensor, nn

from scanl.errors import ConfigError, nearest
from scanl.layers.base import Layer
from scanl.layers.designation import Designation, make_layer
from scanl.layers.module import Module
from scanl.layers.parts.norm import RMSNorm, ZeroCenteredRMSNorm
from scanl.layers.registry import channel_mixers, get, names
from scanl.layers.state import Device, DType, State, loadable
from scanl.options import Fraction, checked

CHANNEL_MIXERS = sorted([*channel_mixers.names(), "none"])  # for help texts: the mixers of the library itself


NORMS: dict[str, type[nn.RMSNorm | nn.LayerNorm]] = {
    "rmsnorm": RMSNorm,
    "zero_centered_rmsnorm": ZeroCenteredRMSNorm,
    "layernorm": nn.LayerNorm,
}


def make_norm(name: str, dim: int, eps: float = 1e-6) -> nn.RMSNorm | nn.LayerNorm:
    """Make the norm called `name` in `NORMS`, over `dim` features."""
    if name not in NORMS:
        raise nearest("norm", name, list(NORMS))
    return NORMS[name](dim, eps=eps)


def normed(norm: nn.RMSNorm | nn.LayerNorm, x: Tensor) -> Tensor:
    """Return norm(x) after casting x to the dtype of the norm's weight."""
    return norm(x.to(norm.weight.dtype))


def check_timed(layer: Layer) -> None:
    """Raise ConfigError unless the layer takes the durations of steps, `timespans`."""
    if "timespans" not in layer.takes:
        able = ", ".join(name for name in names() if "timespans" in get(name).takes)
        raise ConfigError(
            f"block: timespans is given, expected none because {type(layer).__name__} takes none; layers that take "
            f"them: {able}"
        )


@loadable
class BlockState(NamedTuple):
    """State of a `Block`.

    mixer: state of the layer.   channel: state of the channel mixer; () where it has none.
    """

    mixer: State
    channel: State


class Block(Module):
    """Residual block: x + mixer(norm(x)), then x + channel_mixer(norm(x)).

    own_norm: the mixer has a norm of its own, so no norm stands before it.   two_hop: the channel mixer's output is
    added to the block's input, x + channel_mixer(norm(x + mixer(norm(x)))), as in Megalodon (arXiv:2404.08801, 3.4).

    dropout: probability of dropping each number that is added to x, in training only. The numbers that stay are
    divided by 1 - dropout (Srivastava et al., JMLR 15, 2014).

    x may have a wider dtype than the parameters. The norms cast it to their own dtype; the sum keeps the dtype of x.
    """

    @checked("block")
    def __init__(
        self,
        mixer: Layer,
        channel_mixer: Designation = "gated_mlp",
        channel_options: dict[str, Any] | None = None,
        norm: str = "rmsnorm",
        norm_eps: float = 1e-6,
        dropout: Fraction = 0.0,
        own_norm: bool = False,
        two_hop: bool = False,
    ) -> None:
        super().__init__()
        alone = isinstance(channel_mixer, str) and channel_mixer == "none"
        named = isinstance(channel_mixer, str) and not alone and ":" not in channel_mixer
        if named and channel_mixers.find(str(channel_mixer)) is None:
            raise nearest("channel mixer", channel_mixer, ["none", *channel_mixers.names()])
        if two_hop and alone:
            raise ConfigError("block: two_hop is True, expected False because channel_mixer is 'none'")
        self.own_norm, self.two_hop = own_norm, two_hop
        if not own_norm:
            self.mixer_norm = make_norm(norm, mixer.dim, norm_eps)
        self.mixer = mixer
        self.dropout = nn.Dropout(dropout)
        self.channel_norm = None if alone else make_norm(norm, mixer.dim, norm_eps)
        self.channel = None
        if not alone:
            self.channel = make_layer(channel_mixer, mixer.dim, channel_options or {}, channel_mixers)

    def init_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> BlockState:
        kind = {"device": device, "dtype": dtype}
        channel = () if self.channel is None else self.channel.init_state(batch_size, **kind)
        return BlockState(self.mixer.init_state(batch_size, **kind), channel)

    def forward(
        self,
        x: Tensor,
        state: BlockState | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        timespans: Tensor | None = None,
        memo: dict[str, Tensor] | None = None,
    ) -> tuple[Tensor, BlockState]:
        """Apply the block to x (B, T, D).

        timespans: (B, T), duration of each step.   memo: tensors that a block passes to later blocks in the same pass.
        """
        mixer, channel = (None, None) if state is None else state
        more: dict[str, Any] = {"memo": memo} if "memo" in self.mixer.takes else {}
        if timespans is not None:
            check_timed(self.mixer)
            more["timespans"] = timespans
        if "residual" in self.mixer.takes:
            more["residual"] = x
        mixer_input = x if self.own_norm else normed(self.mixer_norm, x)
        y, mixer = self.mixer(mixer_input, mixer, cu_seqlens=cu_seqlens, **more)
        residual, x = x, x + self.dropout(y)
        if self.channel is not None and self.channel_norm is not None:
            y, channel = self.channel(normed(self.channel_norm, x), channel, cu_seqlens=cu_seqlens)
            x = (residual if self.two_hop else x) + self.dropout(y)
        return x, BlockState(mixer, () if self.channel is None else channel)
