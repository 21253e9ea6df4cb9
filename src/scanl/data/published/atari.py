"""Atari, offline: the next action of a player, from the screen and the points that the player will still get."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from scanl.data.base import IGNORED
from scanl.data.fixed import FixedPart, FixedRows, Parts
from scanl.data.published.sources import published
from scanl.data.questions import FeatureInputs, Label
from scanl.data.readers import npy
from scanl.errors import DataError
from scanl.options import Positive, above

SIDE = 84  # pixels of a side of the screen
MAX_TRANSITIONS = 100_000  # transitions of a checkpoint that are read


class Episode(NamedTuple):
    """The transitions of a checkpoint from `begin` to before `end`. The last one ends an episode."""

    checkpoint: int
    begin: int
    end: int


@published("atari")
@dataclass
class AtariReplay(FixedRows):
    """Atari, offline: which action a player takes next, from the screen and the points that it will still get.

    A step has the return to go (the points that are still to come), the action before as a one-hot vector (zeros at the
    first step of a row), and the last four screens of 84 x 84 pixels in [0, 1], which are black before the episode. A
    row has `window` steps. One begins at every step of an episode, and near the end of the episode it is moved back so
    that it fits. A shorter episode gives a row that ends early. In the literature a step is three tokens: the return,
    the screens and the action. Here one step has everything that is known when the action is chosen.

    Episodes are taken whole from random checkpoints of the first 100,000 transitions, eleven successive ones from a
    checkpoint at a time, until there are enough transitions. The last twentieth of the episodes is for test, the
    previous twentieth for validation. The score is the share of right actions. It cannot be compared with the published
    score, which is the return in the game and needs the game.

    Args:
        seed, eval_examples, folder: see `FixedRows`.
        game: name of its folder, such as Breakout, Qbert, Pong or Seaquest.
        window: steps of a row; 30 in the literature, 50 of Pong.
        transitions: the smallest number to read, or all if there are fewer; 500,000 in the literature, 1 % of all.
        visit: episodes of a checkpoint at a time.
        screens: number of screens of a step.
        unit: returns are divided by it; 1 in the literature.
        choice_seed: seed of the choice of checkpoints.
    """

    uneven = True

    game: str = "Breakout"
    window: Positive = 30
    transitions: Positive = 500_000
    visit: Positive = 11
    screens: Positive = 4
    unit: Annotated[float, above(0)] = 1.0
    choice_seed: int = 123

    @property
    def length(self) -> int:
        return self.window

    @property
    def logs(self) -> str:
        return f"{self.game}/1/replay_logs"

    def _stored(
        self, what: str, checkpoint: int, form: tuple[int, ...] = (), max_rows: int = MAX_TRANSITIONS
    ) -> NDArray[Any]:
        path = self.files.path(f"{self.logs}/$store$_{what}_ckpt.{checkpoint}.gz", self.folder)
        return npy.packed(self.files, path, form, max_rows, self.folder)

    @cached_property
    def _logged(self) -> tuple[dict[int, NDArray[np.int64]], dict[int, NDArray[np.float32]], list[Episode]]:
        """The actions and the returns to go of each checkpoint, and the episodes that are read."""
        paths = self.files.below(self.logs, "$store$_action_ckpt.*.gz", self.folder)
        actions: dict[int, NDArray[np.int64]] = {}
        returns: dict[int, NDArray[np.float32]] = {}
        episodes: dict[int, list[Episode]] = {}
        for path in paths:
            if not (suffix := path.name.split(".")[-2]).isdigit():
                raise self.files.damaged(path, f"its checkpoint {suffix!r} is no number", self.folder)
            number = int(suffix)
            columns = [self._stored(what, number) for what in ("action", "reward", "terminal")]
            if len({len(column) for column in columns}) > 1 or columns[0].min(initial=0) < 0:
                lengths = ", ".join(str(len(column)) for column in columns)
                why = f"actions, rewards and terminals are {lengths}, expected equal numbers, and actions from 0 on"
                raise self.files.damaged(path, why, self.folder)
            ends = np.flatnonzero(columns[2]) + 1
            bounds = zip([0, *ends[:-1]], ends, strict=True) if len(ends) else ()
            episodes[number] = [Episode(number, int(begin), int(end)) for begin, end in bounds]
            actions[number], returns[number] = columns[0].astype(np.int64), np.zeros(len(columns[0]), np.float32)
            for _, begin, end in episodes[number]:
                returns[number][begin:end] = columns[1][begin:end][::-1].cumsum(dtype=np.float64)[::-1]
        return actions, returns, self._chosen(episodes)

    def _chosen(self, episodes: dict[int, list[Episode]]) -> list[Episode]:
        """Take episodes from random checkpoints, `visit` at a time, until there are enough transitions."""
        random, chosen, count = np.random.default_rng(self.choice_seed), list[Episode](), 0
        while count < self.transitions and (known := sorted(number for number, waiting in episodes.items() if waiting)):
            number = known[random.integers(len(known))]
            visit, episodes[number] = episodes[number][: self.visit], episodes[number][self.visit :]
            chosen += visit
            count += sum(episode.end - episode.begin for episode in visit)
        return chosen

    @cached_property
    def _frames(self) -> dict[int, NDArray[np.uint8]]:
        """The screens of each checkpoint, up to the last one that is read."""
        last: dict[int, int] = {}
        for number, _, end in self._logged[2]:
            last[number] = max(end, last.get(number, 0))
        frames = {number: self._stored("observation", number, (SIDE, SIDE), end) for number, end in last.items()}
        for number, screens in frames.items():
            if len(screens) < last[number] or screens.dtype != np.uint8:
                path = self.files.path(f"{self.logs}/$store$_observation_ckpt.{number}.gz", self.folder)
                why = f"it has {len(screens)} screens of {screens.dtype}, expected {last[number]} of uint8"
                raise self.files.damaged(path, why, self.folder)
        return frames

    @property
    def question(self) -> Label:  # pyright: ignore[reportIncompatibleVariableOverride]
        actions = 1 + max(int(numbers.max(initial=0)) for numbers in self._logged[0].values())
        channels = 1 + actions + self.screens * SIDE**2
        return Label(FeatureInputs(channels), actions)

    def read(self) -> Parts:
        episodes = self._logged[2]
        aside = max(1, len(episodes) // 20)
        if len(episodes) < 3:
            raise DataError(f"{self.name}: {self.game} has {len(episodes)} whole episodes, expected three or more")
        _ = self._frames
        parts = (episodes[: -2 * aside], episodes[-2 * aside : -aside], episodes[-aside:])
        return Parts(*(self._part(episodes) for episodes in parts))

    def _part(self, episodes: Sequence[Episode]) -> FixedPart:
        """Return the rows as their checkpoint, the begin and end of their episode, and their first transition."""
        rows = [
            (number, begin, end, max(begin, min(start, end - self.window)))
            for number, begin, end in episodes
            for start in range(begin, end)
        ]
        return FixedPart(np.array(rows, np.int64), np.zeros(len(rows), np.int64))

    def form(self, rows: Sequence[NDArray[Any]]) -> NDArray[Any]:
        (actions, returns, _), classes = self._logged, self.question.classes
        batch = np.full((len(rows), self.window, self.question.inputs.count), np.nan, np.float32)
        for place, (number, begin, end, start) in zip(batch, rows, strict=True):
            stop = min(start + self.window, end)
            steps = place[: stop - start]
            steps[:] = 0
            steps[:, 0] = returns[number][start:stop] / self.unit
            steps[np.arange(1, len(steps)), 1 + actions[number][start : stop - 1]] = 1
            screens = steps[:, 1 + classes :].reshape(len(steps), self.screens, -1)
            for back in range(self.screens):
                first = max(start - back, begin)  # what was before the episode is black
                frames = self._frames[number][first : stop - back].reshape(-1, SIDE**2)
                screens[len(steps) - len(frames) :, self.screens - 1 - back] = frames / np.float32(255)
        return batch

    def answers(self, split: FixedPart) -> NDArray[Any]:
        targets = np.full((len(split.rows), self.window), IGNORED, np.int64)
        for place, (number, _, end, start) in zip(targets, split.rows, strict=True):
            actions = self._logged[0][number][start : min(start + self.window, end)]
            place[: len(actions)] = actions
        return targets

    @cached_property
    def _digest(self) -> str:
        """The digest of the actions, the returns and the choice of episodes. The screens are gigabytes."""
        actions, returns, episodes = self._logged
        digest = hashlib.sha256(f"{self.name} {episodes}".encode())
        for number in sorted(actions):
            digest.update(actions[number].data)
            digest.update(returns[number].data)
        return digest.hexdigest()
