"""WAV files of one channel of 16 bits."""

import wave
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from scanl.data.files import Files

RATE = 16_000


@contextmanager
def opened(files: Files, path: Path, folder: str) -> Iterator[wave.Wave_read]:
    """Open a WAV file of one channel of 16 bits at 16 kHz. Raises DataError for another, or a damaged one."""
    try:
        with path.open("rb") as content, wave.open(content) as file:
            form = file.getnchannels(), file.getsampwidth(), file.getframerate()
            if form != (1, 2, RATE) or not file.getnframes():
                why = f"it has {form[0]} channels of {8 * form[1]} bits at {form[2]} Hz, expected 1 of 16 at {RATE}"
                raise files.damaged(path, why, folder)
            yield file
    except (OSError, wave.Error, EOFError, ValueError) as error:
        raise files.damaged(path, f"it is no WAV file: {error}", folder) from error
