"""The order of the rows of all shards: one order, which a few numbers find again."""

import lzma
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from scanl.data.shards.forms import NoColumn, Raw, Record, ShardForm
from scanl.data.shards.listing import Shard, opened
from scanl.errors import DataError

DAMAGE = (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError, tarfile.TarError)


class ShardPlace(NamedTuple):
    """The place of the next row.

    epoch: how often all shards were read.   place: of the shard in the order of the epoch.   row, offset: of the first
    row of the window in the shard, by number and by byte of the unpacked file.   done: rows of the window that were
    read.
    """

    epoch: int = 0
    place: int = 0
    row: int = 0
    offset: int = 0
    done: int = 0


class ShardRow(NamedTuple):
    """A row of a shard, which `record` decodes. number: of the row in the shard, from 0."""

    shard: Shard
    number: int
    raw: Raw

    def record(self) -> Record:
        """Return the columns by name. Raises DataError for a damaged row, or one without a column."""
        try:
            return self.raw()
        except NoColumn as error:
            raise DataError(f"shards: {self.shard.path} has {error} in row {self.number}") from error
        except DAMAGE as error:
            raise damaged(self.shard, self.number, error) from error


def damaged(shard: Shard, row: int, error: Exception) -> DataError:
    """Return the error for a shard that cannot be read further."""
    if isinstance(error, FileNotFoundError | PermissionError):
        return DataError(f"shards: {shard.path} cannot be read: {error.strerror or error}")
    why = " ".join(str(error).split()) or type(error).__name__
    return DataError(
        f"shards: {shard.path} is damaged or cut short at row {row}: {why.rstrip('.')}; put back a whole copy"
    )


@dataclass(frozen=True)
class ShardReader:
    """The rows of all shards in one order, epoch after epoch.

    seed: of the order of the shards, another in each epoch, and of the order in a window; None: as they are listed.
    window: how many rows that follow one another are shuffled, and held in memory.   columns: of the records.
    """

    shards: Sequence[Shard]
    form: ShardForm
    columns: Sequence[str] | None
    seed: int | None
    window: int

    def rows(self, cursor: ShardPlace) -> Iterator[tuple[ShardRow, ShardPlace]]:
        """Yield the rows from a cursor to the end of its epoch, each with the cursor behind it.

        No shard before the cursor is opened, and of its window alone a row is read twice. Raises DataError for a
        damaged shard.
        """
        order = np.arange(len(self.shards)) if self.seed is None else self._order(len(self.shards), cursor.epoch)
        rows = self._in_turn(order.tolist(), cursor)
        while window := list(islice(rows, self.window)):
            end = ShardPlace(cursor.epoch, *window[-1][1])
            places = range(len(window)) if self.window == 1 else self._order(len(window), *cursor[:3]).tolist()
            for done in range(cursor.done, len(window)):
                behind = end if done + 1 == len(window) else cursor._replace(done=done + 1)
                yield window[places[done]][0], behind
            cursor = end

    def endless(self, cursor: ShardPlace) -> Iterator[tuple[ShardRow, ShardPlace]]:
        """Yield the rows of one epoch after another. Raises DataError where the shards have no row."""
        complete = not any(cursor[1:])  # the epoch from its first row
        while True:
            empty = complete
            for pair in self.rows(cursor):
                empty = False
                yield pair
            if empty:
                raise DataError(f"shards: {self.shards[0].path} and all other shards have no row, expected one or more")
            cursor, complete = ShardPlace(cursor.epoch + 1), True

    def _order(self, count: int, *seed: int) -> NDArray[np.int64]:
        return np.random.default_rng((self.seed or 0, *seed)).permutation(count)

    def _in_turn(self, order: Sequence[int], cursor: ShardPlace) -> Iterator[tuple[ShardRow, tuple[int, int, int]]]:
        """Yield rows in the order of the shards, each with place, row and offset behind it."""
        start, offset = cursor.row, cursor.offset
        for place in range(cursor.place, len(order)):
            for row, behind in self._of_shard(self.shards[order[place]], start, offset):
                yield row, (place, row.number + 1, behind)
            start = offset = 0

    def _of_shard(self, shard: Shard, start: int, offset: int) -> Iterator[tuple[ShardRow, int]]:
        number = start
        try:
            with opened(shard.path) as file:
                for raw, behind in self.form.rows(file, self.columns, start, offset):
                    yield ShardRow(shard, number, raw), behind
                    number += 1
        except NoColumn as error:
            raise DataError(f"shards: {shard.path} has {error}") from error
        except DAMAGE as error:
            raise damaged(shard, number, error) from error
