"""Registry of classes by name. Registered classes are listed, built, trained and tested by name."""

import difflib
import functools
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from scanl.errors import ConfigError, nearest


class NamedClass(Protocol):
    name: ClassVar[str]  # `add` sets it


C = TypeVar("C", bound=NamedClass)
S = TypeVar("S", bound=NamedClass)


# Words of the literature that are written in two ways.
SHORT = {
    "recurrentneuralnetwork": "rnn",
    "recurrentneuralnet": "rnn",
    "longshorttermmemory": "lstm",
    "gatedrecurrentunit": "gru",
    "statespacemodel": "ssm",
    "initialisation": "initialization",
    "transformers": "transformer",
}


def folded(name: str) -> str:
    """Return the letters and digits of a name in lower case: `GatedDeltaNet` and `gated-deltanet` are one spelling.

    A plus sign is kept, and some long words are abbreviated: "Gated Recurrent Unit" is "gru".
    """
    key = "".join(character for character in name.casefold() if character.isalnum() or character == "+")
    for long, short in SHORT.items():
        key = key.replace(long, short)
    return key


# The registries whose names users know. They are imported when a name is not in the one in which it is looked up.
PUBLIC = (
    "scanl.layers.registry:layers",
    "scanl.models.presets:presets",
    "scanl.models.presets:wholes",
    "scanl.layers.registry:channel_mixers",
    "scanl.learning.algorithms:algorithms",
    "scanl.tasks.base:registry",
    "scanl.data:sources",
)
# Words that a name may end in: "the adding problem", "LSTM layers". None of them is told apart by such a word.
ENDINGS = ("network", "net", "rnn", "layer", "model", "task", "problem", "algorithm", "block", "s")


class Registry(Generic[C]):
    """The classes of one kind by name: `layers = Registry("layer")`.

    A name is matched without regard to case, hyphens and underscores. The name of the class matches too, and so do its
    `aliases`, other names of the literature that the class declares. A registered name comes before any alias. An alias
    that begins with "=" is matched as it is written, case and all.

    beside: another registry. No name is in both, and each suggests the other's names for a misspelt one.
    use: advice on how to use a class of this kind, with {name} for its name and {cls} for that of the class; for a name
    that is looked up in another registry.
    advice: what to use in place of well-known names that are not registered, by those names.
    listed: where all names are printed; for the error of an unknown name.
    package: a package whose modules register classes when they are imported. A module that bears a name is imported
    when that name is looked up, and all of them when the names are listed or a name is not found so.
    """

    def __init__(
        self,
        kind: str,
        beside: "Registry[Any] | None" = None,
        use: str = "",
        advice: Mapping[str, str] | None = None,
        package: str | None = None,
        listed: str = "",
    ) -> None:
        self.kind, self._use, self._package, self._listed = kind, use, package, listed
        self._advice = {folded(name): text for name, text in (advice or {}).items()}
        self._classes: dict[str, type[C]] = {}
        self._loaded = False
        self._family: list[Registry[Any]] = [] if beside is None else beside._family
        self._family.append(self)

    def add(self, name: str) -> Callable[[type[S]], type[S]]:
        """Decorator: register a class under `name`. Raises ConfigError when another class has the name."""

        def add(cls: Any) -> Any:
            self._load(name)
            for registry in self._family:
                if name in registry._classes:
                    other = registry._classes[name].__name__
                    raise ConfigError(f"{self.kind} {name!r} is registered twice: {other} and {cls.__name__}")
            cls.name = name
            self._classes[name] = cls
            return cls

        return add

    def remove(self, name: str) -> None:
        """Remove a name, if it is registered."""
        self._classes.pop(name, None)

    def names(self) -> list[str]:
        """Return all registered names, sorted."""
        self._load()
        return sorted(self._classes)

    def _load(self, name: str | None = None) -> None:
        """Import the module of the package that bears a name; all modules for None."""
        if self._package is None or self._loaded:
            return
        for module in _modules(self._package):
            if name is None or module.rpartition(".")[2] == name:
                import_module(module)
        self._loaded = name is None

    def spellings(self) -> Iterator[tuple[str, str]]:
        """Yield every folded spelling with the name that it stands for: names first, then class names and aliases."""
        self._load()
        yield from ((folded(name), name) for name in self._classes)
        for name, cls in self._classes.items():
            aliases = [alias for alias in vars(cls).get("aliases", ()) if not alias.startswith("=")]
            yield from ((folded(spelling), name) for spelling in (cls.__name__, *aliases))

    def find(self, name: str) -> str | None:
        """Return the registered name for any spelling of it, or None for an unknown name."""
        if name not in self._classes:
            self._load(name)
        if name in self._classes:
            return name
        exact = self._exact()
        if f"={name}" in exact:
            return exact[f"={name}"]
        key = folded(name)
        return next((known for spelling, known in self.spellings() if spelling == key), None)

    def find_loosely(self, name: str) -> str | None:
        """Call `find`, also for a name in the plural, or with a word like "network" behind it."""
        return next(filter(None, map(self.find, (name, *_endings(name)))), None)

    def _exact(self) -> dict[str, str]:
        aliases = {name: vars(cls).get("aliases", ()) for name, cls in self._classes.items()}
        return {alias: name for name, several in aliases.items() for alias in several if alias.startswith("=")}

    def get(self, name: str) -> type[C]:
        """Return the class of a name. For an unknown name, raises ConfigError with the nearest known ones."""
        known = self.find_loosely(name)
        if known is not None:
            return self._classes[known]
        for registry in self._others():
            known = registry.find_loosely(name)
            if known is not None:
                advice = registry.usage(known) and f"; use {registry.usage(known)}"
                raise ConfigError(f"{name!r} is {_a(registry.kind)}, expected {_a(self.kind)}{advice}")
        advice = self.advice(name)
        raise ConfigError(f"unknown {self.kind} {name!r}; {advice}") if advice else self._unknown(name)

    def usage(self, name: str) -> str:
        """Return the use of a class of this kind, "" if the registry does not say it."""
        return self._use.format(name=name, cls=self._classes[name].__name__)

    def advice(self, name: str) -> str:
        """Return the advice for a well-known name that is not registered; "" if there is none."""
        advices = {key: text for registry in self._others() for key, text in registry._advice.items()} | self._advice
        return next((advices[spelling] for spelling in _endings(name) if spelling in advices), "")

    def _others(self) -> "list[Registry[Any]]":
        return [*self._family, *(public() if self._listed else ())]

    def _unknown(self, name: str) -> ConfigError:
        """Return the error for a name that is nowhere: the nearest names, and where all are printed."""
        if not self._listed:
            return nearest(self.kind, name, sorted(known for registry in self._family for known in registry.names()))
        table = dict(pair for registry in self._family for pair in reversed(list(registry.spellings())))
        close = list(dict.fromkeys(table[key] for key in difflib.get_close_matches(folded(name), table, 3, 0.5)))
        if close and _alike(folded(name), folded(close[0])):
            return ConfigError(f"unknown {self.kind} {name!r}; did you mean {close[0]!r}?")
        near = f"the nearest: {', '.join(close)}; " if close else ""
        return ConfigError(f"unknown {self.kind} {name!r}; {near}{self._listed} prints all")


def _alike(name: str, known: str) -> bool:
    """Whether a name may be a known one that is misspelt. "Reformer" is too far from "performer"."""
    return sorted(name) == sorted(known) or difflib.SequenceMatcher(None, name, known).ratio() >= 0.85


def _endings(name: str) -> Iterator[str]:
    """Yield the folded name, then without the words that it may end in."""
    key = folded(name)
    while True:
        yield key
        ending = next((word for word in ENDINGS if key.endswith(word) and len(key) - len(word) >= 2), None)
        if ending is None:
            return
        key = key.removesuffix(ending)


def _a(kind: str) -> str:
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"


def public() -> list[Registry[Any]]:
    """Return the registries whose names users know, in the order in which a name is looked up in them."""
    places = (place.split(":") for place in PUBLIC)
    return [getattr(import_module(module), attribute) for module, attribute in places]


def look_up(name: str) -> list[tuple[Registry[Any], str]]:
    """Return every registry that has a name, with the registered name: first those that have it as it is written.

    Where an alias that begins with "=" is the name, it alone counts.
    """
    found = [(registry, known) for registry in public() if (known := registry.find_loosely(name)) is not None]
    exact = [pair for pair in found if f"={name}" in pair[0]._exact()]
    return exact or sorted(found, key=lambda pair: pair[1] != name)


@functools.cache
def _modules(package: str) -> list[str]:
    """Return the modules below a package, in the order in which they are found."""
    path = import_module(package).__path__
    return [module.name for module in pkgutil.walk_packages(path, f"{package}.")]


def import_all(package: str) -> None:
    """Import all modules below a package, which register their classes."""
    for module in _modules(package):
        import_module(module)


F = TypeVar("F", bound=Callable[..., Any])


class Functions(Generic[F]):
    """The functions of one kind by name: `losses = Functions("loss")`."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._functions: dict[str, F] = {}

    def add(self, name: str) -> Callable[[F], F]:
        """Decorator: register a function under `name`. Raises ConfigError when another function has the name."""

        def add(function: F) -> F:
            if name in self._functions:
                first, second = self._functions[name].__name__, function.__name__
                raise ConfigError(f"{self._kind} {name!r} is registered twice: {first} and {second}")
            self._functions[name] = function
            return function

        return add

    def remove(self, name: str) -> None:
        """Remove a name, if it is registered."""
        self._functions.pop(name, None)

    def names(self) -> list[str]:
        """Return all registered names, sorted."""
        return sorted(self._functions)

    def get(self, name: str) -> F:
        """Return the function of a name. For an unknown name, raises ConfigError with the nearest known one."""
        if name not in self._functions:
            raise nearest(self._kind, name, self.names())
        return self._functions[name]
