"""Train models on real data, and keep what they reach.

    python benchmarks/evidence.py etth1 --seeds 3
    python benchmarks/evidence.py write        # the page docs/evidence.md, from all that has been kept

Needs `pip install -e '.[series,sklearn]'`; the table `ucr` also aeon, and `intervals` statsmodels. The data lie where
`scanl data get NAME` puts them. Each run is kept in benchmarks/results/evidence when it is over, so a table that was
interrupted goes on where it stopped. Everything runs on one thread.
"""

import argparse
from importlib import import_module

import torch

TABLES = {  # the module that makes it
    "etth1": "evidence_forecast",
    "intervals": "evidence_forecast",
    "ucr": "evidence_classify",
    "digits": "evidence_classify",
    "irregular": "evidence_classify",
    "mnist": "evidence_long",
    "layers": "evidence_long",
    "cifar10": "evidence_long",
    "imdb": "evidence_long",
    "enwik8": "evidence_long",
    "listops": "evidence_long",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=[*TABLES, "write"])
    parser.add_argument("--seeds", type=int, default=1, help="runs of each model, with the seeds 0, 1, ...")
    args = parser.parse_args()
    if args.table == "write":
        import_module("evidence_page").write()
        return
    torch.set_num_threads(1)
    getattr(import_module(TABLES[args.table]), args.table)(args.seeds)


if __name__ == "__main__":
    main()
