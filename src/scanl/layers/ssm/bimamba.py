r"""Mamba in both directions of time, with one projection in and one out.

.. math:: [u; z] = W_{in} x, \quad
          y = W_{out} \left(\mathrm{SSM}_f(u, z) + \mathrm{rev}\,\mathrm{SSM}_b(\mathrm{rev}\,u, \mathrm{rev}\,z)\right)
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from scanl.errors import ConfigError
from scanl.layers.base import UNDECAYED, Layer, preset, register
from scanl.layers.designation import Designation, make_layer
from scanl.layers.packing import reversed_steps
from scanl.layers.ssm.mamba import Mamba, MambaState
from scanl.layers.state import Device, DType, State


@register("vim")
class BiMamba(Mamba):
    """The mixer of Vision Mamba: Mamba forwards and backwards, each with a convolution and a system of its own.

    Both directions share the input projection and the output projection. A carried state affects the forward direction
    only, so reading a sequence in pieces gives other outputs than reading it whole.

    Differs: the released model sets the bias of the backward dt_proj to zero, so that its steps start at about ln 2.
    Here both directions start alike.

    Args:
        dim: D, model width.
        divide_out: divide the sum of the directions by 2, as in the released models of Vim.
        d_state: N, state of each channel.
        d_conv: window of the convolutions.
        expand: E = expand * dim channels.
        dt_rank: R, rank of the map to Δ; "auto" is dim/16, rounded up.
        dt_min, dt_max: range of the initial Δ, in steps.

    `forward` also takes `timespans` (B, T), the duration of each step in units of the usual one. It multiplies Δ.

    Parameters as in the released code: those of `mamba`, and for the backward direction conv1d_b, x_proj_b, dt_proj_b,
    A_b_log and D_b. A_log, D and dt_proj.bias of both directions have no weight decay.
    Initialisation: both directions as in `mamba`.
    State: MambaState of the forward direction.
    """

    id = "S-vim"
    aliases = ("vision_mamba",)
    equation = "[u; z] = W_in x,  y = W_out (SSM_f(u, z) + reverse(SSM_b(reverse(u), reverse(z)))) / 2"
    source = (
        'Zhu et al., "Vision Mamba: Efficient Visual Representation Learning with Bidirectional State Space Model", '
        "arXiv:2401.09417, algorithm 1, and its code"
    )
    reads: ClassVar = {"conv1d_b": nn.Conv1d}
    hints: ClassVar = dict.fromkeys(("dt_proj_b.bias", "A_b_log", "D_b"), UNDECAYED)
    bidirectional = True

    def __init__(self, dim: int, divide_out: bool = True, d_state: int = 16, d_conv: int = 4, expand: float = 2,
                 dt_rank: int | str = "auto", dt_min: float = 0.001, dt_max: float = 0.1) -> None:  # fmt: skip
        options: dict[str, Any] = {"d_state": d_state, "d_conv": d_conv, "expand": expand, "dt_rank": dt_rank}
        options |= {"dt_min": dt_min, "dt_max": dt_max}
        super().__init__(dim, **options)
        self.divide_out = divide_out
        back = Mamba(dim, **options)
        self.conv1d_b, self.x_proj_b, self.dt_proj_b = back.conv1d, back.x_proj, back.dt_proj
        self.A_b_log, self.D_b = back.A_log, back.D

    def _read(
        self, u: Tensor, z: Tensor, state: MambaState | None, cu_seqlens: Tensor | None, timespans: Tensor | None
    ) -> tuple[Tensor, MambaState]:
        y, state = super()._read(u, z, state, cu_seqlens, timespans)
        back = (self.conv1d_b, self.x_proj_b, self.dt_proj_b, self.A_b_log, self.D_b)
        turned = (turn(u, cu_seqlens), turn(z, cu_seqlens))
        spans = None if timespans is None else turn(timespans, cu_seqlens)
        y = y + turn(self._select(*turned, *back, None, cu_seqlens, spans)[0], cu_seqlens)
        return y / 2 if self.divide_out else y, state


@preset("caduceus", divide_out=False)
class CaduceusMixer(BiMamba):
    """BiMamba of Caduceus: the outputs of both directions are added.

    `reverse_complement` around it gives Caduceus-PS. If its input is the reverse complement of a strand, its output is
    the reverse complement of the output for the strand.
    """

    id = "S-caduceus"
    equation = "[u; z] = W_in x,  y = W_out (SSM_f(u, z) + reverse(SSM_b(reverse(u), reverse(z))))"
    source = (
        'Schiff et al., "Caduceus: Bi-Directional Equivariant Long-Range DNA Sequence Modeling", arXiv:2403.03234, '
        "sec. 3.1"
    )


@register("reverse_complement")
class ReverseComplement(Layer):
    """A layer made equivariant to the reverse complement of DNA. It reads each strand in the strand's own direction.

    The first half of the channels is one strand, the second half the other. With R the reversal of time and channels,
    y = [f(a), R f(R b)] for x = [a, b]. So reversing time and all 2 d channels of x does the same to y. With an
    embedding [E(t), reversed E(complement t)] and channels read alike, a model is equivariant.

    Args:
        dim: D = 2 d, even.
        layer: f, of width d: a registered name, a class of your own or an instance. It may be causal; the result never
            is.
        layer_options: options of f.

    State: that of f for the first strand. A carried state affects that strand only.
    """

    id = "S-caduceus"
    equation = "y = [f(a), R f(R b)],  x = [a, b],  R = reversal of time and channels"
    source = (
        'Schiff et al., "Caduceus: Bi-Directional Equivariant Long-Range DNA Sequence Modeling", arXiv:2403.03234, '
        "sec. 3.2"
    )
    sample: ClassVar = {"layer": "lru"}
    bidirectional = True

    def __init__(
        self, dim: int, layer: Designation = "caduceus", layer_options: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__()
        if dim < 2 or dim % 2:
            raise ConfigError(f"reverse_complement: dim is {dim}, expected an even number of at least 2")
        self.dim = dim
        self.layer = make_layer(layer, dim // 2, layer_options or {})

    def init_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> State:
        return self.layer.init_state(batch_size, device=device, dtype=dtype)

    def forward(self, x: Tensor, state: State = None, *, cu_seqlens: Tensor | None = None) -> tuple[Tensor, State]:
        self._check(x, state, cu_seqlens)
        one, other = x.chunk(2, -1)
        y, state = self.layer(one, state, cu_seqlens=cu_seqlens)
        read = self.layer(turn(other, cu_seqlens).flip(-1), cu_seqlens=cu_seqlens)[0]
        return torch.cat([y, turn(read, cu_seqlens).flip(-1)], -1), state


def turn(x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Reverse the time of x (B, T, D), of each packed sequence by itself."""
    return x.flip(1) if cu_seqlens is None else x[:, reversed_steps(cu_seqlens, x.shape[1])]
