"""How a function of flash-linear-attention becomes a call of an op: what all of its functions share.

`written_as` makes one from its header, which is written as Python, and from a function that calls the op.
"""

import functools
import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec

import torch

from scanl.errors import ConfigError, unknown

P = ParamSpec("P")
Result = tuple[Any, ...]  # o, the last state, and with return_intermediate_states those between

# Arguments that say how kernels compute and not what: they are ignored.
KERNEL = (
    "checkpoint_level", "chunk_indices", "chunk_size", "cu_seqlens_cpu", "disable_recompute", "lower_bound",
    "max_num_seqs", "safe_gate", "use_graph",
)  # fmt: skip
# Arguments that ask for what no op computes: each is refused, unless it has its default.
REFUSED_ARGUMENTS = {
    "cp_context": "scanl.parallel.scan divides the sequence of an op among processes",
    "gv": "delta_rule has no decay of columns",
}
STATE = ("initial_state", "output_final_state", "state_v_first", "transpose_state_layout")
# What a header's `**kwargs` may have, where the body names it, or where it is for kernels.
MORE_ARGUMENTS = ("A_log", "chunk_size", "dt_bias", "use_gate_in_kernel")


@dataclass(frozen=True)
class FlaFunction:
    """A function of flash-linear-attention: its name, its parameters, the op, and the function that calls the op."""

    name: str
    parameters: tuple[inspect.Parameter, ...]
    op: str
    body: Callable[..., Result]

    @functools.cached_property
    def own(self) -> tuple[str, ...]:
        """Return the arguments that the body names."""
        return tuple(inspect.signature(self.body).parameters)

    @property
    def explicit(self) -> list[inspect.Parameter]:
        """Return the parameters without `**kwargs`."""
        return [parameter for parameter in self.parameters if parameter.kind is not parameter.VAR_KEYWORD]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(parameter.name for parameter in self.explicit)

    @property
    def ignored(self) -> tuple[str, ...]:
        return tuple(name for name in self.names if name in KERNEL and name not in self.own)

    @property
    def refused(self) -> tuple[str, ...]:
        return tuple(name for name in self.names if name in REFUSED_ARGUMENTS and name not in self.own)

    @property
    def more(self) -> tuple[str, ...]:
        """Return the arguments that `**kwargs` may have."""
        if len(self.names) == len(self.parameters):
            return ()
        more = [name for name in MORE_ARGUMENTS if name not in self.names and (name in KERNEL or name in self.own)]
        return (*more, *(("transpose_state_layout",) if "state_v_first" in self.names else ()))

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return all arguments of a call by their names. Raises TypeError as Python does, and ConfigError."""
        if len(args) > len(self.names):
            raise TypeError(f"{self.name}() takes {len(self.names)} arguments, but {len(args)} were passed")
        values = dict(zip(self.names, args, strict=False))
        for name in kwargs:
            if name in values:
                raise TypeError(f"{self.name}() got several values of {name!r}")
            if name not in self.names and name not in self.more:
                raise ConfigError(f"{self.name}: {unknown('argument', name, [*self.names, *self.more])}")
        defaults = {parameter.name: parameter.default for parameter in self.explicit}
        values = defaults | values | kwargs
        missing = [name for name, value in values.items() if value is inspect.Parameter.empty]
        if missing:
            raise TypeError(f"{self.name}() misses {', '.join(missing)}")
        for name in self.refused:
            if values[name] is not defaults[name]:
                raise ConfigError(
                    f"{self.name}: {name} is not {defaults[name]}, as expected: {REFUSED_ARGUMENTS[name]}"
                )
        return values

    def __call__(self, *args: Any, **kwargs: Any) -> Result:
        values = self.arguments(args, kwargs)
        turned, state = self._turned(values), values.get("initial_state")
        dropped = {*STATE, *self.ignored, *self.refused, *self.more} - {*self.own}
        options = {name: value for name, value in values.items() if name not in dropped}
        y, last, *between = self.body(**options, state=state.mT if turned and state is not None else state)
        if "output_final_state" in self.own or "output_final_state" not in values:
            return y, last
        if not values["output_final_state"]:
            last = tuple(None for _ in last) if isinstance(last, tuple) else None
        states = [S.mT.contiguous() if turned and isinstance(S, torch.Tensor) else S for S in (last, *between)]
        return y, *states

    def _turned(self, values: dict[str, Any]) -> bool:
        """Return whether the axes K and V of the states are exchanged; an old name of that warns, as in fla."""
        turned = values.get("state_v_first", False)
        if "transpose_state_layout" not in values:
            return turned
        if turned:
            raise ConfigError(f"{self.name}: transpose_state_layout is an old name of state_v_first, expected only one")
        warnings.warn("transpose_state_layout is an old name of state_v_first", DeprecationWarning, stacklevel=4)
        return values["transpose_state_layout"]


FUNCTIONS: dict[str, FlaFunction] = {}


def written_as(op: Any, body: Callable[..., Result]) -> Callable[[Callable[P, Any]], Callable[P, Result]]:
    """Make a function of the decorated header, and register it.

    body: calls the op. It takes the header's arguments by their names, and `state`, and returns the op's result. What
    it returns besides o is left out without output_final_state, unless it names output_final_state itself.
    """

    def decorate(header: Callable[P, Any]) -> Callable[P, Result]:
        name, parameters = header.__name__, tuple(inspect.signature(header).parameters.values())
        written = FUNCTIONS[name] = FlaFunction(name, parameters, op.name, body)

        @functools.wraps(header)
        def function(*args: P.args, **kwargs: P.kwargs) -> Result:
            return written(*args, **kwargs)

        function.__doc__ = f"{body.__doc__}\n\n    Computed by `{op.name}`. See `scanl.compat.fla` for what all have."
        return function

    return decorate
