"""`scanl bench-decode RUN|FOLDER`: tokens a second by the number of texts that are written at once."""

import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Annotated

import torch

from scanl.cli.parser import Parser
from scanl.cli.serve import add_model, load
from scanl.models import LanguageModel
from scanl.options import Positive, Range

ROUNDS = 5  # of which the median counts


def run(argv: Sequence[str]) -> int:
    """Print a table, a row for each batch."""
    parser = Parser("bench-decode", "Measure how many tokens a second a language model writes, by batch.")
    add_model(parser)
    counts = Annotated[list[int], Range("numbers of at least 1", lambda batches, _: min(batches, default=1) >= 1)]
    parser.add("--batches", counts, "numbers of texts at once", [1, 4, 16, 64])
    parser.add("--tokens", Positive, "tokens of each text in a round", 32)
    parser.add("--prompt", Positive, "tokens that are read first", 32)
    parser.add("--threads", int | None, "of the processor (default: torch's)")
    args = parser.parse(argv)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    model, _ = load(args.path, "bench-decode")
    print(f"{'batch':>5}  {'ms a step':>10}  {'tokens/s':>9}  {'tokens/s a text':>15}", flush=True)
    for batch in args.batches:
        seconds = statistics.median(_rounds(model, batch, args.prompt, args.tokens))
        row = f"{batch:>5}  {1000 * seconds:>10.3f}  {batch / seconds:>9,.0f}  {1 / seconds:>15,.0f}"
        print(row, flush=True)
    return 0


def _rounds(model: LanguageModel, batch: int, prompt: int, tokens: int) -> Iterator[float]:
    """Yield the seconds of a step in each round. The first tokens, which read the prompt and compile, do not count."""
    random = torch.Generator().manual_seed(0)
    texts = model.generate(torch.randint(model.vocab_size, (batch, prompt), generator=random), temperature=0)
    for _ in range(3):
        next(texts)
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        for _ in range(tokens):
            next(texts)
        yield (time.perf_counter() - begin) / tokens
