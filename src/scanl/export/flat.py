"""A model as a function of tensors: its input and the tensors of its state, all real, by name."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, export

from scanl.errors import ConfigError
from scanl.files import check_new_file
from scanl.hub.streaming.stream import StreamingModule
from scanl.layers import state as states
from scanl.layers.base import Layer
from scanl.models import Forecaster, LanguageModel, RandomFilters
from scanl.models.forecasting.pretrained_step import PretrainedStep
from scanl.models.inputs import Tokens
from scanl.models.reader import Reader
from scanl.ops import backend


class Leaf(NamedTuple):
    """A tensor of the state. name: its path in the state.   start: (1, ...), its value before the first step."""

    name: str
    start: Tensor


class FlatModel(nn.Module):
    """A model whose arguments and results are tensors: `(x, *state) -> (y, *state)`.

    model: a layer, or a model that returns `(y, state)` for `(x, state)`.   example: an input (B, T, ...) with B and T
    above 1; None for a layer, a language model, a reader of tokens or features, a forecaster without covariates, a step
    of the pretrained one, which reads no more than one, and a stream, whose time axis may be another one, and whose
    step may be several steps of its input.
    A complex tensor of the state is a real one with a last axis of 2. Raises ConfigError for a model that has no such
    interface.
    """

    def __init__(self, model: nn.Module, example: Tensor | None = None) -> None:
        super().__init__()
        own = Layer | LanguageModel | Reader | Forecaster | PretrainedStep | StreamingModule
        if not isinstance(model, own) and example is None:
            raise ConfigError(
                f"export: example is None for a {type(model).__name__}, expected an input of the model (B, T, ...)"
            )
        if any(isinstance(part, RandomFilters) for part in model.modules()):
            raise ConfigError(
                "export: the model has random filters, expected a stack alone; `scanl train` makes one with --steps"
            )
        if isinstance(model, Forecaster) and model.form.beside is not None:
            raise ConfigError(
                "export: the forecaster takes the mean with the model in the package, expected one that stands alone; "
                "train it with --pretrained 0"
            )
        self.model = copy.deepcopy(model).cpu().eval()  # the caller's may be in training, and on a GPU
        self.time, self.batch, self.steps, self.reads_one = 1, 0, 1, isinstance(model, PretrainedStep)
        if isinstance(model, StreamingModule):
            self.time, self.batch, self.steps = model.time, model.batch, model.stride
        self.example = _example(model) if example is None else example.detach().cpu()
        with torch.no_grad():
            self._form = self.model.init_state(1)  # pyright: ignore[reportCallIssue]
        self.leaves = [Leaf(path, _real(leaf.detach())) for path, leaf in states.leaves(self._form)]

    def forward(self, x: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        parts = iter(state)
        y, after = self.model(x, states.map_leaves(lambda leaf: _like(next(parts), leaf), self._form))
        return y, *(_real(leaf) for _, leaf in states.leaves(after))

    def start(self, batch_size: int) -> list[Tensor]:
        """Return the tensors of the state before the first step."""
        return [leaf.start.repeat(batch_size, *[1] * (leaf.start.ndim - 1)) for leaf in self.leaves]

    def first_step(self, rows: int) -> Tensor:
        """Return the first step of some sequences of the example."""
        step = self.example.narrow(self.time, 0, self.steps)
        return (step if self.batch is None else step.narrow(self.batch, 0, rows)).contiguous()

    def open_axes(self, dim: Dim) -> tuple[dict[int, Any], dict[int, Any]]:
        """Return the open axes of the input and of each tensor of the state: that of the batch, if there is one."""
        return ({}, {}) if self.batch is None else ({self.batch: dim}, {0: dim})

    def name(self) -> str:
        """Return the name of the model in messages."""
        return str(getattr(self.model, "name", type(self.model).__name__)) or type(self.model).__name__


def exported(flat: FlatModel) -> ExportedProgram:
    """Return the program of a model; the numbers of sequences and of steps are open.

    Raises ConfigError if the program would take only as many steps as the example has.
    """
    of_input, of_state = flat.open_axes(Dim("batch"))
    inputs = flat.example, *flat.start(1 if flat.batch is None else flat.example.shape[flat.batch])
    shapes = {**of_input, flat.time: Dim.AUTO}, tuple(of_state for _ in flat.leaves)
    with torch.no_grad(), backend("cpu", "parallel", "reference"):  # named: a layer then calls no loop of torch's own
        program = export(flat, inputs, dynamic_shapes=shapes, strict=False)
    (x,) = (node for node in program.graph.nodes if node.name == "x")
    steps = x.meta["val"].shape[flat.time]
    if isinstance(steps, int):
        raise ConfigError(f"export: the program of {flat.name()} takes {steps} steps and no other number")
    return program


def one_step(flat: FlatModel, batch_size: int | None = None) -> ExportedProgram:
    """Return the program of one step, of operations of torch alone. batch_size: None leaves the number of rows open."""
    rows = 2 if batch_size is None else batch_size
    inputs = flat.first_step(rows), *flat.start(rows)
    of_input, of_state = ({}, {}) if batch_size is not None else flat.open_axes(Dim("batch"))
    shapes = of_input, tuple(of_state for _ in flat.leaves)
    with torch.no_grad(), backend("reference"):
        program = export(flat, inputs, dynamic_shapes=shapes, strict=False)
    for check in program.graph.find_nodes(op="call_function", target=torch.ops.aten._assert_tensor_metadata.default):
        program.graph.erase_node(check)
    return program


def _example(model: Any) -> Tensor:
    if isinstance(model, StreamingModule):
        return model.example()
    if isinstance(model, Layer):
        return torch.randn(2, 20, model.dim)
    if isinstance(model, PretrainedStep):
        return torch.randn(2, 1, 1, dtype=torch.float64)
    if isinstance(model, Forecaster):
        if model.past or model.static or model.future or model.timed:
            raise ConfigError("export: the forecaster reads covariates or durations, expected one that reads x alone")
        return torch.randn(2, 20, model.targets)
    inputs = model.inputs
    if isinstance(inputs, Tokens):
        return torch.randint(inputs.vocab_size, (2, 20))
    return torch.randn(2, 20, inputs.channels)


def _real(leaf: Tensor) -> Tensor:
    return torch.view_as_real(leaf) if leaf.is_complex() else leaf


def _like(value: Tensor, leaf: Tensor) -> Tensor:
    return torch.view_as_complex(value) if leaf.is_complex() else value


def check_path(path: Path, endings: Sequence[str]) -> None:
    """Raise ConfigError unless a file can have this name."""
    if path.suffix not in endings:
        raise ConfigError(f"export: path is {path}, expected a file of {' or '.join(endings)}")
    check_new_file("export", "path", path)
