"""Modules of torch as C with weights of 8 bits: score, bytes, and the time of each step.

    python benchmarks/quality/small_c.py            # three tasks: some minutes on one core
    python benchmarks/quality/small_c.py digits

digits: images of scikit-learn, a row a step (nn.GRU; the score is the share of wrong answers). text: bytes of Python's
standard library (nn.Embedding, nn.LSTM; bits a byte). waves: the next of a noisy sum of waves (causal nn.Conv1d,
nn.GRU; root of the mean square error). Each is trained here, converted, and written as C of float32 and of 8 bits,
whose weights are rounded for inputs of training. Scores are those of the C files (-O3) on parts that no training saw.

A program in C times a million steps, and a call of nothing before each, by the processor time of its thread: that in
which other programs interrupt it does not count, but the interruptions do. What a step does is counted too, which no
other program changes: the blocks of its code that a step runs through, without those of exp and tanh. arm: bytes of
code and constants for a Cortex-M4 by arm-none-eabi-gcc -Os, and the largest difference of a step by qemu-arm from one
here, where these programs are installed.
"""

import ctypes
import math
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.export import write_c
from scanl.hub import convert

sys.path.append(str(Path(__file__).parents[1]))
from harness import Results, parse, parser

UPDATES, STEPS = 300, 1_000_000
PROGRAM = """
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
void cell_start(void *s);
void cell_step(const void *x, void *s, float *y);
static double state[1 << 14];
static float x[X], y[Y];
static int tokens[X];
static unsigned seen[2][COUNT], blocks;
void __sanitizer_cov_trace_pc(void) { blocks++; }
static int before(const void *a, const void *b)
{
    unsigned x = *(const unsigned *)a, y = *(const unsigned *)b;
    return x < y ? -1 : x > y;
}
static void print(unsigned *numbers, int count)
{
    qsort(numbers, count, sizeof *numbers, before);
    printf("%u %u %u ", numbers[count / 2], numbers[count - 1 - count / 10000], numbers[count - 1]);
}
static void draw(void)
{
    for (int k = 0; k < X; k++) {
        x[k] = (float)(rand() % 2001) / 1000 - 1;
        tokens[k] = rand() % 97;
    }
}
static long now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return t.tv_sec * 1000000000L + t.tv_nsec;
}
int main(void)
{
    cell_start(state);
    for (int i = 0; i < COUNT; i++) {
        draw();
        long from = now(), between = now();
        blocks = 0;
        cell_step(INPUT, state, y);
        seen[0][i] = (unsigned)(between - from);
        seen[1][i] = BLOCKS ? blocks : (unsigned)(now() - between);
    }
    if (!BLOCKS) print(seen[0], COUNT);
    print(seen[1], COUNT);
    return 0;
}
"""
ONCE = """
#include <stdio.h>
#include "cell.c"
int main(void)
{
    static float x[X], y[Y];
    static int tokens[X];
    struct cell_state s;
    cell_start(&s);
    for (int i = 0; i < 50; i++) {
        for (int k = 0; k < X; k++) {
                x[k] = (float)((i * 7 + k * 13) % 101) / 50 - 1;
                tokens[k] = (i * 7 + k) % 97;
            }
        cell_step(INPUT, &s, y);
        for (int k = 0; k < Y; k++) printf("%.9g ", y[k]);
    }
}
"""


class Task(NamedTuple):
    """loss: of a model on a random part of the training data.   inputs: those that weights are rounded for.

    test: inputs (B, T, ...) that no training saw.   score: of the outputs for them.
    """

    module: nn.Module
    loss: Callable[[nn.Module], Tensor]
    inputs: Tensor
    test: Tensor
    score: Callable[[Tensor], float]


class Recurrent(nn.Module):
    """A recurrence between two maps, the first of which may be a causal convolution."""

    def __init__(self, first: nn.Module, rnn: nn.Module, last: nn.Module) -> None:
        super().__init__()
        self.first, self.rnn, self.last = first, rnn, last

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.first, nn.Conv1d):
            before = self.first.kernel_size[0] - 1
            y = self.first(F.pad(x.mT, (before, 0))).relu().mT
        else:
            y = self.first(x)
        return self.last(self.rnn(y)[0])


def digits() -> Task:
    from sklearn.datasets import load_digits

    x, y = map(torch.from_numpy, load_digits(return_X_y=True))
    x, order = x.float().reshape(-1, 8, 8) / 8 - 1, torch.randperm(len(y), generator=torch.Generator().manual_seed(1))
    train, test = order[:1200], order[1200:]

    def loss(module: nn.Module) -> Tensor:
        rows = train[torch.randint(len(train), (64,))]
        return F.cross_entropy(module(x[rows])[:, -1], y[rows])

    module = Recurrent(nn.Linear(8, 64), nn.GRU(64, 96, batch_first=True), nn.Linear(96, 10))
    return Task(
        module, loss, x[train[:64]], x[test], lambda out: float((out[:, -1].argmax(-1) != y[test]).double().mean())
    )


def text() -> Task:
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:60]
    data = torch.tensor(list(b"".join(file.read_bytes() for file in files))).clamp(max=127)
    train, test = data[: len(data) * 9 // 10], data[len(data) * 9 // 10 :][: 16 * 513].reshape(16, 513)

    def loss(module: nn.Module) -> Tensor:
        at = torch.randint(len(train) - 129, (24, 1)) + torch.arange(129)
        return F.cross_entropy(module(train[at[:, :-1]]).mT, train[at[:, 1:]])

    module = Recurrent(nn.Embedding(128, 48), nn.LSTM(48, 128, batch_first=True), nn.Linear(128, 128))
    inputs = train[: 8 * 256].reshape(8, 256)
    score = lambda out: float(F.cross_entropy(out.mT, test[:, 1:])) / math.log(2)  # noqa: E731
    return Task(module, loss, inputs, test[:, :-1], score)


def waves() -> Task:
    generator = torch.Generator().manual_seed(2)

    def drawn(rows: int) -> Tensor:
        speed, phase = torch.rand(3, rows, 1, generator=generator) / 2, torch.rand(3, rows, 1, generator=generator) * 6
        clean = (torch.arange(201.0) * speed + phase).sin().sum(0)
        return (clean + 0.1 * torch.randn(rows, 201, generator=generator))[..., None]

    train, test = drawn(512), drawn(32)

    def loss(module: nn.Module) -> Tensor:
        x = train[torch.randint(len(train), (24,))]
        return F.mse_loss(module(x[:, :-1])[:, 20:], x[:, 21:])

    module = Recurrent(nn.Conv1d(1, 32, 9), nn.GRU(32, 64, batch_first=True), nn.Linear(64, 1))
    return Task(
        module,
        loss,
        train[:16, :-1],
        test[:, :-1],
        lambda out: float((out[:, 20:] - test[:, 21:]).square().mean()) ** 0.5,
    )


TASKS = {"digits": digits, "text": text, "waves": waves}


def in_c(file: Path, x: Tensor, outputs: int) -> Tensor:
    """Return what a file gives for sequences (B, T, ...)."""
    library = file.with_suffix(".so")
    subprocess.run(["cc", "-std=c99", "-O3", "-shared", "-fPIC", file, "-o", library, "-lm"], check=True)
    cell, state = ctypes.CDLL(str(library)), ctypes.create_string_buffer(1 << 16)
    read = (x if x.is_floating_point() else x.int()).contiguous().numpy()
    y = np.zeros((*x.shape[:2], outputs), np.float32)
    for row in range(len(read)):
        cell.cell_start(state)
        for t in range(read.shape[1]):
            cell.cell_step(ctypes.c_void_p(read[row, t:].ctypes.data), state, ctypes.c_void_p(y[row, t:].ctypes.data))
    return torch.from_numpy(y)


def run_of(source: str, folder: Path, compiler: str, *flags: str, runner: tuple[str, ...] = ()) -> str:
    """Compile a program that includes the file, or is linked to it, run it, and return what it prints."""
    (folder / "program.c").write_text(source, encoding="ascii")
    program = folder / "program"
    subprocess.run([compiler, "-std=gnu99", *flags, folder / "program.c", "-o", program, "-lm"], check=True, cwd=folder)
    return subprocess.run([*runner, program], check=True, capture_output=True, text=True).stdout


def costs(folder: Path, flags: list[str], steps: int) -> dict[str, int]:
    """Return nanoseconds of nothing and of a step, and the blocks of a step: the median, and the most."""
    found: list[str] = []
    for count, more, options in (
        (steps, ["-DBLOCKS=0"], ["-O3"]),
        (max(1, steps // 10), ["-DBLOCKS=1"], ["-O3", "-fsanitize-coverage=trace-pc"]),
    ):
        subprocess.run(["gcc", "-std=c99", *options, "-c", "cell.c", "-o", "cell.o"], check=True, cwd=folder)
        found += run_of(PROGRAM, folder, "gcc", "-O2", *flags, f"-DCOUNT={count}", *more, "cell.o").split()
    of, what = ("nothing", "step", "blocks"), ("median", "p9999", "worst")
    return dict(zip([f"{one}_{other}" for one in of for other in what], map(int, found), strict=True))


def arm(folder: Path, flags: list[str]) -> dict[str, object]:
    """Return what compilers for ARM make of the file, where they are installed."""
    row: dict[str, object] = {}
    if shutil.which("arm-none-eabi-gcc"):
        built = folder / "cell.o"
        options = ["-mcpu=cortex-m4", "-mthumb", "-mfloat-abi=hard", "-mfpu=fpv4-sp-d16", "-Os", "-c"]
        subprocess.run(["arm-none-eabi-gcc", "-std=c99", *options, folder / "cell.c", "-o", built], check=True)
        sizes = subprocess.run(["arm-none-eabi-size", built], check=True, capture_output=True, text=True).stdout
        row["arm_bytes"] = int(sizes.splitlines()[1].split()[0])
    if shutil.which("arm-linux-gnueabihf-gcc") and shutil.which("qemu-arm"):
        here = np.fromstring(run_of(ONCE, folder, "cc", "-O3", *flags), sep=" ")
        there = run_of(ONCE, folder, "arm-linux-gnueabihf-gcc", "-O3", "-static", *flags, runner=("qemu-arm",))
        row["arm_difference"] = float(np.abs(here - np.fromstring(there, sep=" ")).max())
    return row


def main() -> int:
    options = parse(parser(__doc__, TASKS))
    results = Results("small_c", options)
    for name in options.names:
        if results.has(task=name):
            continue
        torch.manual_seed(0)
        task = TASKS[name]()
        optimizer = torch.optim.AdamW(task.module.parameters(), 4e-3)
        for _ in range(2 if options.quick else UPDATES):
            optimizer.zero_grad()
            task.loss(task.module).backward()
            optimizer.step()
        stream = convert(task.module.eval(), task.inputs[:2, :12])
        outputs = task.module(task.test[:1]).shape[-1]
        width = task.test[0, 0].numel()
        for weights in ("float32", "int8"):
            with tempfile.TemporaryDirectory() as made:
                folder = Path(made)
                sizes = write_c(stream, folder / "cell.c", task.inputs, weights=weights)
                score = task.score(in_c(folder / "cell.c", task.test, outputs))
                form = "x" if task.test.is_floating_point() else "tokens"
                flags = [f"-DX={width}", f"-DY={outputs}", f"-DINPUT={form}"]
                steps = STEPS // 1000 if options.quick else STEPS
                results.add(task=name, weights=weights, score=score, **sizes._asdict(), steps=steps,
                            **costs(folder, flags, steps), **arm(folder, flags))  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
