"""A package of torch: a program, compiled ahead of time, that runs without scanl, from Python or C++."""

import shutil
from os import PathLike, environ
from pathlib import Path

import torch
from torch import Tensor, nn

from scanl.errors import ConfigError
from scanl.export.flat import Flat, check_path, exported
from scanl.export.lowering import lowered


def write_package(model: nn.Module, path: str | PathLike[str], example: Tensor | None = None) -> None:
    """Compile a model with AOTInductor into a package, which `torch._inductor.aoti_load_package(path)` runs.

    The arguments are x and the tensors of the state, in the order of the inputs of `write_onnx`; the results are y and
    the state after the last step. The numbers of sequences and of steps are open. model, example: as for `write_onnx`.
    Needs a C++ compiler. Raises ConfigError without one, and for a model that has no such program.
    """
    file = Path(path)
    check_path(file, [".pt2"])
    compiler = environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise ConfigError(f"export: {file} needs a C++ compiler, and there is no {compiler}; install one, or set CXX")
    flat = Flat(model, example)
    program = lowered(exported(flat), {})
    with torch.no_grad():
        torch._inductor.aoti_compile_and_package(program, package_path=str(file))  # pyright: ignore
