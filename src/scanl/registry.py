"""Classes by name: what is registered is listed, built, trained and tested."""

from collections.abc import Callable
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from scanl.errors import ConfigError, nearest


class Named(Protocol):
    name: ClassVar[str]  # `add` sets it


C = TypeVar("C", bound=Named)
S = TypeVar("S", bound=Named)


class Registry(Generic[C]):
    """The classes of one kind, under the names that are theirs: `layers = Registry("layer")`."""

    def __init__(self, kind: str):
        self._kind = kind
        self._classes: dict[str, type[C]] = {}

    def add(self, name: str) -> Callable[[type[S]], type[S]]:
        """Decorate a class with its name; ConfigError when another has it already."""

        def add(cls: Any) -> Any:
            if name in self._classes:
                found = self._classes[name].__name__
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
        if name not in self._classes:
            raise nearest(self._kind, name, self.names())
        return self._classes[name]
