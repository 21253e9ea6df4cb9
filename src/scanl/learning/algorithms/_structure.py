"""The numbers of the state that a parameter reaches within n steps, by the structure of a model, not by its values.

The structure is that of the derivatives of a copy of the model with random numbers in the places of the parameters, the
input and the state. An entry is absent if it is 0 for all of a few hundred such numbers. A matrix keeps the zeros that
it has, so a sparse network has a sparse structure.

Where the state has integers, such as the position in a window, what a parameter reaches may change from step to step.
The structure is dense then: every parameter that reaches the state within some steps is taken to reach all of it.
"""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from scanl.errors import ConfigError, ShapeError
from scanl.layers.state import complex_parts, flatten, leaves, unflatten
from scanl.learning.algorithms._flat import products
from scanl.learning.algorithms._pieces import reads
from scanl.learning.questions import Model
from scanl.models import Tokens
from scanl.models.pooling import PooledState

DRAWS, ROWS = 4, 64  # random copies, and inputs and states of each; a ReLU is off in about half of them
EARLIER_STEPS = 3  # steps before the one that is looked at
PROBE_STEPS = 64  # steps within which a parameter reaches a state with integers, if at all

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
        if _positioned(model):
            return _dense(who, model, size)
        samples = [_derivatives(who, model, size) for _ in range(DRAWS)]
    names = [name for name, _ in samples[0][0]]
    batched = all(one[2] for one in samples)
    jacobian = torch.stack([one[1] for one in samples]).any(0)
    patterns = [torch.stack([dict(one[0])[name] for one in samples]).any(0) for name in names]
    reaching = [index for index, pattern in enumerate(patterns) if pattern.any()]
    ends = torch.tensor([0, *(patterns[index].shape[1] for index in reaching)]).cumsum(0).tolist()
    spans = [slice(begin, end) for begin, end in pairwise(ends)]
    if not reaching:
        raise _unreached(who)
    parts = complex_parts(model.init_state(1))  # what reaches the real part of a number reaches the number
    immediate = _compose(parts, torch.cat([patterns[index] for index in reaching], 1))
    return Structure([names[index] for index in reaching], spans, immediate, jacobian, batched)


def _positioned(model: Model) -> bool:
    """Return whether the state has integers, on which the place of what a step writes may depend.

    The number of steps that a model pools is none of them.
    """
    state = model.init_state(1)
    state = state.stack if isinstance(state, PooledState) else state
    return any(not (leaf.is_floating_point() or leaf.is_complex()) for _, leaf in leaves(state))


def _unreached(who: str) -> ConfigError:
    return ConfigError(f"{who}: no parameter reaches the state of the model, expected a recurrent layer with some")


def _dense(who: str, model: Model, size: int) -> Structure:
    """Return the structure in which every parameter that reaches the state reaches all of it."""
    net, x = _random_copy(who, model, 1, PROBE_STEPS)
    try:
        after = flatten(net(x, net.init_state(1))[1])
    except ShapeError:  # of a model with a largest length
        after = flatten(net(x[:, :1], net.init_state(1))[1])
    _check_size(who, after, size)
    named = [(name, parameter) for name, parameter in net.named_parameters() if parameter.requires_grad]
    grads = torch.autograd.grad(
        after.sum(), [parameter for _, parameter in named], retain_graph=True, allow_unused=True
    )
    reaching = [pair for pair, grad in zip(named, grads, strict=True) if grad is not None]
    if not reaching:
        raise _unreached(who)
    ends = torch.tensor([0, *(parameter.numel() for _, parameter in reaching)]).cumsum(0).tolist()
    spans = [slice(begin, end) for begin, end in pairwise(ends)]
    _, batched = _products(after, [parameter for _, parameter in reaching], torch.ones_like(after)[None])
    full = torch.ones(size, size, dtype=torch.bool)
    return Structure([name for name, _ in reaching], spans, full[:, :1].expand(-1, ends[-1]), full, batched)


def _derivatives(who: str, model: Model, size: int) -> tuple[list[tuple[str, Tensor]], Tensor, bool]:
    """Return the places of a random copy's derivatives that are not 0: by each parameter, and by the state."""
    net, x = _random_copy(who, model, ROWS, 1 + EARLIER_STEPS)
    named = [(name, parameter) for name, parameter in net.named_parameters() if parameter.requires_grad]
    with torch.no_grad():  # numbers such as a maximum so far are -infinity at first
        start = net(x[:, :EARLIER_STEPS], net.init_state(ROWS))[1]
    flat = flatten(start).double()
    before = (flat + 0.3 * torch.randn_like(flat)).requires_grad_()
    after = flatten(net(x[:, EARLIER_STEPS:], unflatten(before, start))[1])
    _check_size(who, after, size)
    wanted = [before, *(parameter for _, parameter in named)]
    eye = torch.eye(size, dtype=after.dtype)[:, None].expand(-1, ROWS, -1)
    (of_state, *of_parameters), batched = _products(after, wanted, eye)
    tables = {id(module.weight) for module in net.modules() if isinstance(module, nn.Embedding)}
    patterns = []
    for (name, parameter), derivative in zip(named, of_parameters, strict=True):
        pattern = derivative != 0
        if id(parameter) in tables:  # of the token that was read; another token has another row
            pattern = pattern.any(1, keepdim=True).expand_as(pattern)
        patterns.append((name, pattern.flatten(1)))
    return patterns, (of_state != 0).any(1), batched


def _random_copy(who: str, model: Model, rows: int, steps: int) -> tuple[Any, Tensor]:
    """Return a copy of a model with random parameters in float64, and random inputs of it."""
    computed = [each for module in model.modules() for each in vars(module).values() if isinstance(each, Tensor)]
    memo = {id(each): each.detach().clone() for each in computed}  # a pruned weight, which torch does not copy
    net: Any = copy.deepcopy(model, memo).cpu().double().eval()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(_random(parameter))
    inputs = reads(who, net)
    if isinstance(inputs, Tokens):
        return net, torch.randint(inputs.vocab_size, (rows, steps))
    return net, 2 * torch.randn(rows, steps, inputs.channels, dtype=torch.float64)


def _check_size(who: str, after: Tensor, size: int) -> None:
    if after.shape[1] != size:
        raise ConfigError(
            f"{who}: the state grows from {size} numbers to {after.shape[1]}, expected a state of constant size"
        )


def _products(after: Tensor, inputs: list[Tensor], cotangents: Tensor) -> tuple[list[Tensor], bool]:
    """Return the derivatives, see `products`, and whether they were computed for all cotangents at once."""
    try:
        return products(after, inputs, cotangents, batched=True), True
    except RuntimeError:  # an operation without a rule for batches
        return products(after, inputs, cotangents, batched=False), False


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
