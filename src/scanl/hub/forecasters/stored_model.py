"""A forecaster that is read: its module, and how the file stores its tensors."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from scanl.hub.weights import Weights


class StoredModel(NamedTuple):
    """A module whose weights are not read yet.

    names: by the module's names of tensors, those that they may have in the file.   axes: by the module's names, the
    file's axes in the order of the module, for tensors whose order differs.
    """

    model: nn.Module
    names: Mapping[str, Sequence[str]]
    axes: Mapping[str, Sequence[int]] = {}

    def read(self, weights: Weights, dtype: torch.dtype | None, device: torch.device | str) -> Any:
        """Read the weights, and return the module in evaluation mode. Raises CheckpointError as `Weights.check`."""
        names = {
            name: next((each for each in stored if each in weights.names()), stored[0])
            for name, stored in self.names.items()
        }
        spare = {each: names[name] for name, stored in self.names.items() for each in stored if each != names[name]}
        shapes = {names[name]: self._stored_shape(name, value) for name, value in self.model.state_dict().items()}
        weights.check(shapes, spare)
        tensors = {name: weights.read(stored, dtype, device) for name, stored in names.items()}
        for name, axes in self.axes.items():
            tensors[name] = tensors[name].permute(*axes).contiguous()
        self.model.load_state_dict(tensors, assign=True)
        return self.model.eval()

    def _stored_shape(self, name: str, value: Tensor) -> tuple[int, ...]:
        axes = self.axes.get(name, range(value.ndim))
        return tuple(value.shape[list(axes).index(axis)] for axis in range(value.ndim))
