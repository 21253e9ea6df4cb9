"""Lightning's strategy for a model that is divided among the processes of a run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.strategies import ModelParallelStrategy, ParallelStrategy
from torch.distributed.device_mesh import DeviceMesh

from scanl.learning.run.shards import read_shards, write_shards
from scanl.learning.run.sharing import placed


class ShardedStrategy(ModelParallelStrategy):
    """FSDP2: each process has a shard of every parameter, of its gradient and of the optimizer's numbers.

    A checkpoint is what one process would save, with shards; so any number of processes, or one that has the whole
    model, goes on from it.
    """

    lightning_module_state_dict = ParallelStrategy.lightning_module_state_dict
    optimizer_state = ParallelStrategy.optimizer_state

    @property
    def lightning_restore_optimizer(self) -> bool:
        return True

    @property
    def mesh(self) -> DeviceMesh:
        """All processes, in one row."""
        return self.device_mesh["data_parallel"]

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        write_shards(checkpoint, Path(filepath))

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        return read_shards(Path(checkpoint_path), self.mesh)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        likes = self.lightning_module.state_dict()
        weights = {name: placed(value, likes[name]) for name, value in checkpoint["state_dict"].items()}
        self.lightning_module.load_state_dict(weights, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, stored in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            state = {
                at: {name: placed(value, parameters[at]) for name, value in values.items()}
                for at, values in stored["state"].items()
            }
            optimizer.load_state_dict({**stored, "state": state})
