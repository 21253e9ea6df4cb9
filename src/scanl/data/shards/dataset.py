"""Shards for a training loop of one's own: a dataset of torch, and a loader that keeps its position with workers."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain, count, islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, default_convert, get_worker_info

from scanl.data.shards.listing import listed
from scanl.data.shards.reader import ShardPlace, ShardReader
from scanl.errors import ConfigError, ScanlError
from scanl.options import Natural, Positive, PositiveOrNone, checked

Position = dict[str, int]  # as `Shards.state_dict` returns it


class Shards(IterableDataset[Any]):
    """The rows of many files, in one order that the numbers of ranks and of workers do not change.

    A row is a dictionary of its columns. The items, rows or lists of rows, are numbered in the order of the rows; of n
    ranks with w workers each, worker k of rank r gives the items r + n k, r + n (k + w), ... So each rank gets every
    n-th item, and the workers of a rank share its work. Each of them reads all rows and decodes its own.

    All ranks get the same number of items of an epoch. The rows at its end that are too few for an item of each rank
    are dealt out in their order, as many to each rank, after which the first rows of the epoch fill up, as in torch's
    `DistributedSampler`.

    The position is a number of rows, and a cursor, a few integers that say where to read on. Neither depends on ranks,
    workers or `batch_size`: a position of one rank is right for any number of them. It holds after each item of a loop
    in one process. With workers, `ShardLoader` keeps it.

    Args:
        paths: files, folders, globs and URLs that fsspec opens, all of one form: Parquet, JSON lines, lines of text,
            WebDataset's tar. All but Parquet may be packed (.gz, .xz, .bz2, .zst). A folder or a glob stands for its
            files in the order of their names.
        columns: the columns of a row; None for all.
        batch_size: rows of an item, which is then a list; None for items that are single rows.
        seed: of the order of the shards, another in each epoch, and of the order in a window; None: as they are listed.
        window: number of rows that follow one another and are shuffled. A process holds them in memory, and reads them
            again when it resumes.
        repeat: go on with the next epoch. Otherwise an iteration ends with an epoch, and the next one reads the next.
        drop_last: leave out the rows at the end of an epoch that are too few for an item of each rank.
        rank, world: number of this process, and of all.

    Raises ConfigError for a wrong option, and in an iteration that goes on after another has begun; DataError for
    shards that are missing, damaged or cut short.
    """

    @checked("shards")
    def __init__(
        self,
        paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        columns: Sequence[str] | None = None,
        batch_size: PositiveOrNone = None,
        seed: int | None = None,
        window: Positive = 1,
        repeat: bool = False,
        drop_last: bool = False,
        rank: int = 0,
        world: Positive = 1,
    ) -> None:
        if window > 1 and seed is None:
            raise ConfigError(f"shards: window is {window}, expected 1 because seed is None")
        if not 0 <= rank < world:
            raise ConfigError(f"shards: rank is {rank}, expected 0 to {world - 1} because world is {world}")
        self.paths, self.columns, self.seed, self.window = paths, columns, seed, window
        self.batch_size, self.repeat, self.drop_last = batch_size, repeat, drop_last
        self.rank, self.world = rank, world
        self._position: Position = {"rows": 0, **ShardPlace()._asdict()}
        self._iterations = 0

    @cached_property
    def reader(self) -> ShardReader:
        """The rows; the shards are listed on first use."""
        shards, form = listed(self.paths)
        return ShardReader(shards, form, self.columns, self.seed, self.window)

    def __iter__(self) -> Iterator[Any]:
        for item, position in self.newest(self.positioned()):
            self._position = position
            if item is not None:
                yield item

    def newest(self, pairs: Iterator[Any]) -> Iterator[Any]:
        """Yield the pairs of an iteration. Raises ConfigError once another one has begun, as both set the position."""
        self._iterations += 1
        own = self._iterations
        for pair in pairs:
            yield pair
            if self._iterations != own:
                raise ConfigError("shards: an iteration goes on after another has begun, expected one at a time")

    def positioned(self) -> Iterator[tuple[Any, Position]]:
        """Yield the items of this process or worker, each with the position behind it in the order of all.

        At the end of an epoch, if `repeat` is False, the item is None and the position is the beginning of the next.
        """
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        size = self.batch_size or 1
        rows = self._position["rows"]
        begin = cursor = ShardPlace(*(self._position[name] for name in ShardPlace._fields))
        pairs = self.reader.endless(cursor) if self.repeat else self.reader.rows(cursor)

        def pair(item: list[Any]) -> tuple[Any, Position]:
            return item if self.batch_size else item[0], {"rows": rows, **cursor._asdict()}

        item, own, read = list[Any](), worker == 0, 0  # of a round, in which each rank gets an item
        rounds = count(1)
        for row, cursor in pairs:
            if own and read // size == self.rank:
                item.append(row.record())
            read, rows = read + 1, rows + 1
            if read < self.world * size:
                continue
            if own:
                yield pair(item)
            begin, item, own, read = cursor, [], next(rounds) % workers == worker, 0
        if read and own and not self.drop_last:
            yield pair(self._dealt(begin, -(-read // self.world)))
        cursor = ShardPlace(cursor.epoch + 1)
        yield None, pair([None])[1]

    def _dealt(self, begin: ShardPlace, rows: int) -> list[Any]:
        """Return `rows` rows of this rank. If the epoch ends before, they go on with its first rows."""
        again = chain.from_iterable(self.reader.rows(ShardPlace(begin.epoch)) for _ in count())
        pairs = chain(self.reader.rows(begin), again)
        return [row.record() for row, _ in islice(pairs, self.rank * rows, (self.rank + 1) * rows)]

    def state_dict(self) -> Position:
        """Return the position behind the last item: how many rows all ranks have read, and where to read on.

        Raises ConfigError in a worker, which knows the position of its own items alone.
        """
        if get_worker_info() is not None:
            raise ConfigError("shards: the position is that of a worker, expected the one of all: use ShardLoader")
        return dict(self._position)

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Set the position, as `state_dict` returned it; the next iteration begins there.

        Raises ConfigError for another mapping.
        """
        if state_dict.keys() != self._position.keys():
            expected = ", ".join(self._position)
            raise ConfigError(f"shards: state_dict has {', '.join(map(str, state_dict))}, expected {expected}")
        for name, value in state_dict.items():
            if type(value) is not int or not 0 <= value < 2**63:
                raise ConfigError(f"shards: {name} of state_dict is {value!r}, expected a number of at least 0")
        self._position = {name: state_dict[name] for name in self._position}


class ShardLoader(DataLoader[Any]):
    """A DataLoader of `Shards` that knows the position with any number of workers, and resumes with another.

    Args:
        dataset: the shards; its items are the batches.
        collate_fn: makes a batch of an item, in the worker; None: numbers and arrays become tensors.
        ahead: how many batches the consumer has fetched beside those that it has worked on. Lightning fetches one
            batch ahead, so for its trainer it is 1.
        options: of DataLoader: `num_workers`, `pin_memory`, `persistent_workers`, ... but `in_order`.
    """

    @checked("shards")
    def __init__(
        self, dataset: Shards, *, collate_fn: Callable[[Any], Any] | None = None, ahead: Natural = 0, **options: Any
    ) -> None:
        for name in ("batch_size", "shuffle", "sampler", "batch_sampler", "drop_last"):
            if name in options:
                raise ConfigError(f"shards: {name} is an option of the loader, expected an option of Shards")
        if not options.get("in_order", True):
            raise ConfigError("shards: in_order is False, expected True, as a position counts batches in their order")
        self._positioned = _PositionedRows(dataset)
        super().__init__(self._positioned, batch_size=None, collate_fn=_Items(collate_fn), **options)
        self.shards, self.ahead = dataset, ahead

    def __iter__(self) -> Iterator[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        positions = [self.shards.state_dict()]
        self._positioned.begin(positions[0])
        for item, position in self.shards.newest(super().__iter__()):
            if isinstance(item, ScanlError):
                raise item
            positions = [*positions, position][-self.ahead - 1 :]
            if item is None:  # each worker ends with one
                continue
            self.shards.load_state_dict(positions[max(0, len(positions) - 1 - self.ahead)])
            yield item
        self.shards.load_state_dict(positions[-1])

    def state_dict(self) -> Position:
        """Return the position behind the last batch that the consumer has worked on; see `Shards.state_dict`."""
        return self.shards.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Set the position; see `Shards.load_state_dict`."""
        self.shards.load_state_dict(state_dict)


class _PositionedRows(IterableDataset[Any]):
    """The items of shards with their positions. An error is the last item, so it reaches the loader as it is.

    Workers that outlive an epoch have a copy of the shards, so the position from which they read is in shared memory.
    """

    def __init__(self, shards: Shards) -> None:
        self.shards, self.names = shards, tuple(shards.state_dict())
        self.start = torch.zeros(len(self.names), dtype=torch.int64).share_memory_()

    def begin(self, position: Position) -> None:
        """Set the position at which the next iteration begins, here and in all workers."""
        self.start.copy_(torch.tensor([position[name] for name in self.names]))

    def __iter__(self) -> Iterator[tuple[Any, Position]]:
        try:
            self.shards.load_state_dict(dict(zip(self.names, self.start.tolist(), strict=True)))
            yield from self.shards.positioned()
        except ScanlError as error:
            yield error, {}


class _Items:
    """Makes a batch of each item, and leaves its position as it is."""

    def __init__(self, collate_fn: Callable[[Any], Any] | None) -> None:
        self.collate_fn = default_convert if collate_fn is None else collate_fn

    def __call__(self, pair: Any) -> tuple[Any, Position]:
        item, position = pair
        return (item if item is None or isinstance(item, ScanlError) else self.collate_fn(item)), position
