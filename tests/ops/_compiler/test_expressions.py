"""Expressions as values, and as Python."""

import math
import random

from scanl.ops._compiler.expressions import Constant, Expression, Name, Operation, equal, place, value, where

x, y, z = map(Name, "xyz")
NAMES = {"a": 7, "b": -3, "c": 2}


def draw(chance: random.Random, depth: int) -> Expression:
    """Return an expression of whole numbers."""
    if depth == 0:
        return Name(chance.choice("abc")) if chance.random() < 0.7 else Constant(chance.randrange(-9, 10))
    sign = chance.choice(["+", "-", "*", "//", "neg"])
    first = draw(chance, depth - 1)
    if sign == "neg":
        return -first
    return Operation(sign, first, Name("c") if sign == "//" else draw(chance, chance.randrange(depth)))


def test_text_has_the_value_of_its_expression() -> None:
    chance = random.Random(0)
    for _ in range(500):
        drawn = draw(chance, chance.randrange(1, 6))
        assert eval(str(drawn), {}, NAMES) == value(drawn, NAMES), drawn


def test_text_has_parentheses_where_python_needs_them() -> None:
    assert str(x * (y - z) - (x - y) - z) == "x * (y - z) - (x - y) - z"
    assert str(where((x > y) | ~equal(x, x), -(x * y), x**y)) == ("(-(x * y) if (x > y) | (not x == x) else x ** y)")


def test_constants_are_one_if_their_sources_are() -> None:
    assert len({Constant(value) for value in (0, 0.0, -0.0, 0, 0.0, -0.0, math.nan, float("nan"))}) == 4


def test_truths_are_numbers_where_those_are_needed_and_numbers_are_truths() -> None:
    truth = Name("t", truth=True)
    assert str(x * truth) == "x * (1.0 if t else 0.0)"
    assert str(where(x, y, z)) == "(y if x != 0.0 else z)"
    assert str(where(truth, y, x > z)) == "(y if t else (1.0 if x > z else 0.0))"
    assert str(~x & truth) == "(not x != 0.0) & t"
    assert where(x, truth, y > z).truth
    assert not where(x, truth, y).truth


def test_a_place_has_no_terms_of_nothing() -> None:
    assert str(place(["i", "j", "k"], [Name("D"), 1, 0], 3)) == "i * D + j + 3"
    assert str(place(["i"], [0])) == "0"
