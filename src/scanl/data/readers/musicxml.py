"""Compressed MusicXML: a score in an archive."""

import lzma
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator
from fractions import Fraction
from io import BytesIO
from math import ceil
from xml.etree import ElementTree

STEPS = {"C": 0, "D": 2, "E": 4, "F": 5, "G": 7, "A": 9, "B": 11}  # above C, in semitones
READ_ERRORS = (
    *(zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error, EOFError, OSError, RuntimeError),  # of the archive
    *(ElementTree.ParseError, LookupError, ValueError),  # of the score
)


def score(content: bytes) -> ElementTree.Element:
    """Return the score of a compressed MusicXML file. Raises one of `READ_ERRORS` if there is none."""
    with zipfile.ZipFile(BytesIO(content)) as archive:
        names = [file.get("full-path", "") for file in _xml(archive.read("META-INF/container.xml")).iter("rootfile")]
        root = _xml(archive.read(names[0]))
    if root.tag != "score-partwise":
        raise ValueError(f"it begins with {root.tag}, expected score-partwise")
    return root


def _xml(content: bytes) -> ElementTree.Element:
    if b"<!ENTITY" in content.replace(b"\0", b""):  # of UTF-16
        raise ValueError("it declares an entity, which may stand for very much text")
    return ElementTree.fromstring(content)


def frames(parts: list[ElementTree.Element]) -> list[list[int]]:
    """Return the MIDI numbers of the notes that sound at the start of each quarter note. Raises ValueError."""
    spans = [span for part in parts for span in _spans(part)]
    notes: list[list[int]] = [[] for _ in range(ceil(max((end for _, end, _ in spans), default=0)))]
    for begin, end, note in spans:
        if note is not None:
            for frame in notes[ceil(begin) : ceil(end)]:
                frame.append(note)
    return notes


def _spans(part: ElementTree.Element) -> Iterator[tuple[Fraction, Fraction, int | None]]:
    """Yield the start and end of each note, in quarter notes, and its MIDI number; of a rest, None."""
    measure_begin, divisions = Fraction(0), 0
    for measure in part.iter("measure"):
        begin = now = last = measure_begin
        for item in measure:
            has = {child.tag for child in item}
            if "divisions" in has:
                divisions = _number(item, "divisions", least=1)
            if has & {"transpose", "cue"}:
                raise ValueError("a part is transposed or has a cue, expected notes as they sound")
            if item.tag not in ("note", "backup", "forward") or "grace" in has:
                continue
            if not divisions:
                raise ValueError("a note comes before the divisions of a quarter note")
            time = Fraction(_number(item, "duration", least=1), divisions)
            begin = begin if "chord" in has else now
            end = begin - time if item.tag == "backup" else begin + time
            if end < measure_begin:
                raise ValueError("a backup goes before its measure")
            now, last = now if "chord" in has else end, max(last, end)
            if item.tag == "note":  # a piece ends with its last note or rest
                yield begin, end, None if "rest" in has else _note(item)
        measure_begin = last


def _note(item: ElementTree.Element) -> int:
    step, octave = item.findtext("pitch/step", ""), _number(item, "pitch/octave")
    if step not in STEPS:
        raise ValueError(f"a note has the step {step!r}, expected one of {', '.join(STEPS)}")
    return 12 * (octave + 1) + STEPS[step] + _number(item, "pitch/alter", default="0")


def _number(item: ElementTree.Element, name: str, least: int = -9, default: str = "") -> int:
    text = item.findtext(name, default)
    if not re.fullmatch(r"-?[0-9]{1,6}", text) or int(text) < least:
        raise ValueError(f"{name} of a {item.tag} is {text!r}, expected a whole number of at least {least}")
    return int(text)
