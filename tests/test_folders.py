"""Folders of one's own files: texts, recordings and pictures, a folder for each class; and what is refused."""

import wave

import numpy as np
import pytest
from PIL import Image

from scanl.cli import main
from scanl.data.folders import Folders
from scanl.errors import ConfigError, DataError


def write(path, content):
    """A text; or of a number array a picture (rows, columns) or a recording (samples,)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, str):
        path.write_text(content, encoding="utf-8")
    elif path.suffix == ".wav":
        samples = content if content.dtype == np.uint8 else content.astype("<i2")
        with wave.open(str(path), "wb") as file:
            file.setnchannels(1 if samples.ndim == 1 else samples.shape[1])
            file.setsampwidth(samples.itemsize)
            file.setframerate(8000)
            file.writeframes(samples.tobytes())
    else:
        Image.fromarray(np.asarray(content, np.uint8)).save(path)


def texts(root, count=20):
    for number in range(count):
        for name in "ab":
            write(root / name / f"{number}.txt", name * (number + 1))
    return root


def opened(root, **options):
    source = Folders(seed=0, data=[str(root)], **options)
    source.check()
    return source


def test_shares_are_of_all_files(tmp_path):
    assert [len(part.answers) for part in opened(texts(tmp_path, 6)).parts] == [8, 2, 2]


def test_texts_are_bytes_and_folders_are_classes(tmp_path):
    source = opened(texts(tmp_path), sequence_length=12)
    assert (source.question.kind, source.question.vocab_size, source.question.classes) == ("class", 256, 2)
    assert [len(part.answers) for part in source.parts] == [28, 4, 8]  # of 20 files of each class 14, 2 and 4
    assert source.chance == 0.5
    batch = source.batch(0, 28)
    assert batch.inputs.shape == (28, 12)
    for row, answer in zip(batch.inputs, batch.targets, strict=True):
        assert set(row) <= {ord("ab"[answer]), -100}
    lengths = sorted(int((row != -100).sum()) for row in batch.inputs)
    assert lengths[-1] == 12
    assert len(set(lengths)) > 4


def test_the_parts_stay_when_files_are_added(tmp_path):
    """Each file is in one part, and most stay where they are; the order of training has the seed's order."""
    before = opened(texts(tmp_path))
    parts = [{path.relative_to(tmp_path) for path in part.rows.paths} for part in before.parts]
    assert len(set().union(*parts)) == sum(map(len, parts)) == 40
    texts(tmp_path, 22)
    after = [{path.relative_to(tmp_path) for path in part.rows.paths} for part in opened(tmp_path).parts]
    assert sum(len(old & new) for old, new in zip(parts, after, strict=True)) >= 36
    assert before.digest() != opened(tmp_path).digest()
    assert opened(tmp_path).digest() == opened(tmp_path).digest()


@pytest.mark.parametrize("named", [("train", "test"), ("Train", "val", "test")])
def test_folders_may_say_the_parts(named, tmp_path):
    for part in named:
        texts(tmp_path / part, 10)
    sizes = [len(part.answers) for part in opened(tmp_path).parts]
    assert sizes == ([20, 20, 20] if len(named) == 3 else [18, 2, 20])


def test_recordings(tmp_path):
    waves = {"high": np.arange(50) * 600 % 2**15, "low": np.arange(9) * -100}
    for name, samples in waves.items():
        for number in range(8):
            write(tmp_path / name / f"{number}.wav", np.stack([samples, -samples], 1))
    source = opened(tmp_path, sequence_length=40)
    assert (source.question.channels, source.question.padded, source.length) == (2, True, 40)
    inputs, targets = source.batch(0, 8)
    for row, answer in zip(inputs, targets, strict=True):
        samples = list(waves.values())[answer][:40]
        np.testing.assert_array_equal(row[: len(samples), 0], samples / np.float32(2**15))
        np.testing.assert_array_equal(row[: len(samples), 1], -samples / np.float32(2**15))
        assert np.isnan(row[len(samples) :]).all()


@pytest.mark.parametrize("colours", [False, True])
def test_pictures(colours, tmp_path):
    random = np.random.default_rng(0)
    drawn = random.integers(0, 256, (16, 3, 5, 3) if colours else (16, 3, 5))
    for number, picture in enumerate(drawn):
        write(tmp_path / "ab"[number % 2] / f"{number}.png", picture)
    source = opened(tmp_path)
    assert (source.length, source.question.channels, source.question.padded) == (15, 3 if colours else 1, False)
    rows = {tuple(row.ravel()): answer for row, answer in zip(*source.batch(0, 12), strict=True)}
    for number, picture in enumerate(drawn):
        found = rows.get(tuple((picture / np.float32(255)).astype(np.float32).ravel()))
        assert found in (None, number % 2)
    assert len(rows) > 6


def encoded(root, name, content):
    write(root / name, content)
    found = (root / name).read_bytes()
    (root / name).unlink()
    return found


def bad_folders(root):
    """Of every mistake: what is written, and a part of the message."""
    some = {f"{name}/{number}.txt": name for name in "ab" for number in range(9)}
    picture, other = np.zeros((3, 3)), np.zeros((3, 4))
    pictures = {f"{name}/{number}.png": picture for name in "ab" for number in range(9)}
    sounds = {f"{name}/{number}.wav": np.arange(9) for name in "ab" for number in range(9)}
    png, wav = (b"", b"") if root is None else (encoded(root, "a.png", picture), encoded(root, "a.wav", np.arange(9)))
    return {
        "nothing": ({}, "is not a folder"),
        "no file": ({"a.txt": "a"}, "has no file in the folders of its classes, expected files of .txt, .md"),
        "one class": ({"a/1.txt": "a"}, r"has the classes \['a'\] to train on, expected two or more"),
        "other kind": ({**some, "a/x.exe": "a"}, r"x.exe is of kind '.exe', expected one of .txt"),
        "two kinds": ({**some, "a/x.png": picture}, "are texts and pictures, expected files of one kind"),
        "an empty one": (dict.fromkeys(some, ""), "is empty; leave it out"),
        "no picture": ({**pictures, "a/3.png": "no"}, "3.png is no picture"),
        "sizes": ({**pictures, "a/3.png": other}, "has 3 x 3 pixels of 1 numbers and .*3.png has 4 x 3 pixels"),
        "no sound": ({**sounds, "b/3.wav": "no"}, "3.wav is no WAV file"),
        "bits": ({**sounds, "b/3.wav": np.zeros(4, np.uint8)}, "3.wav has samples of 8 bits, expected 16"),
        "channels": ({**sounds, "b/3.wav": np.zeros((4, 2))}, "has 1 channels at 8000 Hz and .*3.wav has 2 channels"),
        "unseen": (
            {**{f"train/{name}": each for name, each in some.items()}, "test/a/1.txt": "a", "test/c/1.txt": "c"},
            "the class 'c' is in the test part but not in the training part, so it cannot be learnt",
        ),
        "cut picture": ({**pictures, "a/3.png": png[:-28]}, "3.png is no picture"),
        "cut sound": ({**sounds, "b/3.wav": wav[:-3]}, "3.wav is cut off: it has 1. of 18 bytes"),
        "empty sound": ({**sounds, "b/3.wav": b""}, "3.wav is no WAV file"),
        "no samples": ({**sounds, "b/3.wav": np.arange(0)}, "3.wav is empty; leave it out"),
        "an empty one of many": ({**some, "a/3.txt": ""}, "3.txt is empty; leave it out"),
        "deep": ({f"{name}/x/y/{n}.txt": "" for name in "ab" for n in range(9)}, "is empty; leave it out"),
        "no file of a class": (
            {**some, "c/.hidden": ""},
            "the class 'c' has no file to train on; leave its folder out",
        ),
        "parts and classes": (
            {**{f"train/{name}": each for name, each in some.items()}, "extra/1.txt": "a"},
            "has the folders 'extra' and 'train', expected only parts or only classes",
        ),
        "too few": ({"a/1.txt": "a", "b/1.txt": "b"}, "the validation part has no row"),
    }


@pytest.mark.parametrize("mistake", bad_folders(None))
def test_mistakes_are_one_line(mistake, tmp_path, capfd):
    files, message = bad_folders(tmp_path)[mistake]
    for name, content in files.items():
        path = tmp_path / "data" / name
        if isinstance(content, str | bytes):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        else:
            write(path, content)
    with pytest.raises(DataError, match=message):
        opened(tmp_path / "data").check()
    out = tmp_path / "run"
    tiny = ["--dim", "8", "--depth", "1", "--steps", "1", "--accelerator", "cpu", "--out", str(out)]
    if mistake in ("nothing", "unseen", "cut picture"):  # one code path; a command takes a second
        assert main(["train", "--data", str(tmp_path / "data"), "--question", "classify", *tiny]) == 2
        (line,) = capfd.readouterr().err.splitlines()
        assert line.startswith("scanl: ")
        assert not out.exists()


@pytest.mark.parametrize(("made", "numbers"), [("LA", 1), ("RGBA", 3), ("P", 3), ("1", 1), ("I;16", None)])
def test_kinds_of_pixels(made, numbers, tmp_path):
    """Grey stays one number and a colour three; transparency is left out. Of 16 bits half would be lost."""
    for number in range(16):
        pixels = np.full((3, 3), 10 * number + 100, np.uint16 if numbers is None else np.uint8)
        picture = Image.fromarray(pixels) if numbers is None else Image.fromarray(pixels).convert(made)
        (path := tmp_path / "ab"[number % 2] / f"{number}.png").parent.mkdir(exist_ok=True)
        picture.save(path)
    if numbers is None:
        with pytest.raises(DataError, match=r"png has pixels of kind I;16, expected 8 bits for each number"):
            opened(tmp_path)
        return
    assert opened(tmp_path).question.channels == numbers
    assert opened(tmp_path).batch(0, 4).inputs.shape == (4, 9, numbers)


def test_a_recording_that_is_cut_off_is_refused(tmp_path):
    for name in "ab":
        for number in range(8):
            write(tmp_path / name / f"{number}.wav", np.arange(50))
    source = opened(tmp_path)
    first = source.parts.train.rows.paths[0]
    first.write_bytes(first.read_bytes()[:-7])
    with pytest.raises(DataError, match=r"\.wav is cut off: it has 9\d of 100 bytes"):
        source.batch(0, len(source.parts.train.answers))


def test_options_that_do_not_fit(tmp_path):
    with pytest.raises(ConfigError, match=r"folders: test is 1.5, expected between 0 and 1"):
        Folders(seed=0, data=[str(tmp_path)], test=1.5)
    with pytest.raises(ConfigError, match=r"folders: validation \+ test is 1.1, expected below 1"):
        Folders(seed=0, data=[str(tmp_path)], test=0.6, validation=0.5)
    with pytest.raises(ConfigError, match=r"folders: data is \[\], expected one folder: --data FOLDER"):
        Folders(seed=0, data=[])


def test_a_run_learns_from_folders(tmp_path, capfd):
    texts(tmp_path / "data")
    tiny = ["--layer", "lru", "--dim", "8", "--depth", "1", "--steps", "30", "--lr", "0.03", "--accelerator", "cpu"]
    out = ["--sequence-length", "8", "--out", str(tmp_path / "run")]
    assert main(["train", "--data", str(tmp_path / "data"), "--question", "classify", *tiny, *out]) == 0
    assert "accuracy on 8 test rows of folders:\n  this model  1\n" in capfd.readouterr().out
    assert main(["eval", str(tmp_path / "run")]) == 0
    assert "  this model  1\n" in capfd.readouterr().out
    (tmp_path / "data" / "a" / "new.txt").write_text("a")
    assert main(["eval", str(tmp_path / "run")]) != 0
    assert "has changed since the run was trained" in capfd.readouterr().err
