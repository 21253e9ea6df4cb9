"""`scanl algorithms` prints a row for each registered algorithm."""

import pytest

from scanl.cli import main
from scanl.learning.algorithms import algorithms


def test_a_row_for_each_algorithm(capsys):
    assert main(["algorithms"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if line.startswith("| `")]) == len(algorithms.names())
    for name in algorithms.names():
        (row,) = (line for line in lines if line.startswith(f"| `{name}` |"))
        cls = algorithms.get(name)
        assert all(text in row for text in (cls.computes, cls.memory, cls.operations, cls.works_for))


def test_an_unknown_option_is_one_line(capsys):
    assert main(["algorithms", "--wide"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("name", algorithms.names())
def test_an_algorithm_says_what_it_computes(name):
    cls = algorithms.get(name)
    assert all((cls.computes, cls.memory, cls.operations, cls.works_for))
