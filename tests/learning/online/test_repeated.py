"""Learners whose answers and updates become kernels: against the same learners, operation by operation."""

import copy
import math

import pytest
import torch
from torch import nn

import scanl
from scanl.learning.online import Online
from scanl.learning.online.flat import Flat, can_be_flat
from scanl.learning.online.repeated import FORMS, RepeatedFunction
from scanl.learning.optimizers import AdamW, Lion, Muon
from scanl.models import Stack

COVERS = ["learning/online/flat"]


def loop_of(compile_after, layer="lru", algorithm="online_lru", dim=4, dropout=0.0, layer_options=None, **options):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        stack = Stack(dim, 1, layer, channel_mixer="none", layer_options=layer_options or {}, dropout=dropout)
        learner = Online(stack, lr=1e-2, algorithm=algorithm, compile_after=compile_after, **options)
    return learner.begin(1)


def decaying(compile_after):
    return loop_of(compile_after, clip=0.1, weight_decay=0.1)


def run(loop, start, end):
    answers = []
    for t in range(start, end):
        answers.append(loop.answer([math.sin(0.5 * t)]))
        loop.learn(math.sin(0.5 * t + 0.5))
    return answers


def test_within_exact_nothing_is_a_kernel():
    with scanl.exact():
        assert run(decaying(2), 0, 6) == run(decaying(None), 0, 6)


def test_kernels_answer_and_learn_as_operation_by_operation():
    kernels, operations = decaying(6), decaying(None)
    before, exact = run(kernels, 0, 3), run(operations, 0, 6)
    for _ in range(4):  # which are no answers, and do not count
        kernels.peek([0.3])
    before += run(kernels, 3, 6)
    assert before == exact
    answers, expected = run(kernels, 6, 16), run(operations, 6, 16)
    assert answers != expected  # rounding tells that they are kernels
    # Ten steps of the optimizer, each of which moves a weight by up to the rate, whatever the gradient's rounding
    assert max(abs(a - b) for a, b in zip(answers, expected, strict=True)) < 1e-4
    (learner,) = kernels.bank.learners
    assert learner.reasons == []

    resumed = decaying(6)
    resumed.load_state_dict(copy.deepcopy(kernels.state_dict()))
    peeked = kernels.peek([0.3])
    assert resumed.peek([0.3]) == peeked
    stored = copy.deepcopy(kernels.state_dict())
    expected = run(kernels, 16, 20)
    assert run(resumed, 16, 20) == expected
    kernels.load_state_dict(stored)  # its kernels have the places of another state
    assert run(kernels, 16, 20) == expected


def test_a_function_of_ever_other_forms_runs_operation_by_operation():
    twice = RepeatedFunction(lambda x, state: (2 * x, state), after=0)
    for size in range(1, FORMS + 1):
        twice.kernels[((torch.Size([size]), torch.float32),)] = lambda x, state: (-x, state)
    assert twice(torch.ones(1))[0].tolist() == [-1]
    assert twice(torch.ones(FORMS + 1))[0].tolist() == [2] * (FORMS + 1)
    assert twice.reason == f"its inputs had {FORMS} forms, and have another one"
    assert twice(torch.ones(1))[0].tolist() == [2]


def test_a_state_may_come_from_elsewhere_and_must_keep_its_form():
    total = RepeatedFunction(lambda x, state: (state["sum"] * 2, {"sum": state["sum"] + x}), after=0)
    _, one = total(torch.ones(2), state={"sum": torch.zeros(2)})
    _, two = total(torch.ones(2), state=one)
    assert one["sum"].tolist() == [1, 1]
    assert two["sum"].tolist() == [2, 2]
    result, three = total(torch.ones(2), state={"sum": torch.full((2,), 5.0)})
    assert result.tolist() == [10, 10]
    assert three["sum"].tolist() == [6, 6]
    grows = RepeatedFunction(lambda x, state: (x, torch.cat([state, x])), after=0)
    assert grows(torch.ones(1), state=torch.ones(1))[1].tolist() == [1, 1]
    assert grows.reason == "the state that it returns has another form"


def test_a_kernel_is_for_one_value_of_the_constants():
    factor = [2.0]
    scaled = RepeatedFunction(lambda x, state: (x * factor[0], state), after=0, constants=lambda: list(factor))
    assert scaled(torch.ones(1))[0].item() == 2
    factor[0] = 3.0
    assert scaled(torch.ones(1))[0].item() == 3


def two(make=lambda model: AdamW(model, 1e-2, 0.1)):
    """Return a model, a copy of it, and optimizers of both."""
    torch.manual_seed(0)
    apart = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2), nn.Linear(2, 2))
    together = copy.deepcopy(apart)
    return apart, together, make(apart), make(together)


@pytest.mark.parametrize(
    "make",
    [
        lambda model: AdamW(model, 1e-2, 0.1),
        lambda model: Lion(model, 1e-2, 0.1),
        lambda model: torch.optim.Adam(model.parameters(), 1e-2, weight_decay=0.1, fused=True),
    ],
)
def test_a_step_of_an_optimizer_is_a_kernel(make):
    apart, together, one, other = two(make)
    kernel = RepeatedFunction(lambda state: (other.step(),), after=1)
    for _ in range(5):
        for mine, parameter in zip(together.parameters(), apart.parameters(), strict=True):
            parameter.grad = torch.randn_like(parameter)
            mine.grad = parameter.grad.clone() if mine.grad is None else mine.grad.copy_(parameter.grad)
        one.step()
        kernel()
    assert kernel.reason is None
    assert kernel.calls == 5
    eps = torch.finfo(torch.float32).eps
    for mine, parameter in zip(together.parameters(), apart.parameters(), strict=True):
        torch.testing.assert_close(mine, parameter, rtol=16 * eps, atol=16 * eps)
        for name, value in one.state[parameter].items():
            torch.testing.assert_close(other.state[mine][name], value, rtol=16 * eps, atol=16 * eps)


def test_flat_parameters_learn_as_they_do_apart():
    apart, together, one, other = two()
    flat = Flat(other, [parameter for layer in list(together)[:2] for parameter in layer.parameters()])
    assert len(other.param_groups) == len(one.param_groups)
    assert max(len(group["params"]) for group in other.param_groups) == 1
    x = torch.randn(4, 3)
    for step in range(6):
        apart.zero_grad()
        apart[1](apart[0](x)).square().sum().backward()
        for mine, parameter in zip(together.parameters(), apart.parameters(), strict=True):
            if mine in flat.gradients:
                flat.gradients[mine].copy_(parameter.grad)
        one.step()
        other.step()
        if step == 3:
            flat.undo()  # the last steps are those of the parameters one by one, with their moments
            for mine, gradient in flat.gradients.items():
                mine.grad = gradient
    for mine, parameter in zip(together.parameters(), apart.parameters(), strict=True):
        torch.testing.assert_close(mine, parameter, rtol=8 * torch.finfo(mine.dtype).eps, atol=0)
    assert [len(group["params"]) for group in other.param_groups] == [len(g["params"]) for g in one.param_groups]
    assert other.state_dict()["state"].keys() == one.state_dict()["state"].keys()


def test_what_is_not_flat_has_gradients_of_its_own():
    model = nn.Linear(3, 2)
    assert not can_be_flat(Muon(model, 1e-2, 0.0))
    narrow = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2).bfloat16())
    assert not can_be_flat(torch.optim.SGD(narrow.parameters(), 0.1))
    gradients = Flat(Muon(model, 1e-2, 0.0), list(model.parameters())).gradients
    assert all(parameter.grad is gradients[parameter] for parameter in model.parameters())
    head = torch.optim.SGD([model.bias], 0.1)  # of one's own, which leaves a parameter out
    assert Flat(head, list(model.parameters())).gradients.keys() == set(model.parameters())
    assert head.param_groups[0]["params"][0].shape == (2,)


def staged(compile_after=None):
    form = {"layer": "columnar_constructive", "dim": 6, "layer_options": {"columns": 2}}
    return loop_of(compile_after, algorithm="ccn", algorithm_options={"stage_updates": 4}, **form)


@pytest.mark.parametrize("compile_after", [None, 6])
def test_parameters_that_cease_to_learn_stay_and_others_begin(compile_after):
    """A stage of columns is constant after its updates, whatever its moments are."""
    loop = staged(compile_after)
    (learner,) = loop.bank.learners
    first, second, third = learner.model.stack.mixers()[0].stages
    run(loop, 0, 5)  # the first truth makes no step
    weights = [parameter.clone() for parameter in first.parameters()]
    others = [parameter.clone() for parameter in second.parameters()]
    run(loop, 5, 9)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), weights, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(second.parameters(), others, strict=True))
    resumed = staged(compile_after)
    resumed.load_state_dict(copy.deepcopy(loop.state_dict()))
    weights = [parameter.clone() for parameter in second.parameters()]
    assert run(resumed, 9, 12) == run(loop, 9, 12)
    assert all(torch.equal(a, b) for a, b in zip(second.parameters(), weights, strict=True))
    assert not all(
        torch.equal(a, b)
        for a, b in zip(
            third.parameters(), staged().bank.learners[0].model.stack.mixers()[0].stages[2].parameters(), strict=True
        )
    )


def test_a_step_of_another_optimizer_is_no_kernel():
    loop = loop_of(1, optimizer="muon")
    (learner,) = loop.bank.learners
    assert learner.reasons == ["a step of Muon"]
    (never,) = loop_of(None, optimizer="muon").bank.learners
    assert never.reasons == []


def test_the_reason_is_told():
    loop = loop_of(1, algorithm="bptt", dropout=0.5)
    run(loop, 0, 3)
    (learner,) = loop.bank.learners
    (reason,) = learner.reasons
    assert reason.startswith("no kernel computes ")
