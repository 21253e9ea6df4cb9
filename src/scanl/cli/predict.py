"""`scanl predict RUN`: write a run's classes, labels or numbers for a table or for files."""

from collections.abc import Sequence
from pathlib import Path

from scanl.cli.forecast import add_output, check_output, noting, write
from scanl.cli.parser import Parser
from scanl.data.series.columns import WRITTEN_ENDINGS
from scanl.learning.predictions import predict

EXAMPLES = {
    "scanl predict runs/moves-1 --data new.csv --out kinds.csv": "the class of each series of a table",
    "scanl predict runs/sounds --data inbox": "the class of each file of a folder",
}
NOTES = {
    "what is written": {
        "classify": "a row for each series, or each file: the class, and the probability of each class, as kind-p-a",
        "label": "a row for each row of the table: the label, and the probability of each",
        "regress": "a row for each series: the number, and the bounds of intervals, as y-lo-80 and y-hi-80",
    }
}


def run(argv: Sequence[str]) -> int:
    """Write the answers to a file or to standard output."""
    description = "Classes, labels or numbers for a table, or for files of your own."
    parser = Parser("predict", description, examples=EXAMPLES, notes=NOTES)
    parser.add_argument("run", type=str, help="run folder")
    parser.add(
        "--data",
        str,
        "a table with the run's columns, except the target; or files and folders (default: the run's)",
        [],
        nargs="*",
        metavar="PATH",
    )
    add_output(parser)
    args = parser.parse(argv)
    out = None if args.out is None else Path(args.out)
    check_output("predict", "out", out, WRITTEN_ENDINGS)
    with noting():
        answers = predict(args.run, args.data or None, levels=args.levels or None)
    write(answers, out)
    return 0
