"""Pack bytes by what a language model expects, and unpack them."""

import io
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, BinaryIO

import torch

from scanl.errors import ConfigError, DataError
from scanl.models import LanguageModel
from scanl.models.byte_models import byte_model, byte_model_names
from scanl.packing.adaptive import AdaptivePredictor
from scanl.packing.archive import (
    CHECK,
    FRAME,
    HEADER,
    LENGTH,
    MAX_FRAME,
    MODELLED,
    STORED,
    ArchiveFrame,
    ArchiveMember,
    Header,
    Index,
    check,
    damaged,
    read_part,
)
from scanl.packing.frames import AnyPredictor, Moved, decoded, encoded
from scanl.packing.predictor import ContextsAlone, Predictor

GivenModel = LanguageModel | Predictor | ContextsAlone
FRAME_SIZE = 1 << 22
STREAMS = 32
PIECE = 1 << 16  # bytes that are read of a file at a time


def _unmoved(count: int) -> None:
    """Pass over how many bytes were coded."""


def pack(data: bytes, model: GivenModel | None = None, **options: Any) -> bytes:
    """Return an archive of some bytes, which `unpack` reads. options: see `pack_pieces`.

    model: None for the one that comes with scanl.

    >>> from scanl.models import LanguageModel, Stack
    >>> model = LanguageModel(256, Stack(32, 1, "mingru"))
    >>> unpack(pack(b"a text", model), model)
    b'a text'
    """
    return b"".join(pack_pieces([data], model, **options))


def unpack(archive: bytes, model: GivenModel | None = None, *, threads: int | None = None) -> bytes:
    """Return the bytes of an archive. Raises DataError for a damaged one, or one of another model."""
    return b"".join(unpack_file(io.BytesIO(archive), model, threads=threads))


def pack_pieces(
    pieces: Iterable[bytes],
    model: GivenModel | None = None,
    *,
    learn: bool = False,
    streams: int = STREAMS,
    frame: int = FRAME_SIZE,
    threads: int | None = None,
    members: Sequence[ArchiveMember] | None = None,
    earlier: BinaryIO | None = None,
    moved: Moved = _unmoved,
) -> Iterator[bytes]:
    """Yield the parts of an archive of the bytes in `pieces`, as they are made.

    learn: let the model learn from what it has coded, here and where it is unpacked: fewer bits, in a multiple of the
    time, and for one machine and version of torch alone.
    streams: into how many a frame is cut, which are coded side by side. More are faster, and take more bytes.
    frame: bytes of data that are coded together, and read together for one of them.   threads: None for torch's.
    members: the files that the bytes are of, when the pieces have come to their end; None: one without a name.
    earlier: the beginning of an archive of the same bytes: its frames are copied.   moved: called with bytes done.
    """
    _check("streams", streams, 1 << 12)
    _check("frame", frame, MAX_FRAME)
    predictor = _predictor(byte_model() if model is None else model)
    if learn:
        if isinstance(predictor, ContextsAlone):
            raise ConfigError("packing: learn is True, but there is no model that learns; contexts always do")
        predictor, earlier = AdaptivePredictor(predictor), None  # what an earlier frame taught is not in it
    begin = Header(predictor.digest, predictor.arithmetic, predictor.precision, learn, frame, streams).packed()
    yield begin
    index, size, known = Index(), 0, _Earlier(earlier, begin)
    for data in _regular(pieces, frame):
        part = known.frame(data)
        if part is None:
            before = predictor.saved() if isinstance(predictor, AdaptivePredictor) else None
            with _on_threads(threads):
                code = encoded(predictor, data, streams, moved)
            if code is None and isinstance(predictor, AdaptivePredictor) and before is not None:
                predictor.restore(before)  # who unpacks reads such a frame without the model
            kind, code = (STORED, data) if code is None else (MODELLED, code)
            part = ArchiveFrame(kind, len(data), check(data), code)
        else:
            moved(len(data))
        packed = part.packed()
        index.frames.append(len(packed))
        size += len(data)
        yield packed
    index.members = [ArchiveMember("", size)] if members is None else list(members)
    yield index.packed()


def unpack_file(file: BinaryIO, model: GivenModel | None = None, *, threads: int | None = None) -> Iterator[bytes]:
    """Yield the bytes of an archive frame by frame, from a file that need not be one in which one can seek."""
    return Archive(file, model, threads=threads).pieces()


class Archive:
    """An archive in a file.

    `pieces` reads it from the beginning to the end, also from a pipe. `read` reads any bytes of it, by the frames that
    have them.

    model: None for the one of those that come with scanl that packed it.
    """

    def __init__(
        self,
        file: BinaryIO,
        model: GivenModel | None = None,
        *,
        threads: int | None = None,
        moved: Moved = _unmoved,
    ) -> None:
        self._file, self._threads, self._moved = file, threads, moved
        self.header = Header.read(self._read)
        self._predictor = _predictor_of(self.header, model)
        self._index: Index | None = None

    @property
    def index(self) -> Index:
        """The sizes of the frames, and the files. It is at the end of the archive."""
        if self._index is None:
            end = self._file.seek(0, io.SEEK_END)
            self._file.seek(end - LENGTH.size)
            place = end - LENGTH.size - LENGTH.unpack(self._read(LENGTH.size))[0]
            part = None
            if place >= HEADER:
                self._file.seek(place)
                part = read_part(self._read, place)
            if not isinstance(part, Index):
                raise damaged("the index")
            self._index = part
        return self._index

    def pieces(self, earlier: BinaryIO | None = None) -> Iterator[bytes]:
        """Yield the data of each frame. Raises DataError for a damaged part, before anything of it is yielded.

        earlier: the beginning of the data, from an earlier call: what fits the archive is not unpacked again.
        """
        if self._index is not None:  # it has moved the file
            self._file.seek(HEADER)
        place, sizes, size = HEADER, list[int](), 0
        predictor = self._predictor
        if self.header.learning and isinstance(predictor, Predictor):
            predictor, earlier = AdaptivePredictor(predictor), None
        while not isinstance(part := read_part(self._read, place), Index):
            known = b"" if earlier is None else earlier.read(part.size)
            if len(known) == part.size and check(known) == part.data_check:
                self._moved(part.size)
                data = known
            else:
                data, earlier = self._data(part, place, predictor), None
            sizes.append(FRAME.size + len(part.code) + CHECK)
            place, size = place + sizes[-1], size + len(data)
            yield data
        if (part.frames, part.size) != (sizes, size):
            raise damaged("the index")
        self._index = part

    def read(self, begin: int = 0, end: int | None = None) -> bytes:
        """Return the bytes of the data from `begin` to before `end`; None for its end."""
        if self.header.learning:
            raise ConfigError("unpack: the archive was packed with --learn, so it is read from its beginning alone")
        index, frame = self.index, self.header.frame
        end = index.size if end is None else end
        if not 0 <= begin <= end <= index.size:
            raise ConfigError(f"unpack: the bytes {begin} to {end} are asked for, expected some of 0 to {index.size}")
        if begin == end:
            return b""
        numbers = range(begin // frame, -(-end // frame))
        place = HEADER + sum(index.frames[: numbers.start])
        data = []
        for number in numbers:
            self._file.seek(place)
            part = read_part(self._read, place)
            if isinstance(part, Index):
                raise damaged("the index")
            data.append(self._data(part, place, self._predictor))
            place += index.frames[number]
        first = numbers.start * frame
        return b"".join(data)[begin - first : end - first]

    def _read(self, size: int) -> bytes:
        """Return so many bytes, fewer at the end of the file; a pipe may return fewer at a time."""
        parts, missing = [], size
        while missing and (part := self._file.read(missing)):
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)

    def _data(self, part: ArchiveFrame, place: int, predictor: AnyPredictor) -> bytes:
        with _on_threads(self._threads):
            data: bytes | None = part.code
            if part.kind == MODELLED:
                data = decoded(predictor, part.code, part.size, self.header.streams, self._moved)
        if data is None or check(data) != part.data_check:
            raise DataError(
                f"unpack: the frame at byte {place:,} of the archive is whole, but its data are not those that were "
                f"packed: the numbers of this machine differ ({self.header.arithmetic} arithmetic)"
            )
        return data


class _Earlier:
    """The frames of an archive that was not ended."""

    def __init__(self, file: BinaryIO | None, header: bytes) -> None:
        self._file = file
        if file is not None and file.read(len(header)) != header:
            self._file = None

    def frame(self, data: bytes) -> ArchiveFrame | None:
        """Return the next frame as it was packed, if it is whole and of these data."""
        if self._file is None:
            return None
        try:
            part = read_part(self._file.read, 0)
        except DataError:  # it was not written to its end
            part = None
        if not isinstance(part, ArchiveFrame) or (part.size, part.data_check) != (len(data), check(data)):
            self._file = None
            return None
        return part


def _predictor_of(header: Header, model: GivenModel | None) -> Predictor | ContextsAlone:
    """Return the predictor that made an archive. Raises DataError if it is another one."""
    models = chain([ContextsAlone()], map(byte_model, byte_model_names())) if model is None else [model]
    predictors = []
    for tried in models:
        last = _predictor(tried)
        predictors.append(last)
        arithmetic = (last.arithmetic, last.precision) == (header.arithmetic, header.precision) or header.learning
        if last.digest == header.model and arithmetic:
            return last
    given = " and ".join(f"{each.digest} ({each.precision}, {each.arithmetic})" for each in predictors)
    raise DataError(
        f"unpack: the archive was packed by the model {header.model} ({header.precision}, {header.arithmetic}), but "
        f"this is {given or 'no model'}; name the model that packed it"
    )


def _predictor(model: GivenModel) -> Predictor | ContextsAlone:
    return Predictor(model) if isinstance(model, LanguageModel) else model


def _regular(pieces: Iterable[bytes], size: int) -> Iterator[bytes]:
    """Yield the bytes of pieces in pieces of a size; the last one has the rest."""
    waiting = bytearray()
    for piece in pieces:
        waiting += piece
        begin = 0
        while len(waiting) - begin >= size:
            yield bytes(waiting[begin : begin + size])
            begin += size
        del waiting[:begin]
    if waiting:
        yield bytes(waiting)


@contextmanager
def _on_threads(threads: int | None) -> Iterator[None]:
    """A context in which torch has so many threads; None for those that it has."""
    if threads is None:
        yield
        return
    _check("threads", threads, 1 << 10)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _check(name: str, value: int, largest: int) -> None:
    if not 1 <= value <= largest:
        raise ConfigError(f"packing: {name} is {value}, expected 1 to {largest:,}")
