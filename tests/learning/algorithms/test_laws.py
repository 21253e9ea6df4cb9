"""Laws of learning algorithms, over all that are registered. A new algorithm is tested by being in its folder."""

import copy

import pytest
import sympy
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from scanl.cli import main
from scanl.data.batch import Batch
from scanl.data.questions import Features, Numbers
from scanl.errors import ConfigError
from scanl.layers import state as states
from scanl.learning.algorithms import algorithms
from scanl.learning.questions import answerer
from scanl.models import PTNCN, AlignedStack, Stack
from scanl.models.dynamics import Dynamics
from scanl.models.ptncn import ptncn_loss

TASK = answerer(Numbers(Features(2), count=2))
B, T = 3, 4
LAYERS = (
    "mingru",
    "gru",
    "irnn",
    "elman",
    "lru",
    "columnar_constructive",
)  # the first that an algorithm works for is its layer here
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
def test_it_trains_by_command(name, tmp_path):
    options = "--accelerator cpu --dim 8 --depth 1 --steps 2 --eval-examples 4 --data capacity --data-options.length 20"
    if name in UNTRAINED:
        pytest.skip(UNTRAINED[name])
    _, model = case(name)
    layer = model.stack.mixers()[0].name
    command = ["train", *options.split(), "--layer", layer, "--algorithm", name, "--out", str(tmp_path / "run")]
    assert main(command) == 0
