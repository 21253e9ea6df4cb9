"""Modules of The SWORD Project in the form zText: verses in compressed blocks, with headings between them."""

import re
import struct
import zlib
from collections.abc import Iterator

from scanl.data.files import Files

BLOCK, VERSE = struct.Struct("<III"), struct.Struct("<IIH")  # where, packed size, size; block, begin, length


def entries(files: Files, testament: str, folder: str = "") -> list[str]:
    """Return the texts of the files `testament`.bzs, .bzv and .bzz, without their tags and notes.

    The first two entries are headings of the module and of the testament. Then each book has a heading, and in it each
    chapter. Raises DataError for a damaged file.
    """
    blocks, verses, packed = (files.read(f"{testament}.{ending}", folder) for ending in ("bzs", "bzv", "bzz"))
    for ending, content, form in (("bzs", blocks, BLOCK), ("bzv", verses, VERSE)):
        if len(content) % form.size:
            why = f"it has {len(content)} bytes, expected a multiple of {form.size}"
            raise files.damaged(files.path(f"{testament}.{ending}", folder), why, folder)
    texts = list(_unpacked(files, testament, folder, blocks, packed))
    plain = []
    for number, (block, begin, length) in enumerate(VERSE.iter_unpack(verses)):
        if length and (block >= len(texts) or begin + length > len(texts[block])):
            why = f"entry {number} is at {begin} of block {block}, where there is no text"
            raise files.damaged(files.path(f"{testament}.bzv", folder), why, folder)
        plain.append(_plain(texts[block][begin : begin + length].decode(errors="replace")) if length else "")
    return plain


def _unpacked(files: Files, testament: str, folder: str, blocks: bytes, packed: bytes) -> Iterator[bytes]:
    """Yield the texts of the blocks."""
    for number, (begin, length, _) in enumerate(BLOCK.iter_unpack(blocks)):
        try:
            yield zlib.decompress(packed[begin : begin + length])
        except zlib.error as error:
            path = files.path(f"{testament}.bzz", folder)
            raise files.damaged(path, f"it lacks block {number} of {testament}.bzs: {error}", folder) from error


def _plain(text: str) -> str:
    return " ".join(re.sub(r"<note.*?</note>|<[^>]*>", "", text, flags=re.DOTALL).split())
