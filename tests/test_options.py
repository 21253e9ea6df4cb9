"""Constructors of configured classes: which values an annotation takes, what is refused, and what `config` keeps."""

import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import numpy as np
import pytest
import torch

from scanl.errors import ConfigError
from scanl.options import (
    ConfiguredMeta,
    Fraction,
    Natural,
    NaturalOrNone,
    Portion,
    Positive,
    PositiveOrNone,
    Share,
    above,
    above_zero,
    at_least,
    at_least_option,
    below,
    between,
    check,
    check_names,
    check_options,
    checked,
    divides,
    meaning,
    multiple_of,
    one_of,
    options,
    within,
)

POSITIVE, NAMES = Annotated[int, at_least(1)], ("tanh", "relu")


def example(annotation):
    """Return a class with an option of this annotation, beside another that is 6."""

    class Example(metaclass=ConfiguredMeta):
        def __init__(self, value: annotation, other: int = 6) -> None:
            pass

    return Example


ACCEPTED = [
    (POSITIVE, 1),
    (POSITIVE, np.int64(3)),
    (POSITIVE, torch.tensor(3)),
    (Annotated[float, above(0)], 5e-324),
    (Annotated[float, below(1)], 1 - 2**-53),
    (Annotated[float, between(0, 1)], 0),
    (Annotated[float, between(0, 1)], 1),
    (Annotated[int, multiple_of(3)], 6),
    (Annotated[int, divides("other")], 3),
    (Annotated[int, at_least_option("other")], 6),
    (Annotated[str, one_of(NAMES)], "relu"),
    (float, 1),
    (float, np.float32(0.5)),
    (float, math.nan),
    (bool, True),
    (str, ""),
    (Literal["zoh", "bilinear"], "bilinear"),
    (Literal[0, 1, 2], 2),
    (int | None, None),
    (POSITIVE | None, None),
    (Annotated[int | None, at_least(1)], None),
    (POSITIVE | Literal["auto"], "auto"),
    (Sequence[int], (1, np.int64(2))),
    (Sequence[POSITIVE], [1, 2]),
    (tuple[int, float], [1, 0.5]),
    (tuple[int, ...], [1, 2, 3]),
    (Mapping[str, int], {"depth": 2}),
    (Callable[[int], int], abs),
    (type, int),
    (Any, object()),
]


@pytest.mark.parametrize(("annotation", "value"), ACCEPTED)
def test_a_value_that_fits_its_annotation_is_kept(annotation, value):
    config = example(annotation)(value).config
    assert config == {"value": value, "other": 6} or math.isnan(config["value"])
    assert type(config["value"]) is type(value)


REFUSED = [
    (POSITIVE, 0, "0, expected at least 1"),
    (Annotated[float, above(0)], 0, "0, expected more than 0"),
    (Annotated[float, below(1)], 1, "1, expected less than 1"),
    (Annotated[float, between(0, 1)], 1.5, "1.5, expected 0 to 1"),
    (Annotated[float, between(0, 1)], -0.5, "-0.5, expected 0 to 1"),
    (Annotated[int, multiple_of(2)], 3, "3, expected an even number of at least 2"),
    (Annotated[int, multiple_of(2)], 0, "0, expected an even number of at least 2"),
    (Annotated[int, multiple_of(3)], 4, "4, expected a positive multiple of 3"),
    (Annotated[int, divides("other")], 4, "4, expected a divisor of other=6"),
    (Annotated[int, divides("other")], 0, "0, expected a divisor of other=6"),
    (Annotated[int, at_least_option("other")], 5, "5, expected at least other=6"),
    *(
        (Annotated[float, bound], math.nan, f"nan, expected {bound.expected}")
        for bound in (at_least(0), above(0), below(1), between(0, 1))
    ),
    (int, True, "True, expected an integer"),
    (int, 1.0, "1.0, expected an integer"),
    (int, "1", "'1', expected an integer"),
    (int, torch.tensor(1.5), "tensor(1.5000), expected an integer"),
    (int, torch.tensor([1, 2]), "tensor([1, 2]), expected an integer"),
    (int, torch.ones(2, 2), "a Tensor, expected an integer"),
    (float, True, "True, expected a number"),
    (float, "0.5", "'0.5', expected a number"),
    (bool, 1, "1, expected True or False"),
    (str, 1, "1, expected text"),
    (int, None, "None, expected an integer"),
    (Literal[0, 1, 2], 3, "3, expected 0 or 1 or 2"),
    (int | None, "all", "'all', expected an integer or None"),
    (POSITIVE | None, 0, "0, expected at least 1"),
    (Annotated[int | None, at_least(1)], 0, "0, expected at least 1"),
    (Annotated[int, at_least(1)] | Annotated[str, one_of(NAMES)], 0, "0, expected at least 1"),
    (Annotated[int, at_least(1)] | Annotated[str, one_of(NAMES)], 0.5, "0.5, expected an integer or text"),
    (Sequence[int], 3, "3, expected a sequence"),
    (Sequence[str], "tanh", "'tanh', expected a sequence"),
    (Sequence[int], [1, "2"], "[1, '2'], expected a sequence"),
    (tuple[int, float], [1], "[1], expected a tuple"),
    (tuple[int, float], (1, "2"), "(1, '2'), expected a tuple"),
    (tuple[int, ...], (1, None), "(1, None), expected a tuple"),
    (Mapping[str, int], {"depth": "2"}, "{'depth': '2'}, expected a mapping"),
    (Callable[[int], int], 3, "3, expected a function"),
    (type, "int", "'int', expected a class"),
]


@pytest.mark.parametrize(("annotation", "value", "message"), REFUSED)
def test_a_value_that_does_not_fit_is_refused(annotation, value, message):
    with pytest.raises(ConfigError, match=f"^Example: value is {re.escape(message)}$"):
        example(annotation)(value)


def test_a_part_of_a_sequence_is_refused_by_its_index():
    with pytest.raises(ConfigError, match=r"^Example: value\[1\] is 0, expected at least 1$"):
        example(Sequence[POSITIVE])([4, 0])
    with pytest.raises(ConfigError, match=r"^Example: unknown value\[0\] 'tahn'; did you mean 'tanh'\?$"):
        example(Sequence[Annotated[str, one_of(NAMES)]])(["tahn"])


@pytest.mark.parametrize("annotation", [Literal["tanh", "relu"], Annotated[str, one_of(NAMES)]])
def test_an_unknown_name_is_refused_with_the_nearest(annotation):
    with pytest.raises(ConfigError, match=r"^Example: unknown value 'tahn'; did you mean 'tanh'\?$"):
        example(annotation)("tahn")


def test_a_table_of_names_may_grow():
    table = {}
    cls = example(Annotated[str, one_of(table)])
    with pytest.raises(ConfigError, match=r"^Example: unknown value 'silu'"):
        cls("silu")
    table["silu"] = torch.nn.functional.silu
    assert cls("silu").config["value"] == "silu"


def test_relations_are_checked_after_all_other_ranges():
    class Example(metaclass=ConfiguredMeta):
        def __init__(self, heads: Annotated[int, divides("dim")], dim: Annotated[int, at_least(1)]) -> None:
            pass

    with pytest.raises(ConfigError, match=r"^Example: dim is -1, expected at least 1$"):
        Example(4, -1)
    with pytest.raises(ConfigError, match=r"^Example: heads is 4, expected a divisor of dim=6$"):
        Example(4, 6)


def test_a_refusal_comes_before_the_constructor_and_names_the_registered_class():
    class Example(metaclass=ConfiguredMeta):
        name = "example"

        def __init__(self, size: Annotated[int, at_least(1)], free=None) -> None:
            raise AssertionError("the constructor runs")

    with pytest.raises(ConfigError, match=r"^example: size is 0, expected at least 1$"):
        Example(0, free="an argument without an annotation is not checked")


class Base(metaclass=ConfiguredMeta):
    """A base class."""

    added: Mapping[str, Any] = {"decay": Annotated[float, at_least(0), "weight decay"]}
    decay = 0.5

    def __init__(self, dim: Annotated[int, at_least(1), "D, width"], width: int | None = None) -> None:
        self.inherited = (dim, width)


class Child(Base):
    """A class with an option of its own, and those of its base."""

    def __init__(self, extra: Annotated[str, "what it adds"] = "none", **options) -> None:
        super().__init__(**options)
        self.extra = extra


class Alone(Base):
    def __init__(self, dim: int) -> None:
        super().__init__(dim, 3)


def test_options_of_a_base_class_follow_by_keyword():
    made = Child("more", dim=4)
    assert made.config == {"extra": "more", "dim": 4, "width": None, "decay": 0.5}
    assert made.inherited == (4, None)
    assert list(options(Child)) == ["extra", "dim", "width", "decay"]
    assert list(options(Alone)) == ["dim", "decay"]
    with pytest.raises(ConfigError, match=r"^Child: dim is 0, expected at least 1$"):
        Child(dim=0)
    with pytest.raises(TypeError, match=r"^Child: too many positional arguments; it is Child\(extra: str = "):
        Child("more", 4)


def test_a_base_class_that_is_not_configured_has_no_options():
    class Plain:
        def __init__(self, dim, width=3):
            self.dim = dim

    class Example(Plain, metaclass=ConfiguredMeta):
        def __init__(self, extra: int = 1, **others) -> None:
            super().__init__(**others)

    assert list(options(Example)) == ["extra"]
    assert Example(dim=4).config == {"extra": 1, "dim": 4}


def test_an_added_option_is_an_attribute_that_no_constructor_sees():
    assert (Child(dim=4).decay, Child(dim=4, decay=0.25).decay, Alone(2, decay=0).config["decay"]) == (0.5, 0.25, 0)
    with pytest.raises(ConfigError, match=r"^Child: decay is -1, expected at least 0$"):
        Child(dim=4, decay=-1)


def test_an_unknown_keyword_is_refused_with_the_signature():
    with pytest.raises(TypeError, match=r"^Base: got an unexpected keyword argument .wide.; it is Base\(dim: int, "):
        Base(4, wide=3)
    with pytest.raises(ConfigError, match=r"^unknown option of base 'widht'; did you mean 'width'\?$"):
        check_names("base", Base, ["dim", "widht"])


def test_the_docstring_ends_with_the_options_that_have_a_meaning():
    assert Child.__doc__ == (
        "A class with an option of its own, and those of its base.\n\n"
        "Args:\n    extra: what it adds.\n    dim: D, width.\n    decay: weight decay."
    )
    assert Alone.__doc__ is None
    assert meaning(Annotated[Annotated[int, "inner"], at_least(1), "outer"]) == "outer"
    assert meaning(None | Annotated[int, "a count"]) == "a count"


def test_config_keeps_what_the_caller_changes_later_and_makes_the_same_again():
    sizes, table = [1, [2]], {"lru": {"r_min": 0.5}}
    made = example(Any)(sizes, 3)
    mapped = example(Mapping[str, Any])(table)
    sizes[1].append(3)
    table["lru"]["r_min"] = 0.9
    assert made.config == {"value": [1, [2]], "other": 3}
    assert mapped.config["value"] == {"lru": {"r_min": 0.5}}
    assert type(made)(**made.config).config == made.config


def test_options_that_are_absent_have_their_defaults_in_relations():
    class Window(metaclass=ConfiguredMeta):
        def __init__(self, size: Annotated[int, at_least_option("every")] = 4, every: int = 2) -> None: ...

    check_options("window", Window, {"size": 3})
    with pytest.raises(ConfigError, match="Window: size is 1, expected at least every=2"):
        check_options("window", Window, {"size": 1})
    with pytest.raises(ConfigError, match="Window: size is 4, expected at least every=5"):
        check_options("window", Window, {"every": 5})
    with pytest.raises(ConfigError, match="unknown option of window 'sise'; did you mean 'size'"):
        check_options("window", Window, {"sise": 1})


@checked("wave")
def wave(length: Annotated[int, at_least(1)], *, step: Annotated[int, divides("length")] = 1, free: int = 0) -> int:
    """Return what it is given."""
    return length + step + free


def test_a_function_checks_the_arguments_that_have_ranges():
    assert wave(6, step=3) == 9
    assert wave(6, free=0.5) == 7.5
    with pytest.raises(ConfigError, match=r"^wave: length is 0, expected at least 1$"):
        wave(0)
    with pytest.raises(ConfigError, match=r"^wave: length is 'long', expected an integer$"):
        wave(length="long")
    with pytest.raises(ConfigError, match=r"^wave: step is 4, expected a divisor of length=6$"):
        wave(6, step=4)
    with pytest.raises(TypeError, match="missing a required argument: 'length'"):
        wave()
    assert str(inspect.signature(wave)) == "(length: int, *, step: int = 1, free: int = 0) -> int"
    assert (wave.__name__, wave.__doc__) == ("wave", "Return what it is given.")


@dataclass
class Limits:
    size: Annotated[int, within(1, 8, "because of the table"), "numbers in a row"] = 4
    parts: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        check("limits", options(type(self)), vars(self))


def test_a_dataclass_declares_options_like_a_class():
    size, parts = options(Limits).values()
    assert (size.name, size.type, size.meaning, size.default) == ("size", int, "numbers in a row", 4)
    assert (parts.type, parts.ranges) == (list[int], ())
    with pytest.raises(ConfigError, match=r"^limits: size is 9, expected from 1 to 8 because of the table$"):
        Limits(9)
    with pytest.raises(ConfigError, match=r"^limits: parts is 3, expected a sequence$"):
        Limits(parts=3)


@pytest.mark.parametrize(
    ("annotation", "accepted", "refused"),
    [
        (Natural, [0], {-1: "at least 0"}),
        (Positive, [1], {0: "at least 1"}),
        (NaturalOrNone, [0, None], {-1: "at least 0"}),
        (PositiveOrNone, [1, None], {0: "at least 1"}),
        (Share, [0.5, 1], {0: "above 0 and at most 1", 1.5: "above 0 and at most 1"}),
        (Portion, [0.5], {0: "between 0 and 1", 1: "between 0 and 1"}),
        (Fraction, [0, 0.5], {-0.5: "at least 0 and below 1", 1: "at least 0 and below 1"}),
        (Annotated[float, above_zero], [0.5], {0: "above 0"}),
        (Annotated[int, multiple_of(2, "because of pairs")], [2], {3: "an even number of at least 2 because of pairs"}),
        (Annotated[int, at_least(2, ", a pair")], [2], {1: "at least 2, a pair"}),
    ],
)
def test_the_vocabulary_of_ranges(annotation, accepted, refused):
    for value in accepted:
        assert example(annotation)(value).config["value"] == value
    for value, expected in refused.items():
        with pytest.raises(ConfigError, match=f"^Example: value is {value}, expected {expected}$"):
            example(annotation)(value)
