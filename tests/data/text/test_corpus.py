"""Text corpora: what is read, what is refused, and the order in which training reads it."""

import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scanl.data import ContiguousStreams, Windows, read_corpus, standard_library
from scanl.errors import DataError

COVERS = ["data/order", "data/text/text"]

ORDERS = [Windows, ContiguousStreams]


def ramp(n: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, n).astype(np.uint8)


@pytest.mark.parametrize("order", ORDERS)
@given(
    length=st.integers(1, 9),
    size=st.integers(1, 5),
    world=st.integers(1, 4),
    step=st.integers(0, 40),
    extra=st.integers(1, 99),
)
def test_processes_share_the_batch_of_one(order, length, size, world, step, extra):
    source = order(ramp(length + extra), length, seed=3)
    whole = source.batch(step, size * world)
    parts = [source.batch(step, size, rank, world) for rank in range(world)]
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    assert whole.shape == (size * world, length + 1)


def test_an_epoch_of_windows_reads_every_byte_once():
    data = np.arange(240, dtype=np.uint8)
    source = Windows(data, 10, seed=0)
    epochs = [np.concatenate([source.batch(step, 4)[:, :-1] for step in range(6 * e, 6 * e + 6)]) for e in range(2)]
    for epoch in epochs:
        np.testing.assert_array_equal(np.sort(epoch.ravel()), data)
    assert not np.array_equal(*epochs)
    assert not np.array_equal(
        epochs[0], np.concatenate([Windows(data, 10, seed=1).batch(s, 4)[:, :-1] for s in range(6)])
    )


def test_windows_are_contiguous_and_end_with_the_next_byte():
    data = np.arange(200, dtype=np.uint8)
    batch = Windows(data, 7, seed=5).batch(2, 3)
    np.testing.assert_array_equal((batch[:, 1:] - batch[:, :-1]) % 200, 1)


def test_streams_go_on_where_the_last_chunk_ended():
    source = ContiguousStreams(ramp(1000), 16, seed=2)
    for step in range(80):  # beyond the end of the corpus
        np.testing.assert_array_equal(source.batch(step, 3)[:, -1], source.batch(step + 1, 3)[:, 0])


def test_streams_start_at_equal_distances():
    data = np.arange(240, dtype=np.uint8)
    starts = ContiguousStreams(data, 10, seed=0).batch(0, 4)[:, 0]
    np.testing.assert_array_equal(np.diff(starts) % 240, 60)


def test_standard_library_is_the_same_twice_and_split_by_file():
    names = standard_library()
    assert list(names) == sorted(names)
    assert {"argparse.py", "json/decoder.py"} <= names.keys()
    assert not [name for name in names if "site-packages" in name or name.startswith("test/")]
    corpus = read_corpus()
    assert corpus.digest() == read_corpus().digest()
    share = len(corpus.held_out) / (len(corpus.train) + len(corpus.held_out))
    assert 0.02 < share < 0.12
    train, held_out = (set(part.tobytes().split(b"\0")) for part in (corpus.train, corpus.held_out))
    assert len(train | held_out) == len(train) + len(held_out)
    assert Path(names["argparse.py"]).read_bytes() in train | held_out


def test_many_files_are_split_by_file(tmp_path):
    for i in range(100):
        (tmp_path / f"{i}.txt").write_text(f"text {i}")
    corpus = read_corpus([tmp_path], held_out=0.3)
    pieces = [part.tobytes().split(b"\0") for part in (corpus.train, corpus.held_out)]
    assert sorted(pieces[0] + pieces[1]) == sorted(f"text {i}".encode() for i in range(100))
    assert 10 < len(pieces[1]) < 50


@pytest.mark.parametrize(("count", "by_file"), [(19, False), (20, True)])
def test_twenty_files_are_many(tmp_path, count, by_file):
    texts = [f"{i:02}".encode() * 8 for i in range(count)]
    (tmp_path / "texts").mkdir()
    for i, text in enumerate(texts):
        (tmp_path / "texts" / f"{i}.txt").write_bytes(text)
    corpus = read_corpus([tmp_path / "texts"], held_out=0.27)
    pieces = corpus.train.tobytes().split(b"\0") + corpus.held_out.tobytes().split(b"\0")
    assert (sorted(pieces) == texts) is by_file


def test_files_of_one_name_are_all_read(tmp_path):
    for folder in "abc":
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "text").write_text(folder)
    corpus = read_corpus([tmp_path / folder / "text" for folder in "abc"], held_out=0.3)
    assert corpus.train.tobytes() + corpus.held_out.tobytes() == b"a\0b\0c"


def test_few_files_hold_out_the_end(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"a" * 60)
    (tmp_path / "b.txt").write_bytes(b"b" * 39)
    corpus = read_corpus([tmp_path / "a.txt", tmp_path / "b.txt"], held_out=0.1)
    assert corpus.train.tobytes() == b"a" * 60 + b"\0" + b"b" * 29
    assert corpus.held_out.tobytes() == b"b" * 10


def test_folders_leave_out_hidden_empty_and_binary_files(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / ".git").mkdir()
    for name, text in {"deep/a.txt": b"aa", "b.bin": b"b\0b", ".c": b"c", ".git/d": b"d", "e": b"", "f": b"ff"}.items():
        (tmp_path / name).write_bytes(text)
    corpus = read_corpus([tmp_path], held_out=0.2)
    assert corpus.train.tobytes() + corpus.held_out.tobytes() == b"aa\0ff"


def test_refusals(tmp_path, monkeypatch):
    empty, folder, text = tmp_path / "empty.txt", tmp_path / "folder", tmp_path / "text.txt"
    empty.touch()
    folder.mkdir()
    text.write_text("some text")
    with pytest.raises(DataError, match=r"empty.txt is empty; name a file with text in it"):
        read_corpus([empty])
    with pytest.raises(DataError, match=r"folder .*folder has no text: .*; name a folder with text files"):
        read_corpus([folder])
    with pytest.raises(DataError, match=r"nothing.txt does not exist; name a file or a folder"):
        read_corpus([tmp_path / "nothing.txt"])
    with pytest.raises(DataError, match=r"held_out is 1.5, expected above 0 and at most 1"):
        read_corpus([text], held_out=1.5)
    with pytest.raises(DataError, match=re.escape("8 bytes to train on, expected more than 8 because of the sequence")):
        read_corpus([text], held_out=0.15).check(8)
    with pytest.raises(DataError, match=r"0 bytes held out, expected at least 2; give more text"):
        read_corpus([text], held_out=0.01).check(8)

    def refuse(*_args, **_options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)  # as root, no file is unreadable
    with pytest.raises(DataError, match=r"text.txt cannot be read: Permission denied; change its permissions"):
        read_corpus([text])
