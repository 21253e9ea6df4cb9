"""The file of a model, by the ending of its name."""

from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import Any

from torch import nn

from scanl.export.c import CFileSizes, write_c
from scanl.export.flat import check_path
from scanl.export.onnx import write_onnx
from scanl.export.package import write_package
from scanl.export.page import write_page

ENDINGS: dict[str, Callable[..., CFileSizes | None]] = {
    ".onnx": write_onnx,
    ".c": write_c,
    ".pt2": write_package,
    ".html": write_page,
}


def write(model: nn.Module, path: str | PathLike[str], **options: Any) -> CFileSizes | None:
    """Write a model as a file of the format that the ending of `path` names: .onnx, .c, .pt2 or .html.

    options: of `write_onnx`, `write_c`, `write_package` or `write_page`. Returns the sizes of a file in C.
    """
    file = Path(path)
    check_path(file, list(ENDINGS))
    return ENDINGS[file.suffix](model, file, **options)
