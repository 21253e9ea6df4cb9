"""The columns of `scanl list --long`: what kind of recurrence a layer is, and how its cost grows with the steps."""

import pytest
import torch

from scanl import layers
from scanl.cli import main
from scanl.cli.columns import columns, row
from scanl.cli.layers import options_of, state_size
from scanl.layers.state import flatten, unflatten
from scanl.ops import backend

EXPECTED = {
    "gla": (True, True, True, False),
    "mlstm_large": (True, True, True, False),
    "lru": (True, True, False, True),
    "mamba": (True, True, True, True),
    "deltanet": (True, False, True, False),
    "s4": (True, False, False, False),
    "elman": (False, False, False, False),
    "lstm": (False, False, True, False),
    "layernorm_lstm": (False, False, True, False),
    "gru": (False, False, True, False),
    "sru": (False, True, True, True),
    "indrnn": (False, True, False, True),
}
NONE = ("attention", "bidirectional", "transformer_xl", "gated_convolution", "gau", "implicit")
# Layers whose whole state is one tensor of real numbers, so that the Jacobian of a step is all that there is.
PLAIN = ("gilr", "mingru", "minlstm", "decaying_fast_weights", "expdecay", "dense_lti", "elman", "gru", "indrnn", "rfa")


@pytest.mark.parametrize("name", EXPECTED)
def test_columns_are_those_of_the_survey(name):
    assert columns(layers.get(name), 12) == EXPECTED[name]


@pytest.mark.parametrize("name", NONE)
def test_a_layer_that_keeps_inputs_has_no_recurrence(name):
    assert columns(layers.get(name), 12) is None
    assert row(layers.get(name)).startswith("no recurrence; time O(")


@pytest.mark.parametrize("name", PLAIN)
def test_linear_and_elementwise_by_the_jacobian_of_a_step(name):
    """Affine: between two states the step is between their next ones. Elementwise: the Jacobian is diagonal."""
    torch.manual_seed(0)
    layer, x = layers.build(name, 12, **layers.get(name).sample).double().eval(), torch.randn(1, 1, 12).double()
    like = layer.init_state(1)
    first, second = (torch.randn_like(flatten(like)) for _ in range(2))

    def step(flat):
        with backend("reference"):
            return flatten(layer(x, unflatten(flat, like))[1])

    middle = step(0.3 * first + 0.7 * second) - (0.3 * step(first) + 0.7 * step(second))
    jacobian = torch.autograd.functional.jacobian(step, first)[0, :, 0]
    diagonal = not (jacobian - jacobian.diag().diag()).any()
    kind = columns(layers.get(name), 12)
    assert (bool(middle.abs().max() < 1e-12), diagonal) == (kind.linear, kind.elementwise)


@pytest.mark.parametrize("name", [name for name in layers.names() if layers.get(name).cost[1] != "1"])
def test_a_state_that_grows_with_the_steps_grows_with_the_option_that_bounds_them(name):
    """For a window or a segment too. A layer that sees the future has no state."""
    cls = layers.get(name)
    if layers.build(name, 12, **cls.sample).bidirectional:
        assert cls.cost == ("T", "T")
        return
    bounds = ("window", "chunk_size", "conv_size", "num_slots", "segment", "size") if cls.cost[1] == "W" else ()
    known = {option.name for option in options_of(name)}
    (bound, *_) = [option for option in (*bounds, "max_length") if option in known]
    sample = {option: value for option, value in cls.sample.items() if option != "chunk_size" or bound != "max_length"}
    small, large = (state_size(layers.build(name, 12, **{**sample, bound: size})) for size in (9, 72))
    if cls.cost[1] == "log T":
        assert small < large < 2.5 * small
    else:
        assert large > 3 * small


def test_list_prints_the_columns(capsys):
    assert main(["list", "--long", "gla", "attention", "lru", "elman", "log_linear_mamba2"]) == 0
    shown = capsys.readouterr().out
    for line in (
        "linear, elementwise, gated; time O(T), state O(1)",
        "no recurrence; time O(T^2), state O(T)",
        "linear, elementwise, online; time O(T), state O(1)",
        "nonlinear, dense; time O(T), state O(1)",
        "linear, elementwise, gated; time O(T log T), state O(log T)",
    ):
        assert f" {line}\n" in shown
    assert "time, state: how the work over a sequence of T steps" in shown


def test_list_prints_a_line_a_layer_and_measures_nothing(capsys, monkeypatch):
    monkeypatch.setattr("scanl.cli.layers.row", None)
    assert main(["list", "gla", "gated_deltanet_negative_eigenvalues"]) == 0
    title, *lines, blank, end = capsys.readouterr().out.splitlines()
    assert (title[:15], blank, end[:5]) == ("Matrix memories", "", "`scan")
    assert [line.split(maxsplit=1)[0] for line in lines] == ["gla", "gated_deltanet_negative_eigenvalues"]
