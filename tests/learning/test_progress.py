"""Progress of a long choice."""

import sys

import pytest

from scanl.learning import progress as module
from scanl.learning.progress import PrintedProgress


@pytest.fixture
def clock(monkeypatch):
    """Return a list whose only number is the time in seconds."""
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def test_elsewhere_than_on_a_terminal_a_line_comes_every_ten_seconds(clock, capsys):
    progress = PrintedProgress()
    second = progress.part(0.5, 1.0)
    progress.at(0.1, "maps: 1 of 10")
    for tick in range(1, 30):
        clock[0] = 100.0 + tick
        second.at(tick / 40, f"training: {tick} of 40 steps")
    second.note("the stack helps")
    assert capsys.readouterr().err.splitlines() == [
        " 10%  maps: 1 of 10",
        " 62%  training: 10 of 40 steps, about 7 s left",
        " 75%  training: 20 of 40 steps, about 8 s left",
        "the stack helps",
    ]


def test_on_a_terminal_one_line_is_written_again(clock, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    progress = PrintedProgress()
    progress.at(0.0, "maps: 0 of 10")
    clock[0] += 20
    progress.at(0.1, "maps: 1 of 10")
    clock[0] += 0.1
    progress.at(0.2, "maps: 2 of 10")
    clock[0] += 0.2
    progress.at(0.9, "all")
    progress.note("found")
    first, second, third = "  0%  maps: 0 of 10", " 10%  maps: 1 of 10, about 3 min left", " 90%  all, about 2 s left"
    expected = f"\r{first}\r{second}\r{third.ljust(len(second))}\r{'':{len(third)}}\rfound\n"
    assert capsys.readouterr().err == expected
