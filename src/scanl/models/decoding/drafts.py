"""Drafts: tokens that something cheaper proposes. A model reads them in one piece, and takes what it would have drawn.

Source: Leviathan, Kalman and Matias, "Fast Inference from Transformers via Speculative Decoding", arXiv:2211.17192;
Chen et al., "Accelerating Large Language Model Decoding with Speculative Sampling", arXiv:2302.01318; drafts from the
text itself: Saxena, "Prompt Lookup Decoding", 2023. Differs: the model draws its tokens with the random numbers with
which it would draw them without a draft, and goes on as long as the draft has the same. So a draft changes no token,
where speculative sampling changes no distribution. A draft that draws does it with the same random numbers.
"""

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from scanl.layers.state import State
from scanl.models.decoding.decodable import Decodable
from scanl.models.decoding.prefix_tree import Text, common_length
from scanl.whole import whole_number

ROWS = 16  # tokens that a CPU reads in little more time than one: it reads the weights once for all
PATIENCE = 64  # most tokens without a draft after drafts that failed


@runtime_checkable
class Draft(Protocol):
    """Proposer of tokens. It may keep its knowledge of a text from call to call."""

    def propose(self, text: Text, count: int, choose: Callable[[Tensor], Tensor]) -> list[int]:
        """Return at most `count` tokens that may follow the text.

        choose: draws a token (1,) from logits (1, V), with the random numbers of the model for the tokens to come.
        """
        ...


@dataclass(frozen=True)
class PromptLookup:
    """A draft from the text itself: what followed the last tokens where they occurred before.

    longest, shortest: how many last tokens are looked for; the longest that occurred count, at its latest occurrence.
    window: how many tokens back they are looked for.
    """

    longest: int = 4
    shortest: int = 2
    window: int = 16384

    def __post_init__(self) -> None:
        whole_number("prompt lookup", "shortest", self.shortest, 1)
        whole_number("prompt lookup", "longest", self.longest, self.shortest)
        whole_number("prompt lookup", "window", self.window, self.longest)

    def propose(self, text: Text, count: int, choose: Callable[[Tensor], Tensor]) -> list[int]:
        recent = text[-self.window :]
        for length in range(min(self.longest, len(recent) - 1), self.shortest - 1, -1):
            at = _last_occurrence(recent[-length:], recent[:-1])
            if at is not None:
                tokens = recent[:]
                for i in range(at + length, at + length + count):  # it may read what it has just written
                    tokens.append(tokens[i])
                return tokens[len(recent) :].tolist()
        return []


class ModelDraft:
    """A draft by a smaller model of the same tokens. It keeps its states, so each proposal costs its tokens alone."""

    def __init__(self, model: Decodable) -> None:
        self.model = model
        self._text = array("i")  # what the last of the states has read
        self._states: list[tuple[int, State]] = [(0, None)]  # with the number of tokens before them

    @torch.inference_mode()
    def propose(self, text: Text, count: int, choose: Callable[[Tensor], Tensor]) -> list[int]:
        common = min(common_length(self._text, text), len(text) - 1)
        while self._states[-1][0] > common:
            self._states.pop()
        length, state = self._states[-1]
        del self._states[1:-1]  # what was accepted is rarely taken back
        self._text = text[:length]  # if a call below fails, what it has added belongs to no text
        drafted, pending = array("i"), text[length:]
        device = self.model.device
        for _ in range(count):
            logits, state = self.model.decode_logits(torch.tensor([pending], device=device), state)
            length += len(pending)
            self._states.append((length, state))
            drafted.append(int(choose(logits)))
            pending = drafted[-1:]
        self._text = (text + drafted)[:length]
        return drafted.tolist()


class Drafting:
    """A draft, and how many tokens it proposes: more after a right proposal, fewer or none after a wrong one."""

    def __init__(self, draft: Draft) -> None:
        self.draft = draft
        self._count = 4
        self._wait = 0  # tokens that still come without a draft
        self._pause = 0  # tokens without a draft after the last failure

    def propose(self, text: Text, room: int, choose: Callable[[Tensor], Tensor]) -> list[int]:
        """Return tokens that may follow the text, at most `room`."""
        if self._wait > 0:
            self._wait -= 1
            return []
        return self.draft.propose(text, min(self._count, room), choose) if room > 0 else []

    def learn(self, proposed: int, accepted: int) -> None:
        """Take note of how many tokens of a proposal were right."""
        if accepted == proposed:
            self._count, self._pause = min(2 * max(self._count, 1), ROWS - 1), 0
        elif accepted > 0:
            self._count, self._pause = accepted + 1, 0
        else:
            self._count, self._pause = 2, min(max(2 * self._pause, 2), PATIENCE)
            self._wait = self._pause


def _last_occurrence(tokens: Text, text: Text) -> int | None:
    """Return the place at which tokens occur last in a text."""
    target, searched, width = tokens.tobytes(), text.tobytes(), tokens.itemsize
    end = len(searched)
    while (at := searched.rfind(target, 0, end)) >= 0:
        if at % width == 0:
            return at // width
        end = at + len(target) - 1
    return None
