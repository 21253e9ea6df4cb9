"""torch's own recurrent modules: `torch.nn.GRU`, `torch.nn.LSTM` and `torch.nn.RNN`."""

import functools
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence

from scanl.hub.patches.base import Patch, register
from scanl.layers import GRU, LSTM, Elman
from scanl.ops import elman, gru, lstm
from scanl.ops._cpu._threads import threads
from scanl.ops._frame.context import exactly, plain, undirected
from scanl.ops._recurrent.layer import RecurrentLayer, outputs, run, sizes_of

States = tuple[Tensor, ...]
_TENSORS = {Tensor, nn.Parameter}


class _Packing(NamedTuple):
    """Order of the steps of a PackedSequence whose sequences stand one after the other.

    cu_seqlens: the offsets of the sequences.   order: the row of each step in the data of the PackedSequence. Its rows
    are the first steps of all sequences, then the second steps, and so on.
    """

    cu_seqlens: Tensor
    order: Tensor

    @classmethod
    def of(cls, batch_sizes: Tensor) -> "_Packing":
        rows = torch.arange(int(batch_sizes[0]))
        lengths = (batch_sizes > rows[:, None]).sum(1)
        cu_seqlens = F.pad(lengths.cumsum(0), (1, 0))
        owner = rows.repeat_interleave(lengths)
        step = torch.arange(owner.shape[0]) - cu_seqlens[owner]
        return cls(cu_seqlens, (batch_sizes.cumsum(0) - batch_sizes)[step] + owner)


class TorchPatch(Patch):
    """Patch for a recurrent module of torch. What torch refuses, its own forward refuses with its own message.

    Kernels of whole layers compute calls of float32 at any length. An op computes what they do not: packed sequences,
    other dtypes, traced calls, and all calls under `exact`. A subclass names the op in `scan`. The projected inputs of
    all steps are one product before it.

    least_steps: of a call of the op that takes no more time than torch's. Of 120 calls with or without gradients on one
    core of a CPU, float32, B = 1 to 32, D = 8 to 512, one or two directions, those of fewer steps took up to 6 times
    torch's time, because the weights are packed once a call; those of more took 0.03 to 0.97 of it. Under `exact` there
    is no such bound, because torch's own have other bits for a step than for a sequence.
    """

    original: ClassVar = "a loop over the steps in C++, with several kernels a step"
    corrects: ClassVar = ()
    least_steps: ClassVar[int]
    of_kernels: ClassVar = (
        "float32, from one step on: one kernel for each layer, and one for its gradients, which take less time"
    )
    unshared: ClassVar = "large products on more threads than the rows of the batch keep busy"

    @staticmethod
    @abstractmethod
    def scan(
        module: Any, x: Tensor, weights: list[Tensor], state: list[Tensor], **options: Any
    ) -> tuple[Tensor, States]:
        """Run one layer in one direction over x (B, T, ·), from the tensors of its state, (B, D) each.

        weights: weight_ih and weight_hh, then bias_ih and bias_hh if the module has biases.   options: of the op.
        """

    @classmethod
    def whole(cls, module: Any, input: Any, hx: Any = None) -> Any:
        """Return the outputs and the last state by one kernel for each layer, and one for its gradients."""
        if not (_is_ordinary(input) and plain() and undirected()) or exactly() or torch.is_autocast_enabled("cpu"):
            return None
        shape, directions, units = input.shape, 2 if module.bidirectional else 1, module.hidden_size
        if len(shape) == 3:
            x, steps_first = (input, False) if module.batch_first else (input.transpose(0, 1), True)
        elif len(shape) == 2:
            x, steps_first = input[None], False
        else:
            return None
        batch, steps, inputs = x.shape
        weights, initial = _weights(module), ()
        if not input.numel() or inputs != module.input_size:
            return None
        if hx is not None:
            of_lstm = isinstance(module, nn.LSTM)
            if isinstance(hx, Tensor) == of_lstm or not isinstance(hx, Tensor | tuple | list):
                return None
            initial = _parts(hx)
            lead = (module.num_layers * directions, *((batch,) if len(shape) == 3 else ()), units)
            if len(initial) != 1 + of_lstm:
                return None
            if not all(_is_ordinary(state) and state.shape == lead for state in initial):
                return None
            initial = tuple((state if len(shape) == 3 else state[:, None]).contiguous() for state in initial)
        for weight in weights:
            if not (_is_ordinary(weight) and weight.is_contiguous()):
                return None
        if sizes_of(module.mode, batch, steps, inputs, units, directions, threads()).idle:
            return None
        y, last = cls._whole_layers(module, x, weights, initial, steps_first)
        if input.ndim == 2:
            return y[0], _joined(module, [state[:, 0] for state in last])
        return y, _joined(module, last)

    @classmethod
    def _whole_layers(
        cls, module: Any, x: Tensor, weights: Sequence[Tensor], initial: States, steps_first: bool
    ) -> tuple[Tensor, list[Tensor]]:
        """Run all layers over x (B, T, ·). Return the outputs as they lie in memory, and the last states."""
        directions, layers, mode = 2 if module.bidirectional else 1, module.num_layers, module.mode
        each, units, parts, last = len(weights) // layers, module.hidden_size, [], []
        differentiated = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x, *weights, *initial))
        if not differentiated:
            last = [x.new_empty(layers * directions, x.shape[0], units) for _ in range(1 + (mode == "LSTM"))]
        y = x
        for at in range(layers):
            if at:
                x = y.transpose(0, 1) if steps_first else y
                if module.dropout and module.training:
                    x = x * _dropped(x, module.dropout, None)
            x = x if x.stride(2) == 1 or x.shape[2] == 1 else x.contiguous()
            own, rows = weights[at * each : (at + 1) * each], slice(at * directions, (at + 1) * directions)
            first = initial if layers == 1 else tuple(state[rows] for state in initial)
            if differentiated:
                by_ops = functools.partial(cls._plain, module, steps_first, len(first))
                y, *states = RecurrentLayer.apply(mode, by_ops, steps_first, len(first), None, x, *first, *own)
                parts.append(states)
            else:
                y, in_rows = outputs(x, directions * units, steps_first)
                run(mode, x, own, first, in_rows, last if layers == 1 else [state[rows] for state in last], keeps=False)
        if differentiated:
            last = parts[0] if layers == 1 else [torch.cat(states) for states in zip(*parts, strict=True)]
        return y, last

    @classmethod
    def _plain(cls, module: Any, steps_first: bool, states: int, x: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Run one layer by the op, which has derivatives of its gradient."""
        initial, weights = tensors[:states], tensors[states:]
        directions = 2 if module.bidirectional else 1
        each, ys, last = len(weights) // directions, [], []
        for direction in range(directions):
            own = list(weights[direction * each : (direction + 1) * each])
            y, state = cls.scan(module, x, own, [tensor[direction] for tensor in initial], reverse=direction == 1)
            ys.append(y)
            last.append(state)
        y = torch.cat(ys, -1)
        return y.transpose(0, 1) if steps_first else y, *(torch.stack(parts) for parts in zip(*last, strict=True))

    @classmethod
    def takes(cls, module: Any, *args: Any, **kwargs: Any) -> bool:
        return (exactly() or cls.pays(module, *args, **kwargs)) and _takes(module, *args, **kwargs)

    @classmethod
    def pays(cls, module: Any, input: Any, hx: Any = None) -> bool:
        """Whether torch takes more time for a call, if it is well-formed."""
        if isinstance(input, PackedSequence):
            return len(input.batch_sizes) >= cls.least_steps
        if not isinstance(input, Tensor) or input.ndim < 2:
            return False
        return input.shape[int(module.batch_first and input.ndim == 3)] >= cls.least_steps

    @classmethod
    def calls(cls) -> tuple[str, ...]:
        by_op = f"from {cls.least_steps} steps on: packed sequences, float64 and {cls.unshared}; all under exact"
        others = "others: torch's own forward, which takes less time"
        return cls.of_kernels, f"{by_op}: {cls.runs.split(',')[0]}", others

    @staticmethod
    def unable(module: Any) -> str:
        return "proj_size projects the state in each step, which no op does" if module.proj_size else ""

    @classmethod
    def forward(cls, module: Any, input: Any, hx: Any = None) -> Any:
        if isinstance(input, PackedSequence):
            data, batch_sizes, sorted_indices, unsorted_indices = input
            packing = _Packing.of(batch_sizes)
            initial = [_rows(state, sorted_indices) for state in _parts(hx)]
            y, states = cls._layers(module, data[packing.order][None], initial, packing)
            y = torch.empty_like(y[0]).index_copy(0, packing.order, y[0])
            states = [_rows(state, unsorted_indices) for state in states]
            return PackedSequence(y, batch_sizes, sorted_indices, unsorted_indices), _joined(module, states)
        if input.ndim == 2:
            y, states = cls._layers(module, input[None], [state[:, None] for state in _parts(hx)])
            return y[0], _joined(module, [state[:, 0] for state in states])
        x = input if module.batch_first else input.transpose(0, 1)
        y, states = cls._layers(module, x, list(_parts(hx)))
        # Callers may view what torch returns as it lies in memory, steps first.
        y = y if module.batch_first else y.transpose(0, 1).contiguous()
        return y, _joined(module, states)

    @classmethod
    def _layers(
        cls, module: Any, x: Tensor, initial: list[Tensor], packing: _Packing | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """Run all layers over x (B, T, ·). Return the outputs (B, T, ·) and the last states, (layers, B, D) each.

        initial: the first states, in the form of the last ones; none for zeros.
        """
        cu_seqlens = None if packing is None else packing.cu_seqlens
        directions, last = 2 if module.bidirectional else 1, []
        for layer in range(module.num_layers):
            if layer and module.dropout and module.training:
                x = x * _dropped(x, module.dropout, packing)
            ys = []
            for direction in range(directions):
                at = layer * directions + direction
                weights = [getattr(module, name) for name in module._all_weights[at]]
                state = [tensor[at] for tensor in initial]
                y, states = cls.scan(module, x, weights, state, reverse=direction == 1, cu_seqlens=cu_seqlens)
                ys.append(y)
                last.append(states)
            x = ys[0] if directions == 1 else torch.cat(ys, -1)
        return x, [torch.stack(parts) for parts in zip(*last, strict=True)]


def _takes(module: Any, input: Any, hx: Any = None) -> bool:
    """Whether the ops compute this call: well-formed, not empty, on a CPU, in one dtype that their kernels have."""
    x = input.data if isinstance(input, PackedSequence) else input
    if not isinstance(x, Tensor) or not (hx is None or isinstance(hx, Tensor | tuple | list)):
        return False
    tensors = [x, *_parts(hx), *_weights(module)]
    if any(not tensor.is_cpu or tensor.dtype != x.dtype for tensor in tensors if isinstance(tensor, Tensor)):
        return False
    if x.dtype not in (torch.float32, torch.float64) or torch.is_autocast_enabled("cpu") or not x.numel():
        return False
    packed = isinstance(input, PackedSequence)
    if x.ndim not in ((2,) if packed else (2, 3)) or x.shape[-1] != module.input_size:
        return False
    if hx is None:
        return True
    if isinstance(hx, Tensor) == isinstance(module, nn.LSTM) or len(_parts(hx)) != 1 + isinstance(module, nn.LSTM):
        return False
    rows = module.num_layers * (2 if module.bidirectional else 1)
    if packed:
        batch = (int(input.batch_sizes[0]),)
    else:
        batch = () if x.ndim == 2 else (x.shape[0 if module.batch_first else 1],)
    return all(isinstance(state, Tensor) and state.shape == (rows, *batch, module.hidden_size) for state in _parts(hx))


def _is_ordinary(tensor: Any) -> bool:
    """Whether a value is a tensor of float32 on a CPU as kernels read it, of no class of its own."""
    if type(tensor) not in _TENSORS or tensor.dtype is not torch.float32:
        return False
    return tensor.is_cpu and not tensor.is_neg()


def _weights(module: Any) -> list[Tensor]:
    """Return the weights of all layers. A replica of DataParallel has no parameters, only their copies."""
    parameters, names = module._parameters, module._flat_weights_names
    return [parameters[name] if name in parameters else getattr(module, name) for name in names]


def _parts(hx: Any) -> tuple[Any, ...]:
    """Return the tensors of a state in torch's form: none, one, or h and c."""
    return () if hx is None else (hx,) if isinstance(hx, Tensor) else tuple(hx)


def _joined(module: Any, states: list[Tensor]) -> Tensor | States:
    """Return a state in torch's form."""
    return tuple(states) if isinstance(module, nn.LSTM) else states[0]


def _rows(state: Tensor, rows: Tensor | None) -> Tensor:
    return state if rows is None else state.index_select(1, rows)


def _dropped(x: Tensor, p: float, packing: _Packing | None) -> Tensor:
    """Return the factors 0 and 1 / (1 - p) of dropout on x (B, T, ·), as torch draws them: steps first."""
    if packing is not None:
        return F.dropout(torch.ones_like(x[0]), p)[packing.order]
    return F.dropout(x.new_ones(x.shape[1], x.shape[0], x.shape[2]), p).transpose(0, 1)


@register("torch_gru")
class GRUPatch(TorchPatch):
    """The two biases stay apart: the reset gate multiplies the state's bias."""

    modules: ClassVar = ("torch.nn.GRU",)
    runs: ClassVar = "gru, or one kernel a layer"
    least_steps: ClassVar = 32

    @staticmethod
    def scan(
        module: Any, x: Tensor, weights: list[Tensor], state: list[Tensor], **options: Any
    ) -> tuple[Tensor, States]:
        y, last = gru(*GRU.operands(x, *weights), *state, **options)
        return y, (last,)


@register("torch_lstm")
class LSTMPatch(TorchPatch):
    """Only without `proj_size`. The op computes several packed sequences, and all calls under `exact`."""

    modules: ClassVar = ("torch.nn.LSTM",)
    runs: ClassVar = "lstm, or one kernel a layer"

    @classmethod
    def pays(cls, module: Any, input: Any, hx: Any = None) -> bool:
        """Whether torch takes more time. Its times over ours, of a forward and backward pass on one core of a CPU in
        float32, at B = 1 to 32 and D = 64 to 1024: batches 0.6 to 1.2, as oneDNN computes them; one packed sequence
        0.6 to 0.9; several 5.1 to 9.0 (0.95 to 1.8 for the forward pass).
        """
        return isinstance(input, PackedSequence) and int(input.batch_sizes[0]) > 1

    @classmethod
    def calls(cls) -> tuple[str, ...]:
        others = f"others, and {cls.unshared}: torch's own forward, which takes less time"
        return cls.of_kernels, "two packed sequences or more, and under exact: lstm", others

    @staticmethod
    def scan(
        module: Any, x: Tensor, weights: list[Tensor], state: list[Tensor], **options: Any
    ) -> tuple[Tensor, States]:
        initial = torch.stack(state, 1) if state else None
        y, last = lstm(*LSTM.operands(x, *weights), initial, **options)
        return y, last.unbind(1)


@register("torch_rnn")
class RNNPatch(TorchPatch):
    """Elman's network, with tanh or ReLU."""

    modules: ClassVar = ("torch.nn.RNN",)
    runs: ClassVar = "elman, or one kernel a layer"
    least_steps: ClassVar = 40

    @staticmethod
    def scan(
        module: Any, x: Tensor, weights: list[Tensor], state: list[Tensor], **options: Any
    ) -> tuple[Tensor, States]:
        nonlinearity = "relu" if module.mode == "RNN_RELU" else "tanh"
        y, last = elman(*Elman.operands(x, *weights), *state, nonlinearity=nonlinearity, **options)
        return y, (last,)
