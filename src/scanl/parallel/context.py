"""Sequence (context) parallelism: a model whose processes each read a stretch of the sequence."""

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from scanl.errors import ConfigError
from scanl.layers.base import Layer
from scanl.layers.parts.cell_layer import SolvedLayer
from scanl.layers.state import leaves
from scanl.models.heads.language_model import LanguageModel
from scanl.models.stack import Stack
from scanl.ops._frame.context import divided_by
from scanl.ops._frame.op import REGISTRY, Op
from scanl.ops.offsets import sequences
from scanl.parallel import counters, division
from scanl.parallel.exchanges import tied
from scanl.parallel.ranks import TIMEOUT, RankGroup, Ranks

CALL = ("reverse", "cu_seqlens", "backend")  # what every op takes


def scan(
    op: Op[..., Any],
    *operands: Tensor | None,
    group: ProcessGroup | None = None,
    timeout: timedelta = TIMEOUT,
    **more: Any,
) -> tuple[Tensor, Any]:
    r"""Run an op over a sequence that is divided among processes: each has a stretch, and returns the outputs there.

    Rank r of the group has the stretch after that of rank r - 1; stretches may have any lengths. The results, and the
    gradients of all operands, equal what one process has for the whole sequence, up to rounding.

    An op that is linear in its state (`op.summary`) works on all ranks at once: three passes over the stretch forward
    and two backward, and each way 1 + ceil(log2(R - 1)) exchanges of pairs (A, b) of the size of a state. Any other op
    works rank by rank.

    op: one of `scanl.ops`.   operands, more: as in a call of the op, of this rank's stretch.   group: the processes in
    the order of their stretches; None: all.   timeout: how long a rank waits for another. The initial state enters at
    rank 0, and other ranks give none. Returns y of the stretch and the state after it; that of the last rank is the
    last state.

    With cu_seqlens the first sequence of a rank is the one that goes on from the rank before, which may be empty; so
    rank 0 has all its sequences from their beginning (`stretch_offsets`). The state then has a row for each sequence of
    the stretch, where that of the first is given on rank 0 alone. In reverse the last rank is the first.

    Raises ConfigError if the ranks do not fit each other, if a rank behind rank 0 is given a state without cu_seqlens,
    or for cu_seqlens in reverse; ShapeError for a stretch without a sequence; ProcessError for a rank that has ended or
    does not come in time.
    """
    ranks = RankGroup(group, timeout=timeout)
    packed, first = more.get("cu_seqlens") is not None, ranks.size - 1 if more.get("reverse") else 0
    bound, options = op.bind(operands, {name: value for name, value in more.items() if name not in CALL})
    if ranks.rank != first and not packed and bound[op.state] is not None:
        raise ConfigError(
            f"{op.name}: {op.state} is given on rank {ranks.rank}, expected none, as it comes from the rank before"
        )
    tensors = [value for _, value in leaves(bound)]
    kinds = [(name, value.dtype if isinstance(value, Tensor) else None) for name, value in bound.items()]
    facts = {"operands": [kind for kind in kinds if kind[0] != op.state], "options": sorted(options.items())}
    learned = any(tensor.requires_grad for tensor in tensors)
    anchor = meet(ranks, learned, tensors[0].device, op=op.name, packing=packed, **facts)
    with divided_by(partial(division.run, ranks, anchor)):
        return op(*operands, **more)


def meet(ranks: Ranks, learned: bool, device: torch.device, **facts: object) -> Tensor:
    """Let all ranks compare facts about their calls. Returns the anchor of `division.run`. Raises ConfigError.

    learned: whether anything of this rank requires a gradient.
    """
    facts = {"version of scanl": version("scanl"), "version of torch": torch.__version__, **facts}
    learned = learned and torch.is_grad_enabled()
    numbers = torch.tensor([learned, *(_number(fact) for fact in facts.values())], device=device)
    answers = ranks.everyone(numbers)
    for at, (name, fact) in enumerate(facts.items(), 1):
        other = [rank for rank, answer in enumerate(answers) if answer[at] != answers[0][at]]
        if other:
            raise ConfigError(
                f"parallel: rank {other[0]} has another {name} than rank 0, expected the same on all ranks; "
                f"here, on rank {ranks.rank}, it is {fact}"
            )
    return torch.zeros((), device=device, requires_grad=any(bool(answer[0]) for answer in answers))


def _number(fact: object) -> int:
    return int.from_bytes(hashlib.sha256(repr(fact).encode()).digest()[:7])


def by_ops(layer: Layer) -> bool:
    """Return whether the ranks divide the ops of a layer, as its class declares.

    Then the whole state passes through ops. The state of any other layer goes from rank to rank, each of which waits
    for the one before; so it does where a solver takes all steps at once, which is no call of the op.
    """
    solved = isinstance(layer, SolvedLayer) and layer.solver != "sequential"
    return not solved and (layer.carried_by or ("ops" if layer.op else "turns")) == "ops"


def _at_once(layer: Layer) -> bool:
    """Return whether all ranks run the layer at once: its op is linear in its state, or it has none of its own."""
    effect = REGISTRY[layer.op].effect if layer.op in REGISTRY else None
    return by_ops(layer) and (layer.op is None or (effect is not None and not effect.unless))


class _Thread(threading.local):
    undivided = False


_thread = _Thread()


@contextmanager
def undivided() -> Iterator[None]:
    """A context in which the models of this thread read whole sequences, as if no other process read the rest."""
    outer, _thread.undivided = _thread.undivided, True
    try:
        yield
    finally:
        _thread.undivided = outer


class ContextParallel(ParallelStyle):
    """Let each process of a mesh read a stretch of the sequence.

    Call `torch.distributed.tensor.parallel.parallelize_module(model, mesh["cp"], ContextParallel())`.

    model: a `Layer`, a `Stack` or a `LanguageModel` that is causal, with the same weights on all ranks. It is called as
    before, with this rank's stretch of x, of any length. Outputs and states are as for `scan`: the initial state
    enters at rank 0, and the state of the last rank is the last one. Sum the gradients of the weights over the ranks,
    for example with FSDP or DistributedDataParallel over the same processes.

    A layer that remembers by ops alone works on all ranks at once. The state of another layer goes from rank to rank,
    and each rank waits for the one before. `scanl.parallel.by_ops` says which.

    timeout: how long a rank waits for another at the beginning of a call, and in an exchange. Give more if a rank
    compiles, saves or evaluates alone meanwhile. If a layer works in turn, all wait as long as the group.

    Raises ConfigError for a model that is not causal or of another kind, for a mesh whose processes are not in their
    order, and in a call if the ranks do not fit; ProcessError in a call on all ranks if one has ended or does not come.
    """

    def __init__(self, *, timeout: timedelta = TIMEOUT) -> None:
        super().__init__()
        self.timeout = timeout

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if device_mesh.ndim != 1:
            raise ConfigError(f"device_mesh: it has {device_mesh.ndim} axes, expected one, such as mesh['cp']")
        processes = device_mesh.mesh.tolist()
        if processes != sorted(processes):
            raise ConfigError(f"device_mesh: its processes are {processes}, expected them in rising order")
        return divide(module, RankGroup(device_mesh.get_group(), timeout=self.timeout))


def divide(module: nn.Module, ranks: Ranks) -> nn.Module:
    """Divide the sequences of a module among ranks, by a hook on it and new forward passes of its layers."""
    if not isinstance(module, Layer | Stack | LanguageModel):
        raise ConfigError(
            f"module: it is a {type(module).__name__}, expected a Layer, a Stack or a LanguageModel, "
            "whose outputs at a step depend on the steps before alone"
        )
    if both := [layer.name for layer in module.modules() if isinstance(layer, Layer) and layer.bidirectional]:
        raise ConfigError(f"module: {both[0]} reads both directions, expected causal layers")
    parts = list(_outermost(module))
    division_ = _Division(module, ranks if all(map(_at_once, parts)) else ranks.in_turn())
    module.register_forward_pre_hook(division_.begin, with_kwargs=True, prepend=True)
    for layer in parts:
        layer.forward = _ByOps(division_, layer) if by_ops(layer) else _InTurn(division_, layer)
    return module


def _outermost(module: nn.Module) -> Iterator[Layer]:
    if isinstance(module, Layer):
        yield module
    else:
        for child in module.children():
            yield from _outermost(child)


class _Division:
    """What the layers of a module share."""

    def __init__(self, module: nn.Module, ranks: Ranks) -> None:
        self.ranks, self.anchor = ranks, torch.zeros(())
        weights = [(name, tuple(weight.shape), weight.dtype) for name, weight in module.named_parameters()]
        self.model = f"{type(module).__name__} of {len(weights)} weights, digest {_number(weights):x}"

    def begin(self, module: nn.Module, args: tuple[Any, ...], others: dict[str, Any]) -> None:
        """Before a call of the module: the ranks compare what they are about to do."""
        if _thread.undivided:
            return
        if others.get("mask") is not None:
            raise ConfigError("mask: it is given, expected none, as the stretches of the ranks are one sequence")
        if others.get("starts") is not None:
            raise ConfigError("starts: it is given, expected none where ranks divide the sequence; give cu_seqlens")
        x = args[0]
        learned = x.requires_grad or any(weight.requires_grad for weight in module.parameters())
        facts = {"model": self.model, "batch": (*x.shape[:1], *x.shape[2:]), "dtype": x.dtype}
        packed = others.get("cu_seqlens") is not None
        self.anchor = meet(self.ranks, learned, x.device, packing=packed, **facts)


class _ByOps:
    """The forward pass of a layer whose ops are divided. inner: that of the layer alone.

    It takes the place of the layer's own: hooks after a call do not run when it is interrupted, and the division would
    stay open.
    """

    def __init__(self, division_: _Division, layer: Layer) -> None:
        self.division, self.layer, self.inner = division_, layer, layer.forward

    def __call__(self, x: Tensor, state: Any = None, **others: Any) -> tuple[Tensor, Any]:
        if _thread.undivided:
            return self.inner(x, state, **others)
        ranks, anchor = self.division.ranks, self.division.anchor
        outputs = [anchor]

        def run(*args: Any, **call: Any) -> tuple[Tensor, Any]:
            y, last = division.run(ranks, anchor, *args, **call)
            outputs.append(y)
            return y, last

        state = counters.entering(ranks, self.layer, x, state, others.get("cu_seqlens"))
        with divided_by(run), undivided():  # a layer may call its own forward pass
            y, state = self.inner(x, state, **others)
        return tied(y, outputs), state  # of no steps y may depend on no op, and other ranks wait for each


class _InTurn(_ByOps):
    """The forward pass of a layer whose state goes from rank to rank."""

    def __call__(self, x: Tensor, state: Any = None, **others: Any) -> tuple[Tensor, Any]:
        if _thread.undivided:
            return self.inner(x, state, **others)
        packed = others.get("cu_seqlens")
        start = self.layer.init_state(sequences(x, packed)) if state is None else state

        def stretch(state: Any) -> tuple[Tensor, Any]:
            with undivided():
                return self.inner(x, state, **others)

        return division.in_turn(self.division.ranks, self.division.anchor, stretch, start, packed is not None)
