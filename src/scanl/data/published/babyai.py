"""BabyAI: what a bot does next in a grid, from its instruction and what it sees."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scanl.data.base import IGNORED, PlayedSource, padded
from scanl.data.files import folders
from scanl.data.fixed import FixedPart, FixedRows, Parts, set_aside
from scanl.data.published import babyai_bot
from scanl.data.published.sources import published
from scanl.data.questions import FeatureInputs, Label
from scanl.data.readers.pickles import plain
from scanl.errors import ConfigError

VIEW = (7, 7, 3)  # cells before the bot, and of each its thing, colour and state
KINDS = (11, 6, 4)  # of things, colours, states
SEEN_NUMBERS = sum(KINDS) * 49  # numbers that are 0 or 1
DIRECTIONS, ACTIONS = 4, 7
BABYAI = folders["babyai"]


class Demonstrations(Sequence[NDArray[np.int16]]):
    """The episodes of a file. The images of an episode are unpacked each time it is indexed.

    The file is a pickle of a list of episodes. An episode has a mission, images (an array (T, 7, 7, 3), pickled and
    packed by blosc), directions and actions. Neither pickle is run; see `scanl.data.pickles`. An episode is (words + T,
    2 + 147) numbers: a step for each word of the mission, by its number, -1 and zeros; then for each image the
    direction, the action, and the image.
    """

    def __init__(self, name: str, folder: str, words: dict[str, int] | None = None) -> None:
        self.folder, self.path = folder, BABYAI.path(name, folder)
        content = BABYAI.read(name, folder)
        self.digest = hashlib.sha256(content).hexdigest()
        self.episodes = plain(content, BABYAI, self.path, folder)
        if not isinstance(self.episodes, list) or not all(map(_whole, self.episodes)):
            why = "it is no list of episodes of a mission, images, directions and actions"
            raise BABYAI.damaged(self.path, why, folder)
        vocabulary = dict.fromkeys(word for mission, *_ in self.episodes for word in mission.split())
        self.words = {word: number for number, word in enumerate(vocabulary)} if words is None else words

    def __len__(self) -> int:
        return len(self.episodes)

    @property
    def longest(self) -> int:
        """Steps of the longest episode."""
        return max((len(mission.split()) + len(actions) for mission, _, _, actions in self.episodes), default=0)

    def __getitem__(self, place: Any) -> Any:
        mission, packed, directions, actions = self.episodes[place]
        unpacked = plain(_unpacked(packed, self), BABYAI, self.path, self.folder)
        images = getattr(unpacked, "values", np.empty(0))
        if images.shape != (len(actions), *VIEW) or (images < 0).any() or (images >= KINDS).any():
            why = f"the images of episode {place} are {images.shape}, expected {(len(actions), *VIEW)} of known things"
            raise BABYAI.damaged(self.path, why, self.folder)
        return self.row(mission, images, directions, actions)

    def row(
        self, mission: str, images: NDArray[Any], directions: Sequence[int], actions: Sequence[int]
    ) -> NDArray[np.int16]:
        """Return an episode, or a part of one, as numbers."""
        words = mission.split()
        row = np.zeros((len(words) + len(actions), 2 + images[0].size), np.int16)
        row[: len(words), 0] = [self.words.get(word, -1) for word in words]
        row[: len(words), 1] = -1
        row[len(words) :, 0], row[len(words) :, 1] = directions, actions
        row[len(words) :, 2:] = images.reshape(len(actions), -1)
        return row


def _whole(episode: Any) -> bool:
    """Whether an episode has a mission, packed images, and equally many directions and actions that there are."""
    if not isinstance(episode, tuple | list) or len(episode) != 4:
        return False
    mission, packed, directions, actions = episode
    lists = isinstance(directions, list | tuple) and isinstance(actions, list | tuple)
    return (
        isinstance(mission, str)
        and isinstance(packed, bytes)
        and lists
        and len(directions) == len(actions) > 0
        and all(isinstance(number, int) and 0 <= number < DIRECTIONS for number in directions)
        and all(isinstance(number, int) and 0 <= number < ACTIONS for number in actions)
    )


def _unpacked(packed: bytes, where: Demonstrations) -> bytes:
    try:
        import blosc
        from blosc.blosc_extension import error as unpacking_error
    except ImportError as error:
        raise ConfigError("babyai: the images are packed by blosc: pip install 'scanl[babyai]'") from error
    try:
        return blosc.decompress(packed)
    except (unpacking_error, ValueError, TypeError) as error:
        raise BABYAI.damaged(where.path, f"blosc cannot unpack its images: {error}", where.folder) from error


@published("babyai")
@dataclass
class BabyAIDemonstrations(FixedRows, PlayedSource):
    """BabyAI: which of seven actions a bot takes next, from its mission, what it sees and the action before.

    A row has one step for each word of the mission, then one step for each action. A step has the word (zeros for a
    word that the training file does not have), the thing, colour and state of each of the 49 cells before the bot, the
    direction, and the action before. Each of these is a one-hot vector. The answers are the actions.

    A twentieth of the training episodes is set aside for validation. The published validation file is the test part.
    The score is the share of right actions. The published one is the share of fulfilled missions: `scanl eval` plays
    the game, and writes it too, where minigrid is installed.

    Args:
        seed, eval_examples, folder: see `FixedRows`.
        level: name of the level, as files begin with it.
    """

    uneven = True
    level: str = babyai_bot.LEVEL

    @cached_property
    def demonstrations(self) -> tuple[Demonstrations, Demonstrations]:
        """The episodes for training and for validation."""
        train = Demonstrations(f"{self.level}_agent.pkl", self.folder)
        return train, Demonstrations(f"{self.level}_agent_valid.pkl", self.folder, train.words)

    @property
    def length(self) -> int:
        return max(demonstrations.longest for demonstrations in self.demonstrations)

    @property
    def question(self) -> Label:  # pyright: ignore[reportIncompatibleVariableOverride]
        channels = len(self.demonstrations[0].words) + SEEN_NUMBERS + DIRECTIONS + ACTIONS
        return Label(FeatureInputs(channels), ACTIONS)

    def read(self) -> Parts:
        train, test = (FixedPart(rows, np.zeros(len(rows), np.int64)) for rows in self.demonstrations)
        if len(train.answers) < 2:
            train_path = self.demonstrations[0].path
            raise BABYAI.damaged(train_path, f"it has {len(train.answers)} episodes, expected two or more", self.folder)
        # Some are moved by number, so that images stay packed.
        numbers = FixedPart(np.arange(len(train.answers)), train.answers)
        training, validation = set_aside(numbers, max(1, len(train.answers) // 20))
        episodes = self.demonstrations[0]
        return Parts(
            FixedPart(_RowSubset(episodes, training.rows), training.answers),
            FixedPart(_RowSubset(episodes, validation.rows), validation.answers),
            test,
        )

    def form(self, rows: Sequence[NDArray[Any]]) -> NDArray[Any]:
        batch = np.full((len(rows), self.length, self.question.inputs.count), np.nan, np.float32)
        for place, row in zip(batch, rows, strict=True):
            place[: len(row)] = self.inputs(row)
        return batch

    def inputs(self, row: NDArray[np.int16]) -> NDArray[np.float32]:
        """Return the inputs (T, C) of the steps of an episode, or of a part of one, as `Demonstrations` has them."""
        words = len(self.demonstrations[0].words)
        sizes = np.cumsum([0, *KINDS[:-1]])
        cells = words + sum(KINDS) * np.arange(49)[:, None] + sizes  # where each fact of each cell begins
        steps, has_action = np.zeros((len(row), self.question.inputs.count), np.float32), row[:, 1] >= 0
        word_steps = np.flatnonzero(~has_action & (row[:, 0] >= 0))
        steps[word_steps, row[word_steps, 0]] = 1
        action_steps = np.flatnonzero(has_action)
        steps[action_steps[:, None], cells.reshape(-1) + row[action_steps, 2:]] = 1
        steps[action_steps, words + SEEN_NUMBERS + row[action_steps, 0]] = 1
        steps[action_steps[1:], words + SEEN_NUMBERS + DIRECTIONS + row[action_steps[:-1], 1]] = 1
        return steps

    def answers(self, split: FixedPart) -> NDArray[Any]:
        actions = [np.where(row[:, 1] >= 0, row[:, 1], IGNORED).astype(np.int64) for row in split.rows]
        return padded(actions, self.length)

    def play(self, model: Any) -> str | None:
        if not babyai_bot.has_game():
            return None
        count = babyai_bot.EPISODES
        return f"missions fulfilled: {babyai_bot.fulfilled(model, self, count):.1%} of {count}"

    @cached_property
    def _digest(self) -> str:
        """The digest of the files, because unpacking all images takes long."""
        return hashlib.sha256(
            " ".join([self.name, *(demonstrations.digest for demonstrations in self.demonstrations)]).encode()
        ).hexdigest()


@dataclass(frozen=True)
class _RowSubset(Sequence[NDArray[np.int16]]):
    """Some of the rows."""

    rows: Sequence[NDArray[np.int16]]
    places: Any

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, place: Any) -> Any:
        return self.rows[self.places[place]]
