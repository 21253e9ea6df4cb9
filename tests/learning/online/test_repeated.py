"""Learners whose answers and updates become kernels: against the same learners, operation by operation."""

import copy
import math

import torch
from torch import nn

from scanl.learning.online import AnswerNumbers, make_loop
from scanl.learning.online.flat import flatten
from scanl.learning.online.repeated import FORMS, Repeated
from scanl.learning.optimizers import AdamW, Muon
from scanl.learning.run.config import StackConfig

COVERS = ["learning/online/flat"]


def loop_of(compile_after, layer="lru", **options):
    stack = StackConfig(layer=layer, dim=4, depth=1, channel_mixer="none")
    return make_loop(
        AnswerNumbers(1, 10_000, feedback=True), 1, stack, algorithm="online_lru", lr=[1e-2], clip=0.1,
        weight_decay=0.1, compile_after=compile_after, **options,
    )  # fmt: skip


def run(loop, start, end):
    answers = []
    for t in range(start, end):
        answers.append(loop.answer([math.sin(0.5 * t)]))
        loop.learn(math.sin(0.5 * t + 0.5))
    return answers


def test_kernels_answer_and_learn_as_operation_by_operation():
    kernels, operations = loop_of(6), loop_of(None)
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

    resumed = loop_of(6)
    resumed.load_state_dict(copy.deepcopy(kernels.state_dict()))
    peeked = kernels.peek([0.3])
    assert resumed.peek([0.3]) == peeked
    assert run(resumed, 16, 20) == run(kernels, 16, 20)


def test_a_function_of_ever_other_forms_runs_operation_by_operation():
    twice = Repeated(lambda x: 2 * x, after=0)
    for size in range(1, FORMS + 1):
        twice.kernels[(torch.Size([size]),)] = lambda x: -x
    assert twice(torch.ones(1)).tolist() == [-1]
    assert twice(torch.ones(FORMS + 1)).tolist() == [2] * (FORMS + 1)
    assert twice.reason == f"its arguments had {FORMS} forms, and have another one"
    assert twice(torch.ones(1)).tolist() == [2]


def test_flat_parameters_learn_as_they_do_apart():
    torch.manual_seed(0)
    apart = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2), nn.Linear(2, 2))
    together = copy.deepcopy(apart)
    steps = [AdamW(model, 1e-2, 0.1) for model in (apart, together)]
    used = [parameter for layer in list(together)[:2] for parameter in layer.parameters()]
    gradients = flatten(steps[1], used)
    assert gradients is not None
    assert len(steps[1].param_groups) == len(steps[0].param_groups)
    x = torch.randn(4, 3)
    for _ in range(3):
        apart.zero_grad()
        apart[1](apart[0](x)).square().sum().backward()
        for gradient, parameter in zip(gradients, apart.parameters(), strict=False):
            gradient.copy_(parameter.grad)
        for optimizer in steps:
            optimizer.step()
    for one, other in zip(apart.parameters(), together.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=4 * torch.finfo(one.dtype).eps, atol=0)
    torch.testing.assert_close(apart(x), together(x))


def test_parameters_of_an_optimizer_that_reads_matrices_stay_apart():
    model = nn.Linear(3, 2)
    assert flatten(Muon(model, 1e-2, 0.0), list(model.parameters())) is None


def test_the_reason_is_told():
    stack = StackConfig(layer="lru", dim=4, depth=1, channel_mixer="none", dropout=0.5)
    kind = AnswerNumbers(1, 10_000, feedback=True)
    loop = make_loop(kind, 1, stack, algorithm="bptt", lr=[1e-2], compile_after=1)
    run(loop, 0, 3)
    (learner,) = loop.bank.learners
    (reason,) = learner.reasons
    assert reason.startswith("no kernel computes ")
