"""Folders of one's own files: texts, recordings and pictures to classify, or to go on with; and what is refused."""

import wave

import numpy as np
import pytest
import torch
from PIL import Image

from scanl.cli import main
from scanl.data.folders.folders import Folders
from scanl.data.folders.own_signals import OwnSignals
from scanl.data.folders.signals import Recording, expanded, mu_law
from scanl.data.questions import Class, NextToken, Vocabulary
from scanl.errors import ConfigError, DataError
from scanl.learning import RunFolder

COVERS = ["data/folders/own_signals", "data/folders/signals"]

pytestmark = pytest.mark.usefixtures("empty_picture")


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


def write_all(root, files):
    for name, content in files.items():
        if isinstance(content, bytes):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(content)
        else:
            write(root / name, content)


def texts(root, count=20):
    for number in range(count):
        for name in "ab":
            write(root / name / f"{number}.txt", name * (number + 1))
    return root


def opened(root, of=Folders, **options):
    source = of(seed=0, data=[str(root)], **options)
    source.check()
    return source


def test_shares_are_of_all_files(tmp_path):
    assert [len(part.answers) for part in opened(texts(tmp_path, 6)).parts] == [8, 2, 2]


def test_texts_are_bytes_and_folders_are_classes(tmp_path):
    source = opened(texts(tmp_path), sequence_length=12)
    assert source.question == Class(Vocabulary(256), 2)
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
    assert (source.question.inputs.count, source.uneven, source.length) == (2, True, 40)
    inputs, targets, *_ = source.batch(0, 8)
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
    assert (source.length, source.question.inputs.count, source.uneven) == (15, 3 if colours else 1, False)
    rows = {tuple(row.ravel()): answer for row, answer in zip(*source.batch(0, 12)[:2], strict=True)}
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
        "other kind": ({**some, "a/x.exe": "a"}, r"x.exe has the format '.exe', expected one of .txt"),
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
    write_all(tmp_path / "data", files)
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
    assert opened(tmp_path).question.inputs.count == numbers
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
    assert "has changed since training" in capfd.readouterr().err


def waves(root, lengths):
    """Recordings in folders and beside them, of different lengths and loudness; two share each name."""
    draw = np.random.default_rng(0)
    for number, length in enumerate(lengths):
        samples = draw.integers(-9000, 12000, length) // (1 + number)
        write(root / ("a" if number % 2 else ".") / f"{number // 2}.wav", samples)
    return root


def test_recordings_to_generate_are_cut_into_pieces(tmp_path):
    """Each sample is in one piece, in the steps of its whole recording, after 128 or the sample before it."""
    lengths = [1, 39, 40, 41, 80, 81, 3, 100, 121, 7]
    source = opened(waves(tmp_path, lengths), OwnSignals, sequence_length=40)
    assert (source.question, source.length) == (NextToken(Vocabulary(256)), 40)
    assert (source.metric, source.signal.rate, source.signal.steps) == ("bits per sample", 8000, 40)
    files = [{path.relative_to(tmp_path).as_posix() for path in part.rows.paths} for part in source.parts]
    assert [len(part) for part in files] == [7, 1, 2]
    assert len(set().union(*files)) == 10
    pieces = 0
    for part in source.parts:
        inputs, targets, *_ = source._examples(part)
        for path, (start,), row, wanted in zip(part.rows.paths, part.rows.where, inputs, targets, strict=True):
            tokens = Recording(8000, 0).read(path)[start : start + 40]
            np.testing.assert_array_equal(wanted, np.pad(tokens, (0, 40 - len(tokens)), constant_values=-100))
            np.testing.assert_array_equal(row[0], 128)
            np.testing.assert_array_equal(row[1 : len(tokens)], tokens[:-1])
            assert ((row >= 0) & (row < 256)).all()
            pieces += 1
    assert pieces == sum(-(-length // 40) for length in lengths)
    assert source.batch(0, 3).inputs.shape == (3, 40)


@pytest.mark.parametrize("numbers", [1, 3])
def test_pictures_to_generate_are_read_number_by_number(numbers, tmp_path):
    drawn = np.random.default_rng(0).integers(0, 256, (10, 3, 5, numbers)).astype(np.uint8)
    for number, picture in enumerate(drawn):
        write(tmp_path / "ab"[number % 2] / f"{number}.png", picture if numbers == 3 else picture[..., 0])
    source = opened(tmp_path, OwnSignals)
    assert (source.metric, source.length) == ("bits per dimension", 15 * numbers)
    assert source.signal.shape == (3, 5, numbers)
    inputs, targets, *_ = source._examples(source.parts.train)
    for path, row, wanted in zip(source.parts.train.rows.paths, inputs, targets, strict=True):
        np.testing.assert_array_equal(wanted, drawn[int(path.stem)].reshape(-1))
        np.testing.assert_array_equal(row, [0, *wanted[:-1]])


def test_files_to_generate_are_dealt_by_their_paths(tmp_path):
    """Files of one name in different folders are not dealt together; folders may say the parts."""
    for folder in range(8):
        for name in "abcde":
            write(tmp_path / "all" / f"{folder}" / f"{name}.wav", np.arange(9))
    source = opened(tmp_path / "all", OwnSignals)
    assert [len(part.answers) for part in source.parts] == [28, 4, 8]
    assert len({path.name for path in source.parts.test.rows.paths}) > 2
    for part, count in (("train", 3), ("Val", 2), ("test", 1)):
        for number in range(count):
            write(tmp_path / "said" / part / "x" / f"{number}.wav", np.arange(9))
    assert [len(part.answers) for part in opened(tmp_path / "said", OwnSignals).parts] == [3, 2, 1]


TINY = "--layer lru --dim 8 --depth 1 --steps 2 --accelerator cpu --question generate".split()  # noqa: SIM905


def streamed_and_whole(run, prompt, tokens):
    """Check tokens of temperature 0 against one pass over all of them, and return how many there are."""
    model = RunFolder.open(run).load_model()
    with torch.no_grad():
        logits, _ = model(torch.tensor([[*prompt, *tokens[:-1]]]))
    np.testing.assert_array_equal(logits[0, len(prompt) - 1 :].argmax(-1), tokens)
    return len(tokens)


def test_a_run_generates_recordings_of_a_folder(tmp_path, capfd):
    waves(tmp_path / "data", [50] * 8)
    run, data = tmp_path / "run", str(tmp_path / "data")
    assert main(["train", "--data", data, *TINY, "--sequence-length", "30", "--out", str(run)]) == 0
    assert "bits per sample on 4 test rows of signals:" in capfd.readouterr().out
    assert main(["eval", str(run)]) == 0
    assert main(["generate", str(run), "--seed", "1"]) == 0
    with wave.open(str(run / "sample.wav")) as file:
        assert file.getparams()[:4] == (1, 2, 8000, 30)
    prompt, out = tmp_path / "data" / "0.wav", tmp_path / "x.wav"
    more = ["--prompt-file", str(prompt), "--prompt-steps", "9", "--steps", "70", "--out", str(out)]
    assert main(["generate", str(run), "--temperature", "0", *more]) == 0
    with wave.open(str(out)) as file:
        samples = np.frombuffer(file.readframes(100), "<i2")
    steps = np.round(expanded(np.arange(256)) * 32767)
    tokens = np.searchsorted(steps, samples)
    np.testing.assert_array_equal(steps[tokens], samples)
    np.testing.assert_array_equal(tokens[:9], mu_law(OwnSignals.kinds[0].read(prompt)[:, 0])[:9])
    assert streamed_and_whole(run, [128, *tokens[:9].tolist()], tokens[9:].tolist()) == 70


def test_a_run_generates_pictures_of_a_folder(tmp_path, capfd):
    for number in range(8):
        write(tmp_path / "data" / f"{number}.png", np.full((4, 3, 3), 9 * number))
    run, out = tmp_path / "run", tmp_path / "x.png"
    assert main(["train", "--data", str(tmp_path / "data"), *TINY, "--out", str(run)]) == 0
    assert "bits per dimension on 2 test rows of signals:" in capfd.readouterr().out
    more = ["--prompt-file", str(tmp_path / "data" / "3.png"), "--prompt-steps", "5", "--out", str(out)]
    assert main(["generate", str(run), "--temperature", "0", *more]) == 0
    with Image.open(out) as file:
        assert (file.size, file.mode) == ((3, 4), "RGB")
        tokens = np.asarray(file).reshape(-1).tolist()
    assert tokens[:5] == [27] * 5
    assert streamed_and_whole(run, [0, *tokens[:5]], tokens[5:]) == 31
    (tmp_path / "data").rename(tmp_path / "moved")
    assert main(["generate", str(run), "--out", str(tmp_path / "y.png")]) == 2
    assert "data is not a folder, expected a folder of recordings or of pictures" in capfd.readouterr().err
    assert not (tmp_path / "y.png").exists()


def bad_signals(root):
    sounds = {f"{number}.wav": np.arange(9) for number in range(9)}
    pictures = {f"{number}.png": np.zeros((3, 3)) for number in range(9)}
    png, wav = "", ""
    if root is not None:
        png, wav = encoded(root, "a.png", pictures["0.png"]), encoded(root, "a.wav", sounds["0.wav"])
    known = "expected one of .wav, .png, .jpg, .jpeg, .bmp; a text is learnt without --question"
    return {
        "nothing": ({}, "is not a folder, expected a folder of recordings or of pictures, or a table of .csv"),
        "no file": ({".hidden.wav": "a"}, "data has no file, expected files of .wav, .png"),
        "texts": ({f"{number}.txt": "a" for number in range(9)}, f"0.txt has the format '.txt', {known}"),
        "a text": ({**sounds, "a/about.txt": "a"}, f"about.txt has the format '.txt', {known}"),
        "two kinds": ({**sounds, **pictures}, "are pictures and recordings, expected files of one kind"),
        "two channels": (
            {f"{number}.wav": np.zeros((9, 2)) for number in range(9)},
            "data has recordings of 2 channels, expected 1; mix them",
        ),
        "other channels": ({**sounds, "x.wav": np.zeros((4, 2))}, "has 1 channels at 8000 Hz and .*x.wav has 2"),
        "sizes": ({**pictures, "x.png": np.zeros((3, 4))}, "has 3 x 3 pixels of 1 numbers and .*x.png has 4 x 3"),
        "cut sound": ({**sounds, "3.wav": wav and wav[:-3]}, "3.wav is cut off: it has 15 of 18 bytes"),
        "cut picture": ({**pictures, "3.png": png and png[:-28]}, "3.png is no picture"),
        "no samples": ({**sounds, "x/3.wav": np.arange(0)}, "3.wav is empty; leave it out"),
        "too few": ({f"{number}.wav": np.arange(9) for number in range(5)}, "the validation part has no row"),
        "only a test": ({"test/0.wav": np.arange(9)}, "the train part has no row"),
    }  # fmt: skip


@pytest.mark.parametrize("mistake", bad_signals(None))
def test_mistakes_of_signals_are_one_line(mistake, tmp_path, capfd):
    files, message = bad_signals(tmp_path)[mistake]
    write_all(tmp_path / "data", files)
    with pytest.raises(DataError, match=message):
        opened(tmp_path / "data", OwnSignals)
    if mistake in ("nothing", "texts", "two kinds", "two channels", "cut sound"):
        assert main(["train", "--data", str(tmp_path / "data"), *TINY, "--out", str(tmp_path / "run")]) == 2
        (line,) = capfd.readouterr().err.splitlines()
        assert line.startswith("scanl: ")
        assert not (tmp_path / "run").exists()


def test_options_of_signals_that_do_not_fit(tmp_path, capfd):
    for options, message in (
        (["--target", "y"], "target is y, but signals does not use it; leave out --target"),
        (["--held-out", "0.3"], "held_out is 0.3, but signals does not use it; give --test and --validation"),
        (["--until", "-1"], "until is -1, expected at least 0"),
        (["--test", "0.95"], r"signals: validation + test is 1.05, expected below 1"),
    ):
        assert main(["train", "--data", str(waves(tmp_path / "data", [9] * 8)), *TINY, *options]) == 2
        (line,) = capfd.readouterr().err.splitlines()
        assert message in line
