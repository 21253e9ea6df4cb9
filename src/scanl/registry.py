"""Registry of classes by name. Registered classes are listed, built, trained and tested by name."""

import functools
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from scanl.errors import ConfigError, nearest


class Named(Protocol):
    name: ClassVar[str]  # `add` sets it


C = TypeVar("C", bound=Named)
S = TypeVar("S", bound=Named)


def folded(name: str) -> str:
    """Return the letters and digits of a name in lower case: `GatedDeltaNet` and `gated-deltanet` are one spelling."""
    return "".join(character for character in name.casefold() if character.isalnum())


class Registry(Generic[C]):
    """The classes of one kind by name: `layers = Registry("layer")`.

    A name is matched without regard to case, hyphens and underscores. The name of the class matches too, and so do its
    `aliases`, other names of the literature that the class declares. A registered name comes before any alias.

    beside: another registry. No name is in both, and each suggests the other's names for a misspelt one.
    use: advice on how to use a class of this kind, with {name} for its name; for a name that is looked up in `beside`.
    advice: what to use in place of well-known names that are not registered, by those names.
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
    ) -> None:
        self._kind, self._use, self._package = kind, use, package
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
                    raise ConfigError(f"{self._kind} {name!r} is registered twice: {other} and {cls.__name__}")
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
            aliases = vars(cls).get("aliases", ())
            yield from ((folded(spelling), name) for spelling in (cls.__name__, *aliases))

    def find(self, name: str) -> str | None:
        """Return the registered name for any spelling of it, or None for an unknown name."""
        if name not in self._classes:
            self._load(name)
        if name in self._classes:
            return name
        key = folded(name)
        return next((known for spelling, known in self.spellings() if spelling == key), None)

    def get(self, name: str) -> type[C]:
        """Return the class of a name. For an unknown name, raises ConfigError with the nearest known one."""
        known = self.find(name)
        if known is not None:
            return self._classes[known]
        for registry in self._family:
            known = registry.find(name)
            if known is not None:
                advice = registry._use and "; use " + registry._use.format(name=known)
                raise ConfigError(f"{name!r} is a {registry._kind}, expected a {self._kind}{advice}")
        if folded(name) in self._advice:
            raise ConfigError(f"unknown {self._kind} {name!r}; {self._advice[folded(name)]}")
        raise nearest(self._kind, name, sorted(known for registry in self._family for known in registry.names()))


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
