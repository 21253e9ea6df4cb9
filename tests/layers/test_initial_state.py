"""Declarations of states: the tensors that a layer starts from, and what its docstring says of them."""

from typing import Annotated, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from scanl.layers import Layer
from scanl.layers.initial_state import InnerState, StateAxes, StateFields, TensorTuple, declare


class Inner(Layer):
    """A layer inside of another."""

    state = StateAxes("dim", "the last input", fill=0.5)

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim


def outer(form):
    """Return a layer with this state, and attributes for its declaration."""

    class Outer(Layer):
        """A layer."""

        state = form

        def __init__(self) -> None:
            super().__init__()
            self.dim, self.heads, self.window, self.memory, self.shapes = 4, 2, 0, (3, 5), [(2,), (), (3, 1)]
            self.first, self.last, self.absent = Inner(3), Inner(7), None
            self.several = nn.ModuleList([Inner(1), Inner(2)])

    return Outer


@pytest.mark.parametrize(
    ("axes", "shape"),
    [
        ("dim", (6, 4)),
        ("heads, 2 * dim - 1", (6, 2, 7)),
        ("*memory", (6, 3, 5)),
        ("heads, *memory, dim", (6, 2, 3, 5, 4)),
        ("", (6,)),
    ],
)
def test_axes_are_expressions_of_attributes(axes, shape):
    state = outer(StateAxes(axes))().init_state(6)
    assert state.shape == shape
    assert not state.any()


def test_a_state_is_filled_with_a_number_or_one_for_each_entry_of_its_first_axis():
    assert (outer(StateAxes("dim", fill=-2.0))().init_state(3) == -2).all()
    state = outer(StateAxes("heads, dim", fill=(1.0, -3.0)))().init_state(5)
    assert torch.equal(state, torch.tensor([1.0, -3.0])[None, :, None].expand(5, 2, 4))


def test_the_dtype_of_axes_is_the_narrowest_and_an_integer_is_the_only_one():
    for dtype, asked, made in (
        (torch.float32, torch.bfloat16, torch.float32),
        (torch.float32, torch.float64, torch.float64),
        (torch.complex64, torch.float64, torch.complex128),
        (torch.int64, torch.float64, torch.int64),
    ):
        for fill in (1.0, (1.0, 2.0)):
            assert outer(StateAxes("heads", dtype=dtype, fill=fill))().init_state(1, dtype=asked).dtype == made
    assert outer(StateAxes("heads", fill=(1.0, 2.0)))().init_state(1, device="meta").is_meta


def test_a_tensor_is_absent_where_its_attribute_is_none_false_or_zero():
    layer = outer(StateAxes("dim", when="window"))()
    for layer.window, absent in ((0, True), (None, True), (False, True), (1, False), (True, False)):
        assert (layer.init_state(2) == ()) is absent


def test_the_state_of_a_layer_inside_is_its_own():
    state = outer(InnerState("first"))().init_state(2, dtype=torch.float64)
    torch.testing.assert_close(state, torch.full((2, 3), 0.5, dtype=torch.float64))
    assert outer(InnerState("absent"))().init_state(2) == ()
    assert [part.shape for part in outer(InnerState("several"))().init_state(2)] == [(2, 1), (2, 2)]


def test_each_shape_has_a_tensor():
    state = outer(TensorTuple("shapes"))().init_state(4)
    assert [part.shape for part in state] == [(4, 2), (4,), (4, 3, 1)]
    assert not any(part.any() for part in state)


class Pair(NamedTuple):
    """A state of this module, with a state inside."""

    count: Annotated[Tensor, StateAxes("", "steps so far", dtype=torch.int64)]
    inner: Annotated[Tensor, InnerState("last", "of the last")]


class Nested(NamedTuple):
    pair: Annotated[Pair, Pair]
    pieces: Annotated[tuple, TensorTuple("shapes", "sums")]


class Foreign(NamedTuple):
    """A state of another module, which declares nothing."""

    keys: Tensor
    values: Tensor


def test_named_tuples_are_made_field_by_field():
    state = outer(Nested)().init_state(2)
    assert type(state) is Nested
    assert type(state.pair) is Pair
    assert (state.pair.count.dtype, state.pair.count.shape) == (torch.int64, (2,))
    assert state.pair.inner.shape == (2, 7)
    assert len(state.pieces) == 3
    state = outer(StateFields(Foreign, keys=StateAxes("dim"), values=StateAxes("heads, dim", fill=1.0)))().init_state(2)
    assert type(state) is Foreign
    assert (state.keys.shape, state.values.shape) == ((2, 4), (2, 2, 4))
    assert (state.values == 1).all()
    assert not state.keys.any()


def test_a_field_that_lacks_axes_is_refused_when_the_class_is_made():
    class Lacking(NamedTuple):
        count: Annotated[Tensor, StateAxes("")]
        rest: Tensor

    for make in (outer, declare):
        with pytest.raises(AssertionError, match="Lacking: a field lacks StateAxes"):
            make(Lacking)


@pytest.mark.parametrize(
    ("form", "line"),
    [
        (StateAxes("dim", "the last input"), "state (B, dim): the last input"),
        (StateAxes("", fill=-1.0), "state (B), -1.0 at the start"),
        (
            StateAxes("heads", fill=(1.0, 0.0), when="window"),
            "state (B, heads), (1.0, 0.0) at the start, or () without window",
        ),
        (StateAxes("*memory", dtype=torch.complex64), "state (B, *memory), complex"),
        (StateAxes("", dtype=torch.int64), "state (B), int64"),
        (TensorTuple("shapes", "sums"), "state: sums, a tensor for each of shapes"),
        (InnerState("first", "of the first"), "state: the state of first, of the first"),
        (
            Nested,
            "count (B), int64: steps so far; inner: the state of last, of the last; "
            "pieces: sums, a tensor for each of shapes",
        ),
        (StateFields(Foreign, keys=StateAxes("dim"), values=StateAxes("heads")), "keys (B, dim); values (B, heads)"),
    ],
)
def test_the_docstring_lists_the_tensors_of_the_state(form, line):
    assert outer(form).__doc__ == f"A layer.\n\nState: {line}."
