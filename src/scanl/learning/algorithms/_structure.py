"""Which numbers of the state a parameter reaches within n steps: from the structure of a model, not from its values.

The structure is that of the derivatives of a copy of the model with random numbers in the places of the parameters, the
input and the state. An entry is absent if it is 0 for all of a few hundred such numbers. A matrix keeps the zeros that
it has, so a sparse network has a sparse structure.
"""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from scanl.errors import ConfigError
from scanl.learning.algorithms._flat import complex_parts, flatten, products, unflatten
from scanl.learning.algorithms._pieces import reads
from scanl.learning.questions import Model
from scanl.models import Tokens

DRAWS, ROWS = 4, 64  # random copies, and inputs and states of each; a ReLU is off in about half of them
BEFORE = 3  # steps before the one that is looked at

Within = Callable[[], AbstractContextManager[Any]]


class Structure(NamedTuple):
    """The parameters that reach the state, and what they reach.

    names: of these parameters.   spans: for each the range of its numbers among the p of all.   immediate: (e, p), the
    state after a step by the parameters.   jacobian: (e, e), by the state before.   batched: whether backward passes
    can run on many cotangents at once.
    """

    names: list[str]
    spans: list[slice]
    immediate: Tensor
    jacobian: Tensor
    batched: bool

    def reach(self, steps: int | None) -> Tensor:
        """Return (e, p), what a parameter reaches within so many steps; None: within any number."""
        reached, count = self.immediate, 1
        while count != steps:
            further = self.immediate | _compose(self.jacobian, reached)
            if torch.equal(further, reached):
                break
            reached, count = further, count + 1
        return reached

    def closure(self) -> Tensor:
        """Return (e, e), the state after any number of steps, one or more, by the state before."""
        reached = self.jacobian
        while True:
            further = reached | _compose(reached, reached)
            if torch.equal(further, reached):
                return reached
            reached = further


def _compose(left: Tensor, right: Tensor) -> Tensor:
    return (left.float() @ right.float()) > 0


def structure(who: str, model: Model, within: Within) -> Structure:
    """Return the structure of a model. within: the context in which the algorithm runs it.

    Raises ConfigError for a model without a state of numbers, or with one that grows.
    """
    size = flatten(model.init_state(1)).shape[1]
    if not size:
        raise ConfigError(
            f"{who}: the model carries no numbers from step to step, expected layers with a state of constant size"
        )
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), within():
        torch.manual_seed(0)
        samples = [_derivatives(who, model, size) for _ in range(DRAWS)]
    names = [name for name, _ in samples[0][0]]
    batched = all(one[2] for one in samples)
    jacobian = torch.stack([one[1] for one in samples]).any(0)
    patterns = [torch.stack([dict(one[0])[name] for one in samples]).any(0) for name in names]
    reaching = [index for index, pattern in enumerate(patterns) if pattern.any()]
    ends = torch.tensor([0, *(patterns[index].shape[1] for index in reaching)]).cumsum(0).tolist()
    spans = [slice(begin, end) for begin, end in pairwise(ends)]
    if not reaching:
        raise ConfigError(f"{who}: no parameter reaches the state of the model, expected a recurrent layer with some")
    parts = complex_parts(model.init_state(1))  # what reaches the real part of a number reaches the number
    immediate = _compose(parts, torch.cat([patterns[index] for index in reaching], 1))
    return Structure([names[index] for index in reaching], spans, immediate, jacobian, batched)


def _derivatives(who: str, model: Model, size: int) -> tuple[list[tuple[str, Tensor]], Tensor, bool]:
    """Return where the derivatives of a random copy are not 0: by each parameter, and by the state."""
    net = copy.deepcopy(model).cpu().double().eval()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(_random(parameter))
    named = [(name, parameter) for name, parameter in net.named_parameters() if parameter.requires_grad]
    inputs = reads(who, net)
    if isinstance(inputs, Tokens):
        x = torch.randint(inputs.vocab_size, (ROWS, 1 + BEFORE))
    else:
        x = 2 * torch.randn(ROWS, 1 + BEFORE, inputs.channels, dtype=torch.float64)
    with torch.no_grad():  # numbers such as a maximum so far are -infinity at first
        start = net(x[:, :BEFORE], net.init_state(ROWS))[1]
    flat = flatten(start).double()
    before = (flat + 0.3 * torch.randn_like(flat)).requires_grad_()
    after = flatten(net(x[:, BEFORE:], unflatten(before, start))[1])
    if after.shape[1] != size:
        raise ConfigError(
            f"{who}: the state grows from {size} numbers to {after.shape[1]}, expected a state of constant size"
        )
    wanted = [before, *(parameter for _, parameter in named)]
    eye = torch.eye(size, dtype=after.dtype)[:, None].expand(-1, ROWS, -1)
    batched = True
    try:
        of_state, *of_parameters = products(after, wanted, eye, batched=True)
    except RuntimeError:  # an operation without a rule for batches
        batched = False
        of_state, *of_parameters = products(after, wanted, eye, batched=False)
    tables = {id(module.weight) for module in net.modules() if isinstance(module, nn.Embedding)}
    patterns = []
    for (name, parameter), derivative in zip(named, of_parameters, strict=True):
        pattern = derivative != 0
        if id(parameter) in tables:  # of the token that was read; another token has another row
            pattern = pattern.any(1, keepdim=True).expand_as(pattern)
        patterns.append((name, pattern.flatten(1)))
    return patterns, (of_state != 0).any(1), batched


def _random(parameter: Tensor) -> Tensor:
    """Return random numbers near those of a parameter; a matrix keeps its zeros, unless all are 0."""
    scale = parameter.abs().mean()
    values = parameter + 0.5 * (scale if scale > 0 else 0.2) * torch.randn_like(parameter)
    return torch.where(parameter == 0, 0, values) if parameter.ndim > 1 and scale > 0 else values


class Structures:
    """The structures of models, each read once.

    who: the algorithm, for messages.   within: the context in which it runs the model.
    """

    def __init__(self, who: str, within: Within) -> None:
        self._who, self._within = who, within
        self._known: WeakKeyDictionary[Any, Structure] = WeakKeyDictionary()

    def of(self, model: Model) -> Structure:
        """Return the structure of a model, as it was at the first call."""
        if model not in self._known:
            self._known[model] = structure(self._who, model, self._within)
        return self._known[model]
