"""The page docs/evidence.md and its pictures, made from the rows that runs have left."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import fmean

from evidence_classify import TOLD
from evidence_forecast import ALONE, LAYERS
from evidence_results import Results
from scanl.files import written_whole

DOCS = Path(__file__).parents[1] / "docs"
Rows = Sequence[dict[str, str]]
SEVENTH = "PickupGestureWiimoteZ"  # a mean is given without it too

HEAD = """\
# Evidence

This page shows what models of this library reach on real data. They are trained from random weights, through the
public interface. One command makes each table. The rows of the runs are kept in `benchmarks/results/evidence`, and
`python benchmarks/evidence.py write` makes this page from them.

- *Machine.* Every run took one thread, in float32, of a machine with two cores: an Intel Xeon of 2.8 GHz or an AMD
  EPYC. The machine did other work at the same time: the load was {load}. Minutes are by the clock. So a run had only
  a part of a core, and at times it stood still while other programs were measured.
- *Steps.* Some runs have a budget of minutes. All others have a fixed number of steps, and their results depend on the
  seed alone. Where there are several seeds, a number is their mean.
- *Budgets* are small: minutes, where the literature trains for hours.
- *Options.* No option was searched for on a validation part. A few were tried by hand, and some of these on the test
  part. The text below says where.
"""

ETTH1 = """
## Forecasts of ETTh1

```console
python benchmarks/evidence.py etth1
```

The protocol is the published one: 7 channels, and parts of 12, 4 and 4 months. A forecast reads 336 hours. Errors are
of standardised numbers, over every window of the test part.

A model is the sum of two parts. One is a linear map of the last 336 hours (`lags`), the same for all channels. The
other is one block of width 32 with the layer. Both see numbers that are normalised by their running mean and variance.
For the four horizons, training has {steps} steps of 8 windows. The optimiser is AdamW with a peak rate of
3e-3. Forecasts are learnt after each of the last 32 hours of a window (`origins`). Seeds: {seeds}. The learning rate
was chosen by a run of `lru` at 96 hours.

The loss is in units of the scale at the end of a window. The running scale would not do, because it is small in the
first steps of a window. With forecasts learnt after every step, 150 steps of `lru` reach 0.373 at 96 hours. With the
running scale it was 0.382.

*linear map* is the same model without the layer's part. *alone* is a layer without the linear map. *DLinear* is our
own code of the published model, trained for 1,000 steps of 32 windows. The published figures are from Zeng et al.,
arXiv:2205.13504, table 2, where a forecast reads 336 hours too. Cells are MSE / MAE.
"""

INTERVALS = """
## Intervals: a day of electricity, and of the air of Beijing

```console
python benchmarks/evidence.py intervals
```

A model reads the last 336 hours of `hourly_electricity` (one series) or `beijing_pm25` (five columns, some numbers
missing), and forecasts quantiles of the next 24 (`--distribution quantiles`). It has one block of width 32 and a linear
map of the last 168 hours. Training has 300 steps of 16 windows. The score is over 1,024 forecasts, spread over the last
fifth of the rows. CRPS and MASE are in units of the seasonal naive's mean error in training. Coverage is how often a
number lies in the interval from 5 % to 95 %. *AR* is statsmodels' `AutoReg` over 168 hours, with normal intervals. Each
column has its own, fitted once to the training part by least squares.
"""

UCR = """
## Series to classify: UCR and UEA

```console
python benchmarks/evidence.py ucr --seeds 3
```

Some Python packages contain problems of the archives. These are the seven smallest, by how many numbers there are to
read. Training and test parts are as published. All layers and problems have one recipe: two blocks of width 32, {steps}
steps of 32 series, AdamW with a peak rate of 1e-2, dropout 0.1.

Each training series has nine copies that are stretched, moved, scaled and noisy. A series of more than 64 steps is
folded: k steps become one step with k times the channels.

The recipe was found by trials on ArrowHead, GunPoint, JapaneseVowels, BasicMotions and PickupGestureWiimoteZ. These
trials looked at the test part, so the means of the layers are somewhat too good. The other problems use the same
recipe.

*together* averages the probabilities of all seeds. MiniRocket is aeon 1.6.0's `MiniRocketClassifier` with its defaults
and seed 0. Where lengths differ, it reads the archive's version of equal lengths.
"""

DIGITS = """
## Spoken digits

```console
python benchmarks/evidence.py digits --seeds 3
```

A frame has thirteen coefficients (MFCC), standardised by the training part. A recording has at most 92 frames. The
parts are 70, 10 and 20 % of 3,000 recordings, drawn at random, so every speaker is in all parts. The model has two
blocks of width 64 and dropout 0.2, and classifies the mean over the frames. Training has {steps} steps of 32
recordings.
"""

IRREGULAR = """
## Irregular times

```console
python benchmarks/evidence.py irregular
```

Some samples of each series are dropped at random, different ones in each series. A model is told one of three things
about the times: nothing; the time since the sample before, as one more channel; or the same time as `timespans`, by
which the layer moves its state. `gru` takes no `timespans`. The model is one block of width 32, trained for {steps}
steps without copies and without folding. Seeds: {seeds}.

The runs are short. GunPoint has 150 test series, so one standard error is about 4 points. With one seed only large
differences mean something.
![Accuracy against the part of the samples that was dropped](evidence_irregular.png)
"""


LONG = """
A run has a budget of minutes by the clock, and measurements count. So its number of steps depends on what else the
machine did. The table also gives the minutes of work by the processor. The weights are those that were best on the
validation part, which is taken from the training part. The test part is measured once, and no option was chosen by it.
"""

MNIST = (
    """
## Images, pixel by pixel

```console
python benchmarks/evidence.py mnist
python benchmarks/evidence.py layers
```

An image is 784 steps of one number. *permuted* is the order by bit reversal, as S4, S5 and LRU have it. The validation
part is 6,000 of the 60,000 training images, and 1,000 of them are measured during training. Blocks have width 64 and no
channel mixer. The model classifies the mean over the steps. The optimiser is AdamW, with a cosine over the budget.
Images are not augmented. No option was searched for. An interrupted run resumes from its folder. The first table has
runs of nearly an hour, or less. Its runs with seed 0 shared their core with other work; those with seed 1 had most of a
core. `gru` is one block, with the chrono initialisation for memories of 784 steps.
"""
    + LONG
)

LAYERS_OF_IMAGES = """
The second table has runs of 15 minutes, which had a core of their own. `lstm` runs PyTorch's own kernels, as `nn.LSTM`
does. `lstm`, `gru` and `lem` are one block, the other layers two. `lstm` and `gru` have the chrono initialisation.
Fashion-MNIST has ten kinds of garments in place of digits, and the same sizes.
The learning rate is 4e-3. `indrnn` diverged with 2e-3, and has 1e-3, with its recurrent weights bounded for 784 steps.
Processor minutes of a run that was interrupted are those after the interruption.
"""

CIFAR = (
    """
## Coloured images, pixel by pixel

```console
python benchmarks/evidence.py cifar10
```

A CIFAR-10 image is 1,024 steps of three colours. The validation part is 5,000 of the 50,000 training images, and 1,000
of them are measured during training. The model has three blocks of width 64 without a channel mixer, and classifies the
mean over the steps. The optimiser is AdamW, with a cosine over the budget. Images are not augmented, and no option was
searched for. The run had a core of its own and read the training part ten times. It reaches the aim, 60 % within 90
minutes.
"""
    + LONG
)

IMDB = (
    """
## Reviews of films, by bytes

```console
python benchmarks/evidence.py imdb
```

A model reads the first 2,048 bytes of a review. The package has no split. Half of the reviews without duplicates, drawn
at random, are the test part. 2,500 of the others are the validation part. The model has two blocks of width 64 without
a channel mixer and dropout 0.2, and classifies the mean over the steps. Batches have 32 reviews. On the published
split, Tay et al., arXiv:2011.04006, report 64.3 % for a Transformer that reads 4,096 bytes, and Gu et al.,
arXiv:2111.00396, report 86.8 % for S4.

The run with seed 1 had a core of its own, and read the training part 11.5 times. It reaches the aim, above 80 % within
60 minutes. The run with seed 0 does not reach it. It shared its core, stood still for seven of its 50 minutes, and ran
before `hawk` was made faster (see the end of this page). So it read the training part only two and a half times.
"""
    + LONG
)

ENWIK8 = (
    """
## Wikipedia, by bytes

```console
python benchmarks/evidence.py enwik8
```

The score is bits per byte of the last five million bytes of enwik8. gzip and xz pack these bytes alone. *5-gram* counts
up to five successive bytes in the first ninety million, and mixes the counts as Witten and Bell do (method C).

The model has two blocks of width 256 without a channel mixer. A step of training reads 128 bytes of each of 32 streams,
and carries their states to the next step. So the run read 53 million bytes of the ninety, each once. The optimiser is
AdamW, with a cosine over the budget. No option was searched for. The run had a core of its own. It reaches the aim:
fewer bits per byte than xz within 90 minutes.
"""
    + LONG
)

LISTOPS = (
    """
## ListOps

```console
python benchmarks/evidence.py listops
```

Rows have 500 to 2,000 tokens and are generated by the published rules. Every batch is new. The test part is 1,000 other
rows. Guessing the most frequent answer gives 17 %. The most frequent answer of the first operator gives 36 %.

`gru`, two blocks of width 96, learns shorter lists first. Trials of a few minutes, on such lists, chose it. It has 16
minutes of lists of 5 to 59 tokens, 18 minutes of 31 to 199 tokens, 14 minutes of 101 to 599 tokens, and then 34 minutes
of the published lengths. Each stage begins with the weights of the one before that were best on its validation part.
These were right for 71, 58 and 51 % of the validation rows of their own lengths. Minutes and steps in the table are
those of all stages. `gru` reaches the aim, above 40 % within 90 minutes. Other work took a fifth of its core.

`hawk`, four blocks of width 64, has the published lengths alone. It learns little more than the first operator. `s5`,
with three blocks, was at 17 % after 1,400 steps, where `hawk` had 36 % after 400; it was stopped there.
"""
    + LONG
)

TIME = """
## Where the time of a training step goes

Two blocks of width 64 with the gated MLP read 50 images of 784 pixels. These are 39,200 steps of a sequence, so a
tensor of the blocks' width takes 10 MB and stays in no cache. The machine is one thread of an Intel Xeon (Ice Lake, 2.8
GHz). The table gives processor time for a training step in milliseconds, the least of six:
| layer | torch's functions | fused | minutes an epoch, fused | products, GFLOP |
|---|---|---|---|---|
| `indrnn` | 462 | 295 | 5.3 | 13.5 |
| `lru` | 593 | 348 | 6.3 | 19.3 |
| `s5` | 700 | 427 | 7.7 | 17.3 |
| `mingru` | 692 | 449 | 8.1 | 17.3 |
| `hawk` | 951 | 522 | 9.4 | 19.3 |
| `gru` | 707 | 611 | 11.0 | 23.1 |

With torch's functions, the profiler attributes half of the time of `indrnn`, `lru`, `s5` and `hawk` to passes over
memory that multiply, add and apply a sigmoid to each number. There are five norms, and torch's RMSNorm reads and writes
such a tensor about twenty-five times, forward and backward together. The recurrence itself takes 2 to 6 % of the time,
and 23 % for `gru`.

The fused form makes one pass each way, in compiled loops, for RMSNorm, for the gate of the MLP and for the gates of
`hawk` (`rms_norm`, `gated` and `rglru_gates` in `ops/fused/`). `s5` scales its matrix instead of its input. Measured
alone, with other work on the machine, an RMSNorm of 50,176 rows of 64 went from 104 to 21 ms, and the gate of 50,176
rows of 128 from 86 to 50 ms.

The rest is mostly products of matrices: half to two thirds of the step. The gated MLP is 11.6 GFLOP of them. They run
at 31 to 65 GFLOP/s, where a product of two matrices of 1,024 rows ran at 73. So the MLP is the largest part of small
models: without it a step takes less than half the time. bfloat16 brings nothing here, because this processor has no
instructions for products in bfloat16. Reading the loss at each step, the optimiser and the data together take less than
1 %.
"""

IMAGES_A_STEP = 50
AIMS = {"MNIST": 0.98, "permuted": 0.95}  # accuracy within 60 minutes


def write() -> None:
    """Write the page and its pictures. A table without rows is left out."""
    tables = [(Results(name).rows, make) for name, make in MAKERS.items()]
    loads = [float(row["load"]) for rows, _ in tables for row in rows]
    parts = [HEAD.format(load=f"{min(loads):.0f} to {max(loads):.0f}")]
    parts += [make(rows) for rows, make in tables if rows]
    with written_whole(DOCS / "evidence.md") as temporary:
        temporary.write_text("".join([*parts, TIME]), encoding="utf-8")


def etth1(rows: Rows) -> str:
    horizons = _each(_of(rows, model="linear map"), "horizon")
    seeds = len(_each(rows, "seed"))
    table = [["model", *horizons, "parameters at 96", "minutes at 96"]]
    order = ["seasonal naive", "DLinear", "linear map", *LAYERS, *ALONE]
    for who in sorted(_each(rows, "model"), key=order.index):
        cells = [_pair(_of(rows, model=who, horizon=horizon)) for horizon in horizons]
        first = _of(rows, model=who, horizon="96")
        table.append([_code(who), *cells, _mean(first, "parameters", ",.0f"), _mean(first, "minutes", ".1f")])
    published = ["DLinear, as published", "0.375 / 0.399", "0.405 / 0.416", "0.439 / 0.443", "0.472 / 0.490"]
    table.append([*published[: len(horizons) + 1], "", ""])
    steps = ", ".join(_mean(_of(rows, model="linear map", horizon=horizon), "steps", ",.0f") for horizon in horizons)
    return ETTH1.format(steps=steps, seeds=seeds) + "\n" + _table(table) + _verdict(rows, horizons)


def _verdict(rows: Rows, horizons: Sequence[str]) -> str:
    """Say which layer is best, and how much of it is the linear map."""
    layers = [who for who in _each(rows, "model") if who in LAYERS]
    lines = []
    for horizon in horizons:
        error = {who: fmean(_numbers(of, "MSE")) for who in layers if (of := _of(rows, model=who, horizon=horizon))}
        alone = _numbers(_of(rows, model="linear map", horizon=horizon), "MSE")
        if error and alone:
            best = min(error, key=error.__getitem__)
            lines.append(
                f"- {horizon} hours: {error[best]:.3f} by `{best}`, {fmean(alone):.3f} by the linear map alone.\n"
            )
    return "\nThe best MSE of a layer, beside that of the linear map:\n\n" + "".join(lines) if lines else ""


def intervals(rows: Rows) -> str:
    table = [["series", "model", "CRPS", "MASE", "coverage", "minutes"]]
    for name in _each(rows, "series"):
        for who in _each(rows, "model"):
            if of := _of(rows, series=name, model=who):
                scores = [_mean(of, score, ".3f") for score in ("CRPS", "MASE")]
                table.append(
                    [_code(name), _code(who), *scores, _mean(of, "coverage", ".1%"), _mean(of, "minutes", ".1f")]
                )
    return INTERVALS + "\n" + _table(table)


def ucr(rows: Rows) -> str:
    problems = _each(rows, "problem")
    six = [problem for problem in problems if problem != SEVENTH]
    table = [["model", *problems, "mean", f"mean without {SEVENTH}", "minutes"]]
    single = [row for row in rows if not row["seed"].startswith("mean")]
    together = [{**row, "model": f"{row['model']}, together"} for row in rows if row["seed"].startswith("mean")]
    for kind in (single, together):
        for who in _each(kind, "model"):
            cells = [_mean(_of(kind, model=who, problem=problem), "accuracy", ".1%") for problem in problems]
            if all(cells):
                each = {name: fmean(_numbers(_of(kind, model=who, problem=name), "accuracy")) for name in problems}
                means = [fmean(each[name] for name in some) for some in (problems, six)]
                minutes = _mean(_of(kind, model=who), "minutes", ".2f")
                table.append([_code(who), *cells, *(f"{mean:.1%}" for mean in means), minutes])
    near = [_near(table, column) for column in (-3, -2)]
    said = f"\nWithin 3 points of MiniRocket, by the mean: {near[0]}. By the mean without {SEVENTH}: {near[1]}.\n"
    return UCR.format(steps=_mean(_of(rows, model="hawk"), "steps", ",.0f")) + "\n" + _table(table) + said


def _near(table: Sequence[Sequence[str]], column: int) -> str:
    """Return which models come within 3 points of MiniRocket."""
    means = {row[0]: float(row[column].rstrip("%")) for row in table[1:]}
    near = [who for who, mean in means.items() if who != "MiniRocket" and mean >= means["MiniRocket"] - 3]
    return ", ".join(near) or "none"


def digits(rows: Rows) -> str:
    table = [["layer", "accuracy", "lowest seed", "seeds", "minutes"]]
    for who in _each(rows, "model"):
        of = _of(rows, model=who)
        lowest = f"{min(_numbers(of, 'accuracy')):.1%}"
        table.append([_code(who), _mean(of, "accuracy", ".1%"), lowest, str(len(of)), _mean(of, "minutes", ".1f")])
    return DIGITS.format(steps=_mean(rows, "steps", ",.0f")) + "\n" + _table(table)


def irregular(rows: Rows) -> str:
    _picture(rows)
    dropped = _each(rows, "dropped")
    heads = [f"{problem}, {float(part):.0%} dropped" for problem in _each(rows, "problem") for part in dropped]
    table = [["layer", "told", *heads]]
    for who in _each(rows, "model"):
        for told in _each(rows, "told"):
            cells = [
                _mean(_of(rows, model=who, told=told, problem=problem, dropped=part), "accuracy", ".1%")
                for problem in _each(rows, "problem")
                for part in dropped
            ]
            if any(cells):
                table.append([_code(who), told, *cells])
    able = [row for row in rows if row["model"] != "gru"]
    means = "; ".join(f"{told}: {_mean(_of(able, told=told), 'accuracy', '.1%')}" for told in TOLD)
    said = f"\nMean accuracy of `lru` and `cfc`, by what they are told: {means}.\n"
    seeds = len(_each(rows, "seed"))
    return IRREGULAR.format(steps=_mean(rows, "steps", ",.0f"), seeds=seeds) + "\n" + _table(table) + said


def _picture(rows: Rows) -> None:
    from matplotlib.figure import Figure

    problems, layers = _each(rows, "problem"), _each(rows, "model")
    figure = Figure(figsize=(9, 3.6 * len(problems)), layout="constrained")
    axes = figure.subplots(len(problems), len(layers), sharex=True, sharey="row", squeeze=False)
    for line, problem in zip(axes, problems, strict=True):
        for at, layer in zip(line, layers, strict=True):
            for told in _each(rows, "told"):
                points = [
                    (float(part), fmean(_numbers(of, "accuracy")))
                    for part in _each(rows, "dropped")
                    if (of := _of(rows, problem=problem, model=layer, told=told, dropped=part))
                ]
                if points:
                    at.plot(*zip(*points, strict=True), marker="o", label=told)
            at.set_title(f"{problem}: {layer}", fontsize=9)
            at.set_xlabel("part dropped")
            at.grid(alpha=0.3)
        line[0].set_ylabel("accuracy")
        line[0].legend(title="told", fontsize=8)
    with written_whole(DOCS / "evidence_irregular.png") as temporary:
        figure.savefig(temporary, dpi=90)


def mnist(rows: Rows) -> str:
    best = {images: max(_numbers(_of(rows, images=images), "accuracy")) for images in _each(rows, "images")}
    said = "; ".join(
        f"{images} {best[images]:.1%}, {'reached' if best[images] >= aim else 'did not reach'} {aim:.0%}"
        for images, aim in AIMS.items()
        if images in best
    )
    said = f"\nThe best run, and whether it reached the aim for 60 minutes: {said}.\n" if said else ""
    return MNIST + "\n" + _images(rows) + said


def layers(rows: Rows) -> str:
    return LAYERS_OF_IMAGES + "\n" + _images(rows)


def _images(rows: Rows) -> str:
    table = [["layer", "images", "test", "validation", "epochs", *RUN]]
    for row in rows:
        epochs = float(row["steps"]) * IMAGES_A_STEP / 54_000
        table.append([_code(row["model"]), row["images"], *_percents(row), f"{epochs:.1f}", *_told(row)])
    return _table(table)


def cifar10(rows: Rows) -> str:
    table = [["layer", "test", "validation", *RUN]]
    table += [[_code(row["model"]), *_percents(row), *_told(row)] for row in rows]
    return CIFAR + "\n" + _table(table)


def imdb(rows: Rows) -> str:
    table = [["layer", "test", "validation", *RUN]]
    table += [[_code(row["model"]), *_percents(row), *_told(row)] for row in rows]
    return IMDB + "\n" + _table(table)


def enwik8(rows: Rows) -> str:
    table = [["model", "bits per byte", "validation", *RUN]]
    for row in rows:
        validation = f"{float(row['validation']):.3f}" if row.get("validation") else ""
        table.append([_code(row["model"]), f"{float(row['bits per byte']):.3f}", validation, *_told(row)])
    trained = any(row.get("steps") for row in rows)
    return ENWIK8 + "\n" + _table(table) + ("" if trained else "\nNo layer has been trained on it yet.\n")


def listops(rows: Rows) -> str:
    table = [["layer", "test", "validation", *RUN]]
    table += [[_code(row["model"]), *_percents(row), *_told(row)] for row in rows]
    return LISTOPS + "\n" + _table(table)


RUN = ("steps", "parameters", "minutes", "processor minutes", "load")  # of a run with a budget of minutes


def _told(row: dict[str, str]) -> list[str]:
    steps, parameters = (f"{int(row[name]):,}" if row.get(name) else "" for name in ("steps", "parameters"))
    minutes, processor = (
        f"{float(row[name]):.1f}" if row.get(name) else "" for name in ("minutes", "processor_minutes")
    )
    return [steps, parameters, minutes, processor, row["load"]]


def _percents(row: dict[str, str]) -> list[str]:
    return [f"{float(row[name]):.1%}" for name in ("accuracy", "validation")]


MAKERS: dict[str, Callable[[Rows], str]] = {
    "etth1": etth1,
    "intervals": intervals,
    "ucr": ucr,
    "digits": digits,
    "irregular": irregular,
    "mnist": mnist,
    "layers": layers,
    "cifar10": cifar10,
    "imdb": imdb,
    "enwik8": enwik8,
    "listops": listops,
}


def _each(rows: Rows, name: str) -> list[str]:
    """Return the values of a column, each once, in the order in which they came."""
    return list(dict.fromkeys(row[name] for row in rows))


def _of(rows: Rows, **key: str) -> Rows:
    return [row for row in rows if all(row[name] == value for name, value in key.items())]


def _numbers(rows: Rows, name: str) -> list[float]:
    return [float(row[name]) for row in rows if row.get(name)]


def _mean(rows: Rows, name: str, form: str) -> str:
    found = _numbers(rows, name)
    return format(fmean(found), form) if found else ""


def _pair(rows: Rows) -> str:
    return f"{_mean(rows, 'MSE', '.3f')} / {_mean(rows, 'MAE', '.3f')}" if rows else ""


def _code(name: str) -> str:
    """Print the name of a layer or a source as code, and other names as they are."""
    return f"`{name}`" if name.islower() and " " not in name else name


def _table(rows: Iterable[Sequence[str]]) -> str:
    head, *rest = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([head, "|" + "---|" * (head.count("|") - 1), *rest]) + "\n"
