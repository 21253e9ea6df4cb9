"""The size of a state over a stream that does not end: whether its norm stays bounded, and its memory constant."""

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from scanl.errors import ConfigError
from scanl.inspect.base import Drawing, Inspection, inspector, prepared
from scanl.layers.base import Layer
from scanl.layers.designation import label
from scanl.layers.state import leaves
from scanl.options import at_least, checked

STEPS = 256  # of white noise, which is read again and again
PIECES = 32  # at whose ends the state is measured


@dataclass(frozen=True)
class StateNorms(Inspection):
    """steps: (n,), the steps that were read.   norms: (n, P), of each of P tensors of the state, root mean square over
    the sequences.   numbers: (n,), how many the state of one sequence has.   names: of the tensors.
    """

    steps: Tensor
    norms: Tensor
    numbers: Tensor
    names: tuple[str, ...]

    def figures(self) -> dict[str, float]:
        return {
            "steps": self.steps[-1].item(),
            "numbers at first": self.numbers[0].item(),
            "at last": self.numbers[-1].item(),
            "largest norm at first": self.norms[0].max().item(),
            "at the end": self.norms[-1].max().item(),
        }

    def columns(self) -> dict[str, Any]:
        count = len(self.names)
        return {
            "tensor": list(self.names) * len(self.steps),
            "steps": self.steps.repeat_interleave(count).tolist(),
            "norm": self.norms.flatten().tolist(),
            "numbers": self.numbers.repeat_interleave(count).tolist(),
        }

    def panels(self) -> dict[str, Drawing]:
        return {"": self._draw}

    def _draw(self, axes: Any) -> None:
        for name, norms in zip(self.names, self.norms.T, strict=True):
            axes.plot(self.steps, norms, lw=1.4, label=name)
        axes.set(xlabel="steps read", ylabel="norm of the state", xscale="log", yscale="log")
        axes.legend(frameon=False, fontsize=8)
        axes.grid(alpha=0.3, which="both")


@inspector(
    title="Norms of the state over a long stream",
    equation="|s_t| for t = 1, 2, ...",
    source='Chen et al., "Stuffed Mamba: State Collapse and State Capacity of RNN-Based Long-Context Modeling", '
    "arXiv:2410.07145, sec. 3",
    takes="layers with a state of floating-point numbers",
)
@checked("state_norms")
def state_norms(layer: Layer, x: Tensor | None = None, *, steps: Annotated[int, at_least(PIECES)] = 4096) -> StateNorms:
    """Return the norm of each tensor of the state while the layer reads a stream.

    x: (B, T, dim), read again and again; None for 4 sequences of 256 steps of white noise.   steps: the length of the
    stream. The norms are measured 32 times. Integers of the state, such as positions, are left out.

    Raises ConfigError for a layer without a state, and for a length below 32.
    """
    layer, x = prepared("state_norms", layer, x, STEPS)
    if layer.bidirectional:
        raise ConfigError(
            f"state_norms: layer is {label(layer)}, which reads the whole sequence, expected one that carries a state"
        )
    ends = torch.logspace(0, torch.tensor(float(steps)).log10().item(), PIECES).round().long().unique()
    norms, numbers, names, state, done = [], [], (), None, 0
    with torch.no_grad():
        for end in ends.tolist():
            while done < end:
                at = done % x.shape[1]
                piece = x[:, at : min(x.shape[1], at + end - done)]
                state, done = layer(piece, state)[1], done + piece.shape[1]
            parts = {
                path.removeprefix("state.") or path: leaf
                for path, leaf in leaves(state)
                if leaf.is_floating_point() or leaf.is_complex()
            }
            names = tuple(parts)
            norms.append([leaf.abs().square().sum().div(len(leaf)).sqrt().item() for leaf in parts.values()])
            numbers.append(sum((2 if leaf.is_complex() else 1) * leaf[0].numel() for leaf in parts.values()))
    if not names:
        raise ConfigError(f"state_norms: the state of {label(layer)} has no numbers, expected some")
    return StateNorms(ends, torch.tensor(norms, dtype=torch.float64), torch.tensor(numbers), names)
