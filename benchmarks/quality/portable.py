"""The digest of 10^5 logits of the byte model by everything that computes them, and what portable bits cost.

    python benchmarks/quality/portable.py                # what is installed of the list
    python benchmarks/quality/portable.py gcc aarch64    # some of it

`kernel` is the compiled step within `scanl.exact(portable=True)`, for this processor and as for one without AVX-512
and without AVX2 (by NUMBA_CPU_FEATURES). The others are the file that `scanl export text model.c --portable` writes,
by gcc and clang, also for other architectures, which qemu emulates: Debian's packages qemu-user, clang,
gcc-aarch64-linux-gnu, gcc-riscv64-linux-gnu, gcc-s390x-linux-gnu and the libraries that these recommend. `time` is
microseconds a byte of 32 streams: of the portable step, the step of a kernel with freedom of rounding, and the two
ways to have equal bits on one machine within `scanl.exact()`: ordinary steps, and reading at once.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from scanl.export import write_c
from scanl.models import LanguageModel
from scanl.models.byte_models import byte_model
from scanl.ops import exact

sys.path.append(str(Path(__file__).parents[1]))
from harness import Results, in_process, machine, measure, parse, parser

BYTES = 391  # of the license are read, so that there are 100,096 logits
STREAMS, STEPS = 32, 64
# of the processor that are left out
FEATURES = {
    "as it is": (),
    "without AVX-512": ("avx512",),
    "without AVX and FMA": ("avx", "fma", "f16c"),
}  # that are left out
OPTIMIZATIONS = ("-O0", "-O2", "-O3", "-O3 -march=native")
COMPILERS = {  # and what runs their programs
    "gcc": ("gcc", ""),
    "clang": ("clang", ""),
    "aarch64": ("aarch64-linux-gnu-gcc -static", "qemu-aarch64"),
    "riscv64": ("riscv64-linux-gnu-gcc -static", "qemu-riscv64"),
    "s390x": ("s390x-linux-gnu-gcc -static", "qemu-s390x"),
}
PROGRAM = """\
#include <stdio.h>
#include <string.h>
#include "model.c"

int main(void)
{
    static struct model_state s;
    static float y[256];
    model_start(&s);
    for (int x = getchar(); x != EOF; x = getchar()) {
        model_step(&x, &s, y);
        for (int k = 0; k < 256; k++) {
            uint32_t bits;
            memcpy(&bits, y + k, 4);
            printf("%08x", (unsigned)bits);
        }
    }
    return 0;
}
"""


def shipped() -> LanguageModel:
    return byte_model()


def text() -> bytes:
    return (Path(__file__).parents[2] / "LICENSE").read_bytes()[:BYTES]


def digest_of_kernel(data: bytes) -> str:
    """Return the digest of the logits behind each byte."""
    with torch.inference_mode(), exact(portable=True):
        step, state, digest = shipped().compile_step(), None, hashlib.sha256()
        for byte in data:
            logits, state = step(torch.tensor([byte]), state)
            digest.update(logits.numpy().astype(">f4").tobytes().hex().encode())
    return digest.hexdigest()


def by_kernel(results: Results) -> None:
    from llvmlite import binding

    for name, left_out in FEATURES.items():
        if not results.timed(by="kernel", form=name):
            known = binding.get_host_cpu_features()
            flags = (f"{'+' if on and not feature.startswith(left_out or '-') else '-'}{feature}" for feature, on in
                     known.items())  # fmt: skip
            os.environ |= {"NUMBA_CPU_FEATURES": ",".join(flags), "NUMBA_CPU_NAME": binding.get_host_cpu_name()}
            results.add(by="kernel", form=name, logits=256 * BYTES, digest=in_process(digest_of_kernel, text()))


def by_compiler(results: Results, name: str) -> None:
    compiler, runner = COMPILERS[name]
    if not all(shutil.which(command.split()[0]) for command in (compiler, runner) if command):
        print(f"{name}: {compiler.split()[0]} or {runner} is not installed")
        return
    missing = [flags for flags in OPTIMIZATIONS if not results.timed(by=name, form=flags)]
    if runner:
        missing = [flags for flags in missing if "native" not in flags]
    if not missing:
        return
    with tempfile.TemporaryDirectory() as folder:
        with exact(portable=True):
            write_c(shipped(), Path(folder, "model.c"))
        Path(folder, "program.c").write_text(PROGRAM, encoding="ascii")
        for flags in missing:
            command = [*compiler.split(), *flags.split(), "program.c", "-o", "program", "-lm"]
            subprocess.run(command, cwd=folder, check=True)
            run = subprocess.run(
                [*runner.split(), "./program"], cwd=folder, check=True, input=text(), capture_output=True
            )
            results.add(by=name, form=flags, logits=len(run.stdout) // 8, digest=hashlib.sha256(run.stdout).hexdigest())


def by_time(results: Results, rounds: int) -> None:
    """Measure what portable bits cost. The programs take turns."""
    if results.timed(by="time"):
        return
    model, tokens = shipped(), torch.randint(256, (STEPS, STREAMS))
    compiled = model.compile_step(STREAMS)

    def within(context: Callable[[], exact] | None, step: Callable[..., tuple[Tensor, object]]) -> Callable[[], None]:
        def run() -> None:
            state = model.init_state(STREAMS)
            for each in tokens:
                _, state = step(each, state)

        return in_context(context, run)

    calls = {
        "portable": within(lambda: exact(portable=True), compiled),
        "a kernel with freedom": within(None, compiled),
        "exact, steps": within(exact, model.step),
        "exact, at once": in_context(exact, lambda: model(tokens.T)),
    }
    for name, took in measure(calls, rounds).items():
        size = STEPS * STREAMS
        results.add(by="time", form=name, us=1e6 * took.seconds / size, processor_us=1e6 * took.processor / size)


def in_context(context: Callable[[], exact] | None, call: Callable[[], object]) -> Callable[[], None]:
    def run() -> None:
        with torch.inference_mode():
            if context is None:
                call()
            else:
                with context():
                    call()

    return run


def main() -> None:
    options = parse(parser(__doc__, ["kernel", *COMPILERS, "time"], rounds=5))
    results = Results("portable", options)
    for name in options.names:
        if name == "kernel":
            by_kernel(results)
        elif name == "time":
            by_time(results, options.rounds)
        else:
            by_compiler(results, name)
    digests = {row["digest"] for row in results.of(machine=machine()) if row.get("digest")}
    print(f"{len(digests)} digest{'s' * (len(digests) != 1)}")


if __name__ == "__main__":
    main()
