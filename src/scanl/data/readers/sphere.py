"""NIST SPHERE: recordings with a header of text."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from scanl.data.files import Files


def samples(files: Files, path: Path, folder: str = "") -> NDArray[np.int16]:
    """Return the samples of a NIST SPHERE file of one channel of 16 bits at 16 kHz, not packed.

    A file has `NIST_1A`, the length of the header in bytes, lines `NAME -TYPE VALUE` up to `end_head`, and then the
    samples.
    """
    try:
        content = path.read_bytes()
        first, size, *lines = content[:1024].split(b"\n")
        facts = {line.split()[0]: line.split()[2] for line in lines[: lines.index(b"end_head")] if line.strip()}
        values = np.frombuffer(content[int(size) :], "<i2" if facts[b"sample_byte_format"] == b"01" else ">i2")
        count = int(facts[b"sample_count"])
    except (OSError, ValueError, LookupError) as error:
        raise files.damaged(path, f"it is no NIST SPHERE file: {error}", folder) from error
    form = first, facts.get(b"channel_count"), facts.get(b"sample_n_bytes"), facts.get(b"sample_rate")
    if form != (b"NIST_1A", b"1", b"2", b"16000") or facts.get(b"sample_coding", b"pcm") != b"pcm":
        why = f"its header says {b', '.join(form[1:2] + form[2:]).decode(errors='replace')}"  # pyright: ignore
        raise files.damaged(path, f"{why}, expected one channel of 2 bytes at 16000 Hz, not packed", folder)
    if not 0 < count == len(values):
        raise files.damaged(path, f"it has {len(values)} samples, expected {count} of its header", folder)
    return values
