"""A package of torch: a program, compiled ahead of time, that runs without scanl, from Python or C++."""

import shutil
import warnings
from os import PathLike, environ
from pathlib import Path

import torch
from torch import Tensor, nn

from scanl.errors import ConfigError
from scanl.export.flat import FlatModel, check_path, one_step
from scanl.files import files_written_whole


def write_package(model: nn.Module, path: str | PathLike[str], example: Tensor | None = None) -> None:
    """Compile one step of a model with AOTInductor into a package, which `torch._inductor.aoti_load_package` runs.

    The arguments are x (B, 1, ...) and the tensors of the state, in the order of the inputs of `write_onnx`; the
    results are y and the state after the step. The number of sequences is open. model, example: as for `write_onnx`.
    Needs a C++ compiler. Raises ConfigError without one, and for a model whose step is not exported.
    """
    file = Path(path)
    check_path(file, [".pt2"])
    compiler = environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise ConfigError(f"export: {file} needs a C++ compiler, and there is no {compiler}; install one, or set CXX")
    flat = FlatModel(model, example)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about itself
        program = one_step(flat)
        with files_written_whole(file) as partial:
            torch._inductor.aoti_compile_and_package(program, package_path=str(partial))  # pyright: ignore
