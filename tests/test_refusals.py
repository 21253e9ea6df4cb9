"""Seeds, counts and numbers that no function can use are refused in one line; those that it can use are used."""

import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from scanl import layers, tasks
from scanl.data import questions
from scanl.data.base import IGNORED
from scanl.data.batch import Batch
from scanl.errors import ConfigError, DataError, DivergenceError, ShapeError
from scanl.inspect.reconstruction import waves
from scanl.learning.questions import answerer
from scanl.models import (
    Channels,
    Features,
    Forecaster,
    LanguageModel,
    Policy,
    SequenceClassifier,
    SequenceLabeler,
    SequenceRegressor,
    SeriesColumns,
    Stack,
    Tokens,
    caduceus,
)
from scanl.models.whole.dna import complement, encode

torch.manual_seed(0)
LM = LanguageModel(256, Stack(8, 1, "lru")).eval()
DRAWS = Forecaster(2, Stack(8, 1, "lru"), recursive=True).eval()
PROMPT, X = torch.tensor([[1, 2, 3]]), torch.zeros(1, 3, 1)
POLICY = Policy(SequenceLabeler(3, Stack(8, 1, "lru"), Features(5)))


class Corridor:
    """An environment that lasts six steps and pays the action."""

    def reset(self, *, seed=None):
        self.left, self.seed = 6, seed
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.left -= 1
        return np.zeros(1, np.float32), float(action), self.left == 0, False, {}


SEEDED = {
    "generate": lambda seed: torch.stack(list(LM.generate(PROMPT, max_new_tokens=8, seed=seed))),
    "generate numbers": lambda seed: torch.stack(list(DRAWS.generate(X, max_steps=8, seed=seed))),
    "predict": lambda seed: DRAWS.predict(X, paths=5, seed=seed)[0].quantiles,
    "play": lambda seed: torch.tensor(POLICY.play(Corridor(), 9.0, seed=seed)),
    "waves": lambda seed: waves(50, seed),
    "task": lambda seed: torch.from_numpy(tasks.build("copy").generate(3, seed).inputs),
    "wiring": lambda seed: torch.cat([each.flatten() for each in layers.build("cfc_ncp", dim=4, seed=seed).buffers()]),
}


@pytest.mark.parametrize("who", SEEDED)
def test_a_seed_is_a_whole_number_of_any_kind(who):
    """Also one of NumPy or of a tensor: it draws as the int does, and the global generator stays out of it."""
    draw = SEEDED[who]
    expected = draw(3)
    for seed in (np.int64(3), np.uint8(3), torch.tensor(3), np.array(3)):
        torch.manual_seed(int(torch.randint(1000, ())))
        assert torch.equal(draw(seed), expected)
    assert who == "play" or not torch.equal(draw(4), expected)
    for wrong in (2.5, np.float64(3), "3", torch.tensor(3.0), torch.tensor([1, 2]), -1, 2**64, math.nan):
        with pytest.raises(ConfigError, match=r"seed is .*, expected "):
            draw(wrong)


def test_a_generator_is_a_seed_too():
    one, two = (LM.generate(PROMPT, max_new_tokens=8, seed=torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(torch.stack(list(one)), torch.stack(list(two)))


@pytest.mark.parametrize("most", [-1, 2.5, "3", np.float32(2), True, torch.tensor(1.5), math.inf])
def test_a_number_of_steps_is_a_whole_number(most):
    if most is True:
        assert len(list(LM.generate(PROMPT, max_new_tokens=most))) == 1
        return
    for call, name in (
        (lambda: LM.generate(PROMPT, max_new_tokens=most), "generate: max_new_tokens"),
        (lambda: DRAWS.generate(X, max_steps=most), "generate: max_steps"),
        (lambda: DRAWS.predict(X, paths=most), "forecaster: paths"),
        (lambda: POLICY.play(Corridor(), 1.0, max_steps=most), "policy: max_steps"),
        (lambda: LM.generate(PROMPT, max_new_tokens=1, top_k=most), "generate: top_k"),
    ):
        with pytest.raises(ConfigError, match=f"{name} is .*, expected "):
            call()


def test_some_steps_and_none():
    assert len(list(LM.generate(PROMPT, max_new_tokens=np.int64(3)))) == 3
    assert list(LM.generate(PROMPT, max_new_tokens=0)) == list(DRAWS.generate(X, max_steps=0)) == []


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
def test_tokens_of_any_integer_dtype(dtype):
    """A model of bytes takes bytes."""
    narrow = PROMPT.to(dtype)
    assert torch.equal(LM(narrow)[0], LM(PROMPT)[0])
    one, two = (torch.stack(list(LM.generate(p, max_new_tokens=4, seed=0))) for p in (narrow, PROMPT))
    assert torch.equal(one, two)
    mask = torch.tensor([[False, True, True]])
    assert torch.equal(LM(narrow, mask=mask)[0], LM(PROMPT, mask=mask)[0])
    classes = SequenceClassifier(3, Stack(8, 1, "lru"), Tokens(9)).eval()
    assert torch.equal(classes(narrow)[0], classes(PROMPT)[0])
    bases = encode("ACGTNACC")[None]
    assert torch.equal(complement(bases.to(dtype)), complement(bases))
    both = caduceus(8, 1).eval()
    assert torch.equal(both(bases.to(dtype)), both(bases))


@pytest.mark.parametrize("wrong", [torch.ones(1, 3).bool(), torch.ones(1, 3) * 1j, torch.ones(1, 3)])
def test_tokens_are_integers(wrong):
    for model in (LM, caduceus(8, 1), SequenceClassifier(3, Stack(8, 1, "lru"), Tokens(9))):
        with pytest.raises(ShapeError, match=r"is torch\.\w+ \(1, 3\), expected integers \(B, T\)"):
            model(wrong)


@pytest.mark.parametrize(("value", "what"), [([[1, 2]], "a list"), (np.zeros((1, 2)), "an array of NumPy")])
def test_what_is_no_tensor_is_refused(value, what):
    features = SequenceRegressor(1, Stack(8, 1, "lru"), Features(1))
    calls = [
        lambda: LM(value), lambda: LM.generate(value), lambda: caduceus(8, 1)(value), lambda: features(value),
        lambda: DRAWS(value), lambda: DRAWS.predict(value), lambda: DRAWS.generate(value),
        lambda: Forecaster(2, Stack(8, 1, "lru"), Channels(static=1))(X, static=value),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(ShapeError, match=f"is {what}, expected a tensor"):
            call()


@pytest.mark.parametrize("distribution", ["points", "quantiles", "gaussian", "student_t", "negative_binomial"])
def test_a_forecaster_refuses_an_infinite_number(distribution):
    model = Forecaster(2, Stack(8, 1, "lru"), Channels(past=1, static=1, future=1), distribution=distribution)
    shapes = {"x": (1, 4, 1), "past": (1, 4, 1), "static": (1, 1), "future": (1, 6, 1), "targets": (1, 4, 2, 1)}
    for infinite in (math.inf, -math.inf):
        for name in shapes:
            given = {each: torch.zeros(shape) for each, shape in shapes.items()}
            given[name].flatten()[0] = infinite
            *columns, targets = given.values()
            with pytest.raises(ShapeError, match=f"forecaster: {name} has an infinite number"):
                model.loss(SeriesColumns(*columns), targets)
    x, *others, _ = map(torch.zeros, shapes.values())
    x[0, 0, 0] = math.inf
    with pytest.raises(ShapeError, match="forecaster: x has an infinite number, expected finite ones, and NaN where"):
        model.predict(SeriesColumns(x, *others))


@pytest.mark.parametrize("odd", [-1.0, 0.5, -0.25, 1e9 + 0.5])
def test_counts_are_whole_numbers_of_at_least_0(odd):
    model = Forecaster(2, Stack(8, 1, "lru"), distribution="negative_binomial").double()
    regressor = SequenceRegressor(1, Stack(8, 1, "lru"), Features(1), distribution="negative_binomial").double()
    x, targets = torch.zeros(1, 4, 1).double(), torch.full((1, 4, 2, 1), math.nan).double()
    targets[0, 1, 1] = odd
    with pytest.raises(
        ShapeError, match=r"targets has .*, expected counts 0, 1, 2, ... because the distribution is neg"
    ):
        model.loss(x, targets)
    with pytest.raises(ShapeError, match=r"regressor: targets has .*, expected counts"):
        regressor.loss(x, targets[:, 1, 1])
    with pytest.raises(ShapeError, match=r"forecaster: x has .*, expected counts"):
        model.predict(torch.full((1, 4, 1), odd, dtype=torch.float64))


FEATURES = torch.randn(2, 5, 3)
COLUMNS = SeriesColumns(FEATURES[..., :1], FEATURES[..., :0], FEATURES[:, 0, :0], torch.zeros(2, 7, 0))
UNANSWERED = {
    "label": (questions.Label(questions.FeatureInputs(3), 4), FEATURES, torch.full((2, 5), IGNORED)),
    "label of tokens": (questions.TokenLabel(questions.Vocabulary(7)), PROMPT, torch.full((1, 3), IGNORED)),
    "next token": (questions.NextToken(questions.Vocabulary(7)), PROMPT, torch.full((1, 3), IGNORED)),
    "numbers": (questions.Numbers(questions.FeatureInputs(3), 2), FEATURES, torch.full((2, 5, 2), math.nan)),
    "flags": (
        questions.Flags(questions.FeatureInputs(3), 2), FEATURES, torch.full((2, 5, 2), math.nan),
    ),
    "forecast": (questions.ForecastQuestion(2), COLUMNS, torch.full((2, 5, 2, 1), math.nan)),
}  # fmt: skip


@pytest.mark.parametrize("kind", UNANSWERED)
def test_a_batch_without_an_answer_has_no_loss_and_no_gradient(kind):
    question, inputs, targets = UNANSWERED[kind]
    model = answerer(question).model(Stack(8, 1, "lru"), {})
    found = answerer(question).loss(model, Batch(inputs, targets))[0]
    assert found == 0
    found.backward()
    assert not any(p.grad.any() for p in model.parameters() if p.grad is not None)


def test_the_loss_is_the_mean_over_the_answers():
    question, inputs, targets = UNANSWERED["label"]
    model = answerer(question).model(Stack(8, 1, "lru"), {})
    targets = targets.clone()
    targets[0, 1], targets[1, 3] = 2, 0
    log = model(inputs)[0].double().log_softmax(-1)
    expected = -(log[0, 1, 2] + log[1, 3, 0]) / 2
    torch.testing.assert_close(answerer(question).loss(model, Batch(inputs, targets))[0].double(), expected)
    question, inputs, targets = UNANSWERED["flags"]
    model = answerer(question).model(Stack(8, 1, "lru"), {})
    targets = targets.clone()
    targets[0, 1, 1], targets[1, 3, 0] = 1, 0
    logits = model(inputs)[0].double()
    expected = -(F.logsigmoid(logits[0, 1, 1]) + F.logsigmoid(-logits[1, 3, 0])) / 2
    torch.testing.assert_close(answerer(question).loss(model, Batch(inputs, targets))[0].double(), expected)


def test_compiled_kernels_do_not_need_numbas_switch(capsys):
    """NUMBA_DISABLE_JIT is of the user's own functions; kernels give the same numbers with it."""
    pytest.importorskip("numba", reason="numba is not installed: pip install 'scanl[cpu]'")
    program = (
        "import torch, scanl; torch.manual_seed(0); m = scanl.layers.build('lru', dim=8); x = torch.randn(1, 5, 8);"
        "y = m(x)[0]; y.sum().backward(); g = scanl.layers.build('gru', dim=8);"
        "print(y.sum().item(), g(x)[0].sum().item())"
    )
    paths = os.pathsep.join([str(Path(__file__).parents[1] / "src"), os.environ.get("PYTHONPATH", "")])
    found = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": paths, "NUMBA_DISABLE_JIT": "1"},
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    exec(program, {})
    assert found == capsys.readouterr().out != ""


@pytest.mark.long  # Matplotlib looks for its fonts anew
def test_no_message_of_matplotlib_is_before_a_refusal(tmp_path):
    """Lightning imports Matplotlib, which warns when it cannot write to the home directory."""
    (tmp_path / "t.txt").write_text("words and words " * 500)
    command = [
        sys.executable,
        "-m",
        "scanl.cli",
        "train",
        "--data",
        str(tmp_path / "t.txt"),
        "--precision",
        "none",
        "--steps",
        "1",
    ]
    home = {"HOME": "/proc/none", "XDG_CACHE_HOME": "", "XDG_CONFIG_HOME": ""}
    paths = os.pathsep.join([str(Path(__file__).parents[1] / "src"), os.environ.get("PYTHONPATH", "")])
    given = {name: value for name, value in os.environ.items() if name != "MPLCONFIGDIR"}
    ended = subprocess.run(
        [*command, "--layer", "lru", "--dim", "8", "--accelerator", "cpu", "--out", str(tmp_path / "run")],
        env={**given, **home, "PYTHONPATH": paths}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 2
    lines = [line for line in ended.stderr.splitlines() if not line.startswith(("nanobind", " - "))]
    assert len([line for line in lines if "atplotlib" in line or "mkdir" in line]) == 0
    assert lines[0].startswith("scanl: train: ")


sklearn = pytest.importorskip("sklearn", reason="scikit-learn is not installed: pip install 'scanl[sklearn]'")
pd = pytest.importorskip("pandas", reason="pandas is not installed: pip install 'scanl[series]'")

from scanl.learning.estimators import SeriesClassifier, SeriesRegressor  # noqa: E402
from scanl.learning.forecasting.frames import Frames  # noqa: E402

SMALL = {"layer": "lru", "dim": 8, "steps": 2}
TRAINED = {"method": "stack", **SMALL}
ROWS = np.random.default_rng(0).normal(size=(12, 6))
FRAME = pd.DataFrame({"unique_id": "a", "ds": pd.date_range("2024-01-01", periods=40), "y": np.arange(40.0)})


def fits(dropout=0.0, **options):
    options, stack = {**SMALL, **options}, {"dropout": dropout}
    yield lambda: SeriesClassifier(method="stack", **options, stack_options=stack).fit(ROWS, np.arange(12) % 2)
    yield lambda: SeriesRegressor(method="stack", **options, stack_options=stack).fit(ROWS, ROWS[:, 0])
    yield lambda: Frames(2, season=1, **options, **stack).fit(FRAME)


def test_fit_leaves_the_global_generator_alone():
    for fit in fits(dropout=0.1, random_state=7):
        torch.manual_seed(11)
        expected = torch.rand(4)
        torch.manual_seed(11)
        one = fit()
        assert torch.equal(torch.rand(4), expected)
        torch.manual_seed(12)
        two = fit()
        models = [each.model if isinstance(each, Frames) else each.model_ for each in (one, two)]
        for a, b in zip(*(model.parameters() for model in models), strict=True):
            assert torch.equal(a, b)


def test_a_seed_of_an_estimator_is_a_whole_number():
    for wrong in (2.5, "3", -1):
        for fit in fits(random_state=wrong):
            with pytest.raises(ConfigError, match=r"random_state is .*, expected "):
                fit()
    with pytest.raises(ConfigError, match="random_state is None, expected a whole number of at least 0"):
        Frames(2, season=1, **SMALL, random_state=None).fit(FRAME)
    for fit in fits(random_state=np.int64(3)):
        fit()


@pytest.mark.parametrize("name", ["steps", "batch_size"])
@pytest.mark.parametrize("wrong", [0, -1, 2.5, "3"])
def test_sizes_of_training_are_whole_numbers(name, wrong):
    for fit in fits(**{name: wrong}):
        with pytest.raises(ConfigError, match=f"{name} is {wrong!r}, expected a whole number of at least 1"):
            fit()


@pytest.mark.parametrize("lr", [1e2, 1e30])
def test_a_fit_that_diverges_says_so(lr):
    for fit in fits(lr=lr, steps=60, depth=2):
        try:
            fitted = fit()
        except DivergenceError as error:
            assert "try a smaller lr" in str(error)  # noqa: PT017
            continue
        found = fitted.predict() if isinstance(fitted, Frames) else fitted.predict(ROWS)
        numbers = found["scanl"] if isinstance(fitted, Frames) else found
        assert np.isfinite(numbers).all()


def test_a_loss_that_is_not_finite_ends_a_fit(monkeypatch):
    monkeypatch.setattr(F, "cross_entropy", lambda outputs, *_, **__: outputs.sum() * math.nan)
    with pytest.raises(DivergenceError, match="fit: the loss is nan at step 1; try a smaller lr"):
        next(fits())()


def test_lists_of_series():
    """Nested lists are series as arrays are; of unequal lengths, or of unequal channels, they are refused."""
    y = np.arange(12) % 2
    one, two = (SeriesClassifier(**TRAINED).fit(rows, y).predict_proba(rows) for rows in (ROWS, ROWS.tolist()))
    np.testing.assert_array_equal(one, two)
    unequal = [row[: 4 + i % 3] for i, row in enumerate(ROWS)]
    for rows in (unequal, [row.tolist() for row in unequal], tuple(unequal)):
        for kind in (SeriesClassifier, SeriesRegressor):
            with pytest.raises(
                DataError, match="X has series of 4 to 6 steps, expected one shape, not 3; let the shorter"
            ):
                kind(**TRAINED).fit(rows, y)
        with pytest.raises(DataError, match="X has series of 4 to 6 steps"):
            SeriesClassifier(**TRAINED).fit(ROWS, y).predict(rows)
    with pytest.raises(DataError, match="has steps of different channels"):
        SeriesClassifier(**TRAINED).fit([[[1.0, 2.0], [1.0]]] * 12, y)


def test_a_frame_is_a_frame():
    for wrong, kind in (
        ([1.0, 2.0], "list"),
        (np.zeros((3, 3)), "ndarray"),
        ({"y": [1.0]}, "dict"),
        (FRAME.y, "Series"),
    ):
        with pytest.raises(DataError, match=f"frames: df is of type {kind}, expected a DataFrame of pandas"):
            Frames(2).fit(wrong)


@pytest.mark.parametrize("odd", [-2.0, 0.5])
def test_counts_of_a_frame(odd):
    frame = FRAME.assign(y=FRAME.y.where(FRAME.index != 5, odd))
    with pytest.raises(DataError, match=f"the target of series 'a' is {odd:g}, expected counts 0, 1, 2, ... because"):
        Frames(2, distribution="negative_binomial", **SMALL).fit(frame)
