"""Mamba in both directions of time, with one projection in and one out."""

from typing import Annotated, Any, ClassVar

from torch import Tensor, nn

from scanl.layers import options, registry
from scanl.layers.base import UNDECAYED_HINT
from scanl.layers.packing import turned
from scanl.layers.ssm.mamba import Mamba, MambaState


@registry.register("vim")
class BiMamba(Mamba):
    """The mixer of Vision Mamba: Mamba forwards and backwards, each with a convolution and a system of its own.

    Both directions share the input projection and the output projection. A carried state affects the forward direction
    only, so reading a sequence in pieces gives other outputs than reading it whole.

    Differs: the released model sets the bias of the backward dt_proj to zero, so that its steps start at about ln 2.
    Here both directions start alike.

    Parameters as in the released code: `mamba`'s, and for the backward direction conv1d_b, x_proj_b, dt_proj_b,
    A_b_log and D_b. A_log, D and dt_proj.bias of both directions have no weight decay.
    Initialisation: both directions as in `mamba`. The state is that of the forward direction.
    """

    id = "S-vim"
    cost = ("T", "T")
    aliases = ("vision_mamba",)
    equation = "[u; z] = W_in x,  y = W_out (SSM_f(u, z) + reverse(SSM_b(reverse(u), reverse(z)))) / 2"
    source = (
        'Zhu et al., "Vision Mamba: Efficient Visual Representation Learning with Bidirectional State Space Model", '
        "arXiv:2401.09417, algorithm 1, and its code"
    )
    reads: ClassVar = {"conv1d_b": nn.Conv1d}
    hints: ClassVar = dict.fromkeys(("dt_proj_b.bias", "A_b_log", "D_b"), UNDECAYED_HINT)
    bidirectional = True

    def __init__(
        self,
        dim: options.Dim,
        divide_out: Annotated[bool, "divide the sum of the directions by 2, as in the released models of Vim"] = True,
        **mamba: Any,
    ) -> None:
        super().__init__(dim, **mamba)
        self.divide_out = divide_out
        back = Mamba(dim, **mamba)
        self.conv1d_b, self.x_proj_b, self.dt_proj_b = back.conv1d, back.x_proj, back.dt_proj
        self.A_b_log, self.D_b = back.A_log, back.D

    def _read(
        self, u: Tensor, z: Tensor, state: MambaState | None, cu_seqlens: Tensor | None, timespans: Tensor | None
    ) -> tuple[Tensor, MambaState]:
        y, state = super()._read(u, z, state, cu_seqlens, timespans)
        back = self.conv1d_b, self.x_proj_b, self.dt_proj_b, self.A_b_log, self.D_b
        branches = (turned(u, cu_seqlens), turned(z, cu_seqlens))
        spans = None if timespans is None else turned(timespans, cu_seqlens)
        y = y + turned(self._select(*branches, back, None, cu_seqlens, spans)[0], cu_seqlens)
        return y / 2 if self.divide_out else y, state
