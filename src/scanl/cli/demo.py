"""`scanl demo`: train for three minutes, compare with compressors, then generate past 100,000 bytes of context."""

import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import torch
from torch import Tensor

from scanl.cli.evaluate import compared
from scanl.cli.generate import stream, write
from scanl.cli.parser import Parser
from scanl.cli.train import prepare, start
from scanl.data.text.text import Bytes, Text
from scanl.layers.state import leaves
from scanl.learning import RunFolder, TrainConfig
from scanl.learning.evaluation import measures
from scanl.learning.report import ScoreReport
from scanl.learning.run.folder import free_name
from scanl.learning.run.metrics import read_metrics
from scanl.learning.run.picture import draw_loss, save_figure
from scanl.models import LanguageModel
from scanl.options import Range

MARKS = (1_000, 10_000, 100_000)
LINE_STYLES = (("-", "#000000"), ("--", "#a63603"), (":", "#a63603"))  # of the model and two compressors
PROMPT = b"def "
WINDOW, ROUNDS = 100, 30  # bytes in a measured window; windows measured at each mark


@dataclass
class ContextMeasurement:
    """Measurements of generation after `context` bytes: tokens/s of each window, and resident memory in MiB."""

    context: int
    speeds: list[float]
    memory: float

    @property
    def speed(self) -> float:
        return statistics.median(self.speeds)


def run(argv: Sequence[str]) -> int:
    """Run the whole demonstration. It leaves a run folder with demo.png."""
    parser = Parser("demo", "Train on the standard library's source, then generate past 100,000 bytes.")
    parser.add("--minutes", float, "of training", 3.0)
    parser.add("--out", str | None, "run folder; none: runs/demo-N", metavar="PATH")
    parser.add("--data", str, "text to train on; none: Python's standard library", [], nargs="*", metavar="PATH")
    parser.add("--dim", int, "model width", 192)
    marks = Annotated[list[int], Range("numbers of at least 1 that grow", lambda marks, _: _grow(marks))]
    parser.add("--marks", marks, "context lengths to measure at", list(MARKS))
    args = parser.parse(argv)
    out = args.out or str(free_name("demo"))
    # Three minutes of training cover so few bytes that a model smaller than the default gets a better score, of a layer
    # that reads many of them, and that Muon, which makes more of each byte, is worth its time.
    config = TrainConfig.of(
        data=args.data, minutes=args.minutes, out=out, dim=args.dim, channel_options={"expand": 1.5}, precision="auto",
        layer="mingru", optimizer="muon", lr=2e-2,
    )  # fmt: skip
    ready = prepare(config)
    folder, source, model = ready.folder, ready.source, ready.model
    assert folder is not None
    assert isinstance(source, Text)
    assert isinstance(model, LanguageModel)
    if not start(ready):
        return 130
    model.eval()
    exam = source.exam()
    scores = measures(model, source, exam.examples, question=exam.question)
    print(f"\n{compared(scores, source, exam)}\n", flush=True)
    torch.set_num_threads(1)  # one byte at a time is too little work for several threads
    write(PROMPT)
    stream(model.generate(torch.tensor([list(PROMPT)]), max_new_tokens=500, temperature=0.7, seed=config.run.seed))
    write(b"\n\n")
    measured = measure(model, source.corpus.held_out, args.marks)
    weights = sum(weight.numel() * weight.element_size() for weight in model.parameters()) / 2**20
    state = sum(leaf.numel() * leaf.element_size() for _, leaf in leaves(model.init_state(1))) / 2**10
    held = f"{weights:.1f} MiB of weights, a state of {state:.0f} KiB"
    print(f"generating one byte at a time: {held}; the rest of the memory is of torch and of the training before")
    for at in measured:
        print(f"  {at.context:>9,} bytes of context  {at.speed:>6,.0f} tokens/s  {at.memory:,.1f} MiB resident")
    first, last = measured[0], measured[-1]
    print(f"  last to first: speed {last.speed / first.speed:.3f}, memory {last.memory - first.memory:+.1f} MiB")
    lines = {"this model": scores[source.metric], **exam.beside}
    picture = draw(folder, ready.report, measured, lines, held)
    print(f"\n{picture} has the curves; go on with: scanl generate {folder.path} --prompt 'class '")
    return 0


def _grow(marks: Sequence[int]) -> bool:
    return all(last < mark for last, mark in pairwise([0, *marks])) and len(marks) > 0


def measure(model: LanguageModel, text: Bytes, marks: Sequence[int]) -> list[ContextMeasurement]:
    """Read `text` in chunks up to each mark, and measure generation from there.

    The windows of all marks alternate, so that other load on the machine affects all marks alike. Memory is measured
    at each mark while reading, after a first window.
    """
    with torch.inference_mode():
        generations, results = [], []
        state, position = None, 0
        for mark in marks:
            while position < mark - 1:
                places = range(position, min(position + 256, mark - 1))
                state = model(torch.from_numpy(text.take(places, mode="wrap").astype("int64"))[None], state)[1]
                position = places.stop
            pending = torch.tensor([[int(text[position % len(text)])]])
            generations.append(model.generate(pending, state=state, seed=0))
            _speed(generations[-1], WINDOW)
            results.append(ContextMeasurement(mark, [], resident_memory()))
        for _ in range(ROUNDS):
            for generation, result in zip(generations, results, strict=True):
                result.speeds.append(_speed(generation, WINDOW))
    return results


def _speed(generation: Iterator[Tensor], count: int) -> float:
    began = time.perf_counter()
    for _ in range(count):
        next(generation)
    return count / (time.perf_counter() - began)


def resident_memory() -> float:
    """Return this process's resident memory in MiB; the peak where the system does not tell the present value."""
    import resource

    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * resource.getpagesize() / 2**20
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak / (2**20 if sys.platform == "darwin" else 2**10)


def draw(
    folder: RunFolder,
    report: ScoreReport,
    measured: Sequence[ContextMeasurement],
    lines: Mapping[str, float],
    held: str,
) -> Path:
    """Write demo.png: the loss curve, and speed against context.

    lines: scores on the unseen text, of the model and of compressors.   held: what the model holds in memory.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    loss_axes, speed_axes = figure.subplots(1, 2)
    for (name, bits), (style, color) in zip(lines.items(), LINE_STYLES, strict=True):
        loss_axes.axhline(bits, color=color, ls=style, lw=1.5, label=f"{name} on the unseen text: {bits:.2f}")
    draw_loss(loss_axes, read_metrics(folder), report)
    loss_axes.set_title("Training: bits needed for a byte of text")
    contexts = [at.context for at in measured]
    quarters = [statistics.quantiles(at.speeds, n=4) for at in measured]
    speed_axes.fill_between(
        contexts, [q[0] for q in quarters], [q[2] for q in quarters], alpha=0.2, color="#08519c", lw=0
    )
    speed_axes.plot(
        contexts,
        [at.speed for at in measured],
        "o-",
        color="#08519c",
        label="median, and the middle half",
    )
    for at, (_, _, upper) in zip(measured, quarters, strict=True):
        growth = f"{at.memory - measured[0].memory:+.1f} MiB" if at is not measured[0] else f"{at.memory:,.0f} MiB"
        speed_axes.annotate(growth, (at.context, upper), (0, 9), textcoords="offset points", ha="center")
    speed_axes.set(xscale="log", xlabel="bytes read before", ylabel="bytes generated per second")
    speed_axes.set_title("Generation: speed, and memory of the process")
    speed_axes.set_ylim(0, 1.3 * max(q[2] for q in quarters))
    speed_axes.margins(x=0.15)
    speed_axes.grid(alpha=0.3, which="both")
    rest = "the rest of the memory is of torch and training"
    speed_axes.legend(frameon=False, loc="lower left", title=f"{held};\n{rest}")
    return save_figure(figure, folder.path / "demo.png")
