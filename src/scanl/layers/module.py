"""The base class of layers, their parts and models: `nn.Module` with a typed call, and shapes in the repr."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, ParamSpec, Protocol, TypeVar

from torch import nn

if TYPE_CHECKING:
    Given = ParamSpec("Given")
    Result_co = TypeVar("Result_co", covariant=True)

    class ForwardMethod(Protocol[Given, Result_co]):
        def forward(self, *args: Given.args, **kwargs: Given.kwargs) -> Result_co: ...


class Module(nn.Module):
    """`nn.Module` whose call has the type of `forward`. Its `repr` shows the shapes of the module's own parameters."""

    hints: ClassVar[Mapping[str, Any]] = {}  # how an optimiser should train parameters, by name: see `layers.Hint`

    if TYPE_CHECKING:

        def __call__(
            self: "ForwardMethod[Given, Result_co]", *args: "Given.args", **kwargs: "Given.kwargs"
        ) -> "Result_co": ...

    def extra_repr(self) -> str:
        """Return the text in the parentheses of the repr."""
        parameters = self.named_parameters(recurse=False)
        return ", ".join(f"{name}={tuple(parameter.shape)}" for name, parameter in parameters)


@contextmanager
def in_mode(module: nn.Module, *, training: bool) -> Iterator[None]:
    """A context in which a module trains, or is evaluated. Then each part of it is in the mode that it had before."""
    modes = [(part, part.training) for part in module.modules()]
    try:
        module.train(training)
        yield
    finally:
        for part, mode in modes:
            part.training = mode
