"""`scanl lr`: search for a learning rate."""

from collections.abc import Sequence
from pathlib import Path

from scanl.cli.forecast import check_output
from scanl.cli.parser import Parser
from scanl.cli.train import options_parser, refuse_unused, start_from
from scanl.learning import TrainConfig
from scanl.learning.run.run import Run

ROWS = 20  # of the table


def run(argv: Sequence[str]) -> int:
    """Print a table of losses by learning rate, and the suggested rate. Leave no run folder."""
    args = _parser().parse(argv)
    config = TrainConfig.parsed(args)
    picture = None if args.picture is None else Path(args.picture)
    check_output("lr", "picture", picture, (".png",))
    config.check()
    refuse_unused(config)
    ready = Run(config)
    if config.run.init is not None:
        start_from(config.run.init, ready.model)
    from scanl.learning.run.search import save_search, search

    result = search(ready, args.trials)
    print(f"{'rate':>10}  {'mean loss':>10}")
    every = max(1, len(result.rates) // ROWS)
    for rate, mean in list(zip(result.rates, result.means, strict=True))[::every]:
        print(f"{rate:>10.2e}  {mean:>10.4g}")
    if result.suggestion is None:
        print("the loss never falls: no rate is suggested")
    else:
        print(
            f"the loss is lowest at {result.lowest:.2g}; a tenth of that is a good start: --lr {result.suggestion:.2g}"
        )
    if picture is not None:
        save_search(result, picture, f"{config.entry.name}: {config.stack.layer}")
    return 0


EXAMPLES = {
    "scanl lr --data book.txt --layer lru --picture rates.png": "for a text, with a picture of the losses",
    "scanl lr --data moves.csv --question classify --target kind --trials 50": "for a table, at 50 rates",
}


def _parser() -> Parser:
    description = "Search for a learning rate: steps at higher and higher rates. Takes the options of `scanl train`."
    parser = options_parser("lr", description, TrainConfig(), examples=EXAMPLES)
    parser.add("--trials", int, "rates to try, a step at each", 100)
    parser.add("--picture", str | None, "PNG to draw the losses into", metavar="PATH")
    return parser
