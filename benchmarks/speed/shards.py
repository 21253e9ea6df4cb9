"""How fast a process reads shards, and what it reads again when it resumes; beside `datasets` where it is installed.

    python benchmarks/speed/shards.py [FORM ...]

Ten shards have 200 MB of documents of 4,000 bytes each, as they lie unpacked. A reader stops after 85 % of the
documents, in the middle of the ninth shard, and another one resumes from its position. `read_again` is what it reads
from files until it has its first document, as a share of a shard; Linux counts it. Each program reads the one column
of the documents, without shuffling. Seconds are those of the processor.
"""

import gzip
import importlib.util
import io
import json
import os
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).parents[1]))
from harness import Results, parse, parser
from scanl.data import Shards

SHARDS, LENGTH, BYTES = 10, 4000, 200_000_000
ENDINGS = {"parquet": "parquet", "jsonl": "jsonl", "jsonl.gz": "jsonl.gz", "tar": "tar"}
BUILDERS = {"parquet": "parquet", "jsonl": "json", "jsonl.gz": "json", "tar": "webdataset"}  # of `datasets`

Rows = tuple[Iterator[Any], Callable[[], Any]]  # an iterator, and what returns its position


def content(form: str, texts: list[str]) -> bytes:
    """Return a shard of documents."""
    file = io.BytesIO()
    if form == "parquet":
        import pyarrow as pa
        from pyarrow import parquet

        parquet.write_table(pa.table({"text": texts}), file, row_group_size=500)
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


def of_scanl(folder: Path, form: str, position: Any) -> Rows:
    shards = Shards(folder, columns=["txt" if form == "tar" else "text"])
    if position is not None:
        shards.load_state_dict(position)
    return iter(shards), shards.state_dict


def of_datasets(folder: Path, form: str, position: Any) -> Rows:
    from datasets import load_dataset

    files = sorted(map(str, folder.iterdir()))
    rows: Any = load_dataset(BUILDERS[form], data_files=files, split="train", streaming=True)
    if position is not None:
        rows.load_state_dict(position)
    return iter(rows), rows.state_dict


def characters_read() -> int:
    """Return the bytes that this process has read from files so far."""
    return int(Path("/proc/self/io").read_text(encoding="ascii").splitlines()[0].split()[1])


def main() -> None:
    options = parse(parser(__doc__, ENDINGS))
    results = Results("shards", options)
    total = BYTES // 100 if options.quick else BYTES
    programs = {"scanl": of_scanl}
    if importlib.util.find_spec("datasets") is not None:
        os.environ["HF_HUB_OFFLINE"] = "1"
        programs["datasets"] = of_datasets
    for form in options.names:
        if all(results.timed(form=form, program=program) for program in programs):
            continue
        with tempfile.TemporaryDirectory() as folder:
            count = write(Path(folder), form, total)
            size = sum(path.stat().st_size for path in Path(folder).iterdir()) / SHARDS
            stop = round(0.85 * count)
            for program, open_ in programs.items():
                if results.timed(form=form, program=program):
                    continue
                rows, position = open_(Path(folder), form, None)
                begin = time.process_time()
                assert sum(1 for _ in islice(rows, stop)) == stop
                seconds = time.process_time() - begin
                at = position()
                rows, _ = open_(Path(folder), form, at)
                begin, characters = time.process_time(), characters_read()
                next(rows)
                resumed, again = time.process_time() - begin, characters_read() - characters
                exact = sum(1 for _ in rows) == count - stop - 1
                results.add(
                    form=form, program=program, documents=count, megabytes_per_second=stop * LENGTH / 1e6 / seconds,
                    first_document=resumed, read_again=again / size, exact=exact,
                )  # fmt: skip


if __name__ == "__main__":
    main()
