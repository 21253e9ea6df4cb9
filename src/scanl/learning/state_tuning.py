"""State tuning: the first state of a model is learned, and nothing else."""

from collections.abc import Iterable

import torch
from torch import Tensor

from scanl.data.batch import Batch
from scanl.data.questions import NextToken, Question, Vocabulary
from scanl.errors import ConfigError
from scanl.layers.module import in_mode
from scanl.layers.state import State
from scanl.learning.descent import descend
from scanl.learning.questions import Model, answerer
from scanl.models import FirstState


def tune_state(
    model: Model,
    batches: Iterable[Batch],
    *,
    question: Question | None = None,
    state: State = None,
    lr: float = 0.1,
) -> FirstState:
    r"""Learn the state from which a model begins its sequences. The model's weights stay as they are.

    .. math:: s_0^* = \arg\min_{s_0} \sum_n L(f(x_n; s_0), y_n)

    A model reads a prompt into its state; the first state is a prompt that is found by gradient descent and costs
    nothing to read. Each step is one of Adam, whose rate falls from `lr` to 0 as a cosine.

    model: one of `scanl.models` whose layers are causal. Dropout is off.
    batches: one for each step, such as `source.batch(step, 16)` for steps of a source. Every row begins a sequence.
    question: what the batches ask, such as `source.question`; None for the next token, by a `LanguageModel`.
    state: to start from, of one row. None: `model.init_state(1)`. A state after a text, `model(tokens)[1]`, starts
    nearer where the text is like the examples.
    Returns the state: `model(tokens, first(len(tokens)))`, `model.generate(prompt, first(1))`, `first.save`.

    Source: Galim et al., "Parameter-Efficient Fine-Tuning of State Space Models", arXiv:2410.09016, sec. 4, where it is
    called initial state tuning; Xiao, "State Tuning", arXiv:2504.05097, for RWKV-7.
    Raises ConfigError for a model without a first state, and where no number of the state changes the loss;
    DivergenceError for a loss that is not finite.
    """
    if model.stack.bidirectional:
        raise ConfigError("tune_state: the model is bidirectional, expected a causal one because it begins at a state")
    if question is None:
        size = vars(model).get("vocab_size")
        if size is None:
            name = type(model).__name__
            raise ConfigError(f"tune_state: question is None, expected that of the data because the model is a {name}")
        question = NextToken(Vocabulary(size))
    sequence = [batch.tensors(next(model.parameters()).device) for batch in batches]
    if not sequence:
        raise ConfigError("tune_state: batches has none, expected at least one")
    objective = answerer(question).objective
    first = FirstState(model.init_state(1) if state is None else state)
    learnt = list(first.parameters())
    if not learnt:
        raise ConfigError("tune_state: the state has no numbers that can be learned, expected a model that keeps some")
    optimizer = torch.optim.Adam(learnt, lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, len(sequence))

    def step_loss(step: int) -> Tensor:
        return objective(model, sequence[step], first(sequence[step].size))[0]

    def check(step: int, _: float) -> bool:
        if step == 0 and not any(leaf.grad is not None and bool(leaf.grad.any()) for leaf in learnt):
            raise ConfigError(
                "tune_state: no number of the state changes the loss, because the layers ignore a state from before "
                "any step; start from one after a text: state=model(tokens)[1]"
            )
        return False

    frozen = [weight for weight in model.parameters() if weight.requires_grad]
    try:
        for weight in frozen:
            weight.requires_grad_(False)
        with in_mode(model, training=False):
            descend(learnt, optimizer, schedule, len(sequence), step_loss, clip=1.0, after=check)
    finally:
        for weight in frozen:
            weight.requires_grad_(True)
    return first
