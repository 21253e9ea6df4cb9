"""Run models step by step from a carried state: whether time and memory stay constant, and how exact the outputs are.

    python benchmarks/speed/stream.py [forecast] [sashimi] [laughing_hyena] [--steps 100000]

forecast: a forecaster reads a series in pieces of four samples and forecasts after each. The error is that from the
forecasts of the whole series, at 20 random steps, relative to the spread of the series; beside it stands the error of
the whole series in float32 from float64. sashimi: samples of sound from random weights, in ten tenths; the error is
that of the logits from those of one call. laughing_hyena: a language model of Hyena, trained for a few steps on the
bytes of Python's argparse.py, and its distilled form, which decode after a long context. The rows are in
benchmarks/results/stream.csv.
"""

import argparse
import sys
import time
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from scanl.models import Forecaster, LanguageModel, Normalization, Stack, distil_model, sashimi

sys.path.append(str(Path(__file__).parents[1]))
from harness import Results, measure, parse, parser, resident

PLACES, PIECE, TENTHS = 20, 4, 10  # forecasts that are compared; samples of a piece; parts that are timed
MIB = 2**20


def series(steps: int) -> Tensor:
    """A season of 24 about a slow wave of a hundred times its size, with a fiftieth of the numbers missing."""
    time = torch.arange(steps, dtype=torch.float64)
    values = 100 * torch.sin(time / 5000) + torch.sin(2 * torch.pi * time / 24) + 0.2 * torch.randn(steps).double()
    values[torch.rand(steps) < 0.02] = torch.nan
    return values.float()[None, :, None]


@torch.no_grad()
def forecasts(results: Results, options: argparse.Namespace) -> None:
    steps = 250 if options.quick else options.steps
    for layer in options.layers:
        key = {"name": "forecast", "layer": layer, "steps": steps}
        if results.timed(**key):
            continue
        torch.manual_seed(0)
        head = {"distribution": "quantiles", "lags": 24, "normalization": Normalization(500.0)}
        model = Forecaster(12, Stack(16, 1, layer), **head).eval()
        for parameter in model.parameters():  # the map of lags begins at zero
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
        x, calls, levels = series(steps), steps // PIECE, (0.1, 0.5, 0.9)
        places = sorted({PIECE * call + PIECE - 1 for call in torch.randint(calls, (PLACES,)).tolist()})
        spread = x[~x.isnan()].std().item()
        at_once = model.head.quantiles(model(x)[0][:, places], torch.tensor(levels))[0]
        exact = model.double()(x.double())[0][:, places]
        exact = model.head.quantiles(exact, torch.tensor(levels).double())[0]
        model.float()
        state, streamed, memory, times = None, [], [], torch.empty(calls)
        for call in range(calls):
            begin = time.perf_counter()
            forecast, state = model.predict(x[:, PIECE * call :][:, :PIECE], state, levels=levels)
            times[call] = time.perf_counter() - begin
            if PIECE * call + PIECE - 1 in places:
                streamed.append(forecast.quantiles[0])
            if call % (calls // TENTHS) == 0:
                memory.append(resident("VmHWM"))
        tenth = times[: calls // TENTHS * TENTHS].view(TENTHS, -1).median(1).values
        results.add(
            **key, error=(torch.stack(streamed) - at_once).abs().max().item() / spread,
            rounding=(at_once - exact).abs().max().item() / spread, seconds=tenth[0].item(),
            slower=(tenth[-1] / tenth[0]).item(), gained_mib=(memory[-1] - memory[1]) / MIB,
        )  # fmt: skip


@torch.no_grad()
def sound(results: Results, options: argparse.Namespace) -> None:
    """Other work disturbs the clock, and the time of the processor much less, so the rate is by the processor."""
    samples, dim, depth = (20, 2, 1) if options.quick else (16_000, 64, 2)
    if results.timed(name="sashimi", steps=samples):
        return
    torch.manual_seed(0)
    model = sashimi(256, dim, depth=depth).eval()
    made = torch.empty(samples, dtype=torch.int64)  # a list of tensors would grow
    stream = model.generate(torch.zeros(1, 1, dtype=torch.int64), max_new_tokens=samples, seed=0)
    part = samples // TENTHS
    rates, peaks = [], []
    for tenth in range(TENTHS):
        begin = time.thread_time()
        for n in range(part):
            made[tenth * part + n] = next(stream)[0]
        rates.append(part / (time.thread_time() - begin))
        peaks.append(resident("VmHWM") / MIB)
    state, logits = model.init_state(1), []
    compared = made[:2048]
    for sample in compared:
        y, state = model(sample.view(1, 1), state)
        logits.append(y)
    at_once, _ = model(compared[None])
    error = ((torch.cat(logits, 1) - at_once).abs().max() / at_once.abs().max()).item()
    for number, (rate, peak) in enumerate(zip(rates, peaks, strict=True), 1):
        results.add(name="sashimi", steps=samples, tenth=number, rate=rate, peak_mib=peak, error=error)


def taught(text: Tensor, context: int, dim: int, depth: int, steps: int) -> LanguageModel:
    """Return a model that has learned a little, so that its filters are not those of a new one."""
    torch.manual_seed(0)
    model = LanguageModel(256, Stack(dim, depth, "hyena", layer_options={"max_length": context}))
    optimizer, length = torch.optim.AdamW(model.parameters(), lr=1e-3), min(256, context)
    for _ in range(steps):
        starts = torch.randint(len(text) - length - 1, (4,))
        tokens = torch.stack([text[s : s + length + 1] for s in starts])
        loss = F.cross_entropy(model(tokens[:, :-1])[0].flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def hyena(results: Results, options: argparse.Namespace) -> None:
    context, dim, depth, steps = (16, 4, 1, 1) if options.quick else (8192, 64, 2, 60)
    if results.timed(name="laughing_hyena", steps=context):
        return
    text = torch.tensor(list(Path(argparse.__file__).read_bytes()))
    teacher = taught(text, context, dim, depth, steps)
    with torch.no_grad():
        student, fits = distil_model(teacher, tolerance=1e-4)
        tokens = text[None, :context]
        (expected, before), (logits, after) = teacher(tokens), student(tokens)
        calls = {"teacher": lambda: teacher(tokens[:, -1:], before), "student": lambda: student(tokens[:, -1:], after)}
        took = measure(calls, 3 * options.rounds)
    results.add(
        name="laughing_hyena", steps=context, modes=max(fit.modes.shape[1] for fit in fits),
        error=((logits - expected).norm() / expected.norm()).item(), seconds=took["student"].seconds,
        teacher_seconds=took["teacher"].seconds, ratio=took["teacher"].seconds / took["student"].seconds,
    )  # fmt: skip


STREAMS = {"forecast": forecasts, "sashimi": sound, "laughing_hyena": hyena}


def main() -> None:
    made = parser(__doc__, STREAMS, rounds=7)
    made.add_argument("--steps", type=int, default=100_000, help="of the series")
    made.add_argument("--layers", nargs="+", default=["lru", "hawk", "gru"], help="of the forecaster")
    options = parse(made)
    results = Results("stream", options)
    for name in options.names:
        STREAMS[name](results, options)


if __name__ == "__main__":
    main()
