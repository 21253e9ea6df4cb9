"""Hyena: products and long convolutions in turn. A small network computes the filters from the lag."""

from typing import Annotated, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from scanl.layers import options, registry
from scanl.layers.base import Hint, Layer, widen
from scanl.layers.initial_state import StateAxes
from scanl.layers.packing import each_alone
from scanl.layers.parts.history import with_history
from scanl.layers.parts.hyena_filter import HyenaFilter
from scanl.layers.parts.short_convolution import convolve
from scanl.layers.ssm._base import BY_CONVOLUTION
from scanl.options import Range, at_least


class HyenaState(NamedTuple):
    short: Annotated[Tensor, StateAxes("conv_size - 1, (order + 1) * dim", "the last inputs of the short filter")]
    long: Annotated[Tensor, StateAxes("order - 1, max_length - 1, dim", "the last inputs of each long filter")]


class ShortFilterLayer(Layer):
    """Base class of the Hyena layers: the projections, and the short filter after the first."""

    reads: ClassVar = {"short_filter": nn.Conv1d}
    excused: ClassVar = BY_CONVOLUTION
    residual_out = "out_proj"

    def _make_projections(self, dim: int, order: int, conv_size: int) -> None:
        self.dim, self.order, self.conv_size, width = dim, order, conv_size, (order + 1) * dim
        self.in_proj = nn.Linear(dim, width)
        self.out_proj = nn.Linear(dim, dim)
        self.short_filter = nn.Conv1d(width, width, conv_size, groups=width, padding=conv_size - 1)


@registry.register("hyena")
class Hyena(ShortFilterLayer):
    """Hyena operator: a short convolution, then products and long convolutions in turn.

    The paper counts N long convolutions. As in the released code there are N - 1, with a product before and after each.
    A filter has L lags, so older inputs have no effect. Sequences may be longer than L; the released code truncates
    them. The state holds the last L - 1 inputs, so a step costs O(L D). A filter decays to 1/100 within a fraction of
    its lags, 1.5 in the first channel and 0.3 in the last.

    Parameters as in safari: in_proj ((N+1) D, D), out_proj (D, D), short_filter ((N+1) D, 1, W), with biases;
    filter_fn: bias ((N-1) D), implicit_filter.0, .2, ... (linear) and .1.freq (1, width), pos_emb.z (1, L, emb_dim),
    and as buffers pos_emb.t, modulation.deltas. The network and the embedding have no weight decay,
    and the embedding the learning rate 1e-5.
    Initialisation: filter_fn.bias N(0, 1); freq = frequency; z = (t, cos, -sin) of bands from 1e-4 up to
    (emb_dim-1)/2 - 1; deltas from ln(1/100)/1.5 to ln(1/100)/0.3; all else as in PyTorch.
    The filters of one channel are adjacent, as in safari's package. In its standalone_hyena.py the channels of one
    filter are adjacent; up to order 2 both orders are the same.
    """

    id = "S-hyena"
    cost = ("T log T", "T")
    equation = "z^1 = v,  z^{n+1} = x^n * (h^n conv z^n + b^n z^n),  y = W_o z;  h_j = FFN(PE(j)) exp(-alpha j/(L-1))"
    source = (
        'Poli et al., "Hyena Hierarchy: Towards Larger Convolutional Language Models", arXiv:2302.10866, eq. (4) to (7)'
    )
    op = None
    state: ClassVar = HyenaState
    sample: ClassVar = {"max_length": 5, "order": 3, "hidden_dim": 4, "depth": 1}
    hints: ClassVar = {
        "filter_fn.implicit_filter": Hint(weight_decay=False, lr="lr"),
        "filter_fn.pos_emb.z": Hint(weight_decay=False, lr=1e-5),
    }

    def __init__(
        self,
        dim: options.Dim,
        max_length: Annotated[options.MaxLength, "L, lags of the filters"] = 1024,
        order: Annotated[int, at_least(2), "N, number of products; there are N - 1 long convolutions"] = 2,
        hidden_dim: Annotated[options.HiddenDim, "width of the network that computes the filters"] = 64,
        emb_dim: Annotated[
            int,
            Range("an odd number of at least 3", lambda value, _: value >= 3 and value % 2 == 1),
            "size of the embedding of a lag, odd: the lag, cosines, sines",
        ] = 3,
        depth: Annotated[int, at_least(0), "linear maps of that network between the first and the last"] = 2,
        conv_size: options.ConvSize = 3,
        frequency: Annotated[float, "initial frequency of the network's sines"] = 1.0,
        shift: Annotated[float, "value that the decay of the filters approaches"] = 0.0,
        lr: Annotated[options.LearningRate, "learning rate of the network; None for the optimizer's"] = 1e-3,
    ) -> None:
        super().__init__()
        self._make_projections(dim, order, conv_size)
        self.max_length, self.lr = max_length, lr
        self.filter_fn = HyenaFilter((order - 1) * dim, emb_dim, hidden_dim, max_length, frequency, depth, shift)

    def run(self, x: Tensor, state: HyenaState | None, cu_seqlens: Tensor | None) -> tuple[Tensor, HyenaState]:
        short, long = state or (None, None)
        mixed, short = convolve(self.short_filter, self.in_proj(x), short, cu_seqlens=cu_seqlens)
        first, *others, v = widen(mixed).split(self.dim, -1)
        # The filters and biases of one channel are adjacent.
        filters = self.filter_fn().unflatten(0, (self.dim, self.order - 1)).unbind(1)
        biases = widen(self.filter_fn.bias).view(self.dim, self.order - 1).unbind(1)
        histories = []
        for n, (gate, kernel, bias) in enumerate(zip(reversed(others), filters, biases, strict=True)):
            v = v * gate
            history = None if long is None else long[:, n].to(v.dtype)
            if cu_seqlens is None:
                y, after = with_history(v, history, kernel)
            else:
                y, after = each_alone(
                    lambda v, row, kernel=kernel: with_history(v, row, kernel), v, history, cu_seqlens, after_zeros=2
                )
            v = torch.addcmul(y, v, bias)
            histories.append(after)
        return self.out_proj((v * first).to(x.dtype)), HyenaState(short, torch.stack(histories, 1))


@registry.preset("hyena_dna", emb_dim=5, frequency=10.0, shift=0.05)
class HyenaDNAMixer(Hyena):
    """Hyena as in HyenaDNA: faster sines, and a decay that ends at 0.05. `scanl.models.hyena_dna` makes the model.

    In the released models max_length is the length of the longest sequence plus two, and the embedding is not trained.
    """

    id = "S-hyenadna"
    equation = Hyena.equation
    source = (
        'Nguyen et al., "HyenaDNA: Long-Range Genomic Sequence Modeling at Single Nucleotide Resolution", '
        "arXiv:2306.15794, sec. 3.1, and its code"
    )
    hints: ClassVar = {"filter_fn.pos_emb.z": Hint(weight_decay=False, lr=0.0)}
