"""Train classifiers: problems of the UCR and UEA archives beside MiniRocket, spoken digits, and irregular times.

    python benchmarks/quality/classify.py [ucr] [digits] [irregular] [--seeds 3]

Needs `pip install -e '.[series,sklearn]'`, and for `ucr` also aeon. The data lie where `scanl data get NAME` puts them.
"""

import argparse
import sys
import time
import zlib
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
from scanl.learning.estimators import SeriesClassifier, optimize
from scanl.learning.evaluation import measures
from scanl.learning.run.config import seeded_model
from scanl.models import Features, SequenceClassifier, Stack

sys.path.append(str(Path(__file__).parents[1]))
from harness import Panel, Results, parse, parser, picture
from quality.learn import learn

Numbers = NDArray[np.float32]

PROBLEMS = (  # of those that packages bring, the ones with the fewest numbers to read
    "ItalyPowerDemand", "GunPoint", "BasicMotions", "JapaneseVowels", "ArrowHead", "PickupGestureWiimoteZ", "ECG5000"
)  # fmt: skip
UNEQUAL = ("JapaneseVowels", "PickupGestureWiimoteZ")  # lengths; MiniRocket reads the archive's version of equal ones
LAYERS = ("hawk", "gru", "lru")
STACK = {"dropout": 0.1}  # of the recipe
RECIPE: dict[str, Any] = {"dim": 32, "depth": 2, "lr": 1e-2, "batch_size": 32, "steps": 400}
STEPS, COPIES = 64, 9  # most steps that a layer reads: a longer series is folded; varied copies of each training series


class Data(NamedTuple):
    """Series (n, T, C), NaN behind the end of a shorter one, and their classes."""

    train: Numbers
    classes: NDArray[Any]
    test: Numbers
    answers: NDArray[Any]


def problem(name: str) -> Data:
    """Read a problem of the archive with its published training and test part."""
    parts = [ts.series(folders["ucr"], f"{name}_{part}.ts", "") for part in ("TRAIN", "TEST")]
    longest = max(len(row) for rows, _ in parts for row in rows)
    (train, classes), (test, answers) = ((_padded(rows, longest), np.array(named)) for rows, named in parts)
    return Data(train, classes, test, answers)


def _padded(rows: list[Any], length: int) -> Numbers:
    return np.stack([np.pad(row, ((0, length - len(row)), (0, 0)), constant_values=np.nan) for row in rows]).astype(
        np.float32
    )


def folded(x: Numbers, most: int) -> Numbers:
    """Make k steps one, with k times the channels, so that there are at most `most`; missing ones come first."""
    k = -(-x.shape[1] // most)
    x = np.pad(x, ((0, 0), (-x.shape[1] % k, 0), (0, 0)), constant_values=np.nan)
    return x.reshape(len(x), -1, k * x.shape[2])


def varied(x: Numbers, copies: int, draw: np.random.Generator) -> Numbers:
    """Return the series and copies: stretched by up to a tenth, moved by up to a twentieth, scaled, and with noise."""
    found, spread = [x], np.nanstd(x, (0, 1))
    for _ in range(copies):
        copy = x.copy()
        for row in copy:
            steps = int((~np.isnan(row[:, 0])).sum())
            half = steps / 2
            at = (np.arange(steps) - half) * draw.uniform(0.9, 1.1) + half + draw.uniform(-0.05, 0.05) * steps
            for channel in range(row.shape[1]):
                row[:steps, channel] = np.interp(at, np.arange(steps), row[:steps, channel])
        scale = np.exp(draw.normal(0, 0.1, (len(x), 1, x.shape[2])))
        found.append((copy * scale + draw.normal(0, 0.05, x.shape) * spread).astype(np.float32))
    return np.concatenate(found)


def ucr(options: argparse.Namespace) -> None:
    """Accuracy on the test part of problems of the archive: layers with one recipe, and MiniRocket."""
    results, seeds = Results("ucr", options), options.seeds
    for name in PROBLEMS:
        data = problem(name)
        if not results.has(problem=name, model="MiniRocket"):
            results.add(problem=name, model="MiniRocket", seed=0, **_minirocket(name))
        for layer in LAYERS:
            for seed in range(seeds):
                if not results.has(problem=name, model=layer, seed=seed):
                    found = _classified(_kept(results, name, layer, seed), data, layer, seed, options.quick)
                    results.add(problem=name, model=layer, seed=seed, **found)
            together = {"problem": name, "model": f"{layer}, together", "seed": f"mean of {seeds}"}
            if seeds > 1 and not results.has(**together):
                found = np.mean([np.load(_kept(results, name, layer, seed)) for seed in range(seeds)], 0)
                accuracy = (np.unique(data.classes)[found.argmax(1)] == data.answers).mean()
                results.add(**together, accuracy=float(accuracy))


def _classified(path: Path, data: Data, layer: str, seed: int, quick: bool) -> dict[str, Any]:
    recipe = {**RECIPE, "steps": 2} if quick else RECIPE
    begin = time.perf_counter()
    draw = np.random.default_rng((seed, zlib.crc32(path.name.partition("-")[0].encode())))
    x = folded(varied(data.train, COPIES, draw), STEPS)
    model = SeriesClassifier(layer, stack_options=STACK, random_state=seed, **recipe).fit(
        x, np.tile(data.classes, COPIES + 1)
    )
    minutes = (time.perf_counter() - begin) / 60
    found = model.predict_proba(folded(data.test, STEPS))
    path.parent.mkdir(parents=True, exist_ok=True)
    np.save(path, found)
    accuracy = float((model.classes_[found.argmax(1)] == data.answers).mean())
    return {"accuracy": accuracy, "minutes": minutes, "steps": recipe["steps"]}


def _kept(results: Results, name: str, layer: str, seed: int) -> Path:
    return results.folder / "ucr" / f"{name}-{layer}-{seed}.npy"


def _minirocket(name: str) -> dict[str, Any]:
    from aeon.classification.convolution_based import MiniRocketClassifier

    stem = f"{name}_eq" if name in UNEQUAL else name
    (rows, classes), (others, answers) = (
        ts.series(folders["ucr"], f"{stem}_{part}.ts", "") for part in ("TRAIN", "TEST")
    )
    train, test = (np.stack(part).transpose(0, 2, 1) for part in (rows, others))
    begin = time.perf_counter()
    model = MiniRocketClassifier(random_state=0, n_jobs=1).fit(train, np.array(classes))
    minutes = (time.perf_counter() - begin) / 60
    return {"accuracy": float((model.predict(test) == np.array(answers)).mean()), "minutes": minutes}


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


TABLES = {"ucr": ucr, "digits": digits, "irregular": irregular}


def main() -> None:
    options = parse(parser(__doc__, TABLES, seeds=True))
    for name in options.names:
        TABLES[name](options)


if __name__ == "__main__":
    main()
