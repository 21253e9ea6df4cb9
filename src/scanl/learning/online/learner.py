"""A model that learns while it runs: two passes over one stream, of which the second makes the updates."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from scanl.data.batch import Batch
from scanl.errors import CheckpointError, DivergenceError
from scanl.layers.state import State, leaves, map_leaves
from scanl.learning.algorithms import Algorithm
from scanl.learning.online.flat import ELEMENTWISE, Flat
from scanl.learning.online.repeated import RepeatedFunction
from scanl.learning.questions import Model

NORM_EPS = 1e-6  # is added to a norm, as torch does
CHANGE = "the parameters that have gradients change from update to update"


class Learner:
    """A model with the state of the pass that answers, and the learner of the pass that learns behind it.

    block: samples of an update, which makes one step of the optimizer.   clip: largest norm of the gradient.
    compile_after: answers, updates and steps of the optimizer, after which each becomes a kernel; None: never. The
    kernel of a step calls no hooks of the optimizer.
    Between two steps both passes use the same parameters. A pass is never run again over old samples when the
    parameters have changed: that is what makes the memory constant.
    """

    def __init__(
        self,
        model: Model,
        algorithm: Algorithm,
        optimizer: torch.optim.Optimizer,
        block: int = 1,
        clip: float = 1.0,
        compile_after: int | None = None,
    ) -> None:
        self.model, self.algorithm, self.optimizer = model.train(), algorithm, optimizer
        self.block, self.clip = block, clip
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.modes = [vars(module) for module in model.modules()]
        self.state = model.init_state(1)
        self.carried = algorithm.init(model, 1)
        self.samples: list[tuple[Tensor, Tensor]] = []  # of the block that is not yet full
        self.targets = 0  # of the block
        self.flat: Flat | None = None  # from the first update, while the same parameters have gradients in all
        self.apart: dict[nn.Parameter, Tensor] | None = None  # gradients, once other parameters have them
        self.learning: list[nn.Parameter] = []  # those that have gradients in the last update
        self._compared = self.learning  # with the first update's
        self._answer, self._update = (
            RepeatedFunction(self._run, compile_after),
            RepeatedFunction(self._gradients, compile_after),
        )
        after = None if compile_after is None else max(compile_after, 1)  # the first step makes the optimizer's state
        self._step = RepeatedFunction(self._optimize, after, self._constants)
        if not isinstance(optimizer, ELEMENTWISE):  # its state may have numbers that Python changes
            self._step.reason = f"a step of {type(optimizer).__name__}"

    @property
    def reasons(self) -> list[str]:
        """Why answers, updates or steps are no kernels; empty if they are, or will be."""
        return [repeated.reason for repeated in self._repeated if repeated.after is not None and repeated.reason]

    @property
    def _repeated(self) -> list[RepeatedFunction]:
        return [self._answer, self._update, self._step]

    def answer(self, x: Tensor) -> Tensor:
        """Read one step (1, 1, C), keep the state, and return the outputs (1, 1, O)."""
        outputs, self.state = self._answer(x, state=self.state)
        return outputs

    def peek(self, x: Tensor) -> Tensor:
        """Return what `answer` would, and change nothing."""
        state, calls = self.state, self._answer.calls
        try:
            return self.answer(x)
        finally:
            self.state, self._answer.calls = state, calls

    @torch.no_grad()
    def _run(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        self._switch(training=False)
        outputs, state = self.model(x, state)
        self._switch(training=True)
        return outputs, state

    def _gradients(self, x: Tensor, target: Tensor, carried: Any) -> tuple[Tensor, Tensor, Any]:
        """Write the gradients, and return the loss, the norm that the gradient had, and the learner."""
        loss, carried = self.algorithm.update(self.model, carried, Batch(x, target))
        by_all = zip(self.parameters, torch.autograd.grad(loss, self.parameters, allow_unused=True), strict=True)
        known = [(parameter, gradient) for parameter, gradient in by_all if gradient is not None]
        self.learning = [parameter for parameter, _ in known]
        with torch.no_grad():
            squares = [(gradient * gradient).sum() for _, gradient in known] or [
                torch.zeros_like(loss)
            ]  # as of `force`
            norm = torch.stack(squares).sum().sqrt()
            factor = (self.clip / (norm + NORM_EPS)).clamp(max=1.0)  # as `torch.nn.utils.clip_grad_norm_`
            places = self._places()
            for parameter, gradient in known:
                # New tensors in every update would take as long as the update.
                places.setdefault(parameter, torch.zeros_like(parameter)).copy_(gradient * factor)
            return loss.detach(), norm, carried

    def _places(self) -> dict[nn.Parameter, Tensor]:
        """Return where the gradients are written."""
        if self.apart is not None:
            return self.apart
        if self.flat is None:
            self.flat = Flat(self.optimizer, self.learning)
        return self.flat.gradients

    def _separate(self, gradients: dict[nn.Parameter, Tensor]) -> None:
        """Let the optimizer have each parameter by itself: in each update others may have gradients."""
        if self.flat is not None:
            self.flat.undo()
        self.flat, self.apart = None, gradients
        self._update.reason = self._step.reason = CHANGE

    def _switch(self, *, training: bool) -> None:
        """Switch dropout and noise on or off. For a model that is read step by step, `Module.train` takes too long."""
        for mode in self.modes:
            mode["training"] = training

    def learn(self, x: Tensor, target: Tensor, *, answered: bool) -> None:
        """Read a step again, with its target, and make an update if the block is full.

        answered: whether the target is one. Without any in its block the optimizer makes no step.
        Raises DivergenceError when a loss or a gradient is not finite; the parameters are as before then.
        """
        self.samples.append((x, target))
        self.targets += answered
        if len(self.samples) < self.block:
            return
        x, target = self.samples[0] if self.block == 1 else map(_joined, zip(*self.samples, strict=True))
        targets, self.samples, self.targets = self.targets, [], 0
        loss, total, self.carried = self._update(x, target, state=self.carried)
        if not targets or not self.learning:  # `force` writes the weights itself
            return
        norm = total.item()
        if not math.isfinite(norm):
            raise DivergenceError(f"the loss is {loss.item():g} and the gradient's norm {norm:g}; try a smaller rate")
        if self.flat is not None and self.learning is not self._compared:
            self._compared = self.learning  # a kernel leaves it as it is
            if self.flat.used != set(self.learning):
                self._separate(self.flat.gradients)
        if self.apart is not None:
            for parameter in self.parameters:
                parameter.grad = None
            for parameter in self.learning:
                parameter.grad = self.apart[parameter]
        self._step()

    @torch.no_grad()
    def _optimize(self, _: None) -> tuple[None]:
        self.optimizer.step()
        return (None,)

    def _constants(self) -> list[list[Any]]:
        """Return the options of the optimizer's groups."""
        return [[value for name, value in group.items() if name != "params"] for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Return everything that another learner of the same form needs to go on to the bit."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "state": {path: leaf.clone() for path, leaf in leaves(self.state)},
            "carried": {path: leaf.clone() for path, leaf in leaves(self.carried)},
            "samples": [list(pair) for pair in self.samples],
            "targets": self.targets,
            "used": None if self.flat is None else [parameter in self.flat.used for parameter in self.parameters],
            "apart": self.apart is not None,
            "calls": [repeated.calls for repeated in self._repeated],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned. Raises CheckpointError for a state of another form."""
        try:
            if state["apart"]:
                self._separate({})
            elif state["used"] is not None and self.flat is None:
                used = [one for one, is_used in zip(self.parameters, state["used"], strict=True) if is_used]
                self.flat = Flat(self.optimizer, used)
            self.optimizer.load_state_dict(state["optimizer"])
            self.state = _filled(self.model.init_state(1), state["state"])
            self.carried = _filled(self.algorithm.init(self.model, 1), state["carried"])
            self.model.load_state_dict(state["model"])  # the last: `init` sets the buffers of `ccn`
        except (KeyError, RuntimeError, ValueError) as error:
            raise CheckpointError(f"the learner of the checkpoint is of another form: {error}") from error
        self.samples = [(x.clone(), target.clone()) for x, target in state["samples"]]
        self.targets = state["targets"]
        for repeated, calls in zip(self._repeated, state["calls"], strict=True):
            repeated.calls = calls
        self._step.kernels = {}  # they have the addresses of the optimizer's state before


def _joined(parts: Any) -> Tensor:
    return torch.cat(parts, 1)


def _filled(like: Any, stored: dict[str, Tensor]) -> Any:
    """Return a state of the form of another one. The copies have torch's alignment, on which rounding may depend."""
    paths = [path for path, _ in leaves(like)]
    if paths != list(stored):
        raise ValueError(f"it holds {list(stored)}, expected {paths}")
    values = iter(stored.values())
    return map_leaves(lambda leaf: next(values).to(leaf.device, copy=True), like)
