"""Sharing of sequences and of a model among processes: a mesh of data x sequence, and FSDP2."""

from datetime import timedelta
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from scanl.layers.parts.lower_bound import LowerBoundedLayer
from scanl.learning.questions import Model
from scanl.models import Stack
from scanl.models.block import Block
from scanl.parallel.context import divide
from scanl.parallel.ranks import RankGroup

PATIENCE = timedelta(minutes=10)  # one process may compile or write alone; one that has ended is noticed at once
CALLED_METHODS = ("init_state", "logits_at", "loss", "predict")  # methods that read weights, besides `forward`


def placed(value: Any, like: Tensor) -> Any:
    """Return a whole tensor as the shard of this process, if `like` is one of that shape; else the value itself."""
    if isinstance(value, DTensor) or not isinstance(like, DTensor) or value.shape != like.shape:
        return value
    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def share_sequences(model: Model, device: str, processes: int, sequences: int) -> None:
    """Let each `sequences` processes in a row divide the sequences that they read together."""
    axes = ("data", "sequence")
    mesh = init_device_mesh(device, (processes // sequences, sequences), mesh_dim_names=axes)
    divide(model, RankGroup(mesh.get_group("sequence"), timeout=PATIENCE))


def shard(model: Model, mesh: DeviceMesh) -> Model:
    """Divide the parameters of a model among the processes of a mesh, block by block (`fully_shard`). Return the model.

    A stack whose layers read the weights of others is divided as one, since the weights of a block are there only while
    it runs.
    """
    stacks = [stack for stack in model.modules() if isinstance(stack, Stack)]
    alone = [stack for stack in stacks if not any(isinstance(layer, LowerBoundedLayer) for layer in stack.mixers())]
    blocks = [block for stack in alone for block in stack.blocks]
    for block in blocks:
        fully_shard(block, mesh=mesh)
        # FSDP's hook copies dicts, and a block writes into `memo`.
        block.register_forward_pre_hook(_hide_memo, with_kwargs=True, prepend=True)
        block.register_forward_pre_hook(_show_memo, with_kwargs=True)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    for module in (*blocks, model):
        for name in CALLED_METHODS:
            if callable(getattr(module, name, None)):
                register_fsdp_forward_method(module, name)
    return model


class _HiddenValue:
    """A value that FSDP's hooks pass on as it is."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _hide_memo(block: nn.Module, args: tuple[Any, ...], others: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    assert isinstance(block, Block)
    return args, {**others, "memo": _HiddenValue(others["memo"])}


def _show_memo(block: nn.Module, args: tuple[Any, ...], others: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return args, {**others, "memo": others["memo"].value}


def own(tensor: Tensor) -> Tensor:
    """Return this process's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def undivided_tensor(tensor: Tensor) -> Tensor:
    """Return the whole of a tensor. All processes call this for one that is divided."""
    if not isinstance(tensor, DTensor):
        return tensor
    here = tensor.to(tensor.device_mesh.device_type)
    assert isinstance(here, DTensor)
    return here.full_tensor()
