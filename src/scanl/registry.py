"""Registry of classes by name. Registered classes are listed, built, trained and tested by name."""

from collections.abc import Callable
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from scanl.errors import ConfigError, nearest


class Named(Protocol):
    name: ClassVar[str]  # `add` sets it


C = TypeVar("C", bound=Named)
S = TypeVar("S", bound=Named)


class Registry(Generic[C]):
    """The classes of one kind by name: `layers = Registry("layer")`.

    beside: another registry. No name is in both, and each suggests the other's names for a misspelt one.
    use: advice on how to use a class of this kind, with {name} for its name; given when `beside` is asked for it.
    """

    def __init__(self, kind: str, beside: "Registry[Any] | None" = None, use: str = "") -> None:
        self._kind, self._use = kind, use
        self._classes: dict[str, type[C]] = {}
        self._family: list[Registry[Any]] = [] if beside is None else beside._family
        self._family.append(self)

    def add(self, name: str) -> Callable[[type[S]], type[S]]:
        """Decorator: register a class under `name`. Raises ConfigError when another class has the name."""

        def add(cls: Any) -> Any:
            for each in self._family:
                if name in each._classes:
                    found = each._classes[name].__name__
                    raise ConfigError(f"{self._kind} {name!r} is registered twice: {found} and {cls.__name__}")
            cls.name = name
            self._classes[name] = cls
            return cls

        return add

    def remove(self, name: str) -> None:
        """Remove a name, if it is registered."""
        self._classes.pop(name, None)

    def names(self) -> list[str]:
        """Return all registered names, sorted."""
        return sorted(self._classes)

    def get(self, name: str) -> type[C]:
        """Return the class of a name. For an unknown name, raises ConfigError with the nearest known one."""
        if name in self._classes:
            return self._classes[name]
        for each in self._family:
            if name in each._classes:
                advice = each._use and "; use " + each._use.format(name=name)
                raise ConfigError(f"{name!r} is a {each._kind}, expected a {self._kind}{advice}")
        raise nearest(self._kind, name, sorted(known for each in self._family for known in each._classes))
