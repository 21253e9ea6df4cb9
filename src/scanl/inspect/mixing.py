"""The matrix by which a memory mixes its values over steps, as attention does."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from scanl.errors import ConfigError
from scanl.inspect.base import Drawing, Inspection, inspector, prepared
from scanl.layers.base import Layer
from scanl.layers.designation import label
from scanl.ops import op_calls, registry
from scanl.ops._frame.context import OpCall

STEPS = 64
HEADS = 64  # of a matrix; channels beyond are left out
MAX_SHOWN_HEADS = 3  # heads of a picture
DECADES = 1e4  # the largest entry over the least that a picture shows


@dataclass(frozen=True)
class MixingMatrix(Inspection):
    """matrix: M (B, H, T, T), M[b, h, t, s] is what step t reads of the value of step s.   op: the op that mixes."""

    matrix: Tensor
    op: str
    shared = False

    def figures(self) -> dict[str, float]:
        """Return the share of |M| on the diagonal and the mean distance t - s, weighted by |M|."""
        size = self.matrix.abs()
        steps = torch.arange(size.shape[-1], dtype=size.dtype)
        distance = (steps[:, None] - steps).abs()
        total = size.sum((-1, -2)).clamp(min=torch.finfo(size.dtype).tiny)
        return {
            "heads": size.shape[1],
            "share of the present": (size.diagonal(dim1=-2, dim2=-1).sum(-1) / total).mean().item(),
            "mean distance, steps": ((size * distance).sum((-1, -2)) / total).mean().item(),
        }

    def columns(self) -> dict[str, Any]:
        """Return the matrices of the first sequence, without zeros."""
        head, t, s = self.matrix[0].nonzero(as_tuple=True)
        values = self.matrix[0][head, t, s]
        columns = {"head": head.tolist(), "t": t.tolist(), "s": s.tolist(), "value": values.real.tolist()}
        return columns | ({"imaginary": values.imag.tolist()} if values.is_complex() else {})

    def panels(self) -> dict[str, Drawing]:
        return {f"head {head}": self._drawing(head) for head in range(min(MAX_SHOWN_HEADS, self.matrix.shape[1]))}

    def _drawing(self, head: int) -> Drawing:
        def draw(axes: Any) -> None:
            from matplotlib.colors import LogNorm

            size = self.matrix[0, head].abs()
            largest = size.max().item() or 1.0
            image = axes.imshow(size.numpy(), cmap="Blues", norm=LogNorm(largest / DECADES, largest, clip=False))
            axes.set(xlabel="step s that is read", ylabel="step t that reads")
            axes.figure.colorbar(image, ax=axes, shrink=0.8, label="|M|")

        return draw


@inspector(
    title="The attention that a memory implies",
    equation="y_t = sum_s M[t, s] v_s;  of linear attention M[t, s] = q_t^T Diag(e^{g_{s+1} + ... + g_t}) k_s",
    source='Ali, Zimerman and Wolf, "The Hidden Attention of Mamba Models", arXiv:2403.01590, sec. 4',
    takes="layers whose op is linear in its values: scans, linear and softmax attention, delta rules, convolutions",
)
def mixing_matrix(layer: Layer, x: Tensor | None = None) -> MixingMatrix:
    """Return the matrix that the layer's op applies to its values, for what the layer reads.

    x: (B, T, dim); None for 1 sequence of 64 steps of white noise. The op is called once more for each step s, with its
    own queries, keys and decays, and with values that are 1 at step s and 0 elsewhere. So the matrix is exact, of
    whatever form the op is, and what the layer does to the op's output is not in it: a division by a normalizer, a
    norm, a gate. Of an op over channels, such as `linear_scan`, each channel counts as a head. Of an op with decays of
    value channels the first one is taken. At most 64 heads.

    Raises ConfigError for a layer that calls no such op over all steps of x.
    """
    layer, x = prepared("mixing_matrix", layer, x, STEPS, rows=1)
    calls, others = _calls(layer, x), _calls(layer, -2 * x)
    pairs = zip(calls, others, strict=False)
    called = next((call for call, other in pairs if _mixes(call, other, x.shape[1])), None)
    if called is None:
        linear = ", ".join(op.name for op in registry.declared() if op.values)
        names = ", ".join(dict.fromkeys(call.op.name for call in calls)) or "none"
        raise ConfigError(
            f"mixing_matrix: the ops that {label(layer)} calls are {names}, expected one over all {x.shape[1]} steps "
            f"among those that are linear in their values: {linear}"
        )
    return MixingMatrix(_matrix(called), called.op.name)


@torch.no_grad()
def _calls(layer: Layer, x: Tensor) -> list[OpCall]:
    with op_calls() as calls:
        layer(x)
    return calls


def _mixes(call: OpCall, other: OpCall, steps: int) -> bool:
    """Whether a call mixes what the layer made of its input. other: the same call, for another input."""
    name = call.op.values
    if not name or call.op is not other.op or call.operands[name].shape[1] != steps:
        return False
    return not torch.equal(call.operands[name], other.operands[name])  # a clock, or a count of steps, is equal


@torch.no_grad()
def _matrix(call: OpCall) -> Tensor:
    """Return M (B, H, T, T) of a call: the outputs for unit values, one step after the other."""
    values = call.operands[call.op.values]
    columns = []
    for s in range(values.shape[1]):
        unit = torch.zeros_like(values)
        unit[:, s] = 1
        operands = {**call.operands, call.op.values: unit, call.op.state: None}
        y = call.op(**operands, **call.options)[0]
        if "H" in call.op.output:
            y = y[..., 0]
        columns.append(y.flatten(2)[:, :, :HEADS])
    return torch.stack(columns, -1).movedim(1, 2)  # (B, T, H, S) to (B, H, T, S)
