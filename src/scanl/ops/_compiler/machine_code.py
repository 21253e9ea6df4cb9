"""Machine code of kernels in LLVM's language, which is kept on disk."""

import ctypes
import functools
import hashlib
import re
from pathlib import Path
from typing import Any

import llvmlite
from llvmlite import binding
from numba import config

from scanl.ops._compiler.print_llvm import KERNEL, KernelSource, elementary
from scanl.ops._cpu import _elementary
from scanl.ops._cpu._cache import keep
from scanl.ops._cpu._team import PreparedCall
from scanl.ops._frame import cache

_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_DIGEST = hashlib.sha256().digest_size
_FREEDOM = re.compile(" (?:contract|nsz)(?= )")  # flags of instructions of our elementary functions


class NativeKernel:
    """A kernel that gets its slots as those of numba do: the counter of units, their number, and its own."""

    def __init__(self, source: KernelSource) -> None:
        self._address = address(source)
        self._call = _FUNCTION(self._address)

    def prepared(self, packed: list[int], units: int = 1, work: int = 0) -> PreparedCall:
        """Return the kernel with its own slots.   work: about how many numbers it touches."""
        return PreparedCall(self._call, self._address, packed, units, work)

    def once(self, slots: bytes) -> None:
        """Run the kernel on this thread. slots: all of them, the first for a counter that this kernel does without."""
        self._call(slots)


@functools.cache
def address(source: KernelSource) -> int:
    """Return the address of a kernel, which is compiled unless its machine code is on disk."""
    parts = source.text, sorted(source.elementary), source.portable, _elementary.digest(), _machine()
    title = f"{KERNEL}-{hashlib.sha256(repr(parts).encode()).hexdigest()[:32]}"  # no other function has this name
    try:
        code = _checked(cache.read(_path(title)))
    except OSError:
        code = _compiled(source, title)
        keep(lambda: _path(title), hashlib.sha256(code).digest() + code)
    engine = _engine()
    engine.add_object_file(binding.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return engine.get_function_address(title)


def _path(title: str) -> Path:
    return cache.folder() / f"{title}.o"


def _checked(content: bytes) -> bytes:
    """Return machine code after its digest. Raises OSError if it is damaged: LLVM would end the process."""
    if hashlib.sha256(content[_DIGEST:]).digest() != content[:_DIGEST]:
        raise OSError("machine code is damaged")
    return content[_DIGEST:]


def _compiled(source: KernelSource, title: str) -> bytes:
    """Return the machine code of a kernel, whose function gets another name."""
    module = binding.parse_assembly(source.text.replace(f"@{KERNEL}(", f'@"{title}"('))
    for name, kind in sorted(source.elementary):
        text = _elementary.source(name, kind, elementary(name, kind))
        module.link_in(binding.parse_assembly(_FREEDOM.sub("", text) if source.portable else text))
    target = _target()
    module.triple, module.data_layout = target.triple, str(target.target_data)
    options = binding.create_pipeline_tuning_options(speed_level=2)
    options.loop_vectorization, options.slp_vectorization = True, False
    passes = binding.create_pass_builder(target, options)
    passes.getModulePassManager().run(module, passes)
    return target.emit_object(module)


def _machine() -> tuple[str, ...]:
    """Return what machine code depends on beside its source: the version, and the processor as numba has it."""
    settings: Any = config  # numba gives it its attributes at run time
    features = settings.CPU_FEATURES
    features = binding.get_host_cpu_features().flatten() if features is None else features
    return llvmlite.__version__, settings.CPU_NAME or binding.get_host_cpu_name(), features


def _target() -> binding.TargetMachine:
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    target = binding.Target.from_triple(binding.get_process_triple())
    _, name, features = _machine()
    return target.create_target_machine(
        cpu=name, features=features, opt=2, reloc="static", codemodel="jitdefault", jit=True
    )


@functools.cache
def _engine() -> binding.ExecutionEngine:
    """Return what has the machine code in memory, as long as the process runs."""
    target = _target()
    return binding.create_mcjit_compiler(binding.parse_assembly(""), target)
