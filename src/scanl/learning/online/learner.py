"""A model that learns while it runs: two passes over one stream, of which the second makes the updates."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from scanl.data.batch import Batch
from scanl.errors import CheckpointError, DivergenceError
from scanl.layers.state import leaves, map_leaves
from scanl.learning.algorithms import Algorithm
from scanl.learning.questions import Model

NEAR = 1e-5  # torch adds 1e-6 to a norm before it compares


class Learner:
    """A model with the state of the pass that answers, and the learner of the pass that learns behind it.

    block: samples of an update, which makes one step of the optimizer.   clip: largest norm of the gradient.
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
    ) -> None:
        self.model, self.algorithm, self.optimizer = model.train(), algorithm, optimizer
        self.block, self.clip = block, clip
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.modes = [vars(module) for module in model.modules()]
        self.state = model.init_state(1)
        self.carried = algorithm.init(model, 1)
        self.samples: list[tuple[Tensor, Tensor]] = []  # of the block that is not yet full
        self.targets = 0  # of the block

    @torch.no_grad()
    def answer(self, x: Tensor) -> Tensor:
        """Read one step (1, 1, C), keep the state, and return the outputs (1, 1, O)."""
        self._switch(training=False)
        outputs, self.state = self.model(x, self.state)
        self._switch(training=True)
        return outputs

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
        batch = Batch(*(self.samples[0] if self.block == 1 else map(_joined, zip(*self.samples, strict=True))))
        targets, self.samples, self.targets = self.targets, [], 0
        for parameter in self.parameters:
            parameter.grad = None
        loss, self.carried = self.algorithm.update(self.model, self.carried, batch)
        if not targets:
            return
        loss.backward()
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        total = nn.utils.get_total_norm(gradients)
        norm = total.item()
        if not math.isfinite(norm):
            raise DivergenceError(f"the loss is {loss.item():g} and the gradient's norm {norm:g}; try a smaller rate")
        if norm + NEAR > self.clip:  # below, `clip_grad_norm_` would multiply all by 1
            nn.utils.clip_grads_with_norm_(self.parameters, self.clip, total)
        self.optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        """Return everything that another learner of the same form needs to go on to the bit."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "state": dict(leaves(self.state)),
            "carried": dict(leaves(self.carried)),
            "samples": [list(pair) for pair in self.samples],
            "targets": self.targets,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned. Raises CheckpointError for a state of another form."""
        try:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.state = _filled(self.model.init_state(1), state["state"])
            self.carried = _filled(self.algorithm.init(self.model, 1), state["carried"])
        except (KeyError, RuntimeError, ValueError) as error:
            raise CheckpointError(f"the learner of the checkpoint is of another form: {error}") from error
        self.samples = [(x.clone(), target.clone()) for x, target in state["samples"]]
        self.targets = state["targets"]


def _joined(parts: Any) -> Tensor:
    return torch.cat(parts, 1)


def _filled(like: Any, stored: dict[str, Tensor]) -> Any:
    """Return a state of the form of another one. The copies have torch's alignment, on which rounding may depend."""
    paths = [path for path, _ in leaves(like)]
    if paths != list(stored):
        raise ValueError(f"it holds {list(stored)}, expected {paths}")
    values = iter(stored.values())
    return map_leaves(lambda leaf: next(values).to(leaf.device, copy=True), like)
