"""The catalogue of published data: every record has a source, and a set of a known format is one file of TOML."""

import fnmatch
import json
import pickle
import re
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import published
from making import data
from scanl.data import sources
from scanl.data.files import folders
from scanl.data.published.records import CATALOGUE
from scanl.data.published.sources import add, kinds, records
from scanl.errors import ConfigError, DataError
from scanl.layers.state import leaves
from scanl.learning import TrainConfig

COVERS = ["data/published/sources"]

ROOT = Path(__file__).parents[3]
HEAD = 'form = "small files"\n'
SOURCE = """
[sources.{name}]
class = "Small"
kind = "{kind}"
about = "Small."
citation = "Nobody"
split = "as it is"
"""


@pytest.fixture
def root(tmp_path, monkeypatch):
    """An empty folder of data sets; the sources that a test adds are gone after it."""
    monkeypatch.setenv("SCANL_DATA", str(tmp_path / "data"))
    before = set(records)
    yield tmp_path / "data"
    for name in set(records) - before:
        record = records.pop(name)
        folders.pop(record.files.name, None)
        made = sources.get(name)
        sources.remove(name)
        delattr(__import__(made.__module__, fromlist=["x"]), made.__name__)


def write(root: Path, text: str, name: str = "small") -> Path:
    """Write a catalogue of one data set beside `root`, and return its folder."""
    (folder := root.parent / "catalogue").mkdir(exist_ok=True)
    (folder / f"{name}.toml").write_text(text, "utf-8")
    return folder


def opened(name: str, **options: Any) -> Any:
    short = {"sequence_length": 8} if "sequence_length" in sources.get(name).option_names() else {}
    return TrainConfig.of(data=[name], data_options=options, **short).open_source()


def test_every_record_has_a_source_and_every_published_source_a_record():
    assert set(records) == {name for name in sources.names() if sources.get(name).needs is not None}
    assert {path.stem for path in CATALOGUE.glob("*.toml")} == {*folders, "packages"}
    for name, record in records.items():
        assert sources.get(name).needs is record.files is folders[record.path.stem]
        assert f"Source: {record.citation}." in (sources.get(name).__doc__ or "")


def test_every_kind_has_a_source():
    assert {record.kind for record in records.values()} - {""} <= set(kinds)
    for cls in kinds.values():
        assert any(issubclass(sources.get(name), cls) for name in records), cls


def test_every_package_has_files():
    packages = tomllib.loads((CATALOGUE / "packages.toml").read_text("utf-8"))
    used = {package.name for files in folders.values() for package in files.packages}
    assert used == set(packages)


def test_borders_are_of_the_published_rows():
    for record in records.values():
        if "borders" in record.facts:
            assert record.facts["borders"][-1] == record.files.counts["rows"]


def test_the_catalogue_is_in_the_wheel():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["scanl"]
    for path in CATALOGUE.iterdir():
        inside = path.relative_to(ROOT / "src" / "scanl").as_posix()
        assert any(fnmatch.fnmatch(inside, pattern) for pattern in patterns), inside


def test_a_class_that_is_made_is_found_by_pickle_and_by_its_name():
    made = sources.get("etth1")
    assert pickle.loads(pickle.dumps(made(horizon=3))) == made(horizon=3)
    assert __import__("scanl.data", fromlist=["ETTh1"]).ETTh1 is made


def test_the_page_has_citation_split_chance_and_licence():
    rows = dict(data.facts(sources.get("spoken_digits")))
    assert rows["split"] == "70, 10 and 20 % at random by the seed 42"
    assert (rows["chance"], rows["licence"]) == ("0.1", "CC BY-SA 4.0")
    assert 'Jackson et al., "Free Spoken Digit Dataset", 2018' in data.page(
        "scanl.data.published.classified_series", [sources.get("spoken_digits")]
    )


# A new data set of each format, which is one file of TOML.


@pytest.mark.parametrize("name", sorted(name for name, record in records.items() if record.kind))
def test_a_record_in_another_catalogue_is_the_same_source(name, root, monkeypatch):
    """Every record without code, under another name, beside the source that the library has of it."""
    record = records[name]
    text = record.path.read_text("utf-8")
    begin = text.index(f"[sources.{name}]")
    own = text[begin:].split("\n[sources.")[0].replace(f"[sources.{name}]", "[sources.another]")
    text = text[: text.index("[sources.")] + own.replace(f'class = "{record.class_name}"', 'class = "Another"')
    parsed = tomllib.loads(text)
    for key in ("sha256", "counts", "packages"):
        parsed.pop(key, None)
    parsed.setdefault("needs", list(record.files.needs))
    published.written(root, record.files.name)
    (root / record.files.name).rename(root / "elsewhere")
    monkeypatch.setattr(record.files, "sha256", {})
    monkeypatch.setattr(record.files, "counts", {})
    assert add(write(root, toml(parsed), "elsewhere")) == ["another"]
    options = published.OPTIONS.get(name, {})
    ours, theirs = opened("another", **options), opened(name, folder=str(root / "elsewhere"), **options)
    assert ours.question == theirs.question
    for one, other in ((ours.batch(0, 3), theirs.batch(0, 3)), (next(ours.unseen(0)), next(theirs.unseen(0)))):
        for (_, part), (_, same) in zip(leaves(one.tensors()), leaves(other.tensors()), strict=True):
            torch.testing.assert_close(part, same, rtol=0, atol=0, equal_nan=True)


def toml(tables: dict[str, Any]) -> str:
    """Tables as TOML, in which JSON's strings, numbers and lists are written alike."""
    lines = [f"{json.dumps(key)} = {json.dumps(one)}" for key, one in tables.items() if not isinstance(one, dict)]
    for name, one in tables.items():
        for title, inner in one.items() if name == "sources" else [(None, one)]:
            if isinstance(one, dict):
                lines.append(f"[{name}]" if title is None else f"[{name}.{title}]")
                lines += [f"{json.dumps(key)} = {json.dumps(value)}" for key, value in inner.items()]
    return "\n".join(lines) + "\n"


def test_the_record_of_the_page_works(root):
    """The one of docs/data.md: three series of shops."""
    page = (ROOT / "docs" / "data.md").read_text("utf-8")
    name, text = re.findall(r"```toml\n# my_sets/(\w+).toml\n(.*?)```", page, re.DOTALL)[0]
    assert add(write(root, text, name)) == ["sales"]
    (root / name).mkdir(parents=True)
    published.waves(root / name, "sales.csv", "date", ["a", "b", "c"])
    source = TrainConfig.of(data=["sales"], horizon=2).open_source()
    source.check()
    assert (source.targets, source.question.season) == (["a", "b", "c"], 7)


def test_images_of_an_archive_of_numpy(root):
    """Two by two pixels, in [0, 1]; the label of an image is in an array of its own."""
    layout = '[layout]\nreader = "npz"\nimages = "x"\nlabels = "y"\ntrain = ["train.npz"]\ntest = ["test.npz"]\n'
    facts = "shape = [2, 2, 1]\nclasses = 3\naside = 2\n"
    assert add(write(root, HEAD + layout + SOURCE.format(name="tiny", kind="Images") + facts)) == ["tiny"]
    (root / "small").mkdir(parents=True)
    for part, count in (("train", 5), ("test", 3)):
        images = np.arange(4 * count, dtype=np.uint8).reshape(count, 2, 2)
        np.savez(root / "small" / f"{part}.npz", x=images, y=np.arange(count) % 3)
    batch = next(iter(opened("tiny").exam().examples))
    np.testing.assert_allclose(batch.inputs[:, :, 0], np.arange(12).reshape(3, 4) / 255, rtol=1e-6)
    assert batch.targets.tolist() == [0, 1, 2]
    assert opened("tiny").chance == pytest.approx(1 / 3)
    np.savez(root / "small" / "test.npz", x=np.zeros((3, 2, 2), np.uint8), y=[0, 3, 1])
    with pytest.raises(DataError, match=r"small is damaged: a test image has the label 3, expected from 0 to 2"):
        opened("tiny").check()
    np.savez(root / "small" / "test.npz", x=np.zeros((3, 2, 2), np.uint8), y=[0, 1])
    with pytest.raises(DataError, match=r"\(3, 2, 2\) images have int64 \(2,\) labels"):
        opened("tiny").check()


def test_a_table_with_semicolons(root):
    """Twenty rows of two columns, of which one is forecast: 14, 2 and 4 rows."""
    layout = '[layout]\nreader = "csv"\ndelimiter = ";"\nwhole = ["a.csv"]\n'
    facts = 'chosen = ["y"]\nusual_season = 3\n'
    add(write(root, HEAD + layout + SOURCE.format(name="tiny", kind="PublishedSeries") + facts))
    (root / "small").mkdir(parents=True)
    (root / "small" / "a.csv").write_text("x;y\n" + "".join(f"a;{i * i}\n" for i in range(20)))
    source = TrainConfig.of(data=["tiny"], horizon=2, sequence_length=4).open_source()
    assert source.parts == [[(0, 0, 14)], [(0, 14, 16)], [(0, 16, 20)]]
    batch = next(iter(source.unseen(0)))
    assert batch.inputs.target[0, :, 0].tolist() == [100, 121, 144, 169]
    assert batch.targets.numbers[0, :, 0].tolist() == [196, 225]
    for content in ("", "\n"):
        (root / "small" / "a.csv").write_text(content)
        with pytest.raises(DataError, match=r"a.csv is damaged: it has the columns \[\], and lacks {'y'}"):
            TrainConfig.of(data=["tiny"]).open_source().check()


def test_published_series_with_a_part_for_validation(root):
    layout = '[layout]\nreader = "ts"\ntrain = ["a.ts"]\nvalidation = ["b.ts"]\ntest = ["c.ts"]\n'
    add(write(root, HEAD + layout + SOURCE.format(name="tiny", kind="SeriesProblem")))
    (root / "small").mkdir(parents=True)
    for name, rows in (("a", ["1,2:up", "3,4:down"]), ("b", ["5,6:up"]), ("c", ["7,8:down", "9,9:up"])):
        (root / "small" / f"{name}.ts").write_text(published.ts(rows))
    parts = opened("tiny").parts
    assert [part.answers.tolist() for part in parts] == [[1, 0], [1], [0, 1]]
    assert parts.test.rows[0].tolist() == [[7], [8]]
    (root / "small" / "b.ts").write_text(published.ts(["1:left"]))
    with pytest.raises(DataError, match=r"b.ts is damaged: class 'left' is not in the training part"):
        opened("tiny").check()


IDX = '[layout]\nreader = "idx"\ntrain = ["a", "b"]\ntest = ["c", "d"]\n'
GOOD = HEAD + IDX + SOURCE.format(name="tiny", kind="Images") + "shape = [2, 2, 1]\nclasses = 3\n"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("form =", "form", "small.toml is no file of TOML: Expected '=' after a key"),
        ('form = "small files"', "", r"small.toml has no form, expected form, sources"),
        ("form =", 'lisence = "x"\nform =', r"unknown entry of .*small.toml 'lisence'; did you mean 'license'\?"),
        ('"small files"', "3", "small.toml: form is 3, expected str"),
        ('reader = "idx"', 'reader = "idy"', r"unknown reader of .*small.toml for Images 'idy'; did you mean 'idx'\?"),
        ('reader = "idx"', 'reader = "fasta"', "unknown reader of .*small.toml for Images 'fasta'"),
        ('reader = "idx"\n', "", "small.toml: layout has no reader, expected reader"),
        ('reader = "idx"', 'reader = "idx"\nlabels = 2', "unknown entry of .*small.toml: layout 'labels'"),
        ('reader = "idx"', 'reader = "cifar"\nlabels = "2"', "small.toml: layout: labels is '2', expected int"),
        ('reader = "idx"', 'reader = "npz"', "small.toml: layout has no images, expected images"),
        ('test = ["c", "d"]\n', "", "the layout has the parts train, expected train, test because of Images"),
        ('test = ["c", "d"]', "test = []", "the part test of the layout has 0 files, expected some because of Images"),
        (IDX, 'needs = ["a"]\n', "sources.tiny: the data set has no layout, expected one because of Images"),
        ('["a", "b"]', '"a"', "small.toml: layout: train is 'a', expected a list of str"),
        ("[sources", '[packages.nothing]\n"a" = "a"\n[sources', "unknown package of .*small.toml 'nothing'"),
        ("[sources", '[counts]\n"a" = "b"\n[sources', "small.toml: counts is {'a': 'b'}, expected a table of int"),
        ('kind = "Images"', 'kind = "Image"', r"unknown kind of .*small.toml 'Image'; did you mean 'Images'\?"),
        ("sources.tiny", "sources.mnist", "sources.mnist: a source of this name exists already, expected a new name"),
        ("sources.tiny", "sources.parity", "sources.parity: a source of this name exists already"),
        (
            'class = "Small"',
            'class = "Images"',
            "class is 'Images', expected a name that scanl.data.published.images lacks",
        ),
        ('class = "Small"', 'class = "1"', "class is '1', expected a name that scanl.data.published.images lacks"),
        ('class = "Small"\n', "", "sources.tiny has no class, expected about, citation, class, split"),
        ('citation = "Nobody"\n', "", "sources.tiny has no citation, expected"),
        ("classes = 3", "classes = 3\nside = 2", "unknown entry of .*sources.tiny 'side'"),
        ("classes = 3", "classes = 3\nseed = 2", "unknown entry of .*sources.tiny 'seed'"),
        ("classes = 3", 'classes = "3"', "sources.tiny: classes is '3', expected int"),
        ("classes = 3\n", "", "sources.tiny has no classes, expected classes, shape"),
        ("[2, 2, 1]", "[2, 2]", r"sources.tiny: shape is \[2, 2\], expected a list of int, 3 of them"),
        ("classes = 3", "classes = 3\naside = 2.5", "sources.tiny: aside is 2.5, expected int"),
        ("classes = 3", 'classes = 3\nchance = "one of 3"', "sources.tiny: chance is 'one of 3', expected float"),
    ],
)
def test_a_mistake_in_a_record_is_one_line(old, new, message, root):
    """And nothing is registered."""
    assert old in GOOD
    before = (
        set(records),
        set(folders),
        sources.names(),
        set(vars(__import__("scanl.data.published.images", fromlist=["x"]))),
    )
    with pytest.raises(ConfigError, match=message) as error:
        add(write(root, GOOD.replace(old, new, 1)))
    assert len(str(error.value).splitlines()) == 1
    after = (
        set(records),
        set(folders),
        sources.names(),
        set(vars(__import__("scanl.data.published.images", fromlist=["x"]))),
    )
    assert before == after


def test_a_part_has_as_many_files_as_its_kind_reads(root):
    layout = '[layout]\nreader = "csv"\nwhole = ["a.csv", "b.csv"]\n'
    with pytest.raises(ConfigError, match="the part whole of the layout has 2 files, expected one because of Publish"):
        add(write(root, HEAD + layout + SOURCE.format(name="tiny", kind="PublishedSeries")))
    add(write(root, GOOD.replace('["a", "b"]', '["a", "b", "e"]')))
    (root / "small").mkdir(parents=True)
    with pytest.raises(ConfigError, match="small: the part of a, b, e is no file of images and one of labels"):
        opened("tiny").check()


def test_other_mistakes_are_one_line(root):
    with pytest.raises(ConfigError, match="the data set 'mnist' exists already; rename the file"):
        add(write(root, GOOD, "mnist"))
    (root.parent / "catalogue" / "mnist.toml").unlink()
    with pytest.raises(DataError, match=r"catalogue has no file \*.toml, expected one for each data set"):
        add(root.parent / "catalogue")
    (root.parent / "catalogue" / "packages.toml").write_text('[a]\nmanager = "npm"\n')
    with pytest.raises(ConfigError, match=r"packages.toml: a has no archive, expected archive, manager, sha"):
        add(write(root, GOOD))
    (root.parent / "catalogue" / "packages.toml").unlink()
    write(root, GOOD)
    with pytest.raises(ConfigError, match=r"sources.tiny: a source of this name exists already"):
        add(write(root, GOOD, "twice"))
