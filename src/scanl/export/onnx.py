"""ONNX files. The state is among the inputs and the outputs, so a runtime reads a sequence in pieces or in steps."""

import importlib.util
import json
import logging
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._decomp import get_decompositions
from torch.export import ExportedProgram

from scanl.errors import ConfigError
from scanl.export.flat import FlatModel, check_path, exported, one_step
from scanl.export.lowering import lowered
from scanl.export.native import CONVERTED, NATIVE, OPSET, settled
from scanl.export.pairs import without_complex_numbers
from scanl.files import files_written_whole


def write_onnx(
    model: nn.Module, path: str | PathLike[str], example: Tensor | None = None, *, opset: int = CONVERTED
) -> None:
    """Write a model as one ONNX file with its weights, whole or not at all; beyond 2 GB they are in a file beside it.

    model: a layer, or a model that returns `(y, state)` for `(x, state)`.   example: an input (B, T, ...), B and T
    above 1; needed for a class that is not of scanl.

    Inputs: `x`, and each tensor of the state under its path, such as `state.0.mixer`. Outputs: `y`, and the state after
    the last step, `next_state.0.mixer`. The numbers of sequences and of steps are open; a step of the pretrained
    forecaster reads one. Complex tensors have a last axis of 2. The metadata `state` says in JSON with what each tensor
    starts; `start_state` reads it.

    opset: 25, which every runtime of today reads, onnxruntime-web too: each recurrence becomes a `Scan`. With 27,
    linear attention, delta rules and short convolutions become `LinearAttention` and `CausalConvWithState`, which
    read a prompt faster; a file without them has opset 25.

    Raises ConfigError if a package is missing, or for a model that has no such program, such as one with filters
    through an FFT.
    """
    file = Path(path)
    check_path(file, [".onnx"])
    if opset not in (CONVERTED, OPSET):
        raise ConfigError(f"export: opset is {opset}, expected {CONVERTED} or {OPSET}")
    _needed()
    flat = FlatModel(model, example)
    names = [leaf.name for leaf in flat.leaves]
    natives = NATIVE if opset == OPSET else {}
    try:
        with torch.no_grad(), _quiet():
            written = torch.onnx.export(
                without_complex_numbers(_step(flat) if flat.reads_one else lowered(exported(flat), natives)),
                dynamo=True,
                opset_version=CONVERTED,
                verbose=False,
                input_names=["x", *names],
                output_names=["y", *(f"next_{name}" for name in names)],
            )
    except (RuntimeError, ValueError, torch.onnx.OnnxExporterError) as error:
        if isinstance(error, ConfigError):
            raise
        cause = error if error.__cause__ is None else error.__cause__  # torch wraps it in advice of several pages
        reason = str(cause).strip().splitlines()[0]
        raise ConfigError(f"export: {flat.name()} has no program of ONNX: {reason}") from error
    assert written is not None
    settled(written.model)
    starts = {leaf.name: described(leaf.start) for leaf in flat.leaves}
    written.model.metadata_props["state"] = json.dumps(starts, allow_nan=False)
    with files_written_whole(file) as partial:
        written.save(partial)


def _step(flat: FlatModel) -> ExportedProgram:
    # onnxruntime has no softplus of float64.
    return one_step(flat).run_decompositions(get_decompositions([torch.ops.aten.softplus.default]))


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress torch's own messages during the export."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


def _needed() -> None:
    if any(importlib.util.find_spec(package) is None for package in ("onnx", "onnxscript")):
        raise ConfigError("export: an ONNX file needs onnx and onnxscript: pip install 'scanl[export]'")


def described(start: Tensor) -> dict[str, Any]:
    """Return shape, dtype and numbers of a tensor before the first step; one number if all are the same.

    JSON has no numbers that are not finite, so they are the texts Infinity, -Infinity and NaN.
    """
    values = start.unique().tolist() or [0]  # a tensor without numbers has no first one
    value = values[0] if len(values) == 1 else start.tolist()
    return {"shape": list(start.shape), "dtype": str(start.dtype).removeprefix("torch."), "start": _in_json(value)}


def _in_json(value: Any) -> Any:
    if isinstance(value, list):
        return [_in_json(entry) for entry in value]
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def start_state(metadata: str, batch_size: int = 1) -> dict[str, np.ndarray]:
    """Return the inputs of an ONNX file that are the state before the first step.

    metadata: the file's text `state`, `session.get_modelmeta().custom_metadata_map["state"]` in onnxruntime.
    """
    described = json.loads(metadata).items()
    return {
        name: np.broadcast_to(np.asarray(about["start"], about["dtype"]), (batch_size, *about["shape"][1:])).copy()
        for name, about in described
    }
