"""Declarations of a layer's state, from which its initial state, its checks and its documentation are made.

A class declares `state`: `StateAxes` for a tensor, `TensorTuple` for a tuple of tensors, `InnerState` for the state of
a layer inside, or a NamedTuple whose fields are annotated with one of them: `Annotated[Tensor, StateAxes("width")]`.
`StateFields` is for the NamedTuple of another module.
"""

import ast
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Protocol, TypeAlias, cast, get_args, get_origin, get_type_hints

import torch
from torch import Tensor, nn

from scanl.layers.state import Device, DType, State, loadable

UNPACKED_AXES = re.compile(r"(?:^|, )\*")  # axes that are named by a tuple


class StatefulLayer(Protocol):
    """The part of a layer that this module reads."""

    state: ClassVar[Any]

    def init_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> State: ...

    def _filled(self, value: float, shape: Sequence[int], device: Device, dtype: DType, at_least: DType) -> Tensor: ...


@dataclass(frozen=True)
class StateAxes:
    """A tensor of the state, (B, *axes).

    axes: attributes of the layer, or sums and products of them: "num_heads, conv_size - 1"; `*memory` for a tuple;
    "" for one number for each sequence.
    meaning: what it holds.   fill: its initial value, or one for each entry of the first axis.
    dtype: a floating or complex dtype is the narrowest that the tensor has; an integer dtype is the only one.
    when: an attribute of the layer; where it is None, False or 0, the state has () in place of the tensor.
    after: for a tensor that depends on the number of steps alone, the function of it and of n that gives it n steps
    later.
    """

    axes: str
    meaning: str = ""
    fill: float | tuple[float, ...] = 0.0
    dtype: torch.dtype = torch.float32
    when: str = ""
    after: Callable[[Tensor, Tensor], Tensor] | None = None
    sizes: Callable[[StatefulLayer], tuple[int, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", _compiled(self.axes))


@dataclass(frozen=True)
class InnerState:
    """The state of the layer at an attribute; of each layer for a list of them. () where the attribute is None."""

    attribute: str
    meaning: str = ""


class StateFields:
    """A NamedTuple of another module and its fields: `StateFields(SegmentMemory, keys=StateAxes(...), ...)`."""

    def __init__(self, form: type[tuple[Any, ...]], **parts: "Form") -> None:
        self.form, self.parts = loadable(form), parts


@dataclass(frozen=True)
class TensorTuple:
    """A tuple of tensors, (B, *shape) for each of the shapes that the layer has at an attribute."""

    shapes: str
    meaning: str = ""


Form: TypeAlias = StateAxes | TensorTuple | InnerState | StateFields | type[tuple[Any, ...]]


def initial(layer: StatefulLayer, form: Form, batch_size: int, device: Device, dtype: DType) -> State:
    """Return the state before any input, as declared. device and dtype default to those of the parameters."""
    if isinstance(form, StateAxes):
        if form.when and getattr(layer, form.when) in (None, False):
            return ()
        sizes = (batch_size, *form.sizes(layer))
        if not isinstance(form.fill, tuple):
            return layer._filled(form.fill, sizes, device, dtype, form.dtype)
        return torch.stack(
            [layer._filled(fill, (batch_size, *sizes[2:]), device, dtype, form.dtype) for fill in form.fill], 1
        )
    if isinstance(form, TensorTuple):
        shapes = getattr(layer, form.shapes)
        return tuple(layer._filled(0.0, (batch_size, *shape), device, dtype, torch.float32) for shape in shapes)
    if isinstance(form, InnerState):
        inner: StatefulLayer | nn.ModuleList | None = getattr(layer, form.attribute)
        if inner is None:
            return ()
        if isinstance(inner, nn.ModuleList):
            return tuple(
                cast(StatefulLayer, member).init_state(batch_size, device=device, dtype=dtype) for member in inner
            )
        return inner.init_state(batch_size, device=device, dtype=dtype)
    state: Any = form.form if isinstance(form, StateFields) else form
    return state(*(initial(layer, component, batch_size, device, dtype) for _, component in fields(form)))


def later(layer: StatefulLayer, form: Form | None, state: State, steps: Tensor) -> State:
    """Return the state whose tensors that depend on the number of steps alone are those `steps` later, (B,).

    The others are None.
    """
    if isinstance(form, StateAxes) and form.after is not None and isinstance(state, Tensor):
        return form.after(state, steps.view(-1, *[1] * (state.ndim - 1)))
    if isinstance(form, InnerState) and not isinstance(inner := getattr(layer, form.attribute), nn.ModuleList):
        return None if inner is None else later(inner, inner.state, state, steps)
    if form is None or isinstance(form, StateAxes | TensorTuple | InnerState):
        return None
    inside = (later(layer, declared, value, steps) for (_, declared), value in zip(fields(form), state, strict=True))
    return type(state)(*inside)


DECLARED_FORMS: dict[type[tuple[Any, ...]], list[tuple[str, Form]]] = {}  # what the fields of NamedTuples declare


def declare(form: Form) -> None:
    """Read the annotations of a NamedTuple, and of those in its fields, before a state of this form is made."""
    if not inspect.isclass(form) or form in DECLARED_FORMS:
        return
    declared: list[tuple[str, Form]] = []
    for name, hint in get_type_hints(form, include_extras=True).items():
        notes = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
        parts: list[Any] = [
            note
            for note in notes
            if isinstance(note, StateAxes | TensorTuple | InnerState | StateFields) or inspect.isclass(note)
        ]
        declared += [(name, component) for component in parts]
    assert [name for name, _ in declared] == list(getattr(form, "_fields", ())), (
        f"{form.__name__}: a field lacks StateAxes"
    )
    DECLARED_FORMS[form] = declared
    loadable(form)
    for _, component in declared:
        declare(component)


def fields(form: StateFields | type[tuple[Any, ...]]) -> list[tuple[str, Form]]:
    """Return the fields of a NamedTuple and what each declares."""
    return list(form.parts.items()) if isinstance(form, StateFields) else DECLARED_FORMS[form]


def rows(form: Form, name: str = "state", layer: StatefulLayer | None = None) -> Iterator[str]:
    """Yield a line for each tensor of a state: its name, its axes, its meaning.

    layer: with it, the tensors of a layer inside take the place of the layer's name, and numbers that of axes which the
    declaration names as a tuple.
    """
    if isinstance(form, StateAxes):
        kind = {torch.float32: "", torch.complex64: ", complex"}.get(
            form.dtype, f", {form.dtype}".replace("torch.", "")
        )
        start = "" if form.fill == 0 else f", {form.fill} at the start"
        absent = f", or () without {form.when}" if form.when else ""
        axes = (
            form.axes
            if layer is None or UNPACKED_AXES.search(form.axes) is None
            else ", ".join(map(str, form.sizes(layer)))
        )
        yield f"{name} ({', '.join(filter(None, ('B', axes)))}){kind}{start}{absent}" + (
            f": {form.meaning}" if form.meaning else ""
        )
    elif isinstance(form, TensorTuple):
        yield f"{name}: {form.meaning}, a tensor for each of {form.shapes}"
    elif isinstance(form, InnerState):
        inner: Any = None if layer is None else getattr(layer, form.attribute)
        if not form.meaning and getattr(inner, "state", None) is not None:
            yield from rows(inner.state, name, inner)
            return
        owned = "its own state" if name == form.attribute else f"the state of {form.attribute}"
        yield f"{name}: {owned}" + (f", {form.meaning}" if form.meaning else "")
    else:
        for component, inside in fields(form):
            yield from rows(inside, component, layer)


class _OfLayer(ast.NodeTransformer):
    """Make each name in an expression the attribute of that name of `layer`."""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Attribute(ast.Name("layer", ast.Load()), node.id, ast.Load())


def _compiled(axes: str) -> Callable[[StatefulLayer], tuple[int, ...]]:
    """Return the function of a layer that gives the sizes of axes. It is plain Python, which `torch.compile` traces."""
    tree = ast.parse(f"lambda layer: ({axes},)" if axes else "lambda layer: ()", mode="eval")
    tree.body = ast.Lambda(tree.body.args, _OfLayer().visit(tree.body.body))  # pyright: ignore[reportAttributeAccessIssue]
    return eval(compile(ast.fix_missing_locations(tree), f"<axes {axes!r}>", "eval"))
