"""The state from which a model begins, as something that is learned and kept in a small file."""

from os import PathLike
from pathlib import Path
from typing import Any, Self

from torch import Tensor, nn

from scanl.digests import digest_of, load_tensors, save_tensors
from scanl.errors import CheckpointError, ShapeError
from scanl.layers.module import Module
from scanl.layers.state import State, leaves, map_leaves, restored, stored
from scanl.models.saving import recorded


class FirstState(Module):
    """A state of one row, from which a model begins every sequence; its numbers are parameters.

        first = scanl.learning.tune_state(model, batches)
        logits, state = model(tokens, first(len(tokens)))
        first.save("haiku.safetensors", model)

    Parameters: numbers, the tensors of the state that can be learned.   Buffers: the others. These are integers, and
    tensors with an infinity, such as a running maximum before any step.

    Args:
        state: of one row, such as `model.init_state(1)`, or `model(tokens)[1]` after a text. It is copied.
    """

    def __init__(self, state: State) -> None:
        super().__init__()
        for path, leaf in leaves(state):
            if leaf.shape[:1] != (1,):
                raise ShapeError(f"first state: {path} has shape {tuple(leaf.shape)}, expected one row of the batch")
        values = [leaf.detach().clone() for _, leaf in leaves(state)]
        self._form = map_leaves(lambda leaf: leaf.detach().to("meta"), state)
        self._learned = [_is_learned(value) for value in values]
        kinds = list(zip(values, self._learned, strict=True))
        self.numbers = nn.ParameterList(value for value, learned in kinds if learned)
        for i, value in enumerate(value for value, learned in kinds if not learned):
            self.register_buffer(f"constant_{i}", value)

    def forward(self, batch_size: int) -> State:
        """Return the state for a batch: `batch_size` equal rows, with a graph to the parameters."""
        numbers, constants, learned = iter(self.numbers), self.buffers(), iter(self._learned)

        def rows(_: Tensor) -> Tensor:
            return next(numbers if next(learned) else constants).repeat_interleave(batch_size, 0)

        return map_leaves(rows, self._form)

    def save(self, path: str | PathLike[str], model: Any) -> None:
        """Write a safetensors file with a digest of its bytes, and one of the model's options and weights.

        Raises CheckpointError when it cannot be written.
        """
        save_tensors(stored(self(1)), Path(path), {"first state of": _digest(model)})

    @classmethod
    def load(cls, path: str | PathLike[str], model: Any) -> Self:
        """Read a file of `save` for this model.

        Raises CheckpointError when the file is damaged, or holds no first state of a model with exactly these weights.
        """
        tensors, about = load_tensors(Path(path), "first state")
        if "first state of" not in about:
            raise CheckpointError(f"first state: {path} holds none, expected a file that `FirstState.save` has written")
        state = restored(tensors, model.init_state(1), path)
        if about["first state of"] != _digest(model):
            raise CheckpointError(
                f"first state: {path} was learned for other weights, expected those of this model; load the model "
                "that it was learned for, or learn it again"
            )
        return cls(state)


def _is_learned(leaf: Tensor) -> bool:
    return (leaf.is_floating_point() or leaf.is_complex()) and bool(leaf.isfinite().all())


def _digest(model: Any) -> str:
    return digest_of(model.state_dict(), recorded(model))
