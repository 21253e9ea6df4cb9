"""Plain text: a file as it is, its lines, or a folder of books."""

import numpy as np

from scanl.data.files import Files, lines, whole_lines
from scanl.data.text.corpus import SEPARATOR, Bytes
from scanl.errors import DataError


def whole(files: Files, name: str, folder: str, split: str, *, letters: str = "") -> Bytes:
    """Return the bytes of a file.

    split: the split whose published count is compared; empty: the count of the data set.   letters: the only
    characters that the file may have; empty: all.
    """
    content = np.frombuffer(files.read(name, folder), np.uint8)
    files.check_counts({f"{split} bytes".strip(): len(content)}, folder)
    if letters and (odd := set(np.unique(content).tolist()) - set(letters.encode())):
        raise files.damaged(files.path(name, folder), f"it has byte {min(odd)}, expected {letters!r} alone", folder)
    return content


def lined(files: Files, name: str, folder: str, split: str) -> Bytes:
    """Return the bytes of the lines of a file that are not blank, without spaces at their ends."""
    text = "\n".join(lines(files.text(name, folder))) + "\n"
    return np.frombuffer(text.encode(), np.uint8)


def words(files: Files, name: str, folder: str) -> list[str]:
    """Return the words between blanks of a file; the end of a line is the word `<eos>`."""
    return [word for line in whole_lines(files.text(name, folder)) for word in (*line.split(), "<eos>")]


def books(files: Files, name: str, folder: str, split: str) -> Bytes:
    """Return the bytes of the files *.txt of a folder, a zero byte between two."""
    paths = files.below(name, "*.txt", folder)
    files.check_counts({f"{split} books".strip(): len(paths)}, folder)
    try:
        return np.frombuffer(SEPARATOR.join(path.read_bytes() for path in paths), np.uint8)
    except OSError as error:
        raise DataError(f"{files.name}: {error.filename} cannot be read: {error.strerror}") from error
