"""A run's answers for tables and files: what `scanl predict` writes, and `scanl eval` of other data."""

import re

import numpy as np
import pytest
import torch

from scanl.cli import main
from scanl.learning import RunFolder, predict
from scanl.learning.run.config import TrainConfig, seeded_model

COVERS = ["data/folders/unanswered", "cli/predict"]

pd = pytest.importorskip("pandas", reason="pandas is not installed: pip install 'scanl[series]'")

SMALL = {"layer": "lru", "dim": 8, "depth": 1, "accelerator": "cpu"}


def made(path, data, **options):
    """A run folder whose model has not been trained, and the model."""
    config = TrainConfig.of(**{**SMALL, "out": str(path), "data": [str(data)], **options})
    folder = RunFolder.fresh(config)
    source = config.open_source()
    model = seeded_model(config, source.question)
    folder.create(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    folder.save_model(model, source.digest())
    return folder.path, model.eval()


def series(count=8, rows=20, seed=0):
    draw, frames = np.random.default_rng(seed), []
    for i in range(count):
        steps = rows + i % 3
        frames.append(
            pd.DataFrame(
                {
                    "id": f"s{i}", "t": np.arange(steps), "u": draw.normal(size=steps), "v": draw.normal(size=steps),
                    "kind": "ab"[i % 2], "size": 10.0 * i, "up": np.where(draw.normal(size=steps) > 0, "yes", "no"),
                }
            )
        )  # fmt: skip
    return pd.concat(frames, ignore_index=True)


QUESTIONS = {
    "classify": {"target": "kind", "past": ["u", "v"]},
    "regress": {"target": "size", "past": ["u", "v"], "distribution": "gaussian"},
    "label": {"target": "up", "past": ["u", "v"], "sequence_length": 8},
}


def by_hand(question, model, rows, longest):
    """The model's output for one series alone, which begins with missing steps up to the longest of training."""
    x = rows[["u", "v"]].to_numpy(np.float64)
    if question != "label":
        x = np.concatenate([np.full((max(0, longest - len(x)), 2), np.nan), x])
    output = model(torch.tensor(x)[None])[0][0].detach()
    if question == "regress":
        levels = torch.tensor([0.1, 0.9, 0.025, 0.975], dtype=torch.float64)
        return torch.cat([model.head.mean(output), model.head.quantiles(output, levels)[0]]).numpy()[None]
    return output.double().softmax(-1).numpy().reshape(-1, 2)


@pytest.mark.parametrize("question", QUESTIONS)
def test_answers_are_the_model_s_for_each_series_alone(question, tmp_path, capfd):
    """Of a table without the target, with series longer and shorter than in training, in another order."""
    series().to_csv(tmp_path / "t.csv", index=False)
    options = {"question": question, "series": "id", "time": "t", **QUESTIONS[question]}
    path, model = made(tmp_path / "run", tmp_path / "t.csv", **options)
    target = str(options["target"])
    other = pd.concat([series(3, 15, seed=1), series(6, 30, seed=2)[93:]]).drop(columns=[target])
    other.to_csv(tmp_path / "other.csv", index=False)
    argv = ["predict", path, "--data", tmp_path / "other.csv", "--out", tmp_path / "p.parquet"]
    assert main([*map(str, argv)]) == 0
    assert capfd.readouterr().out.strip() == str(tmp_path / "p.parquet")
    answers = pd.read_parquet(tmp_path / "p.parquet")
    pd.testing.assert_frame_equal(answers, predict(path, other), check_dtype=False)
    longest = int(series().groupby("id").size().max())
    expected = [by_hand(question, model, rows, longest) for _, rows in other.groupby("id", sort=False)]
    numbers = answers.select_dtypes("float").to_numpy()
    np.testing.assert_allclose(numbers, np.concatenate(expected), rtol=1e-4, atol=1e-5)
    if question == "label":
        assert answers[["id", "t"]].to_numpy().tolist() == other[["id", "t"]].to_numpy().tolist()
    else:
        assert answers["id"].tolist() == other["id"].unique().tolist()
    if question == "regress":
        assert list(answers.columns[1:]) == ["size", *(f"size-{b}" for b in ("lo-80", "hi-80", "lo-95", "hi-95"))]
    else:
        classes = ["a", "b"] if question == "classify" else ["no", "yes"]
        assert list(answers.columns[-3:]) == [target, *(f"{target}-p-{name}" for name in classes)]
        assert answers[target].tolist() == [classes[k] for k in numbers.argmax(1)]


@pytest.mark.parametrize("question", ["classify", "label"])
def test_names_of_series_in_several_columns(question, tmp_path):
    frame = series().assign(site="x", name=lambda rows: rows.id)
    frame.to_csv(tmp_path / "t.csv", index=False)
    options = {"question": question, "time": "t", **QUESTIONS[question]}
    two, _ = made(tmp_path / "two", tmp_path / "t.csv", series="site,name", **options)
    one, _ = made(tmp_path / "one", tmp_path / "t.csv", series="id", **options)
    (two / "model.safetensors").write_bytes((one / "model.safetensors").read_bytes())
    answers, expected = predict(two), predict(one)
    assert list(answers.columns[:2]) == ["site", "name"]
    pd.testing.assert_frame_equal(answers.iloc[:, 2:], expected.iloc[:, 1:])


def test_rows_keep_their_order(tmp_path):
    """Rows of two series in turn; an absent time is no answer."""
    series(9, 40).to_csv(tmp_path / "t.csv", index=False)
    options = {"question": "label", "series": "id", "time": "t", **QUESTIONS["label"]}
    path, _ = made(tmp_path / "run", tmp_path / "t.csv", **options)
    frame = series(2, 40).query("not (id == 's1' and t == 7)").sort_values(["t", "id"])
    answers = predict(path, frame)
    assert answers[["id", "t"]].to_numpy().tolist() == frame[["id", "t"]].to_numpy().tolist()
    alone = predict(path, frame[frame.id == "s1"])
    np.testing.assert_allclose(answers[answers.id == "s1"]["up-p-no"], alone["up-p-no"], rtol=1e-4, atol=1e-5)


def test_files_are_classified(tmp_path, capfd):
    for number in range(8):
        for name in "ab":
            file = tmp_path / "letters" / name / f"{number}.txt"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(name * (number + 1))
    path, model = made(tmp_path / "run", tmp_path / "letters", question="classify", sequence_length=6)
    (tmp_path / "new").mkdir()
    for name in ("one", "two"):
        (tmp_path / "new" / f"{name}.txt").write_text(f"{name}, a longer text")
    assert main(["predict", str(path), "--data", str(tmp_path / "new")]) == 0
    (tmp_path / "p.csv").write_text(capfd.readouterr().out)
    answers = pd.read_csv(tmp_path / "p.csv")
    assert answers["file"].tolist() == [str(tmp_path / "new" / f"{name}.txt") for name in ("one", "two")]
    tokens = torch.tensor([list(f"{name}, a longer text".encode()[:6]) for name in ("one", "two")])
    np.testing.assert_allclose(
        answers[["class-p-a", "class-p-b"]], model(tokens)[0].softmax(-1).detach(), rtol=1e-4, atol=1e-6
    )
    assert len(predict(path)) == 16
    (tmp_path / "new" / "c.png").write_bytes(b"")
    for data, message in (
        (tmp_path / "new", "are pictures and texts, expected files of one kind"),
        (tmp_path / "new" / "c.png", "c.png is one of pictures, expected texts as in training"),
        (tmp_path / "none", "none, which does not exist"),
    ):
        assert main(["predict", str(path), "--data", str(data)]) == 2
        assert message in capfd.readouterr().err


EVALUATED = {**QUESTIONS, "forecast": {"target": "u", "past": ["v"], "horizon": 3, "sequence_length": 8}}


@pytest.mark.parametrize("question", EVALUATED)
def test_a_run_is_measured_on_another_table(question, tmp_path, capfd):
    series(12, 30).to_csv(tmp_path / "t.csv", index=False)
    options = {"question": question, "series": "id", "time": "t", **EVALUATED[question]}
    path, _ = made(tmp_path / "run", tmp_path / "t.csv", **options)
    other = series(4, 30, seed=5)
    other.to_csv(tmp_path / "other.csv", index=False)
    assert main(["eval", str(path), "--data", str(tmp_path / "other.csv")]) == 0
    out = capfd.readouterr().out
    assert out.startswith("other data than the run's: ")
    assert "of other.csv" in out
    if question in ("classify", "label"):
        target = str(options["target"])
        right = (predict(path, tmp_path / "other.csv")[target] == (
            other[target] if question == "label" else other.groupby("id")[target].first().to_numpy()
        )).mean()  # fmt: skip
        assert f"this model  {right:.4g}" in re.sub(" {2,}", "  ", out)
    (tmp_path / "t.csv").rename(tmp_path / "moved.csv")
    assert main(["eval", str(path), "--data", str(tmp_path / "moved.csv")]) == 0
    assert " in the test part of moved.csv" in capfd.readouterr().out


def test_a_run_is_measured_on_other_folders(tmp_path, capfd):
    for root, count in (("letters", 10), ("other", 3)):
        for number in range(count):
            for name in "ab":
                file = tmp_path / root / name / f"{number}.txt"
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(name * (number + count))
    path, _ = made(tmp_path / "run", tmp_path / "letters", question="classify", sequence_length=6)
    assert main(["eval", str(path), "--data", str(tmp_path / "other")]) == 0
    right = (predict(path, tmp_path / "other")["class"] == ["a"] * 3 + ["b"] * 3).mean()
    assert f"{right:.4g}" in capfd.readouterr().out
    (tmp_path / "other" / "c").mkdir()
    (tmp_path / "other" / "c" / "0.txt").write_text("c")
    assert main(["eval", str(path), "--data", str(tmp_path / "other")]) == 2
    assert "the class 'c' of" in capfd.readouterr().err


def test_mistakes_are_one_line(tmp_path, capfd):
    series(12, 30).to_csv(tmp_path / "t.csv", index=False)
    options = {"series": "id", "time": "t"}
    classify, _ = made(tmp_path / "c", tmp_path / "t.csv", question="classify", **options, **QUESTIONS["classify"])
    points = {**QUESTIONS["regress"], "distribution": "points"}
    regress, _ = made(tmp_path / "r", tmp_path / "t.csv", question="regress", **options, **points)
    ahead, _ = made(tmp_path / "f", tmp_path / "t.csv", question="forecast", **options, **EVALUATED["forecast"])
    series(12).rename(columns={"id": "kind-p-a"}).to_csv(tmp_path / "named.csv", index=False)
    named, _ = made(
        tmp_path / "n", tmp_path / "named.csv", question="classify", **options | {"series": "kind-p-a"},
        **QUESTIONS["classify"],
    )  # fmt: skip
    series(3).drop(columns="v").to_csv(tmp_path / "few.csv", index=False)
    series(3).assign(kind="c").to_csv(tmp_path / "kinds.csv", index=False)
    assert list(predict(regress).columns) == ["id", "size"]
    for argv, message in (
        (["predict", ahead], "was trained on the question 'forecast' of a table, expected .*; scanl forecast"),
        (
            ["predict", classify, "--levels", "80"],
            r"levels is \[80.0\], expected none because the distribution is points",
        ),
        (
            ["predict", regress, "--levels", "80"],
            r"levels is \[80.0\], expected none because the distribution is points",
        ),
        (["predict", named], "predict: the answer would have two columns called 'kind-p-a'; rename one in the table"),
        (["predict", classify, "--out", "a.txt"], "predict: out is a.txt, expected a file of .csv or .parquet"),
        (["predict", classify, "--data", tmp_path / "few.csv"], "unknown column for a covariate of the past 'v'"),
        (["predict", classify, "--data", tmp_path / "none.csv"], "none.csv, which does not exist"),
        (["eval", classify, "--data", tmp_path / "kinds.csv"], "column 'kind' has 'c', expected one of 'a', 'b', the"),
    ):
        assert main([*map(str, argv)]) == 2
        out, err = capfd.readouterr()
        assert (out, len(err.splitlines())) == ("", 1)
        assert re.search(message, err), err
