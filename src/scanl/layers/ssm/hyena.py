r"""Hyena: products and long convolutions in turn. A small network computes the filters from the lag.

.. math:: z^{n+1} = x^n \odot (h^n * z^n + b^n z^n), \quad y = W_o\, z^{N}, \quad
          h^n_j = \mathrm{FFN}(\mathrm{PE}(j)) \odot e^{-\alpha j / (L-1)}
"""

from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from scanl.errors import ConfigError
from scanl.layers.base import Hint, Layer, preset, register, widen
from scanl.layers.packing import each_alone
from scanl.layers.parts.history import with_history
from scanl.layers.parts.hyena_filter import HyenaFilter
from scanl.layers.parts.short_convolution import convolve
from scanl.layers.ssm._base import BY_CONVOLUTION
from scanl.layers.state import Device, DType


class HyenaState(NamedTuple):
    """State of `Hyena`.

    short: the last inputs of the short filter (B, W-1, (N+1) D).
    long: the last inputs of each long filter (B, N-1, L-1, D).
    """

    short: Tensor
    long: Tensor


@register("hyena")
class Hyena(Layer):
    """Hyena operator: a short convolution, then products and long convolutions in turn.

    The paper counts N long convolutions. As in the released code there are N - 1, with a product before and after each.
    A filter has l_max lags, so older inputs have no effect. Sequences may be longer than l_max; the released code
    truncates them. The state holds the last l_max - 1 inputs, so a step costs O(l_max D).

    Args:
        dim: D, model width.
        l_max: L, lags of the filters.
        order: N, number of products; there are N - 1 long convolutions.
        filter_order: width of the network that computes the filters.
        emb_dim: size of the embedding of a lag, odd: the lag, cosines, sines.
        num_inner_mlps: linear maps of that network between the first and the last.
        short_filter_order: window of the short convolution.
        w: initial frequency of the sines.
        fast_decay_pct, slow_decay_pct, target: a filter decays to `target` within a fraction of L; the fraction is
            slow_decay_pct in the first channel and fast_decay_pct in the last.
        shift: value that the decay approaches.
        lr: learning rate of the network.
        lr_pos_emb: learning rate of the embedding of the lags.

    Parameters as in safari: in_proj ((N+1) D, D), out_proj (D, D), short_filter ((N+1) D, 1, W), with biases;
    filter_fn: bias ((N-1) D), implicit_filter.0, .2, ... (linear) and .1.freq (1, width), pos_emb.z (1, L, emb_dim),
    and as buffers pos_emb.t, modulation.deltas. The network and the embedding have no weight decay.
    Initialisation: filter_fn.bias N(0, 1); freq = w; z = (t, cos, -sin) of bands from 1e-4 up to (emb_dim-1)/2 - 1;
    deltas from ln(target)/slow_decay_pct to ln(target)/fast_decay_pct; all else as in PyTorch.
    The filters of one channel are adjacent, as in safari's package. In its standalone_hyena.py the channels of one
    filter are adjacent; up to order 2 both orders are the same.
    State: HyenaState.
    """

    id = "S-hyena"
    equation = "z^1 = v,  z^{n+1} = x^n * (h^n conv z^n + b^n z^n),  y = W_o z;  h_j = FFN(PE(j)) exp(-alpha j/(L-1))"
    source = (
        'Poli et al., "Hyena Hierarchy: Towards Larger Convolutional Language Models", arXiv:2302.10866, eq. (4) to (7)'
    )
    op = None
    reads: ClassVar = {"short_filter": nn.Conv1d}
    excused: ClassVar = BY_CONVOLUTION
    sample: ClassVar = {"l_max": 5, "order": 3, "filter_order": 4, "num_inner_mlps": 1}
    residual_out = "out_proj"
    hints: ClassVar = {
        "filter_fn.implicit_filter": Hint(weight_decay=False, lr="lr"),
        "filter_fn.pos_emb.z": Hint(weight_decay=False, lr="lr_pos_emb"),
    }

    def __init__(
        self,
        dim: int,
        l_max: int = 1024,
        order: int = 2,
        filter_order: int = 64,
        emb_dim: int = 3,
        num_inner_mlps: int = 2,
        short_filter_order: int = 3,
        w: float = 1.0,
        fast_decay_pct: float = 0.3,
        slow_decay_pct: float = 1.5,
        target: float = 1e-2,
        shift: float = 0.0,
        lr: float = 1e-3,
        lr_pos_emb: float = 1e-5,
    ) -> None:
        super().__init__()
        if order < 2:
            raise ConfigError(f"hyena: order is {order}, expected at least 2")
        if emb_dim < 3 or emb_dim % 2 == 0:
            raise ConfigError(f"hyena: emb_dim is {emb_dim}, expected an odd number of at least 3")
        if min(l_max, filter_order, short_filter_order) < 1:
            sizes = f"{l_max}, {filter_order}, {short_filter_order}"
            raise ConfigError(f"hyena: l_max, filter_order, short_filter_order are {sizes}, expected at least 1")
        self.dim = dim
        self.l_max = l_max
        self.order, self.short_filter_order = order, short_filter_order
        self.lr, self.lr_pos_emb = lr, lr_pos_emb
        width = (order + 1) * dim
        self.in_proj = nn.Linear(dim, width)
        self.out_proj = nn.Linear(dim, dim)
        self.short_filter = nn.Conv1d(width, width, short_filter_order, groups=width, padding=short_filter_order - 1)
        self.filter_fn = HyenaFilter(
            (order - 1) * dim, emb_dim, filter_order, l_max, w, num_inner_mlps,
            fast_decay_pct, slow_decay_pct, target, shift,
        )  # fmt: skip

    def init_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> HyenaState:
        short = (self.short_filter_order - 1, (self.order + 1) * self.dim)
        long = (self.order - 1, self.l_max - 1, self.dim)
        return HyenaState(
            *(
                self._zeros(batch_size, *size, device=device, dtype=dtype, at_least=torch.float32)
                for size in (short, long)
            )
        )

    def forward(
        self, x: Tensor, state: HyenaState | None = None, *, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, HyenaState]:
        self._check(x, state, cu_seqlens)
        short, long = (None, None) if state is None else state
        if cu_seqlens is not None and long is None:
            long = self.init_state(cu_seqlens.shape[0] - 1).long
        mixed, short = convolve(self.short_filter, self.in_proj(x), short, cu_seqlens=cu_seqlens)
        first, *others, v = widen(mixed).split(self.dim, -1)
        # The filters and biases of one channel are adjacent.
        filters = self.filter_fn().unflatten(0, (self.dim, self.order - 1)).unbind(1)
        biases = widen(self.filter_fn.bias).view(self.dim, self.order - 1).unbind(1)
        histories = []
        for n, (gate, kernel, bias) in enumerate(zip(reversed(others), filters, biases, strict=True)):
            v = v * gate
            before = None if long is None else long[:, n].to(v.dtype)
            if cu_seqlens is None:
                y, after = with_history(v, before, kernel)
            else:
                y, after = each_alone(lambda v, row, kernel=kernel: with_history(v, row, kernel), v, before, cu_seqlens)
            v = torch.addcmul(y, v, bias)
            histories.append(after)
        return self.out_proj((v * first).to(x.dtype)), HyenaState(short, torch.stack(histories, 1))


@preset("hyena_dna", emb_dim=5, w=10.0, shift=0.05, lr_pos_emb=0.0)
class HyenaDNAMixer(Hyena):
    """Hyena as in HyenaDNA: faster sines, and a decay that ends at 0.05. `scanl.models.hyena_dna` makes the model.

    In the released models l_max is the length of the longest sequence plus two.
    """

    id = "S-hyenadna"
    equation = Hyena.equation
    source = (
        'Nguyen et al., "HyenaDNA: Long-Range Genomic Sequence Modeling at Single Nucleotide Resolution", '
        "arXiv:2306.15794, sec. 3.1, and its code"
    )
