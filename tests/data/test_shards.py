"""Shards: one order for any number of ranks and workers, exact resuming, damaged files, and runs on them."""

import bz2
import gzip
import io
import json
import lzma
import math
import re
import tarfile
from contextlib import closing, contextmanager
from itertools import chain, cycle, islice, pairwise
from types import SimpleNamespace

import fsspec
import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from scanl.cli import main
from scanl.data import ShardedText, ShardLoader, Shards, Text
from scanl.data.shards import dataset, reader
from scanl.data.shards.listing import is_sharded, listed
from scanl.data.text.corpus import fraction
from scanl.errors import ConfigError, DataError
from scanl.learning import TrainConfig
from scanl.learning.questions import answerer
from scanl.learning.run.module import Learning
from scanl.learning.run.run import Run
from scanl.models import LanguageModel, Stack

COVERS = ["data/text/sharded_text", "data/shards/*"]

TINY = "--accelerator cpu --layer lru --dim 8 --depth 1 --batch-size 2 --sequence-length 16 --eval-bytes 64".split()  # noqa: SIM905
SHARDS, ROWS = 10, 7
TEXTS = [f"document {number} " + "é" * (number % 5) for number in range(SHARDS * ROWS)]


def parquet(texts):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(
        pa.table({"number": range(len(texts)), "text": texts}),
        file := io.BytesIO(),
        row_group_size=3,
        write_statistics=False,
    )
    return file.getvalue()


def json_lines(texts):
    return "".join(json.dumps({"text": text, "number": n}) + "\n" for n, text in enumerate(texts)).encode()


def tar(texts, **options):
    with tarfile.open(fileobj=(file := io.BytesIO()), mode="w", **options) as archive:
        for number, text in enumerate(texts):
            for kind, content in (("txt", text.encode()), ("cls", b"%d" % number)):
                member = tarfile.TarInfo(f"a/{number:03}.{kind}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return file.getvalue()


def zstandard(content):
    pytest.importorskip("pyarrow")  # which unpacks it
    codec = pytest.importorskip("zstandard").ZstdCompressor()
    half = len(content) // 2
    return codec.compress(content[:half]) + codec.compress(content[half:])  # of two frames


WRITERS = {
    "parquet": parquet,
    "jsonl": json_lines,
    "txt": lambda texts: "\r\n".join([*texts[:2], "", *texts[2:]]).encode(),
    "tar": tar,
    "jsonl.gz": lambda texts: gzip.compress(json_lines(texts)),
    "ndjson.zst": lambda texts: zstandard(json_lines(texts)),
    "txt.xz": lambda texts: lzma.compress("\n".join(texts).encode()),
    "txt.bz2": lambda texts: bz2.compress("\n".join(texts).encode()),
    "tgz": lambda texts: gzip.compress(tar(texts)),
}
KINDS = list(WRITERS)
each_kind = pytest.mark.parametrize("kind", KINDS)


def write(folder, kind="jsonl", texts=TEXTS, count=SHARDS):
    """Write texts in shards, in order."""
    folder.mkdir(exist_ok=True)
    size = -(-len(texts) // count)
    for number in range(count):
        (folder / f"{number:02}.{kind}").write_bytes(WRITERS[kind](texts[number * size :][:size]))
    return folder


def texts_of(rows):
    return [value.decode() if isinstance(value := next(iter(row.values())), bytes) else value for row in rows]


def column(kind):
    return ["txt" if kind in ("tar", "tgz") else "text"]


@contextmanager
def worker(monkeypatch, number, count):
    """As in a worker process of a DataLoader."""
    with monkeypatch.context() as patch:
        patch.setattr(dataset, "get_worker_info", lambda: SimpleNamespace(id=number, num_workers=count))
        yield


def loaded(monkeypatch, make, position, workers):
    """What a DataLoader of several workers gives: an item of each in turn; and the position behind each."""
    of_workers = []
    for number in range(workers):
        shards = make()
        shards.load_state_dict(position)
        with worker(monkeypatch, number, workers):
            of_workers.append(list(shards.positioned()))
    turns = chain.from_iterable(zip(*[[*items, *[(None, None)] * 99] for items in of_workers], strict=False))
    return [(item, position) for item, position in turns if item is not None]


@each_kind
def test_rows_come_in_the_order_of_the_files(tmp_path, kind):
    rows = list(Shards(write(tmp_path / "a", kind), columns=column(kind)))
    assert texts_of(rows) == TEXTS
    (first, *_) = Shards(tmp_path / "a")
    names = {"tar": {"__key__", "txt", "cls"}, "tgz": {"__key__", "txt", "cls"}}.get(kind, {"text", "number"})
    assert first.keys() == ({"text"} if kind.startswith("txt") else names)


@each_kind
@pytest.mark.parametrize(("seed", "window"), [(None, 1), (3, 1), (3, 4)])
def test_a_position_gives_the_exact_rest(tmp_path, kind, seed, window):
    write(tmp_path / "a", kind)

    def make():
        return Shards(tmp_path / "a", columns=column(kind), seed=seed, window=window)

    shards, texts, positions = make(), [], []
    positions.append(shards.state_dict())
    for row in shards:
        texts.append(texts_of([row])[0])
        positions.append(shards.state_dict())
    assert sorted(texts) == sorted(TEXTS)
    assert (texts == TEXTS) == (seed is None)
    for number in range(0, len(texts), 11):
        resumed = make()
        resumed.load_state_dict(json.loads(json.dumps(positions[number])))
        assert texts_of(resumed) == texts[number:], number
    following = texts_of(shards)  # the next epoch
    assert sorted(following) == sorted(TEXTS)
    assert (following == texts) == (seed is None)
    shards = make()
    shards.repeat = True
    assert texts_of(islice(shards, 2 * len(TEXTS))) == texts + following


@pytest.mark.parametrize("batch_size", [None, 3])
def test_ranks_and_workers_share_one_order(tmp_path, monkeypatch, batch_size):
    """The position is that of all of them, also behind an item of one rank; others may go on from it."""
    write(tmp_path / "a", texts=TEXTS[:48])

    def make(rank=0, world=1):
        return Shards(tmp_path / "a", batch_size=batch_size, seed=1, window=4, rank=rank, world=world)

    alone = make()
    start = alone.state_dict()
    items = list(alone)
    for world, workers in ((1, 3), (2, 1), (2, 2), (4, 2)):
        of_ranks = [loaded(monkeypatch, lambda r=rank, w=world: make(r, w), start, workers) for rank in range(world)]
        assert [item for turn in zip(*of_ranks, strict=True) for item, _ in turn] == items, (world, workers)
        for rank in range(world):
            for number in range(rank, len(of_ranks[rank]) - 1, 4):
                _, position = of_ranks[rank][number]
                assert position["rows"] == (number + 1) * world * (batch_size or 1)
                for others in (1, 2, 3):
                    rest = loaded(monkeypatch, make, position, others)
                    assert [item for item, _ in rest] == items[(number + 1) * world :]


def numbers_of(items):
    """The numbers of the rows of items that are lists."""
    return [[row["n"] for row in item] for item in items]


@each_kind
def test_each_row_may_come_from_a_reading_of_its_own(tmp_path, kind):
    """The position behind the last row of a shard too, where the reading began within it."""
    write(tmp_path / "a", kind)
    texts, position = [], Shards(tmp_path / "a").state_dict()
    for _ in range(ROWS + 3):
        shards = Shards(tmp_path / "a", columns=column(kind))
        shards.load_state_dict(position)
        texts += texts_of(islice(shards, 1))
        position = shards.state_dict()
    assert texts == TEXTS[: ROWS + 3]


def numbered(folder, sizes):
    """Write shards of these numbers of rows, which are numbered through."""
    folder.mkdir()
    numbers = iter(range(sum(sizes)))
    for place, size in enumerate(sizes):
        lines = "".join(f'{{"n": {number}}}\n' for number in islice(numbers, size))
        (folder / f"{place:02}.jsonl").write_text(lines)
    return folder


def dealt(rows, world, size, drop_last):
    """What each rank reads of an epoch: whole rounds, then the rest as `DistributedSampler` deals it out."""
    whole = len(rows) // (world * size) * world * size
    ranks = [[rows[at + rank * size :][:size] for at in range(0, whole, world * size)] for rank in range(world)]
    rest = rows[whole:]
    if rest and not drop_last:
        share = math.ceil(len(rest) / world)
        rest = list(islice(chain(rest, cycle(rows)), share * world))
        for rank in range(world):
            ranks[rank].append(rest[rank * share :][:share])
    return ranks


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("sizes", "seed"), [((3, 0, 5, 3), None), ((1,), None), ((0, 2), None), ((4, 7), 2)])
def test_all_ranks_get_as_many_items_of_an_epoch(tmp_path, monkeypatch, sizes, seed, drop_last):
    """Also where a shard is empty, where ranks are more than rows, and from a position in the epoch."""
    folder = numbered(tmp_path / "a", sizes)
    options = {"seed": seed, "window": 1 if seed is None else 3, "drop_last": drop_last}
    rows = [row["n"] for row in Shards(folder, **{**options, "drop_last": False})]
    for world, size, workers in ((1, 2, 1), (2, 1, 2), (2, 2, 1), (3, 2, 3), (4, 1, 2), (5, 3, 2)):

        def make(rank, world=world, size=size):
            return Shards(folder, batch_size=size, rank=rank, world=world, **options)

        start, expected = make(0).state_dict(), dealt(rows, world, size, drop_last)
        for rank in range(world):
            items = loaded(monkeypatch, lambda rank=rank: make(rank), start, workers)
            assert numbers_of(item for item, _ in items) == expected[rank], (world, size, workers)
            for number, (_, position) in enumerate(items, 1):
                assert position["rows"] == min(number * world * size, len(rows))
                rest = loaded(monkeypatch, lambda rank=rank: make(rank), position, 3 - workers % 2)
                assert numbers_of(item for item, _ in rest) == expected[rank][number:]
            alone = make(rank)
            assert numbers_of(alone) == expected[rank]
            assert alone.state_dict() == {"rows": len(rows), **reader.ShardPlace(1)._asdict()}


def test_rounds_of_ranks_go_on_into_the_next_epoch(tmp_path):
    folder = numbered(tmp_path / "a", (5,))
    ranks = [Shards(folder, batch_size=2, repeat=True, rank=rank, world=2) for rank in range(2)]
    assert [numbers_of(islice(shards, 3)) for shards in ranks] == [[[0, 1], [4, 0], [3, 4]], [[2, 3], [1, 2], [0, 1]]]
    assert ranks[0].state_dict() == ranks[1].state_dict()


def test_each_window_of_a_shard_has_an_order_of_its_own(tmp_path):
    """As numpy draws it from the seed, the epoch, the place of the shard and the first row of the window."""
    rows = list(range(32))
    folder = numbered(tmp_path / "a", (32,))
    shards = Shards(folder, seed=7, window=8)
    for epoch in range(2):
        orders = [np.random.default_rng((7, epoch, 0, at)).permutation(8) for at in range(0, 32, 8)]
        expected = [rows[8 * window + place] for window, order in enumerate(orders) for place in order]
        assert [row["n"] for row in shards] == expected
        assert len({tuple(order) for order in orders}) == 4


def test_a_shard_without_a_row_is_passed_over(tmp_path):
    folder = numbered(tmp_path / "a", (0, 3, 0, 0, 2, 0))
    shards = Shards(folder)
    assert [row["n"] for row in shards] == list(range(5))
    for stop in range(6):
        cut = Shards(folder)
        assert [row["n"] for row in islice(cut, stop)] == list(range(stop))
        resumed = Shards(folder, repeat=True)
        resumed.load_state_dict(cut.state_dict())
        assert [row["n"] for row in islice(resumed, 7)] == [*range(stop, 5), *range(5), *range(5)][:7]


def test_shards_whose_rows_are_gone_do_not_begin_epoch_after_epoch(tmp_path, monkeypatch):
    """A position within an epoch, of shards that have no row now."""
    rows, epochs = Shards(write(tmp_path / "a")).reader, iter(range(3))
    monkeypatch.setattr(reader.ShardReader, "rows", lambda *_: iter(()) if next(epochs) < 2 else None)
    with pytest.raises(DataError, match="all other shards have no row, expected one or more"):
        next(rows.endless(reader.ShardPlace(row=1)))


@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_position_is_that_of_the_batch_that_was_worked_on(tmp_path, ahead, workers):
    """Workers have read further, and the consumer itself holds `ahead` batches more."""
    folder = numbered(tmp_path / "a", (7, 6))
    loader = ShardLoader(Shards(folder, batch_size=2), ahead=ahead, num_workers=workers, collate_fn=list)
    fetched, batches = iter(loader), [[at, at + 1] for at in range(0, 12, 2)] + [[12]]
    for number in range(1, 8):
        next(fetched)
        resumed = Shards(folder, batch_size=2)
        resumed.load_state_dict(loader.state_dict())
        assert numbers_of(resumed) == batches[max(0, number - ahead) :]
    assert next(fetched, None) is None
    assert loader.state_dict() == {"rows": 13, **reader.ShardPlace(1)._asdict()}


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.long)])
def test_workers_that_outlive_an_epoch_begin_where_the_position_is(tmp_path, context):
    folder = numbered(tmp_path / "a", (5, 4))
    alone = Shards(folder, batch_size=2, seed=3, window=3)
    epochs = [numbers_of(alone) for _ in range(3)]
    shards = Shards(folder, batch_size=2, seed=3, window=3)
    workers = {"num_workers": 2, "persistent_workers": True, "multiprocessing_context": context}
    loader = ShardLoader(shards, collate_fn=list, **workers)
    assert numbers_of(loader) == epochs[0]
    assert numbers_of(islice(loader, 2)) == epochs[1][:2]  # left half way, with batches fetched ahead
    position = loader.state_dict()
    assert numbers_of(loader) == epochs[1][2:]
    assert numbers_of(loader) == epochs[2]
    loader.load_state_dict(dict(sorted(position.items())))
    assert numbers_of(loader) == epochs[1][2:]


@pytest.mark.parametrize("workers", [0, 1])
def test_of_two_iterations_the_older_one_is_refused(tmp_path, workers):
    """Both would set one position."""
    folder = numbered(tmp_path / "a", (6,))
    loaders = [Shards(folder, batch_size=1)]
    loaders += [ShardLoader(Shards(folder, batch_size=1), num_workers=workers, persistent_workers=workers > 0)]
    for loader in loaders:
        older = iter(loader)
        next(older)
        newer = iter(loader)
        next(newer)
        with pytest.raises(ConfigError, match="an iteration goes on after another has begun, expected one at a time"):
            next(older)
        assert len(list(newer)) == 4
        assert loader.state_dict()["epoch"] == 1


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_a_worker_is_one_line(tmp_path, workers):
    loader = ShardLoader(Shards("nosuch://x"), num_workers=workers)
    with pytest.raises(ConfigError, match=r"^shards: nosuch://x cannot be opened: Protocol not known: nosuch$"):
        next(iter(loader))


def test_a_loader_resumes_with_another_number_of_workers(tmp_path):
    write(tmp_path / "a", "jsonl.gz")

    def make(workers):
        shards = Shards(tmp_path / "a", columns=["number", "text"], batch_size=4, seed=0, window=8)
        return ShardLoader(shards, collate_fn=texts, num_workers=workers)

    def texts(rows):
        return [row["text"] for row in rows]

    alone = list(make(0))
    loader = make(2)
    batches = iter(loader)
    assert [next(batches) for _ in range(7)] == alone[:7]
    for workers in (0, 1):
        resumed = make(workers)
        resumed.load_state_dict(loader.state_dict())
        assert list(resumed) == alone[7:]
    assert list(batches) == alone[7:]
    (path := tmp_path / "a" / "05.jsonl.gz").write_bytes(path.read_bytes()[:60])
    with pytest.raises(DataError) as error:
        list(make(2))
    assert "\n" not in str(error.value)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "txt", "tar"])
def test_what_was_read_is_not_read_again(tmp_path, monkeypatch, kind):
    """Earlier shards are not opened. Of its own shard, a reader enters the row."""
    generator = np.random.default_rng(0)
    write(tmp_path / "a", kind, [text + generator.bytes(8000).hex() for text in TEXTS], count=2)
    opened, sizes = [], []

    class Counted(io.BytesIO):
        def read(self, size=-1):
            sizes.append(len(content := super().read(size)))
            return content

        def __iter__(self):
            return iter(io.BytesIO(self.read()))

    @contextmanager
    def counted(path):
        opened.append(path[-len(kind) - 3 :])
        with open(path, "rb") as file, closing(Counted(file.read())) as content:
            yield content

    monkeypatch.setattr(reader, "opened", counted)
    shards = Shards(tmp_path / "a", columns=column(kind))
    rows = iter(shards)
    seen = [next(rows) for _ in range(60)]
    assert len(seen) == 60
    position = shards.state_dict()
    size = sum((tmp_path / "a" / name).stat().st_size for name in opened[1:])
    opened.clear()
    sizes.clear()
    resumed = Shards(tmp_path / "a", columns=column(kind))
    resumed.load_state_dict(position)
    assert len(list(resumed)) == 10
    assert opened == [f"01.{kind}"]
    assert sum(sizes) < 0.5 * size


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "txt"])
def test_a_shard_cut_in_half_is_one_line_that_names_it(tmp_path, kind):
    write(tmp_path / "a", kind, count=2)
    path = tmp_path / "a" / f"01.{kind}"
    content = path.read_bytes()
    step = 1536 if kind == "tar" else max(1, len(content) // 8)
    for size in (len(content) // 2, *range(step, len(content.rstrip(b"\0\n")) - 1, step)):
        path.write_bytes(content[:size])
        if kind == "jsonl" and content[:size].rstrip().endswith(b"}"):
            continue  # a file of fewer lines
        shards = Shards(tmp_path / "a", columns=column(kind))
        rows = []
        with pytest.raises(DataError, match=r"shards: .* is damaged or cut short at row \d+: .*; put back") as error:
            rows.extend(shards)
        assert str(path) in str(error.value)
        assert "\n" not in str(error.value)
    path.write_bytes(content)
    assert texts_of(Shards(tmp_path / "a", columns=column(kind))) == TEXTS


def test_memory_is_that_of_a_row_group(tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    texts = [np.random.default_rng(number).bytes(10_000).hex() for number in range(120)]
    pq.write_table(pa.table({"text": texts, "other": texts}), tmp_path / "a.parquet", row_group_size=6)
    before = pa.total_allocated_bytes()
    peak = 0
    for row in Shards(tmp_path / "a.parquet", columns=["text"], seed=0, window=4):
        assert len(row["text"]) == 20_000
        peak = max(peak, pa.total_allocated_bytes() - before)
    assert 6 * 20_000 <= peak < 6 * 6 * 20_000  # of twenty row groups: two in a window, as Arrow allots them


def test_what_paths_stand_for(tmp_path, monkeypatch):
    folder = write(tmp_path / "a")
    (folder / "README.md").write_text("about")
    (folder / ".hidden.jsonl").write_text("{}")
    (folder / "_tmp").mkdir()
    (folder / "_tmp" / "1.jsonl").write_text("{}")
    write(tmp_path / "b", "txt", count=1)
    assert [shard.name for shard in listed(folder)[0]] == [f"{n:02}.jsonl" for n in range(10)]
    assert [shard.name for shard in listed([folder / "03.jsonl", str(tmp_path / "a" / "0[01]*")])[0]] == [
        *("03.jsonl", "00.jsonl", "01.jsonl")
    ]
    monkeypatch.chdir(tmp_path)
    assert listed("a/00.jsonl")[0][0].size == (folder / "00.jsonl").stat().st_size
    memory = fsspec.filesystem("memory")
    memory.pipe({f"/bucket/{path.name}": path.read_bytes() for path in sorted(folder.glob("0*.jsonl"))})
    for words in ("memory://bucket", "memory://bucket/*.jsonl"):
        assert texts_of(Shards(words, columns=["text"])) == TEXTS
    find = type(memory).find  # a file system may list its files in any order
    monkeypatch.setattr(type(memory), "find", lambda *args, **more: dict(reversed(find(*args, **more).items())))
    assert texts_of(Shards("memory://bucket", columns=["text"])) == TEXTS
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    memory.rm("/bucket", recursive=True)
    sharded = ["a", "a/*.jsonl", "a/00.jsonl", "s3://bucket", "b/*.txt", "a.tar.gz"]
    assert [word for word in [*sharded, "b", "b/00.txt", "none", "."] if is_sharded(word)] == sharded


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([], r"data is \[\], expected one path or more"),
        ("none.jsonl", "none.jsonl cannot be read: "),
        ("empty", "empty has no shard, expected files of .parquet, .jsonl, .*: the folder has no such file"),
        ("a/*.tar", "the glob stands for no such file"),
        ("a/note.html", "the file ends otherwise"),
        (["a", "b"], r"00.jsonl and \S*00.txt are of two forms, expected one"),
        ("nosuch://x", "nosuch://x cannot be opened: Protocol not known: nosuch"),
    ],
)
def test_paths_that_are_no_shards(tmp_path, monkeypatch, paths, message):
    write(tmp_path / "b", "txt", count=1)
    write(tmp_path / "a", count=1)
    (tmp_path / "a" / "note.html").write_text("")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises((DataError, ConfigError), match=message):
        list(Shards(paths))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0, expected at least 1"),
        ({"window": 2}, "window is 2, expected 1 because seed is None"),
        ({"rank": 2, "world": 2}, "rank is 2, expected 0 to 1 because world is 2"),
    ],
)
def test_options_that_are_refused(options, message):
    with pytest.raises(ConfigError, match=f"shards: {message}"):
        Shards("a", **options)


def test_what_a_dataset_and_a_loader_refuse(tmp_path, monkeypatch):
    shards = Shards(write(tmp_path / "a"), columns=["body"])
    with pytest.raises(DataError, match=r"00.jsonl has no column 'body', only text, number in row 0"):
        list(shards)
    with pytest.raises(ConfigError, match="state_dict has rows, expected rows, epoch, place"):
        shards.load_state_dict({"rows": 1})
    for value in (-1, 2**63, "3", True):
        with pytest.raises(ConfigError, match=f"row of state_dict is {value!r}, expected a number of at least 0"):
            shards.load_state_dict({**shards.state_dict(), "row": value})
    with worker(monkeypatch, 0, 2), pytest.raises(ConfigError, match="the position is that of a worker"):
        shards.state_dict()
    with pytest.raises(ConfigError, match="batch_size is an option of the loader, expected an option of Shards"):
        ShardLoader(shards, batch_size=3)
    with pytest.raises(ConfigError, match="drop_last is an option of the loader, expected an option of Shards"):
        ShardLoader(shards, drop_last=True)
    with pytest.raises(ConfigError, match="in_order is False, expected True, as a position counts batches"):
        ShardLoader(shards, num_workers=2, in_order=False)
    with pytest.raises(ConfigError, match="ahead is -1, expected at least 0"):
        ShardLoader(shards, ahead=-1)
    (tmp_path / "a" / "00.jsonl").write_text("[1]\n")
    with pytest.raises(DataError, match="row 0: its line is a list, expected an object"):
        list(Shards(tmp_path / "a"))
    for path in (tmp_path / "a").iterdir():
        path.write_text("\n")
    with pytest.raises(DataError, match="all other shards have no row"):
        next(iter(Shards(tmp_path / "a", repeat=True)))


class Adding(pl.LightningModule):
    """Writes down what it reads."""

    def __init__(self):
        super().__init__()
        self.weight, self.read = torch.nn.Parameter(torch.zeros(1)), []

    def training_step(self, batch, index):
        self.read.append(batch)
        return self.weight.sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:.*isinstance")
@pytest.mark.filterwarnings("ignore:.*IterableDataset.*")
def test_lightning_keeps_the_position(tmp_path):
    write(tmp_path / "a")

    def fit(steps, checkpoint=None):
        shards = Shards(tmp_path / "a", columns=["text"], batch_size=3, seed=0, window=5, repeat=True)
        module, quiet = Adding(), {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = pl.Trainer(max_steps=steps, accelerator="cpu", enable_checkpointing=False, **quiet)
        trainer.fit(module, ShardLoader(shards, ahead=1), ckpt_path=checkpoint, weights_only=False)
        trainer.save_checkpoint(tmp_path / "last.ckpt")
        return module.read

    whole = fit(9)
    assert fit(4) + fit(9, tmp_path / "last.ckpt") == whole


def source(folder, **options):
    return ShardedText(**{"data": [str(folder)], "held_out": 0.2, "sequence_length": 16, "window": 4, **options})


def test_documents_are_packed_into_rows(tmp_path):
    """As by joining all of them, in the order of the reader, and cutting."""
    packed = source(write(tmp_path / "a"))
    packed.check()
    rows = list(packed.reader.rows(reader.ShardPlace()))
    texts = [
        b"\0" + row.record()["text"].encode() for row, _ in rows if fraction(f"{row.shard.name}/{row.number}") >= 0.2
    ]
    held_out = [text for batch in packed.exam().examples for text in as_texts(batch)]
    assert sorted(held_out + [text[1:].decode() for text in texts]) == sorted(TEXTS)
    assert 0 < len(held_out) < len(texts)
    joined = np.frombuffer(b"".join(texts), np.uint8)
    begins = np.cumsum([0, *map(len, texts)])
    for step in range(10):
        batch = packed.batch(step, 3)
        first = step * 3 * 16
        assert np.array_equal(batch.inputs.flatten(), joined[first : first + 48])
        assert np.array_equal(batch.targets.flatten(), joined[first + 1 : first + 49])
        expected = {at - first for at in begins if first <= at < first + 48} | {0, 16, 32}
        assert set(np.flatnonzero(batch.starts)) == expected


def as_texts(batch):
    """The documents of a batch of held-out rows; each target is the input after it."""
    for inputs, targets in zip(batch.inputs, batch.targets, strict=True):
        end = int((targets != -100).sum())
        assert np.array_equal(inputs[1:end], targets[: end - 1])
        assert inputs[0] == targets[end - 1] == 0
        yield bytes(inputs[1:end].astype(np.uint8)).decode()


def test_rows_do_not_depend_on_the_way_to_them(tmp_path):
    """Forward, backward, by another number of processes and from a position, whose document alone is read again."""
    folder = write(tmp_path / "a")
    packed = source(folder)
    whole = [packed.batch(step, 4) for step in range(40)]  # more than an epoch
    for step in (39, 3, 0, 20):
        for rank in range(2):
            part = packed.batch(step, 2, rank, 2)
            assert np.array_equal(part.inputs, whole[step].inputs[2 * rank : 2 * rank + 2])
            assert np.array_equal(part.starts, whole[step].starts[2 * rank : 2 * rank + 2])
    for step in range(1, 40, 6):
        packed.batch(step - 1, 4)
        position = packed.position(4 * step)
        packed.batch(step, 4)  # read ahead
        assert packed.position(4 * step) == position
        assert position["rows"] == 4 * step
        resumed = source(folder)
        resumed.resume(json.loads(json.dumps(position)))
        assert np.array_equal(resumed.batch(step, 4).targets, whole[step].targets)
        assert np.array_equal(resumed.batch(2 * step + 2, 2).targets, whole[step + 1].targets[:2])


def test_a_packed_document_is_read_as_if_it_were_alone(tmp_path):
    batch = source(write(tmp_path / "a")).batch(0, 3).tensors()
    torch.manual_seed(0)
    method = answerer(ShardedText.question)
    model = LanguageModel(256, Stack(8, 2, "lru"))
    outputs, targets, _ = method.answers(model, batch)
    assert torch.equal(targets, batch.targets.flatten())
    begins = [*batch.starts.flatten().nonzero()[:, 0].tolist(), 48]
    for begin, end in pairwise(begins):
        alone, _ = model(batch.inputs.flatten()[None, begin:end])
        torch.testing.assert_close(outputs[begin:end], alone[0])
    _, state = model(batch.inputs)  # which enters no row, because each begins with a document
    assert batch.starts[:, 0].all()
    torch.testing.assert_close(method.answers(model, batch, state).outputs, outputs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"held_out": 0.0}, "held_out is 0.0, expected above 0 and at most 1"),
        ({"held_out": 1.0}, "is to train on; give more documents or a smaller --held-out"),
        ({"held_out": 1e-9}, "is held out; give more documents or a larger --held-out"),
        ({"column": "number"}, "column 'number' of .* has a int in row \\d, expected text; name another column"),
        ({"column": "body"}, "has no column 'body', only text, number in row \\d"),
        ({"window": 0}, "window is 0, expected at least 1"),
    ],
)
def test_a_source_that_cannot_be_used(tmp_path, options, message):
    write(tmp_path / "a")
    with pytest.raises((ConfigError, DataError), match=message):
        source(tmp_path / "a", **options).check()


def test_rows_without_a_document_are_left_out(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": null}\n{"text": "abcd\\ud800"}\n{"text": ""}\n')
    batch = source(tmp_path / "a.jsonl", held_out=1e-9, sequence_length=8, seed=0, window=1).batch(0, 1)
    assert bytes(batch.inputs[0].astype(np.uint8)) in (b"\0abcd\xed\xa0\x80", b"\0\0abcd\xed\xa0")


@pytest.mark.usefixtures("short_sample")
def test_a_run_resumes_with_the_same_bits(tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a", "jsonl.gz")
    command = ["train", *TINY, "--data", "a/*.jsonl.gz", "--steps", "12", "--log-every", "1", "--held-out", "0.2"]
    assert main([*command, "--out", "whole"]) == 0
    assert "x 16 bytes, packed from the documents of 10 shards of JSON lines" in capfd.readouterr().err
    step = Learning.training_step

    def interrupted(self, batch, batch_idx):
        self.wishes["stop"] = self.wishes["stop"] or self.global_step == 4
        return step(self, batch, batch_idx)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Learning, "training_step", interrupted)
        assert main([*command, "--out", "cut"]) == 130
    assert main(["train", "--resume", "cut"]) == 0
    weights, others = (load_file(f"{name}/model.safetensors") for name in ("whole", "cut"))
    for name, value in weights.items():
        torch.testing.assert_close(others[name], value, rtol=0, atol=0)
    capfd.readouterr()
    assert main(["eval", "cut"]) == 0
    assert "bits per byte on the held-out documents of 10 shards:" in capfd.readouterr().out
    (tmp_path / "a" / "03.jsonl.gz").write_bytes(gzip.compress(b'{"text": "another"}\n'))
    assert main(["eval", "cut"]) == 2
    assert "the data of the run, or its split, has changed since training" in capfd.readouterr().err
    (tmp_path / "a" / "03.jsonl.gz").write_bytes((tmp_path / "a" / "04.jsonl.gz").read_bytes()[:50])
    assert main(command) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert re.match(r"scanl: shards: .*a/03.jsonl.gz is damaged or cut short at row 0: Compressed file ended", line)


def test_algorithms_that_cannot_reset_a_state_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a")
    config = TrainConfig.of(data=["a"], layer="lru", dim=8, depth=1, algorithm="tbptt")
    assert config.entry is ShardedText
    with pytest.raises(ConfigError, match="algorithm is tbptt, expected bptt, in one segment"):
        Run(config)
    divided = TrainConfig.of(data=["a"], layer="lru", dim=8, depth=1, devices=2, sequence_parallel=2)
    with pytest.raises(ConfigError, match="expected 1 because shards packs several documents into a row"):
        Run(divided)
    (tmp_path / "plain.txt").write_text("text")
    assert TrainConfig.of(data=["plain.txt"]).entry is Text
