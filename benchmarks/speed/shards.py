"""How fast a process reads shards, and what becomes of its position; beside `datasets` and torchdata, if installed.

    python benchmarks/speed/shards.py [FORM ...]

Ten shards have 20 MB of documents of 4,000 bytes each. A reader stops after 85 % of the documents, in the middle of
the ninth shard, and another one resumes from its position. Of a row:

megabytes_per_second: of documents, by the processor's time.   read_again: what is read from files until the first
document is there, as a share of a shard; Linux counts it.   exact: whether the rest is the same.
lost, twice: of the same with shuffling, documents that are never read, and that are read again; the window or buffer
has 500 documents.   same_order: whether two workers give the order of none.   other_workers: of a position saved with
two workers and resumed with one: exact, inexact, or the error.
"""

import gzip
import importlib.metadata
import importlib.util
import io
import json
import os
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).parents[1]))
from harness import Results, parse, parser
from scanl.data import ShardLoader, Shards

SHARDS, LENGTH, BYTES, WINDOW, BATCH = 10, 4000, 20_000_000, 500, 8
FORMS = ("parquet", "jsonl", "jsonl.gz", "tar")
BUILDERS = {"parquet": "parquet", "jsonl": "json", "jsonl.gz": "json", "tar": "webdataset"}  # of `datasets`

Rows = tuple[Any, Callable[[], Any]]  # an iterable of documents or of batches, and what returns its position


def content(form: str, texts: list[str]) -> bytes:
    """Return a shard of documents."""
    file = io.BytesIO()
    if form == "parquet":
        import pyarrow as pa
        from pyarrow import parquet

        parquet.write_table(pa.table({"text": texts}), file, row_group_size=len(texts) // 10)
        return file.getvalue()
    if form == "tar":
        with tarfile.open(fileobj=file, mode="w") as archive:
            for number, text in enumerate(texts):
                member = tarfile.TarInfo(f"{number:06}.txt")
                member.size = len(text)
                archive.addfile(member, io.BytesIO(text.encode()))
        return file.getvalue()
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    return gzip.compress(lines, 6) if form.endswith(".gz") else lines


def write(folder: Path, form: str, total: int) -> int:
    """Write the shards, and return the number of documents."""
    generator, count = np.random.default_rng(0), total // SHARDS // LENGTH
    words = ["".join(map(chr, generator.integers(97, 123, size))) for size in generator.integers(2, 9, 5000)]
    for number in range(SHARDS):
        texts = [" ".join(generator.choice(words, LENGTH // 5))[:LENGTH] for _ in range(count)]
        (folder / f"{number:02}.{form}").write_bytes(content(form, texts))
    return SHARDS * count


class Scanl:
    """`Shards` and its loader."""

    packages = ("pyarrow",)

    def rows(self, folder: Path, form: str, position: Any = None, *, shuffled: bool = False, **options: Any) -> Any:
        options |= {"seed": 0, "window": WINDOW} if shuffled else {}
        shards = Shards(folder, columns=[column(form)], **options)
        if position is not None:
            shards.load_state_dict(position)
        return shards

    def loader(self, folder: Path, form: str, workers: int) -> Any:
        return ShardLoader(self.rows(folder, form, batch_size=BATCH), num_workers=workers)


class Datasets:
    """`datasets` as a stream, and torchdata's loader."""

    packages = ("pyarrow", "datasets", "torchdata")

    def rows(self, folder: Path, form: str, position: Any = None, *, shuffled: bool = False) -> Any:
        from datasets import load_dataset

        files = sorted(map(str, folder.iterdir()))
        rows: Any = load_dataset(BUILDERS[form], data_files=files, split="train", streaming=True)
        rows = rows.select_columns([column(form)])
        rows = rows.shuffle(seed=0, buffer_size=WINDOW) if shuffled else rows
        if position is not None:
            rows.load_state_dict(position)
        return rows

    def loader(self, folder: Path, form: str, workers: int) -> Any:
        from torchdata.stateful_dataloader import StatefulDataLoader

        return StatefulDataLoader(self.rows(folder, form), batch_size=BATCH, num_workers=workers, collate_fn=list)


def versions(packages: Sequence[str]) -> str:
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)


def column(form: str) -> str:
    return "txt" if form == "tar" else "text"


def names(rows: Any, form: str) -> Iterator[Any]:
    """Yield the beginning of each document, which no other has; of batches one after another."""
    for row in rows:
        for document in row if isinstance(row, list) else [row]:
            yield document[column(form)][:40]


def characters_read() -> int:
    """Return the bytes that this process has read from files so far."""
    return int(Path("/proc/self/io").read_text(encoding="ascii").splitlines()[0].split()[1])


def speed(program: Any, folder: Path, form: str, count: int) -> dict[str, Any]:
    """Measure reading and resuming in order."""
    stop, size = round(0.85 * count), sum(path.stat().st_size for path in folder.iterdir()) / SHARDS
    rows, begin = program.rows(folder, form), time.process_time()
    stream = iter(rows)
    assert sum(1 for _ in islice(stream, stop)) == stop
    seconds = time.process_time() - begin
    position = rows.state_dict()
    rest = list(names(stream, form))
    stream = iter(program.rows(folder, form, position))
    characters = characters_read()
    first = next(stream)
    again = characters_read() - characters
    exact = [*names([first], form), *names(stream, form)] == rest
    megabytes = stop * LENGTH / 1e6
    return {"megabytes_per_second": megabytes / seconds, "read_again": again / size, "exact": exact}


def shuffled(program: Any, folder: Path, form: str, count: int) -> dict[str, Any]:
    """Count the documents that a shuffled reader loses when it resumes, and those that it reads twice."""
    rows = program.rows(folder, form, shuffled=True)
    stream = names(rows, form)
    first = set(islice(stream, round(0.85 * count)))
    position, rest = rows.state_dict(), set(stream)
    resumed = set(names(program.rows(folder, form, position, shuffled=True), form))
    return {"lost": len(rest - resumed), "twice": len(first & resumed)}


def with_workers(program: Any, folder: Path, form: str, count: int) -> dict[str, Any]:
    """Compare two workers with none, and resume with another number of them."""
    alone = list(names(program.rows(folder, form), form))
    loader = program.loader(folder, form, 2)
    batches = iter(loader)
    first = list(names(islice(batches, count // BATCH // 2), form))
    position = loader.state_dict()
    rest = list(names(batches, form))
    other = program.loader(folder, form, 1)
    try:
        other.load_state_dict(position)
        outcome = "exact" if list(names(other, form)) == rest else "inexact"
    except Exception as error:
        outcome = type(error).__name__
    return {"same_order": first + rest == alone, "other_workers": outcome}


def main() -> None:
    options = parse(parser(__doc__, FORMS))
    results = Results("shards", options)
    programs: dict[str, Any] = {"scanl": Scanl()}
    if importlib.util.find_spec("datasets") is not None:
        os.environ["HF_HUB_OFFLINE"] = "1"
        programs["datasets"] = Datasets()
    for form, (name, program) in product(options.names, programs.items()):
        if results.timed(form=form, program=name):
            continue
        with tempfile.TemporaryDirectory() as folder:
            count = write(Path(folder), form, BYTES // 10 if options.quick else BYTES)
            row: dict[str, Any] = {}
            for measured in (speed, shuffled, with_workers):
                row |= measured(program, Path(folder), form, count)
        results.add(form=form, program=name, documents=count, **row, note=versions(program.packages))


if __name__ == "__main__":
    main()
