"""`scanl generate` of signals: recordings, pictures, and the series of a table. Text is in test_cli.py."""

import re
import wave

import numpy as np
import pytest
import torch
from PIL import Image

from scanl.cli import main
from scanl.data import sources
from scanl.data.folders.signals import BLOCK, Picture, Recording, expanded, mu_law
from scanl.errors import ConfigError, DataError, ShapeError
from scanl.layers import state as states
from scanl.learning import RunFolder
from scanl.learning.run.config import TrainConfig, seeded_model
from scanl.models import Channels, Forecaster, SeriesColumns, Stack
from scanl.models.heads.distributions import make_head

COVERS = ["data/series/generate"]

SMALL = {"layer": "lru", "dim": 8, "depth": 1, "accelerator": "cpu"}


def made(path, **options):
    """A run folder whose model has not been trained."""
    config = TrainConfig.of(**{**SMALL, "out": str(path), **options})
    folder, model = RunFolder.fresh(config), seeded_model(config, config.open_source().question)
    folder.create(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    folder.save_model(model, "0")
    return folder, model.eval()


def generated(capfd, *argv):
    assert main(["generate", *map(str, argv)]) == 0
    return capfd.readouterr().out.strip()


def test_tokens_of_the_mu_law_come_back():
    tokens = np.arange(256)
    samples = expanded(tokens)
    assert (np.diff(samples) > 0).all()
    # The quantisation scales by the range, so both ends of it are there.
    np.testing.assert_array_equal(mu_law(np.array([-1.0, *samples, 1.0]))[1:-1], tokens)


@pytest.mark.parametrize("steps", [1, BLOCK + 1])
def test_a_recording_is_written_as_it_comes(tmp_path, steps):
    tokens = np.random.default_rng(steps).integers(0, 256, steps)
    Recording(8000, 10).write(iter(tokens.tolist()), tmp_path / "a.wav")
    with wave.open(str(tmp_path / "a.wav")) as file:
        assert file.getparams()[:4] == (1, 2, 8000, steps)
        samples = np.frombuffer(file.readframes(steps), "<i2")
    np.testing.assert_allclose(samples, expanded(tokens) * 32767, atol=0.5)


def test_a_recording_is_continued(tmp_path, capfd):
    folder, model = made(tmp_path / "run", data=["sc09"], data_options={"max_length": 30})
    prompt = np.random.default_rng(0).integers(0, 256, 25)
    Recording(16000, 0).write(prompt, tmp_path / "in.wav")
    read = Recording(16000, 0).read(tmp_path / "in.wav")
    assert generated(capfd, folder.path, "--seed", 3) == str(folder.path / "sample.wav")
    tokens = torch.cat(list(model.generate(torch.tensor([[128]]), max_new_tokens=30, seed=3)))
    Recording(16000, 0).write(tokens.tolist(), tmp_path / "expected.wav")
    assert (folder.path / "sample.wav").read_bytes() == (tmp_path / "expected.wav").read_bytes()
    more = ["--prompt-file", tmp_path / "in.wav", "--prompt-steps", 7, "--out", tmp_path / "out.wav"]
    generated(capfd, folder.path, *more, "--steps", 5, "--temperature", 0)
    start = torch.tensor([[128, *read[:7]]])
    tokens = torch.cat(list(model.generate(start, max_new_tokens=5, temperature=0)))
    Recording(16000, 0).write([*read[:7], *tokens.tolist()], tmp_path / "expected.wav")
    assert (tmp_path / "out.wav").read_bytes() == (tmp_path / "expected.wav").read_bytes()


@pytest.mark.parametrize("name", ["sc09", "beethoven", "youtubemix"])
def test_a_recording_goes_in_the_steps_of_its_source(tmp_path, name):
    """Those of the mu-law, or equal ones. The first and the last step are there, so the range is the whole one."""
    own, tokens = sources.get(name)(seed=0), np.array([0, 255, 3, 64, 127, 128, 129, 200, 254])
    own.signal.write(iter(tokens), tmp_path / "a.wav")
    np.testing.assert_array_equal(own.signal.read(tmp_path / "a.wav"), tokens)
    with wave.open(str(tmp_path / "a.wav")) as file:
        samples = np.frombuffer(file.readframes(9), "<i2")
    np.testing.assert_array_equal(own.encode(samples), tokens)
    assert (abs(samples[3]) > 2**13) == (name == "beethoven")  # half of the way down, or an eleventh by the mu-law


@pytest.mark.parametrize("numbers", [1, 3])
def test_a_picture_goes_in_and_comes_out(tmp_path, numbers):
    draw = np.random.default_rng(numbers)
    picture = Picture((5, 4, numbers), draw.permutation(20 * numbers))
    tokens = draw.integers(0, 256, 20 * numbers)
    picture.write(iter(tokens), tmp_path / "a.png")
    with Image.open(tmp_path / "a.png") as file:
        assert (file.size, file.mode) == ((4, 5), "L" if numbers == 1 else "RGB")
        assert (np.asarray(file).reshape(-1)[picture.order] == tokens).all()
    np.testing.assert_array_equal(picture.read(tmp_path / "a.png"), tokens)
    with pytest.raises(DataError, match=r"a.png has 4 x 5 pixels of . numbers, expected 5 x 4 pixels of 3 numbers"):
        Picture((4, 5, 3), picture.order).read(tmp_path / "a.png")


def test_a_picture_is_continued(tmp_path, capfd):
    folder, model = made(tmp_path / "run", data=["mnist_pixels"], data_options={"order": "bit_reversal"})
    pixels = np.random.default_rng(0).integers(0, 256, (28, 28)).astype(np.uint8)
    Image.fromarray(pixels).save(tmp_path / "in.png")
    more = ["--prompt-file", tmp_path / "in.png", "--prompt-steps", 700, "--seed", 1]
    generated(capfd, folder.path, *more)
    order = folder.config().open_source().pixels
    with Image.open(folder.path / "sample.png") as file:
        found = np.asarray(file).reshape(-1)[order]
    prompt = pixels.reshape(-1)[order][:700].astype(np.int64)
    np.testing.assert_array_equal(found[:700], prompt)
    start = torch.from_numpy(np.insert(prompt, 0, 0))[None]
    np.testing.assert_array_equal(found[700:], torch.cat(list(model.generate(start, max_new_tokens=84, seed=1))))


def a_table(path, irregular=False, rows=(30, 20)):
    pd = pytest.importorskip("pandas", reason="pandas is not installed: pip install 'scanl[series]'")
    draw, frames = np.random.default_rng(5), []
    for number, count in enumerate(rows):
        hours = np.cumsum(draw.integers(1, 4, count)) if irregular else np.arange(count)
        dates = pd.Timestamp("2024-03-01") + pd.to_timedelta(hours, unit="h")
        numbers = {name: draw.normal(size=count).round(3) for name in ("y", "z", "p", "f")}
        frames.append(pd.DataFrame({"id": f"s{number}", "ds": dates, **numbers, "kind": "ab"[number], "size": number}))
    frame = pd.concat(frames, ignore_index=True)
    frame.loc[3, "y"] = np.nan
    frame.to_csv(path, index=False)
    return frame


ROLES = {"target": "y,z", "time": "ds", "series": "id", "past": ["p"], "static": ["kind", "size"], "future": ["f"]}


def by_hand(model, source, name, prompt, steps, freq=None):
    """Medians of the steps after the first `prompt` rows: all that is known is read again for each of them."""
    from scanl.data.series.generate import openings

    (at,) = [i for i, one in enumerate(source.collection.series) if one.name == name]
    one = source.collection.series[at]
    begin = max(0, prompt - source.length)
    x, past = one.target[begin:prompt], one.past[begin:prompt]
    if not prompt:
        x, past = np.full((1, 2), np.nan), np.full((1, 1), np.nan)
    batch = openings(source, None, prompt, steps, freq)[at].batch
    for _ in range(steps):
        reach = slice(len(x) + model.horizon)
        parameters, _ = model(
            torch.tensor(x)[None],
            past=torch.tensor(past)[None],
            static=torch.tensor(one.static)[None],
            future=torch.tensor(batch.inputs.future[:, reach]),
            timespans=torch.tensor(batch.inputs.timespans[:, reach]) if model.timed else None,
        )
        median = model.head.quantiles(parameters[0, -1, 0], torch.tensor([0.5]))[:, 0]
        x, past = np.vstack([x, median.tolist()]), np.vstack([past, [np.nan]])
    return x[-steps:]


@pytest.mark.parametrize(("irregular", "prompt"), [(False, None), (True, None), (False, 4), (True, 0)])
def test_series_of_a_table_are_continued(tmp_path, capfd, irregular, prompt):
    frame = a_table(tmp_path / "t.csv", irregular)
    options = {**ROLES, "data": [str(tmp_path / "t.csv")], "sequence_length": 16, "lags": 2}
    question = {"question": "forecast", "horizon": 3, "recursive": True} if irregular else {"question": "generate"}
    folder, model = made(tmp_path / "run", **options, **question)
    assert isinstance(model, Forecaster)
    assert (model.past, model.static, model.timed) == (1, 3, irregular)
    asked = [] if prompt is None else ["--prompt-steps", prompt]
    if irregular and prompt is None:
        assert main(["generate", str(folder.path)]) == 2
        out, err = capfd.readouterr()
        assert out == ""
        assert re.fullmatch(r"scanl: .*the times 'ds' of series 's0' have no frequency .*: --freq D.*\n", err)
        asked = ["--freq", "3h"]
    path = generated(capfd, folder.path, "--steps", 6, "--temperature", 0, *asked)
    import pandas as pd

    found = pd.read_csv(path, parse_dates=["ds"])
    assert list(found.columns) == ["id", "ds", "y", "z"]
    for name in ("s0", "s1"):
        own, part = frame[frame.id == name], found[found.id == name]
        begin = len(own) if prompt is None else prompt
        np.testing.assert_allclose(
            part[["y", "z"]],
            by_hand(model, folder.config().open_source(), name, begin, 6, "3h" if irregular else None),
            rtol=2e-4,
            atol=2e-4,
        )
        if prompt is None:
            step = pd.Timedelta(hours=3 if irregular else 1)
            assert part.ds.tolist() == [own.ds.iloc[-1] + step * k for k in range(1, 7)]
        else:
            assert part.ds.tolist() == own.ds.iloc[begin : begin + 6].tolist()


def test_the_steps_that_follow_fill_no_gaps(tmp_path, capfd):
    """A seventh of the steps is absent, which is too much to fill; with 100 steps to follow it would be a tenth."""
    frame = a_table(tmp_path / "t.csv", rows=(90,)).drop(index=[row + row % 5 for row in range(5, 84, 6)])
    frame.to_csv(tmp_path / "t.csv", index=False)
    options = {**ROLES, "data": [str(tmp_path / "t.csv")], "sequence_length": 16}
    folder, model = made(tmp_path / "run", **options, question="forecast", horizon=3, recursive=True)
    assert isinstance(model, Forecaster)
    assert model.timed
    assert np.load(generated(capfd, folder.path, "--steps", 100, "--freq", "h", "--out", tmp_path / "a.npy")).shape == (
        1,
        100,
        2,
    )


def test_numbers_of_a_table_have_a_seed_and_another_file(tmp_path, capfd):
    a_table(tmp_path / "t.csv", rows=(30,))
    roles = {**ROLES, "static": ["size"]}
    folder, _ = made(tmp_path / "run", **roles, question="generate", data=[str(tmp_path / "t.csv")], sequence_length=8)
    frame = a_table(tmp_path / "more.csv", rows=(70, 50))

    def drawn(*options):
        return np.load(generated(capfd, folder.path, "--steps", 4, "--out", tmp_path / "a.npy", *options))

    one = drawn("--seed", 1)
    assert (one.shape, one.dtype) == ((1, 4, 2), np.float64)
    assert np.array_equal(drawn("--seed", 1), one)
    assert not np.array_equal(drawn("--seed", 2), one)
    assert drawn("--seed", 1, "--prompt-file", tmp_path / "more.csv").shape == (2, 4, 2)
    assert frame.shape == (120, 8)
    text, _ = made(tmp_path / "text", **ROLES, question="generate", data=[str(tmp_path / "t.csv")], sequence_length=8)
    assert main(["generate", str(text.path), "--prompt-file", str(tmp_path / "more.csv")]) == 0  # with a new text


def test_a_generation_goes_on_in_constant_memory():
    torch.manual_seed(0)
    model = Forecaster(1, Stack(8, 1, "lru"), Channels(past=1, future=2), lags=3).double()
    x, past, future = (torch.randn(2, *shape).double() for shape in ((5, 1), (5, 1), (15, 2)))
    ahead = list(future[:, 6:].unbind(1))
    columns = SeriesColumns(x, past, future=future[:, :6])
    whole = model.generate(columns, following=iter(ahead), seed=1)
    steps = list(whole)
    assert len(steps) == 10  # as many as covariates, and the first
    begun = model.generate(columns, following=iter(ahead), max_steps=4, seed=1)
    first, sizes = list(begun), {leaf.shape for _, leaf in states.leaves(begun.state)}
    later = model.generate(
        SeriesColumns(begun.pending, torch.full((2, 1, 1), torch.nan).double(), future=future[:, 8:10]), begun.state,
        following=iter(ahead[4:]), seed=begun.generator,
    )  # fmt: skip
    torch.testing.assert_close(torch.stack([*first, *later]), torch.stack(steps))
    assert {leaf.shape for _, leaf in states.leaves(later.state)} == sizes


def test_temperature_narrows_and_widens():
    head = make_head("gaussian", 3, 1)
    parameters = torch.tensor([[5.0, 2.0]]).expand(20_000, 2)
    for temperature in (0.25, 1.0, 2.0):
        drawn = head.sample(parameters, torch.Generator().manual_seed(0), temperature)
        assert drawn.std() == pytest.approx(2 * temperature**0.5, rel=0.03)
    assert head.sample(parameters, temperature=100.0).isfinite().all()
    torch.testing.assert_close(head.sample(parameters, temperature=0.0), torch.full((20_000,), 5.0))


def test_wrong_generation_is_refused():
    x, stack = torch.zeros(1, 3, 1), Stack(8, 1, "lru")
    for make, error, message in (
        (lambda: Forecaster(2, stack).generate(x), ConfigError, "forecasts 2 steps at once, expected one; make"),
        (lambda: Forecaster(1, stack).generate(x[:, :0]), ShapeError, r"x has shape \(1, 0, 1\), expected"),
        (lambda: Forecaster(1, stack).generate(x, temperature=-1.0), ConfigError, "temperature is -1.0"),
        (
            lambda: Forecaster(1, stack, Channels(future=1)).generate(SeriesColumns(x, future=torch.zeros(1, 4, 1))),
            ConfigError, "following is None, expected covariates because future is 1",
        ),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            make()


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("sc09", "--bytes 4", "bytes is 4, but a run on a signal generates steps; give --steps instead"),
        ("sc09", "--steps 0", "steps is 0 after 0 steps of the prompt, expected at least 1"),
        ("sc09", "--steps -1", "steps is -1, expected at least 0"),
        ("sc09", "--prompt one", "prompt is 'one', but the run is on a signal; give --prompt-file"),
        ("sc09", "--prompt-file none.wav", "prompt_file is none.wav, which does not exist"),
        ("sc09", "--prompt-file bad.wav", "bad.wav is no WAV file"),
        ("sc09", "--prompt-file slow.wav", "slow.wav has 3 samples of 1 channels at 8000 Hz, expected 1 channels"),
        ("sc09", "--out a.mp3", "out is a.mp3, expected a file of .wav"),
        ("sc09", "--out none/a.wav", "out is none/a.wav, whose folder does not exist"),
        ("mnist_pixels", "--steps 5", "steps is 5 after 0 steps of the prompt, expected the remaining 784 of 784"),
        ("mnist_pixels", "--prompt-file whole.png", "steps is 0 after 784 steps of the prompt, expected at least 1"),
        ("adding", "", "was trained on adding, expected a run on text, a signal or a table"),
        ("table", "--top-k 3", "top_k is 3, but a table has numbers, which use no top_k; give --temperature"),
        ("table", "--steps 3 --out a.png", "out is a.png, expected a file of .csv or .npy"),
        ("table", "--steps 0", "steps is 0, expected at least 1"),
        ("table", "", "was trained to forecast, which does not go step by step, expected a run with --question"),
        ("horizon", "", "table: horizon is 5, expected 1 because generation goes step by step"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(kind, options, message, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.wav").write_text("no")
    Recording(8000, 0).write([1, 2, 3], tmp_path / "slow.wav")
    Image.new("L", (28, 28)).save(tmp_path / "whole.png")
    given = {"data": [kind]}
    if kind in ("table", "horizon"):
        a_table(tmp_path / "t.csv", rows=(40,))
        given = {"question": "forecast", "horizon": 5, "data": ["t.csv"], **ROLES, "sequence_length": 8}
    if kind == "horizon":
        argv = ["train", "--data", "t.csv", "--question", "generate", "--target", "y", "--horizon", "5"]
    else:
        folder, _ = made(tmp_path / "run", **given)
        argv = ["generate", str(folder.path), *options.split()]
    before = sorted(tmp_path.rglob("*"))
    assert main(argv) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert message in err
    assert sorted(tmp_path.rglob("*")) == before


def test_dates_go_on_as_in_the_table(tmp_path, capfd):
    """Month ends, and another table of the same frequency and of others."""
    import pandas as pd

    for name, freq, rows in (("ends", "ME", 40), ("few", "ME", 2), ("days", "D", 40)):
        dates = pd.date_range("2021-01-31", periods=rows, freq=freq)
        pd.DataFrame({"ds": dates, "y": np.arange(rows) % 7}).to_csv(tmp_path / f"{name}.csv", index=False)
    options = {"target": "y", "time": "ds", "sequence_length": 8, "question": "generate"}
    folder, _ = made(tmp_path / "run", **options, data=[str(tmp_path / "ends.csv")])
    for name, rows in (("ends", 40), ("few", 2)):
        path = generated(capfd, folder.path, "--steps", 3, "--prompt-file", tmp_path / f"{name}.csv")
        expected = pd.date_range("2021-01-31", periods=rows + 3, freq="ME")[rows:]
        assert pd.read_csv(path)["ds"].tolist() == [str(date.date()) for date in expected]
    for options, message in (
        (
            ["--prompt-file", str(tmp_path / "days.csv")],
            "a step of the times 'ds' lasts 0.03285 times as long as in",
        ),
        (["--freq", "often"], "freq is 'often', expected a frequency of pandas"),
        (["--freq", "MS"], "freq is 'MS', expected none because the times have another frequency: 2021-01-31 00:00:00"),
    ):
        assert main(["generate", str(folder.path), *options]) == 2
        out, err = capfd.readouterr()
        assert (out, len(err.splitlines())) == ("", 1)
        assert message in err
