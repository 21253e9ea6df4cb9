"""Chorales in compressed MusicXML: which notes sound at the start of each quarter note."""

import re
import zipfile

import numpy as np
import pytest

import published
from published import compressed_score, note
from scanl.data.files import folders
from scanl.data.published.chorales import BachChorales
from scanl.data.readers.musicxml import frames, score
from scanl.errors import DataError

CHORD, TIE, DOT = "<chord/>", '<tie type="start"/>', "<dot/>"
BACKUP = "<backup><duration>8</duration></backup>"
SIX = "<attributes><divisions>6</divisions></attributes>"
FORWARD = "<forward><duration>4</duration></forward>"
WHOLE = f"<measure>{note('C', 4, 16)}</measure>"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder of ten small chorales, and of a score of five parts."""
    return published.written(published.root(tmp_path, monkeypatch), "bach_chorales")


def frames_of(*parts: str) -> list[list[int]]:
    return [sorted(frame) for frame in frames(score(compressed_score(*parts)).findall("part"))]


def refused(folder, content: bytes) -> str:
    path = folder / "bach" / "bwv3.mxl"
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"^bach_chorales: {re.escape(str(path))} is damaged: .*; run ") as error:
        BachChorales(0).check()
    assert len(str(error.value).splitlines()) == 1
    return str(error.value)


@pytest.mark.parametrize(
    ("measures", "expected"),
    [
        ([note("C", 4, 4) + note("A", 0, 8)], [[60], [21], [21]]),
        ([note("C", 4, 4) + note("D", 4, 4, extra=TIE), note("D", 4, 8)], [[60], [62], [62], [62]]),
        ([note("C", 4, 4) + note("", 0, 4) + note("E", 4, 4) + note("", 0, 4)], [[60], [], [64], []]),
        # A dotted quarter note reaches the second frame, and the eighth note after it none.
        ([note("C", 4, 6, extra=DOT) + note("D", 4, 2) + note("E", 4, 4)], [[60], [60], [64]]),
        # What begins after the start of a frame and holds is heard in the next: a syncope.
        ([note("C", 4, 2) + note("D", 4, 4) + note("E", 4, 2)], [[60], [62]]),
        # Two voices, and a chord in the second, whose notes begin together.
        (
            [
                note("C", 5, 8) + BACKUP + note("C", 4, 4)
                + note("E", 4, 4) + note("G", 4, 4, extra=CHORD),
                note("F", 4, 4),
            ],
            [[60, 72], [64, 67, 72], [65]],
        ),
        # A short note of a chord does not move what follows.
        ([note("C", 4, 8) + note("E", 4, 4, extra=CHORD) + note("D", 4, 4)], [[60, 64], [60], [62]]),
        # A second voice that ends early does not shorten its measure.
        ([note("C", 4, 8) + BACKUP + note("E", 4, 4), note("D", 4, 4)], [[60, 64], [60], [62]]),
        # The gap that a forward leaves is silent, except at the end of a piece, which ends with its last note.
        ([FORWARD + note("C", 4, 4) + FORWARD, note("D", 4, 4) + FORWARD], [[], [60], [], [62]]),
        ([note("C", 4, 4, extra="<grace/>") + note("D", 4, 4)], [[62]]),
        ([note("C", 4, 4), SIX + note("D", 4, 6) + note("E", 4, 6)], [[60], [62], [64]]),
        ([note("C", 4, 4), note("D", 4, 5)], [[60], [62], [62]]),  # it reaches the last frame
    ],
)  # fmt: skip
def test_a_frame_says_what_sounds_at_its_begin(measures, expected):
    assert frames_of("".join(f"<measure>{measure}</measure>" for measure in measures)) == expected


def test_notes_of_all_parts_sound_together_and_are_altered():
    flat = note("E", 3, 8).replace("<octave>", "<alter>-1</alter><octave>")
    sharp = note("F", 5, 4).replace("<octave>", "<alter>1</alter><octave>")
    short = f"<measure>{flat}</measure>", f"<measure>{sharp}</measure>"
    assert frames_of(*short, WHOLE) == [[51, 60, 78], [51, 60], [60], [60]]


def test_every_fifth_chorale_is_for_the_test(folder):
    """In the order of names, bwv10 after bwv1. The score of five parts, bwv7, is left out, and bwv99, which is bwv9."""
    (folder / "bach" / "bwv99.mxl").write_bytes((folder / "bach" / "bwv9.mxl").read_bytes())
    parts = BachChorales(0).read()
    lengths = {"0": 3, "1": 4, "10": 13, "2": 5, "3": 6, "4": 7, "5": 8, "6": 9, "8": 11, "9": 12}
    in_order = list(lengths.values())
    assert [len(row) for row in parts.train.rows] == in_order[:3] + in_order[5:8]
    assert [len(row) for row in parts.validation.rows] == [in_order[3], in_order[8]]
    assert [len(row) for row in parts.test.rows] == [in_order[4], in_order[9]]
    np.testing.assert_array_equal(np.argwhere(parts.train.rows[1])[:, 1] + 21, [62, 64, 65, 67])


def test_counts_are_verified(folder, monkeypatch):
    for what, count, message in (
        ("scores", 12, "has 11 scores, exp"),
        ("different chorales of four parts", 9, "has 10 diff"),
    ):
        monkeypatch.setattr(folders["bach_chorales"], "counts", {what: count})
        with pytest.raises(DataError, match=message):
            BachChorales(0).check()
    for path in (folder / "bach").iterdir():
        path.unlink()
    with pytest.raises(
        DataError, match=r"bach has no file bwv\*.mxl; run `scanl data get bach_chorales` \(pip: music21"
    ):
        BachChorales(0).check()


@pytest.mark.parametrize(
    ("measure", "message"),
    [
        (note("H", 4, 4), "a note has the step 'H', expected one of C, D, E, F, G, A, B"),
        (note("C", 4, 4).replace("pitch", "unpitched"), "pitch/octave of a note is '', expected a whole number"),
        (note("C", 9, 4), "note 120, expected from 21 to 108"),
        (note("C", 4, 0), "duration of a note is '0', expected a whole number of at least 1"),
        (note("C", 4, 10**6), "duration of a note is '1000000', expected"),
        (note("C", 4, 4).replace("<octave>", "<alter>0.5</alter><octave>"), "pitch/alter of a note is '0.5', expected"),
        ("<attributes><divisions>0</divisions></attributes>", "divisions of a attributes is '0', expected"),
        ("<attributes><transpose/></attributes>", "a part is transposed or has a cue"),
        (note("C", 4, 4, extra="<cue/>"), "a part is transposed or has a cue"),
        (note("C", 4, 4) + "<backup><duration>5</duration></backup>", "a backup goes before its measure"),
        ("", "it has no frame"),
    ],
)
def test_a_note_that_is_not_understood_is_refused(measure, message, folder):
    assert message in refused(folder, compressed_score(*[f"<measure>{measure}</measure>"] * 4))


def test_what_is_no_score_is_refused(folder):
    entity = '<!DOCTYPE score-partwise [<!ENTITY a "b">]>\n'
    assert "it declares an entity" in refused(folder, compressed_score(*[WHOLE] * 4, head=entity))
    timewise = compressed_score(*[WHOLE] * 4, root="score-timewise")
    assert "it begins with score-timewise, expected score-partwise" in refused(folder, timewise)
    whole = compressed_score(*[WHOLE] * 4)
    for name, text in (
        ("META-INF/container.xml", "<container/>"),
        ("META-INF/container.xml", '<container><rootfile full-path="b.xml"/></container>'),
        ("META-INF/other.xml", "<container/>"),
        ("META-INF/container.xml", '<?xml version="1.0" encoding="klingon"?><container/>'),
    ):
        path = folder / "other.zip"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(name, text)
        refused(folder, path.read_bytes())
    for cut in range(0, len(whole), 7):
        refused(folder, whole[:cut])
    without = score(whole).findall("part")
    measure = without[0][0]
    measure.remove(measure[0])
    with pytest.raises(ValueError, match="a note comes before the divisions of a quarter note"):
        frames(without)
