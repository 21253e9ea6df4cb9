"""Laws of learning algorithms, over all that are registered. A new algorithm is tested by being in its folder."""

import copy

import pytest
import sympy
import torch
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.utils.flop_counter import FlopCounterMode

from scanl.cli import main
from scanl.data.batch import Batch
from scanl.data.questions import FeatureInputs, Numbers
from scanl.errors import ConfigError
from scanl.layers import state as states
from scanl.learning import TrainConfig
from scanl.learning.algorithms import BPTT, algorithms
from scanl.learning.questions import answerer
from scanl.learning.run.config import update_steps
from scanl.learning.run.run import Run
from scanl.models import PTNCN, AlignedStack, Stack
from scanl.models.whole.dynamics import Dynamics
from scanl.models.whole.ptncn import ptncn_loss

TASK = answerer(Numbers(FeatureInputs(2), count=2))
B, T = 3, 4
LAYERS = (
    "mingru", "gru", "irnn", "elman", "lru", "columnar_constructive",
)  # the first that an algorithm works for is its layer here  # fmt: skip
every_algorithm = pytest.mark.parametrize("name", algorithms.names())
pytestmark = pytest.mark.cells_by_loop

# Where a law cannot hold by what an algorithm is. An excuse without need fails.
CUT = {"bptt": "the gradient of an update ends at the state before it"}
SHARED = {"force": "the rows of a batch are one regression"}
UNTRAINED = {
    "force": "its answers are numbers, not labels; test_force.py trains it",
    "gtf": "its model is Dynamics, which is no stack; test_gtf.py trains it",
    "lra": "its model is over an AlignedStack, which no option names; test_lra.py trains it",
    "p_tncn": "its model is PTNCN, which is no stack; test_p_tncn.py trains it",
}


def dynamics_loss(model, batch, state):
    y, state = model(batch.inputs, state)
    return F.mse_loss(y, batch.targets), state


MODELS = {  # of algorithms that do not train stacks of layers: their losses, and what makes a tiny one
    "gtf": (dynamics_loss, lambda: Dynamics(2, 3)),
    "lra": (TASK.loss, lambda: TASK.model(AlignedStack(4, 2, std=0.5))),
    "p_tncn": (ptncn_loss, lambda: PTNCN(2, 4, 2)),
}


def case(name: str):
    """Return an algorithm with its defaults and a tiny model that it trains, in float64."""
    cls = algorithms.get(name)
    torch.manual_seed(0)
    if name in MODELS:
        loss, make = MODELS[name]
        return cls(loss), make().double()
    for layer in LAYERS:
        algorithm, model = cls(TASK.loss), TASK.model(Stack(4, 1, layer, channel_mixer="none")).double()
        try:
            algorithm.init(model, B)
        except ConfigError:
            continue
        return algorithm, model
    raise AssertionError(f"{name} works for none of {LAYERS}: add a layer that it works for")


def batches(count: int, rows: int = B) -> list[Batch]:
    draw = torch.Generator().manual_seed(1)
    numbers = torch.randn(2, rows, count * T, 2, generator=draw, dtype=torch.float64)
    return [Batch(*numbers[:, :, i * T : (i + 1) * T]) for i in range(count)]


def update(algorithm, model, learner, batch):
    """Make an update with the same random numbers every time, and return its loss, its gradients and the learner."""
    torch.manual_seed(2)
    model.zero_grad()
    loss, learner = algorithm.update(model, learner, batch)
    loss.backward()
    gradients = {key: each.grad.clone() for key, each in model.named_parameters() if each.grad is not None}
    return loss.detach(), gradients, learner


def learn(algorithm, model, parts, rows=B):
    """Return the gradient of the mean loss over all parts, and the learner."""
    learner, total = algorithm.init(model, rows), {}
    steps = sum(part.length for part in parts)
    for part in parts:
        _, gradients, learner = update(algorithm, model, learner, part)
        total = {key: total.get(key, 0) + each * part.length / steps for key, each in gradients.items()}
    return total, learner


def numbers(learner) -> int:
    return sum(leaf.numel() * (1 + leaf.is_complex()) for _, leaf in states.leaves(learner))


@every_algorithm
def test_a_learner_saved_and_restored_goes_on_to_the_bit(name, tmp_path):
    algorithm, model = case(name)
    first, second, third = batches(3)
    learner = algorithm.init(model, B)
    for part in (first, second):
        _, _, learner = update(algorithm, model, learner, part)
    states.save(learner, tmp_path / "learner")
    again, twin = case(name)
    restored = states.load(tmp_path / "learner", like=again.init(twin, B))
    loss, gradients, learner = update(algorithm, model, learner, third)
    same_loss, same, restored = update(again, twin, restored, third)
    assert torch.equal(loss, same_loss)
    assert gradients.keys() == same.keys()
    assert all(torch.equal(gradients[key], same[key]) for key in same)
    assert all(
        torch.equal(a, b) for (_, a), (_, b) in zip(states.leaves(learner), states.leaves(restored), strict=True)
    )


@every_algorithm
def test_a_learner_is_constant_in_size_and_as_large_as_its_memory_says_at_most(name):
    algorithm, model = case(name)
    formula = sympy.sympify(type(algorithm).memory)
    letters = {str(symbol) for symbol in formula.free_symbols}
    longest = int(max(algorithm.config.get(letter, 0) for letter in letters))  # a window of steps, for example
    learner, sizes = algorithm.init(model, B), []
    for part in batches(4 + longest // T):
        _, _, learner = update(algorithm, model, learner, part)
        sizes.append(numbers(learner))
    assert sizes[-1] == sizes[-3]
    known = {"B": B, "T": T, "d": 2, "e": numbers(model.init_state(1))}
    known["p"] = sum(parameter.numel() for parameter in model.parameters())  # of the recurrence, and a few more
    known |= {option: value for option, value in algorithm.config.items() if isinstance(value, int | float)}
    assert letters <= known.keys()
    assert sizes[-1] <= formula.subs(known)


@every_algorithm
def test_formulas_of_cost_are_in_known_letters_and_grow_with_the_batch(name):
    cls = algorithms.get(name)
    letters = {"B", "T", "d", "e", "p", *(cls.__signature__.parameters.keys() - {"loss"})}
    for text in (cls.memory, cls.operations):
        formula = sympy.sympify(text)
        assert {str(symbol) for symbol in formula.free_symbols} <= letters
        powers = [power for (power,) in sympy.Poly(formula, sympy.Symbol("B")).monoms()]
        assert powers == [1] or (text == cls.operations and set(powers) <= {1, 2})
    assert cls.computes in ("exact", "truncation", "estimate")
    assert all((cls.source, cls.equation, cls.id))
    assert cls.error or cls.computes == "exact"


@pytest.mark.parametrize("name", ["bptt", "diagonal_rtrl", "rtrl", "snap", "eprop", "uoro", "kfrtrl"])
def test_the_multiplications_grow_with_the_batch_as_the_formula(name):
    """Counted in products of matrices: they are in proportion to the rows, or grow faster where the formula has B²."""
    counts = []
    for rows in (1, 2, 4):
        algorithm, model = case(name)
        learner = algorithm.init(model, rows)
        with FlopCounterMode(display=False) as counter:
            update(algorithm, model, learner, batches(1, rows)[0])
        counts.append(counter.get_total_flops())
    faster = counts[2] - counts[1] > 2 * (counts[1] - counts[0])
    assert faster == (sympy.degree(sympy.sympify(algorithm.operations), sympy.Symbol("B")) > 1)


@pytest.mark.parametrize("name", [name for name in algorithms.names() if algorithms.get(name).computes == "exact"])
def test_the_sum_of_exact_gradients_does_not_depend_on_where_updates_end(name):
    """Of the parameters of the layer; those below it act on it through the input, which some algorithms leave out."""
    algorithm, model = case(name)
    parts = batches(3)
    whole = Batch(*(torch.cat([getattr(part, field) for part in parts], 1) for field in ("inputs", "targets")))
    single = [Batch(whole.inputs[:, t : t + 1], whole.targets[:, t : t + 1]) for t in range(3 * T)]
    expected, _ = learn(algorithm, model, [whole])
    errors = []
    for cuts in (parts, single):
        found, _ = learn(algorithm, model, cuts)
        inside = [key for key in expected if ".mixer." in key]
        errors += [((found[key] - expected[key]).abs().max() / expected[key].abs().max()).item() for key in inside]
    assert (max(errors) < 1e-9) != (name in CUT)


@every_algorithm
def test_rows_of_a_batch_are_independent(name):
    """The gradient of a batch is the mean of its rows' gradients, and the learner has each row's own."""
    algorithm, model = case(name)
    if algorithm.computes == "estimate":
        pytest.skip("the rows of a batch draw other random numbers than each row alone")
    parts = batches(3)
    total, learner = learn(algorithm, model, parts)
    mean, errors = dict.fromkeys(total, torch.zeros(())), []
    for row in range(B):
        alone = [Batch(part.inputs[row : row + 1], part.targets[row : row + 1]) for part in parts]
        gradients, single = learn(algorithm, copy.deepcopy(model), alone, rows=1)
        mean = {key: each + gradients[key] / B for key, each in mean.items()}
        pairs = zip(states.leaves(learner), states.leaves(single), strict=True)
        errors += [(mine[row] - own[0]).abs().max().item() for (_, mine), (_, own) in pairs if own.numel()]
    errors += [(total[key] - each).abs().max().item() for key, each in mean.items()]
    assert (max(errors) < 1e-9) != (name in SHARED)


@every_algorithm
@pytest.mark.usefixtures("empty_picture")
def test_it_trains_by_command(name, tmp_path):
    options = "--accelerator cpu --dim 8 --depth 1 --steps 2 --eval-examples 4 --data capacity --data-options.length 20"
    if name in UNTRAINED:
        pytest.skip(UNTRAINED[name])
    _, model = case(name)
    layer = model.stack.mixers()[0].name
    command = ["train", *options.split(), "--layer", layer, "--algorithm", name, "--out", str(tmp_path / "run")]
    assert main(command) == 0


# What a run learns from: an answer at every step, some of them missing; one at the end; one of rows that end early.
RUNS = {
    "each step": {"data": ["capacity"], "data_options": {"length": 20}},
    "the end": {"data": ["adding"], "data_options": {"length": 5}},
    "a mask": {"data": ["listops"], "data_options": {"length": 8, "least": 1}},
}
STEPS = slice(17, 23)  # of `capacity`, whose targets begin at step 20
# Those that have the gradient of backpropagation in the layer: `ccn` of the stage that learns, `tbptt` for sequences
# that are no longer than its window, and the last two up to their iterations.
EXACT = ("bptt", "ccn", "diagonal_rtrl", "online_lru", "rtrl", "tbptt")
CLOSE = (*EXACT, "lifted", "predictive_coding")
# What an algorithm does not learn, by its definition; all others learn all three runs.
REFUSED = {
    "ccn": {"a mask"},
    "cg_rbp": {"the end", "a mask"},
    "diagonal_rtrl": {"a mask"},
    "force": {"the end", "a mask"},
    "gtf": {*RUNS},
    "kfrtrl": {"the end", "a mask"},
    "lifted": {"the end", "a mask"},
    "local_propagation": {"the end", "a mask"},
    "lra": {*RUNS},
    "neumann_rbp": {"the end", "a mask"},
    "online_lru": {"a mask"},
    "p_tncn": {*RUNS},
    "predictive_coding": {"the end", "a mask"},
    "rbp": {"the end", "a mask"},
    "rflo": {"the end", "a mask"},
}
LEARNED = ("gru", "elman", "lru", "columnar_constructive")  # the first that an algorithm works for; dense ones first


def begun(name: str, kind: str) -> Run:
    """Return a run of the first layer that the algorithm works for, before its first step."""
    refusal = ConfigError("no layer")
    for layer in LEARNED:
        stack = {"layer": layer, "dim": 4, "depth": 1, "channel_mixer": "none"}
        try:
            return Run(TrainConfig.of(**RUNS[kind], **stack, algorithm=name, steps=1))
        except ConfigError as error:
            refusal = error
    raise refusal


def present(batch: Batch) -> int:
    """Return how many answers a batch has."""
    if batch.weights is not None:
        return int((batch.weights > 0).sum())
    return int(batch.targets.isfinite().sum()) if batch.answered_each_step else batch.size


@every_algorithm
@pytest.mark.parametrize("kind", RUNS)
def test_a_run_learns_by_the_algorithm_or_refuses_before_it_begins(name, kind):
    """By the mean over all answers of the updates' gradients, with constant parameters, in float64."""
    if kind in REFUSED.get(name, ()):
        with pytest.raises(ConfigError) as refusal:
            begun(name, kind)
        assert "\n" not in str(refusal.value)
        return
    run = begun(name, kind)
    model, batch = run.model.double(), run.source.batch(0, B).tensors()
    if kind == "each step":
        batch = batch.steps(STEPS.start, STEPS.stop, targets=True)
    steps, algorithm = update_steps(run.config, run.algorithm), run.algorithm
    parts = [batch] if steps is None else list(batch.parts(steps, gradual=algorithm.gradual))
    found, learner, total = {}, algorithm.init(model, B), sum(map(present, parts))
    for part in parts:
        _, gradients, learner = update(algorithm, model, learner, part)
        if present(part):
            found = {key: found.get(key, 0) + each * present(part) / total for key, each in gradients.items()}
    assert all(each.isfinite().all() for each in found.values())
    exact = BPTT(answerer(run.source.question).objective)
    _, expected, _ = update(exact, model, exact.init(model, B), batch)
    inside = [key for key in expected if ".mixer." in key]
    lacking = torch.zeros((), dtype=torch.float64)
    error = max(
        (found.get(key, lacking) - expected[key]).norm() / expected[key].norm().clamp(min=1e-12) for key in inside
    )
    assert (error < 1e-3) == (name in CLOSE)
    assert (error < 1e-12) == (name in EXACT)


@pytest.mark.parametrize("name", ["diagonal_rtrl", "eprop", "fptt", "online_lru", "rtrl", "snap", "tbptt", "uoro"])
def test_a_pruned_model_learns_as_one_with_that_weight(name):
    """In a recurrence of channels alone, where all but `uoro` are exact; a weight that was pruned gets no gradient."""
    algorithm = algorithms.get(name)(TASK.loss)
    model, (batch,) = TASK.model(Stack(4, 1, "mingru", channel_mixer="none")).double(), batches(1)
    pruned = next(module for module in model.stack.mixers()[0].modules() if isinstance(module, torch.nn.Linear))
    prune.random_unstructured(pruned, "weight", 0.5)
    _, expected, _ = update(BPTT(TASK.loss), model, None, batch)
    parts = [batch] if name in ("fptt", "uoro") else list(batch.parts(1))
    found, _ = learn(algorithm, model, parts)
    for key in expected:
        if ".mixer." in key:
            torch.testing.assert_close(found[key], expected[key], rtol=0, atol=1e-12)
    assert not found["stack.blocks.0.mixer." + _weight(model)][pruned.weight_mask == 0].any()


def _weight(model) -> str:
    return next(name for name, _ in model.stack.mixers()[0].named_parameters() if name.endswith("weight_orig"))


def test_algorithms_that_write_a_pruned_weight_refuse_it():
    model = TASK.model(Stack(4, 1, "elman"))
    prune.random_unstructured(model.stack.mixers()[0], "weight_hh_l0", 0.5)
    with pytest.raises(ConfigError, match="kfrtrl: weight_hh_l0 of elman is not a parameter"):
        algorithms.get("kfrtrl")(TASK.loss).init(model, 2)
    prune.random_unstructured(model.head, "weight", 0.5)
    with pytest.raises(ConfigError, match="force: the weight of the model's head is computed, as after pruning"):
        algorithms.get("force")(TASK.loss).init(model, 2)


@every_algorithm
def test_new_sequences_keep_what_the_class_declares_and_begin_all_else(name):
    algorithm, model = case(name)
    (batch,) = batches(1)
    learner = algorithm.init(model, B)
    for part in batch.parts(2):
        _, _, learner = update(algorithm, model, learner, part)
    torch.manual_seed(3)
    renewed = algorithm.renew(model, learner, 2)
    torch.manual_seed(3)
    fresh = algorithm.init(model, 2)
    assert set(algorithm.outlives) <= set(getattr(learner, "_fields", ()))
    for path, leaf in states.leaves(renewed):
        kept = path.split(".")[1:2] and path.split(".")[1] in algorithm.outlives
        source = dict(states.leaves(learner if kept else fresh))[path]
        assert torch.equal(leaf, source[:1].expand(2, *source.shape[1:]) if kept else source)
