"""The bytes of an archive: a header, frames, and an index at the end.

    header               7 bytes of magic and version, the fields of `Header`, a check
    frame                kind, size, length of the code, the data's check; the code; a check
    ...
    index                the kind END, 4 bytes of length, JSON of `Index`, a check
    end                  4 bytes: how many the index takes

Numbers are little-endian. A check is BLAKE2b of 8 bytes over all bytes of its part, so a flipped bit is found before
anything is made of them. The data's check is that of the bytes that a frame stands for: it finds numbers of another
machine than those by which the frame was coded.
"""

import hashlib
import json
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Self

from scanl.errors import DataError

MAGIC, VERSION = b"\x93scanl", 2
ARITHMETICS, PRECISIONS = ("exact", "portable"), ("float32", "int8", "no model")
STORED, MODELLED, END = 0, 1, 255  # kinds of what follows the header
CHECK = 8  # bytes of a check
MAX_FRAME = 1 << 26  # bytes of data, each of which takes 20 bytes of memory; the code of a frame is no longer
FIELDS, FRAME, LENGTH = struct.Struct("<16sBBBIH"), struct.Struct("<BII8s"), struct.Struct("<I")

Read = Callable[[int], bytes]  # returns so many bytes, fewer at the end


def check(*parts: bytes) -> bytes:
    digest = hashlib.blake2b(digest_size=CHECK)
    for part in parts:
        digest.update(part)
    return digest.digest()


def damaged(part: str) -> DataError:
    return DataError(f"unpack: {part} is damaged or cut off: its bytes do not fit its check; copy the archive again")


class Header(NamedTuple):
    """What holds for all frames. model: the digest of the predictor's, 32 hexadecimal digits.

    learning: whether the model learns from each frame.   frame: bytes of data in a frame, but the last one.
    streams: into how many a frame is cut, at most.
    """

    model: str
    arithmetic: str
    precision: str
    learning: bool
    frame: int
    streams: int

    def packed(self) -> bytes:
        choices = ARITHMETICS.index(self.arithmetic), PRECISIONS.index(self.precision), self.learning
        part = MAGIC + bytes([VERSION]) + FIELDS.pack(bytes.fromhex(self.model), *choices, self.frame, self.streams)
        return part + check(part)

    @classmethod
    def read(cls, read: Read) -> Self:
        """Return the header. Raises DataError for another file, or a damaged one."""
        begin = read(len(MAGIC) + 1)
        if begin[: len(MAGIC)] != MAGIC:
            raise DataError("unpack: the file is no archive of scanl, or its first bytes are damaged")
        if begin[-1] != VERSION:
            raise DataError(f"unpack: the archive has version {begin[-1]}, expected {VERSION}, or is damaged")
        fields = read(FIELDS.size)
        if read(CHECK) != check(begin, fields):
            raise damaged("the header")
        model, arithmetic, precision, learning, frame, streams = FIELDS.unpack(fields)
        return cls(model.hex(), ARITHMETICS[arithmetic], PRECISIONS[precision], bool(learning), frame, streams)


HEADER = len(MAGIC) + 1 + FIELDS.size + CHECK  # bytes of the header


class ArchiveFrame(NamedTuple):
    """A frame. size: of its data.   data_check: their check.

    kind: MODELLED, or STORED as they are, where that is shorter.
    """

    kind: int
    size: int
    data_check: bytes
    code: bytes

    def packed(self) -> bytes:
        begin = FRAME.pack(self.kind, self.size, len(self.code), self.data_check)
        return begin + self.code + check(begin, self.code)


class ArchiveMember(NamedTuple):
    """A file of an archive; its name is "" for bytes without one."""

    name: str
    size: int


@dataclass
class Index:
    """What is known at the end. frames: the bytes that each takes.   members: the files whose bytes the data are."""

    frames: list[int] = field(default_factory=list)
    members: list[ArchiveMember] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Bytes of data."""
        return sum(member.size for member in self.members)

    def packed(self) -> bytes:
        text = json.dumps([self.frames, self.members], separators=(",", ":")).encode()
        part = bytes([END]) + LENGTH.pack(len(text)) + text
        return part + check(part) + LENGTH.pack(len(part) + CHECK)

    @classmethod
    def read(cls, begin: bytes, read: Read) -> Self:
        """Return the index behind its first byte. Nothing may follow it."""
        size = read(LENGTH.size)
        text = read(LENGTH.unpack(size)[0]) if len(size) == LENGTH.size else b""
        if read(CHECK) != check(begin, size, text):
            raise damaged("the index")
        if read(LENGTH.size + 1) != LENGTH.pack(len(begin) + len(size) + len(text) + CHECK):
            raise damaged("the end")
        frames, members = json.loads(text)
        return cls(frames, [ArchiveMember(*member) for member in members])


def read_part(read: Read, place: int) -> ArchiveFrame | Index:
    """Return the next frame, or the index. place: where it begins. Raises DataError for a damaged one."""
    begin = read(1)
    if begin == bytes([END]):
        return Index.read(begin, read)
    begin += read(FRAME.size - 1)
    kind, size, length, data_check = FRAME.unpack(begin) if len(begin) == FRAME.size else (END, 0, 0, b"")
    if kind not in (STORED, MODELLED) or not 0 < length <= size <= MAX_FRAME:
        raise damaged(f"the frame at byte {place:,}")
    code = read(length)
    if read(CHECK) != check(begin, code):
        raise damaged(f"the frame at byte {place:,}")
    return ArchiveFrame(kind, size, data_check, code)
