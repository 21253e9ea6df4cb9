"""The base class of layers, their parts and models: torch's module with a typed call and sizes in its repr."""

from typing import TYPE_CHECKING, ParamSpec, Protocol, TypeVar

from torch import nn

if TYPE_CHECKING:
    Given = ParamSpec("Given")
    Result_co = TypeVar("Result_co", covariant=True)

    class Forward(Protocol[Given, Result_co]):
        def forward(self, *args: Given.args, **kwargs: Given.kwargs) -> Result_co: ...


class Module(nn.Module):
    """For type checkers a call has the signature of `forward`; `repr` shows the shapes of a module's own parameters."""

    if TYPE_CHECKING:

        def __call__(
            self: "Forward[Given, Result_co]", *args: "Given.args", **kwargs: "Given.kwargs"
        ) -> "Result_co": ...

    def extra_repr(self) -> str:
        """The text in the parentheses of the repr."""
        own = self.named_parameters(recurse=False)
        return ", ".join(f"{name}={tuple(parameter.shape)}" for name, parameter in own)
