"""A module for TorchRL. `pip install 'scanl[agents]'`; nothing else of scanl imports tensordict or torchrl."""

from typing import Any

from tensordict import TensorDictBase  # pyright: ignore[reportMissingImports]
from tensordict.nn import TensorDictModuleBase, dispatch  # pyright: ignore[reportMissingImports]
from torch.nn import functional as F
from torchrl.data import Unbounded  # pyright: ignore[reportMissingImports]
from torchrl.envs import TensorDictPrimer  # pyright: ignore[reportMissingImports]
from torchrl.modules import recurrent_mode  # pyright: ignore[reportMissingImports]

from scanl.layers.designation import Designation
from scanl.learning.adapters.agent_body import AgentBody


class ScanModule(TensorDictModuleBase):
    """What LSTMModule of TorchRL is, with any layer as the memory.

    Args:
        input_size: numbers of an observation.   hidden_size: of an output.   layer, options: as of `AgentBody`.
        in_key, out_key, state_key: of observations, outputs and the state, which is one row of numbers.
        default_recurrent_mode: outside of `torchrl.modules.set_recurrent_mode`, whether the last axis of the batch is
            time.

    In recurrent mode a batch is read in one scan from the state at its first step; the state begins anew wherever
    `is_init`, which `InitTracker` sets, is True. Only the last step then has a next state; the others have zeros.

    >>> from torchrl.envs import GymEnv, InitTracker, TransformedEnv
    >>> from scanl.learning.adapters.torchrl import ScanModule
    >>> env = TransformedEnv(GymEnv("CartPole-v1"), InitTracker())
    >>> memory = ScanModule(4, 16, "lru", in_key="observation", out_key="embedding")
    >>> _ = env.append_transform(memory.make_tensordict_primer())
    >>> memory(env.reset())["embedding"].shape
    torch.Size([16])
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        layer: Designation = "gru",
        *,
        in_key: Any = "observation",
        out_key: Any = "embedding",
        state_key: str = "recurrent_state",
        default_recurrent_mode: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        self.body = AgentBody(input_size, hidden_size, layer, **options)
        self.in_keys = [in_key, state_key, "is_init"]
        self.out_keys = [out_key, ("next", state_key)]
        self.default_recurrent_mode = default_recurrent_mode

    @property
    def recurrent_mode(self) -> bool:
        """Whether the last axis of a batch is time."""
        mode = recurrent_mode()
        return self.default_recurrent_mode if mode is None else mode

    def make_tensordict_primer(self) -> TensorDictPrimer:
        """Return the transform that gives an environment the state before any step."""
        return TensorDictPrimer({self.in_keys[1]: Unbounded(shape=(self.body.row_size,))}, expand_specs=True)

    @dispatch
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        x, row, starts = (tensordict.get(key, None) for key in self.in_keys)
        shape = tensordict.batch_size
        steps = shape[-1] if self.recurrent_mode else 1
        x = x.reshape(shape.numel() // max(steps, 1), steps, -1)
        row = x.new_zeros(len(x), self.body.row_size) if row is None else row.reshape(*x.shape[:2], -1)[:, 0]
        y, last = self.body.read(x, row, starts.reshape(x.shape[:2]))
        after = F.pad(last[:, None], (0, 0, steps - 1, 0))
        for key, value in zip(self.out_keys, (y, after), strict=True):
            tensordict.set(key, value.reshape(*shape, -1))
        return tensordict
