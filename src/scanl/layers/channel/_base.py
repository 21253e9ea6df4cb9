"""Channel mixers that map each step by itself."""

from torch import Tensor, nn

from scanl.layers.base import Layer
from scanl.layers.state import Device, DType, State


class PointwiseMixer(Layer):
    """A channel mixer of linear maps that maps each step by itself, so it has no state. A subclass defines `mapped`."""

    def init_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> State:
        return ()

    def run(self, x: Tensor, state: State, cu_seqlens: Tensor | None) -> tuple[Tensor, State]:
        return self.mapped(x), ()

    def mapped(self, x: Tensor) -> Tensor:
        """Map x (B, T, D) to (B, T, D)."""
        raise NotImplementedError

    def _hidden(self, expand: float, dim: int, multiple: int = 1) -> int:
        """Return int(expand * dim) rounded up to a multiple. Raises ConfigError if it is 0."""
        hidden = int((expand * dim + multiple - 1) // multiple) * multiple
        if hidden < 1:
            self._refuse("expand", expand, f"at least 1/{dim} because of dim={dim}")
        return hidden

    def _initialise(self) -> None:
        """Draw the weights of the linear maps from N(0, 1/fan_in); biases are 0."""
        for linear in self.children():
            assert isinstance(linear, nn.Linear)
            nn.init.normal_(linear.weight, std=linear.in_features**-0.5)
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)
