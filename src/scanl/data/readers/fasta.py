"""FASTA: genomes as text."""

import numpy as np

from scanl.data.files import Files
from scanl.data.text.corpus import Bytes

BASES = b"ACGTN"


def records(files: Files, name: str, folder: str = "") -> dict[str, Bytes]:
    """Read FASTA: a line `>NAME ...`, then lines of bases, for each record. Return the tokens 0 ... 4 for ACGTN.

    Small letters are read as capitals. The other letters of the standard code are uncertain bases, and are read as N.
    """
    sequences: dict[str, Bytes] = {}
    codes = np.full(256, 255, np.uint8)
    for letter in b"RYSWKMBDHVU-":
        codes[[letter, ord(chr(letter).lower())]] = BASES.index(b"N")
    for number, letter in enumerate(BASES):
        codes[[letter, ord(chr(letter).lower())]] = number
    content = files.read(name, folder)
    path = files.path(name, folder)
    if not content.startswith(b">"):
        raise files.damaged(path, "it does not begin with >, as FASTA does", folder)
    for record in content[1:].split(b"\n>"):
        title, _, letters = record.partition(b"\n")
        bases = codes[np.frombuffer(letters.replace(b"\n", b"").replace(b"\r", b""), np.uint8)]
        if not title.split() or not len(bases) or bases.max() == 255:
            raise files.damaged(path, f"record {title[:40].decode(errors='replace')!r} is no sequence of bases", folder)
        sequences[title.split()[0].decode(errors="replace")] = bases
    return sequences


def bases(files: Files, name: str, folder: str, split: str) -> Bytes:
    """Return the tokens of all records of a file, one after the other."""
    tokens = np.concatenate(list(records(files, name, folder).values()))
    files.check_counts({f"{split} bases".strip(): len(tokens)}, folder)
    return tokens
