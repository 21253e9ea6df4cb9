"""Compile for sm_90, without a GPU, the kernels that the triton backend would launch; print what each of them uses."""

import json
import re
import subprocess
import sys
import tempfile
import warnings
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from scanl.ops._triton import linear_scan

SHORT = {"float32": "fp32", "float64": "fp64", "bfloat16": "bf16", "float16": "fp16", "int64": "i64"}
CASES = {
    "float32": ((8, 1024, 1024), (8, 1024, 1024), torch.float32),
    "bfloat16": ((8, 1024, 1024), (8, 1024, 1024), torch.bfloat16),
    "complex64": ((8, 1024, 1024), (8, 1024, 1024), torch.complex64),
    "complex64, constant": ((8, 1024, 1024), (1024,), torch.complex64),
    "float32, shared": ((8, 1024, 16, 64), (8, 1024, 16, 1), torch.float32),
    "float32, narrow": ((2, 64, 3), (64, 3), torch.float32),
    "float32, cut": ((1, 16384, 64), (1, 16384, 64), torch.float32),
    "bfloat16, cut, constant": ((1, 16384, 64), (64,), torch.bfloat16),
}


class Compiled:
    """In a kernel's place: compiles it for the arguments that it is launched with."""

    def __init__(self, kernel: Any):
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]):
        return self.launch

    def launch(self, *arguments: Any, **flags: Any) -> None:
        options = {name: flags.pop(name) for name in list(flags) if name not in self.kernel.arg_names}
        signature, constants, attributes = dict.fromkeys(flags, "constexpr"), flags, {}
        for i, (parameter, value) in enumerate(zip(self.kernel.params, arguments, strict=False)):
            tensor = isinstance(value, torch.Tensor)
            if value is None or (not tensor and value == 1 and not parameter.do_not_specialize):
                signature[parameter.name], constants[parameter.name] = "constexpr", value
                continue
            signature[parameter.name] = "*" + SHORT[str(value.dtype).removeprefix("torch.")] if tensor else "i32"
            if tensor or (value % 16 == 0 and not parameter.do_not_specialize):
                attributes[(i,)] = [["tt.divisibility", 16]]
        signature = {name: signature[name] for name in self.kernel.arg_names}
        source = ASTSource(self.kernel, signature, constants, attributes)
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(compiled.asm["cubin"])
            file.flush()
            command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
            usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        registers, stack, local = (int(re.search(rf"{key}:(\d+)", usage)[1]) for key in ("REG", "STACK", "LOCAL"))
        print(
            json.dumps(
                {
                    "case": name,
                    "kernel": self.kernel.__name__.strip("_") + (" summary" if constants.get("SUMMARY") else ""),
                    "tile": [constants["STEPS"], constants["CHANNELS"]],
                    "registers": registers,
                    "spilled": stack + local,
                    "shared": compiled.metadata.shared,
                    "asynchronous": compiled.asm["ptx"].count("cp.async.c"),
                }
            ),
            flush=True,
        )


if __name__ == "__main__":
    warnings.simplefilter("error")
    linear_scan._forward = Compiled(linear_scan._forward)
    linear_scan._backward = Compiled(linear_scan._backward)
    for name in sys.argv[1:] or CASES:
        x_shape, a_shape, dtype = CASES[name]
        wide = {torch.bfloat16: torch.float32}.get(dtype, dtype)
        x, a = torch.empty(x_shape, dtype=dtype), torch.empty(a_shape, dtype=dtype)
        state = torch.empty(x_shape[:1] + x_shape[2:], dtype=wide)
        linear_scan.forward(x, a, state, False, None)
        linear_scan.backward(x, state, a, x, state, False, None)
