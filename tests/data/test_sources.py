"""What a run learns from: laws over every registered source, and a source that is new."""

import csv
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import published
from scanl import tasks
from scanl.cli import main
from scanl.data import IGNORED, Corpus, Exam, Folders, OwnSignals, ShardedText, Source, Table, Text, register, sources
from scanl.data.base import Entry, padded, present
from scanl.data.batch import Batch, Outcomes
from scanl.data.files import folders
from scanl.data.folders.signals import Recording
from scanl.data.questions import Class, FeatureInputs, ForecastQuestion, Label, NextToken, Vocabulary
from scanl.data.series.series import Collection, Series
from scanl.errors import ConfigError
from scanl.layers.state import cat, leaves
from scanl.learning import RunFolder, TrainConfig
from scanl.learning.questions import answerer
from scanl.learning.report import ScoreReport
from scanl.learning.run.config import OWN_SOURCES
from scanl.models import SeriesColumns, Stack
from scanl.tasks.stream import StreamTask

COVERS = ["data/base", "data/fresh", "learning/report"]

ROOM = Path(__file__).parents[2] / "src" / "scanl"
TINY = "--accelerator cpu --layer lru --dim 8 --depth 1 --steps 30 --log-every 10 --lr 0.03".split()  # noqa: SIM905

# What runs of before have written into their checkpoints: with another digest they could not go on.
DIGESTS = {
    "adding": "a32735563e1c0a4d46eec6cc19af2f01860f4761a5bf66184ab02a8ae9bb9584",
    "associative_recall": "194cd7a12289e89fb821de0c1c2615ee9798103af2cb37a02630fb869a13d250",
    "copy": "f9ee83b33b337a0743702f64886d6f68eaac770a37606fc37ec93379ce20b0d9",
    "induction": "12ec31e35a6fe710f5ef5a359cd6653b4af2ba4ec71bb7408591e687c00fd09f",
    "irregular": "77f80456e1d7b0e5a3d56ad268a4adb312eecf7527aca04518f8f3e2bd5fe587",
    "mqar": "2133fc54d9cb92651b5a25ab6cbe16f4ff05dab2340d9799989a91087bc11f79",
    "parity": "194f52e49ae84189e574fb544b841e831533d06ed2cca58f87183b42e8f70ec4",
    "selective_copy": "c56a74b447467d48bc27b83c9c0d3698cd858c7958bac56f609ccbc2cd50fadb",
    "table": "cf058b9fcd3eca401eeab2f27fc43e63548a54afba713b6780893d4635547604",
    "text": "f11eeb80c625a7b8d66834c24a1579547806051946533d2fa233e401ca47f353",
}
each_source = pytest.mark.parametrize("name", sources.names())


@pytest.fixture(scope="module", autouse=True)
def small_files(tmp_path_factory):
    """Small files in the place of every published data set."""
    root = tmp_path_factory.mktemp("published")
    published.write_all(root)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SCANL_DATA", str(root))
        for files in folders.values():
            patch.setattr(files, "sha256", {})
            patch.setattr(files, "counts", {})
        yield


def config_of(name: str, **given: Any) -> TrainConfig:
    """The options of a configuration; those of texts are short."""
    short: dict[str, Any] = {}
    if "sequence_length" in sources.get(name).option_names():
        short = {"sequence_length": 20, "carry_state": True}
    elif name in ("path_x", "miniimagenet") or issubclass(sources.get(name), StreamTask):
        short = {"eval_examples": 2}  # pictures take long to draw and to read, and flows long to reach their attractor
    named = {} if name in OWN_SOURCES else {"data": [name], "data_options": published.OPTIONS.get(name, {})}
    return TrainConfig.of(**named, **short, **given)


def opened(name: str) -> Source:
    """With small files; text is of 3,000 known bytes, a table of two known series."""
    if name == "table":
        rows = np.arange(60)
        waves = [(rows * k % 7.0)[:, None] for k in (1, 2)]
        table = Table(["t.csv"], "forecast", "y", horizon=3, sequence_length=20)
        both = [Series("", y, y[:, :0], np.zeros(0), y[:, :0], None, rows * 1.0) for y in waves]
        table.collection = Collection(Path("t.csv"), both, [], 7, "two waves")
        return table
    if name == "folders":
        root = Path(os.environ["SCANL_DATA"]) / "own"
        for number in range(12):
            (path := root / "ab"[number % 2] / f"{number}.txt").parent.mkdir(parents=True, exist_ok=True)
            path.write_text("ab"[number % 2] * 9)
        return Folders(seed=0, data=[str(root)], sequence_length=20)
    if name == "signals":
        (root := Path(os.environ["SCANL_DATA"]) / "sounds").mkdir(exist_ok=True)
        for number in range(12):
            Recording(8000, 0).write(range(5 * number, 100), root / f"{number}.wav")
        return OwnSignals(seed=0, data=[str(root)], sequence_length=20)
    if name == "shards":
        lines = [f'{{"text": "{number:>{number}}"}}\n' for number in range(1, 200)]
        (path := Path(os.environ["SCANL_DATA"]) / "own.jsonl").write_text("".join(lines))
        return ShardedText([str(path)], sequence_length=20)
    source = config_of(name).open_source()
    if isinstance(source, Text):
        data = (np.arange(3000) % 251).astype(np.uint8)
        source.corpus = Corpus(data[:2000], data[2000:])
    return source


def test_every_task_is_a_source():
    others = {name for name in sources.names() if sources.get(name).needs is not None}
    streams = {name for name in sources.names() if issubclass(sources.get(name), StreamTask)}
    assert len(streams) == 7
    assert set(sources.names()) == {
        "table",
        "folders",
        "shards",
        "signals",
        "text",
        "mackey_glass",
        "pathfinder",
        "path_x",
        "pendulum",
        *others,
        *streams,
        *tasks.names(),
    }


def test_every_data_set_has_a_source_and_a_small_copy():
    used = {files.name for name in sources.names() if (files := sources.get(name).needs) is not None}
    assert used == set(folders) == set(published.WRITERS)


@each_source
def test_the_digest_is_the_one_that_checkpoints_hold(name):
    source = opened(name)
    # That of files is the same when they are read again.
    assert source.digest() == (DIGESTS[name] if name in DIGESTS else opened(name).digest())


@each_source
def test_processes_share_the_batch_of_one(name):
    source = opened(name)
    whole = source.batch(7, 6)
    assert whole.size == 6
    for size, world in ((2, 3), (3, 2)):
        parts = [source.batch(7, size, rank, world) for rank in range(world)]
        joined = cat([part.tensors() for part in parts])
        for (_, part), (_, expected) in zip(leaves(joined), leaves(whole.tensors()), strict=True):
            torch.testing.assert_close(part, expected, rtol=0, atol=0, equal_nan=True)


@each_source
def test_the_model_answers_the_question(name):
    """Of as many answers as there are targets, and a loss that every parameter learns from."""
    source = opened(name)
    method = answerer(source.question)
    model = method.model(Stack(8, 1, "lru"))
    outputs, targets, _ = method.answers(model, next(iter(source.unseen(0))).tensors())
    numbers = targets.numbers if isinstance(targets, Outcomes) else targets
    assert len(outputs) == len(numbers) > 0
    for total, count in method.scores(outputs.detach(), targets).values():
        assert (total / count >= 0, count) == (True, int((numbers != IGNORED).sum()))
    found, _ = method.loss(model, source.batch(0, 2).tensors())
    found.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@each_source
def test_a_source_says_what_its_scores_mean(name):
    source = opened(name)
    source.check()
    report = ScoreReport.of(source)
    assert {report.measured, *([report.bits] if report.bits else [])} <= {*report.columns}
    for known in (source.chance, report.best):
        report.check_reachable(known, name)
    if source.chance is not None and report.best is not None:
        assert report.better(report.best, source.chance)
    assert source.metric in source.exam(sample=True).title


def test_a_source_is_data_and_nothing_else():
    members = {name for name in (*vars(Source), *Source.__annotations__) if not name.startswith("_")} - {*vars(Entry)}
    assert members == {
        "question",
        "metric",
        "chance",
        "notes",
        "check",
        "batch",
        "unseen",
        "exam",
        "digest",
        "held_out_bytes",
        "is_own",
        "is_text",
        "elsewhere",
        "ask",
        "is_forecast",
        "class_names",
        "empty_parts",
    }


def test_only_sources_know_what_kind_they_are():
    """Outside of data and tasks no code asks whether a source is a text or a task; `scanl demo` is about text."""
    asks = re.compile(r"isinstance\([^()]*\b(Text|Corpus|Task|FreshExamples)\b|\btask is (not )?None")
    files = [*(ROOM / "learning").rglob("*.py"), *(ROOM / "cli").glob("*.py")]
    assert [path.name for path in files if asks.search(path.read_text(encoding="utf-8"))] == ["demo.py"]


# A source that is new: one class, as its one file would hold it.


@dataclass
class Signs(Source):
    """Rows of numbers whose class is the sign of their sum.

    Args:
        sequence_length: numbers in a row.
        seed: of the rows.
        margin: how far from 0 each sum is, at least.
    """

    metric = "accuracy"
    chance = 0.5
    question = Class(FeatureInputs(1), 2)

    sequence_length: int
    seed: int
    margin: float = 0.0

    def check(self) -> None:
        if self.margin < 0:
            raise ConfigError(f"signs: margin is {self.margin}, expected at least 0")

    def rows(self, count: int, *seed: int) -> Batch:
        inputs = (
            np.random.default_rng((self.seed, *seed)).normal(size=(count, self.sequence_length, 1)).astype(np.float32)
        )
        inputs += self.margin * np.sign(inputs.sum(1, keepdims=True))
        return Batch(inputs, (inputs.sum((1, 2)) > 0).astype(np.int64))

    def batch(self, step: int, size: int, rank: int = 0, world: int = 1) -> Batch:
        whole = self.rows(size * world, 0, step)
        return whole.rows(slice(rank * size, (rank + 1) * size))

    def digest(self) -> str:
        return repr(self)

    def unseen(self, step: int) -> Iterator[Batch]:
        yield self.rows(32, 1, step)

    def exam(self, *, sample: bool = False, count: int = 64) -> Exam:
        rows = self.rows(count, 2)
        return Exam(f"accuracy on {len(rows.inputs)} rows:", [rows], {"chance": 0.5}, ".3f")


@pytest.fixture
def signs(monkeypatch):
    register("signs")(Signs)
    yield
    sources.remove("signs")


@pytest.mark.usefixtures("signs")
def test_a_new_source_is_trained_resumed_and_measured_by_name(tmp_path, capfd):
    folder = str(tmp_path / "run")
    own = ["--data", "signs", "--data-options.margin", "1", "--sequence-length", "5", "--out", folder]
    assert main(["train", *TINY, *own, "--until", "0.9", "--eval-every", "10", "--patience", "9"]) == 0
    out, err = capfd.readouterr()
    assert out.startswith("accuracy on 64 rows:\n  this model  ")
    assert "the score is as good as --until 0.9 after step" in err
    assert main(["train", "--resume", folder]) == 0
    capfd.readouterr()
    assert main(["eval", folder, "--count", "100"]) == 0
    title, found, _ = capfd.readouterr().out.splitlines()
    assert title == "accuracy on 100 rows:"
    inputs, targets, *_ = Signs(5, 0, 1.0).rows(100, 2).tensors()
    logits, _ = RunFolder.open(folder).load_model()(inputs)
    assert float(found.split()[-1]) == pytest.approx((logits.argmax(-1) == targets).float().mean().item())
    with (tmp_path / "run" / "metrics.csv").open() as file:
        assert next(csv.reader(file)) == ["step", "loss", "tokens_per_second", "lr", "score"]


@pytest.mark.usefixtures("signs")
def test_the_loss_of_classes_is_their_cross_entropy():
    source = Signs(5, 0)
    model = answerer(source.question).model(Stack(8, 1, "lru"), {})
    inputs, targets, *_ = source.batch(0, 4).tensors()
    torch.testing.assert_close(
        answerer(source.question).loss(model, Batch(inputs, targets))[0], F.cross_entropy(model(inputs)[0], targets)
    )


@pytest.mark.usefixtures("signs")
@pytest.mark.parametrize(
    ("command", "message"),
    [
        (
            "train --data sings",
            "data is 'sings', expected a file, a folder or a known name; did you mean 'signs'?",
        ),
        ("train --data signs --data-options.marign 1", "unknown option of signs 'marign'; did you mean 'margin'?"),
        ("train --data signs --data-options.margin -1", "signs: margin is -1, expected at least 0"),
        ("train --data signs --carry-state", "carry_state is True, but signs does not use it; leave out --carry-state"),
        ("train --data signs --until 2", "until is 2, expected from 0 to 1 because signs is scored by accuracy"),
        ("train --data signs --tie-embeddings", "tie_embeddings is True, but the answers are not tokens of the input"),
    ],
)
def test_a_new_source_refuses(command, message, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert main(command.split()) == 2
    assert message in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("tokens", [True, False])
def test_a_row_that_ends_early_is_read_to_its_end(tokens):
    """In one piece and in chunks, one of which begins after the end of a row."""
    question = Class(Vocabulary(9) if tokens else FeatureInputs(2), 3)
    model = answerer(question).model(Stack(8, 1, "lru"), {}).eval()
    random, lengths = np.random.default_rng(0), (5, 2, 9)
    rows = [random.integers(0, 9, n) if tokens else random.normal(size=(n, 2)).astype(np.float32) for n in lengths]
    inputs = torch.from_numpy(padded(rows, 10))
    alone = torch.cat([model(torch.from_numpy(row)[None])[0] for row in rows])
    batch = Batch(inputs, torch.zeros(3), mask=torch.from_numpy(present(inputs.numpy())))
    assert batch.mask.sum(1).tolist() == list(lengths)
    outputs, *_ = answerer(question).answers(model, batch)
    torch.testing.assert_close(outputs, alone)
    state = None
    for begin in range(0, 10, 4):
        outputs, _, state = answerer(question).answers(model, batch.steps(begin, begin + 4, targets=False), state)
    torch.testing.assert_close(outputs, alone)


def test_labels_of_features_have_a_model():
    question = Label(FeatureInputs(3), 4)
    model = answerer(question).model(Stack(8, 1, "lru"), {})
    inputs, targets = torch.randn(2, 5, 3), torch.tensor([[0, IGNORED, 3, 1, 1], [IGNORED] * 5])
    outputs, asked, _ = answerer(question).answers(model, Batch(inputs, targets))
    assert (outputs.shape, asked.tolist()) == ((4, 4), [0, 3, 1, 1])
    torch.testing.assert_close(outputs, model(inputs)[0][0, [0, 2, 3, 4]])
    found, _ = answerer(question).loss(model, Batch(inputs, targets))
    torch.testing.assert_close(found, F.cross_entropy(outputs, asked))


def test_columns_of_a_forecast_reach_their_arguments():
    """Targets, covariates of the past, static ones, those known ahead, and the durations."""
    question = ForecastQuestion(
        4, target=2, past=3, static=1, future=2, timed=True, scales=tuple((float(i), i + 1.0) for i in range(8)),
        distribution="gaussian",
    )  # fmt: skip
    method = answerer(question)
    model = method.model(Stack(8, 1, "lru"), {"lags": 2})
    columns = SeriesColumns(*(torch.randn(2, *shape) for shape in ((5, 2), (5, 3), (1,), (9, 2))), torch.rand(2, 9))
    batch = Batch(columns, torch.randn(2, 5, 4, 2))
    torch.testing.assert_close(method.loss(model, batch)[0], model.loss(columns, batch.targets)[0])
    outputs, targets, _ = method.answers(model, batch)
    torch.testing.assert_close(outputs, model.predict(columns)[0].quantiles)
    assert targets is batch.targets
    assert model.config["channels"].scales == [[float(i), i + 1.0] for i in range(8)]


@pytest.mark.parametrize(("name", "value"), [("recursive", True), ("lags", 3), ("span", 5.0)])
def test_options_of_forecasters_are_theirs(name, value):
    for question in (NextToken(Vocabulary(4)), Class(FeatureInputs(2), 2)):
        with pytest.raises(
            ConfigError, match=f"train: {name} is {value}, but the question of the data is not a forecast; leave out"
        ):
            answerer(question).model(Stack(8, 1, "lru"), {name: value})
