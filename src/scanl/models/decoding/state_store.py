"""States of a model by the tokens that it has read: in memory, and in a folder."""

import hashlib
import os
import threading
import time
import warnings
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heappop, heappush
from pathlib import Path

from scanl.errors import CheckpointError, ConfigError
from scanl.layers.state import State, leaves, map_leaves
from scanl.models.decoding.decodable import Decodable
from scanl.models.decoding.prefix_tree import PrefixNode, PrefixTree, Text
from scanl.models.decoding.state_files import ReadText, model_digest, read_text, tokens_of, write_text
from scanl.whole import whole_number

MEBIBYTE = 2**20
ENDING = ".safetensors"
ABANDONED_SECONDS = 3600.0  # seconds after which an unfinished file is that of a process that was killed


@dataclass(eq=False)
class StoredState:
    """A state of a store. state: None if it is only in the file.   path, file_size: the file, and its bytes.

    used: when a process last used the file, in nanoseconds, as its time of change says.
    """

    node: PrefixNode["StoredState"]
    state: State = None
    size: int = 0
    path: Path | None = None
    file_size: int = 0
    used: int = 0


class StateStore:
    """States of one model by the tokens that led to them: a text that begins as an earlier one goes on from its state.

    The tokens are a tree, so texts share what they begin with. Beyond a limit the least recently used states go: from
    memory, where the folder keeps them if there is one, and from the folder. What has gone is computed again.

    With a folder each state is written as it is put, whole or not at all, with a digest. Other processes find it if
    their model has the same weights, also those that run at the same time; they keep to one limit together, each with
    its own `folder_limit`. A damaged file is refused: a warning names it, it is removed, and an earlier state takes its
    place.

    Several threads may use a store. It does not see that weights change: make a new one after a training step.

    Args:
        model: whose states they are.
        limit: bytes of the states in memory.
        folder: where the states are written; None for memory alone. Each model has a folder in it, named by its digest.
        folder_limit: bytes of the files of this model, whichever process wrote them.
    """

    def __init__(
        self,
        model: Decodable,
        *,
        limit: int = 256 * MEBIBYTE,
        folder: str | os.PathLike[str] | None = None,
        folder_limit: int = 4096 * MEBIBYTE,
    ) -> None:
        self.model = model
        least = size_of(model.init_state(1, device="meta"))
        self.limit = whole_number("state store", "limit", limit, least)
        self.folder_limit = whole_number("state store", "folder_limit", folder_limit, least)
        self._lock = threading.RLock()
        self._tree: PrefixTree[StoredState] = PrefixTree()
        self._in_memory: OrderedDict[StoredState, None] = OrderedDict()  # the least recently used first
        self._on_disk: dict[str, StoredState] = {}  # by the names of the files
        self.bytes_in_memory = self.bytes_on_disk = 0
        self.folder = None
        if folder is not None:
            self.folder = Path(folder, self.digest[:32])
            self._open(self.folder)

    @cached_property
    def digest(self) -> str:
        """Return the digest of the model's configuration and weights."""
        return model_digest(self.model)

    def __len__(self) -> int:
        """Return the number of states."""
        return len({*self._in_memory, *self._on_disk.values()})

    def put(self, tokens: Text, state: State) -> None:
        """Keep a copy of the state after these tokens, at least one. state: of one row."""
        with self._lock:
            node = self._tree.insert(tokens)
            entry = node.value = node.value or StoredState(node)
            if entry not in self._in_memory:
                # A copy, because a state may be a small part of a large tensor.
                self._remember(entry, map_leaves(lambda leaf: leaf.detach().clone(), state))
            self._look()
            if self.folder is not None and entry.path is None:
                self._write(entry, tokens, self.folder)
                self._look()  # of several processes that write at once, the last one sees all files
            self._use(entry)
            self._shrink()

    def longest(self, tokens: Text) -> tuple[int, State]:
        """Return the length of the longest beginning of the text with a state here, and the state; or 0 and None.

        Do not write into the state.
        """
        with self._lock:
            self._look()
            for length, node in reversed(list(self._tree.beginnings(tokens))):
                entry = node.value
                assert entry is not None
                if entry in self._in_memory or self._load(entry, tokens[:length]):
                    state = entry.state
                    self._use(entry)
                    self._shrink()
                    return length, state
            return 0, None

    def clear(self) -> None:
        """Forget all states, those on disk too."""
        with self._lock:
            self._look()
            for entry in {*self._in_memory, *self._on_disk.values()}:
                self._forget(entry)
                self._remove_file(entry)

    def _open(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            names = os.listdir(folder)
        except OSError as error:
            raise ConfigError(f"state store: {folder} cannot be used: {error.strerror}") from error
        for path in [folder / name for name in names if name.startswith(".") and name.endswith(f".tmp{ENDING}")]:
            if (last := _last_use(path)) is not None and time.time_ns() - last > ABANDONED_SECONDS * 1e9:
                path.unlink(missing_ok=True)
        self._look()
        self._shrink()

    def _look(self) -> None:
        """Take up the files that other processes have written, and drop those that they have removed."""
        if self.folder is None:
            return
        try:
            names = {name for name in os.listdir(self.folder) if name.endswith(ENDING) and not name.startswith(".")}
        except OSError:  # whatever is then read or written says why it fails
            return
        for entry in [entry for name, entry in self._on_disk.items() if name not in names]:
            self._drop_file(entry)
        for name in names - self._on_disk.keys():
            path = self.folder / name
            try:
                tokens = tokens_of(path)
                if name != _file_name(tokens):
                    raise CheckpointError(f"state store: {path} is damaged: its name does not fit its text")
            except CheckpointError as error:
                _refuse(path, error)
                continue
            node = self._tree.insert(tokens)
            entry = node.value = node.value or StoredState(node)
            self._add_file(entry, path)
            self._drop_if_gone(entry)

    def _write(self, entry: StoredState, tokens: Text, folder: Path) -> None:
        path = folder / _file_name(tokens)
        try:
            write_text(path, ReadText(tokens, len(tokens), entry.state), self.digest)
        except CheckpointError as error:  # a text can go on without a file
            warnings.warn(f"state store: {error}; the state is in memory alone", stacklevel=3)
            return
        self._add_file(entry, path)

    def _load(self, entry: StoredState, tokens: Text) -> bool:
        """Read the file of an entry into memory. If it cannot be read, drop it and return False."""
        assert entry.path is not None
        try:
            text = read_text(entry.path, self.model, self.digest, "state store")
            if text.tokens != tokens or text.length != len(tokens):
                raise CheckpointError(f"state store: {entry.path} holds another text")
        except CheckpointError as error:
            _refuse(entry.path, error)
            self._drop_file(entry)
            return False
        self._remember(entry, text.state)
        return True

    def _remember(self, entry: StoredState, state: State) -> None:
        entry.state, entry.size = state, size_of(state)
        self._in_memory[entry] = None
        self.bytes_in_memory += entry.size

    def _forget(self, entry: StoredState) -> None:
        if entry in self._in_memory:
            del self._in_memory[entry]
            self.bytes_in_memory -= entry.size
            entry.state = None
            self._drop_if_gone(entry)

    def _add_file(self, entry: StoredState, path: Path) -> None:
        with suppress(OSError):  # another process has just removed it
            status = path.stat()
            entry.path, entry.file_size, entry.used = path, status.st_size, status.st_mtime_ns
            self._on_disk[path.name] = entry
            self.bytes_on_disk += entry.file_size

    def _remove_file(self, entry: StoredState) -> None:
        if entry.path is not None:
            with suppress(OSError):  # another process may have removed it
                entry.path.unlink()
            self._drop_file(entry)

    def _drop_file(self, entry: StoredState) -> None:
        """Forget the file of an entry, which is there no more or is left to others."""
        assert entry.path is not None
        del self._on_disk[entry.path.name]
        self.bytes_on_disk -= entry.file_size
        entry.path = None
        self._drop_if_gone(entry)

    def _drop_if_gone(self, entry: StoredState) -> None:
        if entry not in self._in_memory and entry.path is None:
            self._tree.remove(entry.node)

    def _use(self, entry: StoredState) -> None:
        """Make an entry the most recently used."""
        self._in_memory.move_to_end(entry)
        if entry.path is not None:
            entry.used = time.time_ns()  # the system's own time of change is coarse
            with suppress(OSError):  # another process may have removed it
                os.utime(entry.path, ns=(entry.used, entry.used))

    def _shrink(self) -> None:
        """Remove the least recently used states beyond the limits."""
        while self.bytes_in_memory > self.limit:
            self._forget(next(iter(self._in_memory)))
        if self.bytes_on_disk > self.folder_limit:
            order = [(entry.used, name) for name, entry in self._on_disk.items()]
            heapify(order)
            while self.bytes_on_disk > self.folder_limit:
                used, name = heappop(order)
                entry = self._on_disk[name]
                assert entry.path is not None
                if (last := _last_use(entry.path)) is not None and last > used:  # another process has used it
                    entry.used = last
                    heappush(order, (last, name))
                else:
                    self._remove_file(entry)


def size_of(state: State) -> int:
    """Return the bytes of a state's tensors."""
    return sum(leaf.numel() * leaf.element_size() for _, leaf in leaves(state))


def _file_name(tokens: Text) -> str:
    return f"{hashlib.sha256(tokens.tobytes()).hexdigest()[:32]}{ENDING}"


def _last_use(path: Path) -> int | None:
    """Return the time of change of a file in nanoseconds; None if another process has removed it."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None


def _refuse(path: Path, error: CheckpointError) -> None:
    """Warn of a file that cannot be used, and remove it if that is because of its bytes."""
    if "No such file" in str(error.__cause__):  # another process has removed it
        return
    if isinstance(error.__cause__, OSError | RuntimeError):  # RuntimeError is torch's for a file that it cannot open
        warnings.warn(f"{error}; the state is computed again", stacklevel=2)
        return
    warnings.warn(f"{error}; the file is removed, and the state is computed again", stacklevel=2)
    with suppress(OSError):
        path.unlink()
