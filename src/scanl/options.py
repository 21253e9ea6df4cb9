"""Options: declared by annotations of constructors, dataclasses and functions, and checked in one way.

An annotation says what a value must be and what it means: `Annotated[int, at_least(1), "H, number of heads"]`.
"""

import functools
import inspect
import numbers
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Literal,
    NoReturn,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from scanl.errors import ConfigError, nearest, unknown
from scanl.whole import is_whole


@dataclass(frozen=True)
class Range:
    """A condition on the value of an option.

    expected: for the message, "at least 1"; the names of other options in braces stand for their values.
    holds: takes the value and all options by name.   known: all names, where the value is one of them.
    relation: whether it depends on other options. These ranges are checked after all others.
    """

    expected: str
    holds: Callable[[Any, Mapping[str, Any]], bool]
    known: Collection[str] | None = None
    relation: bool = False

    def __repr__(self) -> str:
        return self.expected or f"one of {', '.join(self.known or ())}"

    def explained(self, name: str, value: object, options: Mapping[str, Any]) -> str:
        """Return the message for a value outside the range."""
        if self.known is not None:
            return unknown(name, value, self.known)
        return f"{name} is {shown(value)}, expected {self.expected.format_map(options)}"


def at_least(least: float, reason: str = "") -> Range:
    """Return the range of numbers that are not below `least`. reason: text for the message, behind the number."""
    return Range(f"at least {least}{_behind(reason)}", lambda value, _: value >= least)


def above(bound: float) -> Range:
    """Return the range of numbers above `bound`."""
    return Range(f"more than {bound}", lambda value, _: value > bound)


def below(bound: float) -> Range:
    """Return the range of numbers below `bound`."""
    return Range(f"less than {bound}", lambda value, _: value < bound)


def between(low: float, high: float) -> Range:
    """Return the range from `low` to `high`, both included."""
    return Range(f"{low} to {high}", lambda value, _: low <= value <= high)


def within(low: int, high: int, reason: str = "") -> Range:
    """Return the range from `low` to `high`, both included, of counts. reason: as of `at_least`."""
    return Range(f"from {low} to {high}{_behind(reason)}", lambda value, _: low <= value <= high)


def multiple_of(unit: int, reason: str = "") -> Range:
    """Return the range of positive multiples of `unit`. reason: as of `at_least`."""
    text = "an even number of at least 2" if unit == 2 else f"a positive multiple of {unit}"
    return Range(f"{text}{_behind(reason)}", lambda value, _: value > 0 and value % unit == 0)


def divides(other: str) -> Range:
    """Return the range of divisors of another option."""
    return Range(
        f"a divisor of {other}={{{other}}}",
        lambda value, options: value > 0 and options[other] % value == 0,
        relation=True,
    )


def at_least_option(other: str) -> Range:
    """Return the range of numbers that are not below another option."""
    return Range(f"at least {other}={{{other}}}", lambda value, options: value >= options[other], relation=True)


def _behind(reason: str) -> str:
    return reason if reason.startswith(",") else f" {reason}".rstrip()


def one_of(known: Collection[str]) -> Range:
    """Return the range of the names in `known`, which may be a table that grows. Use `Literal` for a fixed few."""
    return Range("", lambda value, _: value in known, known)


@dataclass(frozen=True)
class Placeholder:
    """The word that stands for an option's value in a help, where its type is not word enough: COLUMN."""

    word: str


COLUMN, NAME, PATH = map(Placeholder, ("COLUMN", "NAME", "PATH"))

above_zero = Range("above 0", lambda value, _: value > 0)
Natural = Annotated[int, at_least(0)]
Positive = Annotated[int, at_least(1)]
NaturalOrNone = Annotated[int | None, at_least(0)]
PositiveOrNone = Annotated[int | None, at_least(1)]
Share = Annotated[float, Range("above 0 and at most 1", lambda value, _: 0 < value <= 1)]
Portion = Annotated[float, Range("between 0 and 1", lambda value, _: 0 < value < 1)]
Fraction = Annotated[float, Range("at least 0 and below 1", lambda value, _: 0 <= value < 1)]


@dataclass(frozen=True)
class Option:
    """An option of a class, a function, a command, a source or a model.

    type: of its values, ranges aside.   ranges: conditions on a value that is not None.
    meaning: in words, "" if no annotation says it.   default: `inspect.Parameter.empty` for none.
    placeholder: what stands for its value in a help.
    """

    name: str
    type: Any
    ranges: tuple[Range, ...] = ()
    meaning: str = ""
    default: Any = inspect.Parameter.empty
    placeholder: str = "VALUE"

    @classmethod
    def of(cls, name: str, annotation: Any, default: Any = inspect.Parameter.empty) -> "Option":
        """Return the option that an annotation declares."""
        kind, *notes = get_args(annotation) if get_origin(annotation) is Annotated else (annotation,)
        ranges = tuple(note for note in notes if isinstance(note, Range))
        words = [note.word for note in notes if isinstance(note, Placeholder)]
        words += [NAME.word for bound in ranges if bound.known is not None]
        return cls(name, kind, ranges, meaning(annotation), default, words[0] if words else placeholder(kind))

    def mistake(self, value: object, values: Mapping[str, Any], relation: bool) -> str:
        """Return why a value is refused, or "". values: of all options.   relation: which of the ranges are checked."""
        refused = _mistake(self.type, self.name, value, values, relation)
        if refused or value is None:
            return refused
        bounds = (bound for bound in self.ranges if bound.relation == relation and not bound.holds(value, values))
        return next((bound.explained(self.name, value, values) for bound in bounds), "")


def check(who: str, options: Mapping[str, Option], values: Mapping[str, Any]) -> None:
    """Raise ConfigError for a value that does not have the type of its option, or is outside its ranges."""
    for relation in (False, True):
        for name, option in options.items():
            if name in values and (refused := option.mistake(values[name], values, relation)):
                raise ConfigError(f"{who}: {refused}")


F = TypeVar("F", bound=Callable[..., Any])


def checked(who: str) -> Callable[[F], F]:
    """Decorator: a function checks the arguments whose annotations have ranges. who: the first word of messages.

    >>> @checked("wave")
    ... def wave(length: Annotated[int, at_least(1)]) -> list[int]:
    ...     return [0] * length
    >>> wave(0)
    Traceback (most recent call last):
    scanl.errors.ConfigError: wave: length is 0, expected at least 1
    """

    def add(function: Any) -> Any:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            check(who, {name: option for name, option in options(function).items() if option.ranges}, bound.arguments)
            return function(*args, **kwargs)

        parameters = [option.replace(annotation=_bare(option.annotation)) for option in signature.parameters.values()]
        vars(call)["__signature__"] = signature.replace(parameters=parameters)
        return call

    return add


if TYPE_CHECKING:
    ConfiguredBase = type
else:

    class ConfiguredBase(type):  # a type checker must see the constructor of the class, not this call
        def __call__(cls, *args, **kwargs):
            signature = cls.__signature__
            try:
                bound = signature.bind(*args, **kwargs)
            except TypeError as error:
                raise TypeError(f"{cls.__name__}: {error}; it is {cls.__name__}{signature}") from None
            bound.apply_defaults()
            config = _by_name(bound)
            check(who(cls), options(cls), config)
            instance = super().__call__(*args, **{name: kwargs[name] for name in kwargs if name not in cls.added})
            vars(instance).update(config=config, **{name: config[name] for name in cls.added})
            return instance


class ConfiguredMeta(ConfiguredBase):
    # Metaclass of classes whose constructor's arguments are checked by their annotations and kept as `config`:
    # `type(made)(**made.config)` makes another object of the same form. An annotation is a type, or `Annotated` with
    # ranges and a meaning. An argument without one is not checked. A value of another type or outside its range raises
    # ConfigError before the constructor runs.

    # Options of every subclass that its constructor lacks: name -> annotation. The class has the default as an
    # attribute of that name, and an object its value.
    added: ClassVar[Mapping[str, Any]] = {}

    @property
    def __doc__(cls) -> str | None:  # pyright: ignore[reportIncompatibleVariableOverride]: made when it is read
        """The docstring of the class, and below it what is made from its declarations."""
        text = vars(cls)["__doc__"]
        return text and "\n\n".join([inspect.cleandoc(text), *filter(None, cls.sections())])

    def sections(cls) -> list[str]:
        """Return the parts of the docstring that are made from declarations: the options and their meanings."""
        rows = [f"    {option.name}: {option.meaning}." for option in options(cls).values() if option.meaning]
        wrapped = [textwrap.fill(row, 110, subsequent_indent=" " * 8) for row in rows]
        return ["\n".join(["Args:", *wrapped])] if wrapped else []

    @property
    def __signature__(cls) -> inspect.Signature:
        """The signature of the constructor, with the types of its options alone.

        Where the constructor ends in `**options`, which it passes to its base class, the options of that class follow.
        """
        return _signature(cls, vars(cls).get("__init__"))


POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@functools.cache
def _signature(cls: ConfiguredMeta, constructor: Callable[..., None] | None) -> inspect.Signature:
    """Return the signature of a class, once for each constructor: `preset` sets one after the class is made."""
    parameters: dict[str, inspect.Parameter] = {}
    more: list[inspect.Parameter] = []
    for start in _constructors(cls):
        _, *arguments = inspect.signature(start).parameters.values()
        types = get_type_hints(start)
        arguments = [
            argument.replace(annotation=types.get(argument.name, argument.annotation)) for argument in arguments
        ]
        if parameters:
            arguments = [
                argument.replace(kind=argument.KEYWORD_ONLY) if argument.kind in POSITIONAL else argument
                for argument in arguments
            ]
        more = [argument for argument in arguments if argument.kind is argument.VAR_KEYWORD]
        parameters |= {
            argument.name: argument
            for argument in arguments
            if argument not in more and argument.name not in parameters
        }
    for name, kind in cls.added.items():
        option = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=getattr(cls, name))
        parameters[name] = option.replace(annotation=_bare(kind))
    return inspect.Signature([*parameters.values(), *more])


def _constructors(cls: type) -> list[Callable[..., None]]:
    """Return the constructor of a class, and the constructors of its bases that get its further keyword arguments."""
    starts: list[Callable[..., None]] = []
    for owner in cls.__mro__:
        start = vars(owner).get("__init__")
        if start is None:
            continue
        if starts and not isinstance(owner, ConfiguredMeta):
            break
        starts.append(start)
        if not any(
            parameter.kind is parameter.VAR_KEYWORD for parameter in inspect.signature(start).parameters.values()
        ):
            break
    return starts


def options(owner: Callable[..., Any]) -> Mapping[str, Option]:
    """Return the options of a class, a dataclass or a function by name, in the order of its arguments.

    >>> class Window(metaclass=ConfiguredMeta):
    ...     def __init__(self, size: Annotated[int, at_least(1), "steps in the window"] = 4) -> None:
    ...         pass
    >>> options(Window)["size"].meaning
    'steps in the window'
    >>> Window(0)
    Traceback (most recent call last):
    scanl.errors.ConfigError: Window: size is 0, expected at least 1
    """
    return _options(owner, vars(owner).get("__init__"))


@functools.cache
def _options(owner: Callable[..., Any], constructor: Callable[..., None] | None) -> Mapping[str, Option]:
    hints = _hints(owner) if isinstance(owner, ConfiguredMeta) else get_type_hints(owner, include_extras=True)
    return {
        name: Option.of(name, hints.get(name, Any), parameter.default)
        for name, parameter in inspect.signature(owner).parameters.items()
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    }


def meaning(annotation: Any) -> str:
    """Return the meaning that an annotation gives: the last text in the outermost `Annotated` that has one."""
    if get_origin(annotation) is Annotated:
        inner, *notes = get_args(annotation)
        texts = [note for note in notes if isinstance(note, str)]
        return texts[-1] if texts else meaning(inner)
    if get_origin(annotation) in (Union, UnionType):
        return next(filter(None, map(meaning, get_args(annotation))), "")
    return ""


def check_names(owner: str, cls: ConfiguredMeta, names: Collection[str]) -> None:
    """Raise ConfigError, with the nearest name, for a name that is no option of the class."""
    known = options(cls)
    for name in names:
        if name not in known:
            raise nearest(f"option of {owner}", name, [option for option in known if option != "dim"])


def check_options(owner: str, cls: ConfiguredMeta, values: Mapping[str, Any]) -> None:
    """Raise ConfigError for an option that the class lacks, or a value that it refuses. Absent ones have defaults."""
    check_names(owner, cls, values)
    known = options(cls)
    defaults = {name: known[name].default for name in known if known[name].default is not inspect.Parameter.empty}
    check(who(cls), known, defaults | dict(values))


def who(cls: type) -> str:
    """Return the name of a class in messages: its registered name, or else the name of the class."""
    return vars(cls).get("name") or cls.__name__


def shown(value: object) -> str:
    """Return a value for a message: its repr, or its class if the repr is long or has several lines."""
    text = repr(value)
    return f"a {type(value).__name__}" if "\n" in text or len(text) > 100 else text


def refuse(cls: type, name: str, value: object, expected: str) -> NoReturn:
    """Raise ConfigError for a value of an option that does not fit the others."""
    raise ConfigError(f"{who(cls)}: {name} is {value!r}, expected {expected}")


@functools.cache
def _hints(cls: ConfiguredMeta) -> dict[str, Any]:
    hints: dict[str, Any] = {}
    for start in _constructors(cls):
        hints = get_type_hints(start, include_extras=True) | hints
    return hints | dict(cls.added)


def _bare(annotation: Any) -> Any:
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def _by_name(bound: inspect.BoundArguments) -> dict[str, Any]:
    """Return the arguments of a constructor by name."""
    config: dict[str, Any] = {}
    for name, parameter in bound.signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            config |= _copied(bound.arguments[name])
        elif parameter.kind is not parameter.VAR_POSITIONAL:
            config[name] = _copied(bound.arguments[name])
    return config


def _copied(value: Any) -> Any:
    """Return an argument as `config` keeps it: mappings and lists are copied, because the caller may change them."""
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list) else value


def _mistake(annotation: Any, name: str, value: object, config: Mapping[str, Any], relation: bool) -> str:
    """Return why a value does not fit an annotation, or "" if it fits."""
    if get_origin(annotation) is Annotated:
        return Option.of(name, annotation).mistake(value, config, relation)
    if get_origin(annotation) in (Union, UnionType):
        arms = get_args(annotation)
        reasons = [_mistake(arm, name, value, config, relation) for arm in arms]
        if not all(reasons):
            return ""
        fitting = [reason for arm, reason in zip(arms, reasons, strict=True) if fits(value, arm)]
        return fitting[0] if fitting else f"{name} is {shown(value)}, expected {' or '.join(map(described, arms))}"
    if get_origin(annotation) is Literal and isinstance(value, str):
        return "" if value in get_args(annotation) else unknown(name, value, map(str, get_args(annotation)))
    if not fits(value, annotation):
        return f"{name} is {shown(value)}, expected {described(annotation)}"
    if get_origin(annotation) is Sequence and isinstance(value, Sequence):
        (arm,) = get_args(annotation)
        parts = (_mistake(arm, f"{name}[{i}]", item, config, relation) for i, item in enumerate(value))
        return next(filter(None, parts), "")
    return ""


def fits(value: object, annotation: Any) -> bool:
    """Return whether a value has the type of an annotation, ranges aside."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin in (Annotated, ClassVar):
        return fits(value, args[0])
    if origin in (Union, UnionType):
        return any(fits(value, arm) for arm in args)
    if origin is Literal:
        return value in args
    if annotation is int:
        return is_whole(value) and not isinstance(value, bool)
    if annotation is float:
        return isinstance(value, numbers.Real) and not isinstance(value, bool)
    if annotation is None or annotation is NoneType:
        return value is None
    kind = origin or annotation
    if kind is Callable:
        return callable(value)
    if kind is Any or not isinstance(kind, type) or getattr(kind, "_is_protocol", False):
        return True
    if kind is tuple and isinstance(value, list):
        value = tuple(value)  # JSON and YAML have no tuples
    if not isinstance(value, kind) or (isinstance(value, str) and kind is not str and issubclass(kind, Sequence)):
        return False
    if issubclass(kind, Mapping) and isinstance(value, Mapping) and len(args) == 2:
        return all(fits(key, args[0]) and fits(item, args[1]) for key, item in value.items())
    if issubclass(kind, tuple) and isinstance(value, tuple) and args and args[-1] is not Ellipsis:
        return len(value) == len(args) and all(fits(item, arm) for item, arm in zip(value, args, strict=True))
    if issubclass(kind, Sequence) and isinstance(value, Sequence) and args:
        return all(fits(item, args[0]) for item in value)
    return True


WORDS: dict[Any, str] = {  # of types in messages; a module adds its own
    int: "an integer",
    float: "a number",
    bool: "True or False",
    str: "text",
    NoneType: "None",
    Mapping: "a mapping",
    Callable: "a function",
    Sequence: "a sequence",
    dict: "a mapping",
    list: "a sequence",
    type: "a class",
}


def described(annotation: Any) -> str:
    """Return the type of an annotation in words: "an integer of at least 1"."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return described(args[0])
    if origin is Literal:
        return " or ".join(map(repr, args))
    if origin in (Union, UnionType):
        return " or ".join(map(described, args))
    kind = origin or annotation
    words = WORDS.get(kind)
    return words or (f"a {kind.__name__}" if isinstance(kind, type) else str(annotation))


def placeholder(annotation: Any) -> str:
    """Return the word that stands for a value of a type in a help: INTEGER, or NAME|NAME for a few names."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return placeholder(args[0])
    if origin in (Union, UnionType):
        return "|".join(dict.fromkeys(placeholder(arm) for arm in args if arm is not NoneType))
    if origin is Literal:
        return "|".join(map(str, args))
    if origin is list:
        return f"[{placeholder(args[0])}, ...]"
    if origin is dict:
        return ".NAME VALUE"
    return described(annotation).rpartition(" ")[2].upper()
