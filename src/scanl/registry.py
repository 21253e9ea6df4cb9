"""Classes by name: what is registered is listed, built, trained and tested."""

from collections.abc import Callable
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from scanl.errors import ConfigError, nearest


class Named(Protocol):
    name: ClassVar[str]  # `add` sets it


C = TypeVar("C", bound=Named)
S = TypeVar("S", bound=Named)


class Registry(Generic[C]):
    """The classes of one kind, each under a name of its own: `layers = Registry("layer")`.

    beside: another registry. No name is in both, and each suggests the other's names to whoever misspells one.
    use: how a class of this kind is used, with {name} for its name: the advice to whoever asks `beside` for it.
    """

    def __init__(self, kind: str, beside: "Registry[Any] | None" = None, use: str = "") -> None:
        self._kind, self._use = kind, use
        self._classes: dict[str, type[C]] = {}
        self._family: list[Registry[Any]] = [] if beside is None else beside._family
        self._family.append(self)

    def add(self, name: str) -> Callable[[type[S]], type[S]]:
        """Decorate a class with its name; ConfigError when another has it already."""

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
        """Forget a name, if it is known."""
        self._classes.pop(name, None)

    def names(self) -> list[str]:
        """Every registered name, sorted."""
        return sorted(self._classes)

    def get(self, name: str) -> type[C]:
        """The class of a name; ConfigError with the nearest known one for any other."""
        if name in self._classes:
            return self._classes[name]
        for each in self._family:
            if name in each._classes:
                advice = each._use and "; use " + each._use.format(name=name)
                raise ConfigError(f"{name!r} is a {each._kind}, expected a {self._kind}{advice}")
        raise nearest(self._kind, name, sorted(known for each in self._family for known in each._classes))
