"""Models as files that run without Python: ONNX, C99, a compiled package of torch, and pages of a browser."""

from scanl.export.c import write_c as write_c
from scanl.export.file import write as write
from scanl.export.onnx import start_state as start_state
from scanl.export.onnx import write_onnx as write_onnx
from scanl.export.package import write_package as write_package
from scanl.export.page import write_page as write_page
from scanl.faces import public

__dir__ = public(__name__)
