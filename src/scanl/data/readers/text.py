"""Plain text: a file as it is, its lines, or a folder of books."""

import numpy as np

from scanl.data.corpus import SEPARATOR, Bytes
from scanl.data.files import Files, lines
from scanl.errors import DataError


def whole(files: Files, name: str, folder: str, part: str, *, letters: str = "") -> Bytes:
    """Return the bytes of a file.   letters: the only characters that it may have; empty for all."""
    content = np.frombuffer(files.read(name, folder), np.uint8)
    files.counted({"bytes": len(content)}, folder)
    if letters and (odd := set(np.unique(content).tolist()) - set(letters.encode())):
        raise files.damaged(files.path(name, folder), f"it has byte {min(odd)}, expected {letters!r} alone", folder)
    return content


def lined(files: Files, name: str, folder: str, part: str) -> Bytes:
    """Return the bytes of the lines of a file that are not blank, without spaces at their ends."""
    text = "\n".join(lines(files.text(name, folder))) + "\n"
    return np.frombuffer(text.encode(), np.uint8)


def books(files: Files, name: str, folder: str, part: str) -> Bytes:
    """Return the bytes of the files *.txt of a folder, a zero byte between two."""
    paths = files.below(name, "*.txt", folder)
    files.counted({f"{part} books": len(paths)}, folder)
    try:
        return np.frombuffer(SEPARATOR.join(path.read_bytes() for path in paths), np.uint8)
    except OSError as error:
        raise DataError(f"{files.name}: {error.filename} cannot be read: {error.strerror}") from error
