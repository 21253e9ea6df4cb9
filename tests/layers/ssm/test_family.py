"""State-space layers: timespans, convolutions beside recurrences, and options that are refused."""

import re
from itertools import pairwise

import pytest
import torch

import laws
from by_hand import DIM, T, follows_time, shaken
from scanl import layers
from scanl.errors import ConfigError, ShapeError
from scanl.layers import H3, S4, S4D, S5, Hyena, Mamba
from scanl.layers import state as states
from scanl.layers.parts import dense_ssm, diagonal_ssm
from scanl.layers.ssm import s4 as s4_layer
from tests.layers.ssm.equations import without_decay
from tests.layers.test_equations import CASES

pytestmark = pytest.mark.cells_by_loop("name")


OF_POLYNOMIALS = [
    "hippo", "hippo_bilinear", "hippo_legt", "hippo_fourier", "hippo_rnn", "hippo_rnn_lagt", "lmu_parallel", "lmu",
]  # fmt: skip

TIMED = [
    "mamba", "mamba_without_a_bias", "s4d", "s4d_bilinear", "s4d_dirac", "s5", "s5_bilinear", "s5_all_eigenvalues",
    "s5_clipped", "s5_plain", "s5_gelu", "s7", "s7_async", "s7_stable", "s7_bilinear", "lru", "dss",
    "dss_of_one_step_size", "dss_softmax", "dss_softmax_growing", "gss", "gss_of_free_frequencies", "liquid_s4",
    "liquid_s4_of_degree_four", "liquid_s4_of_all_degrees", "lssl", "lssl_fixed", "lssl_of_each_channel", "s4",
]  # fmt: skip

CONVOLVED = ["s4d", "s4d_bilinear", "dss", "dss_softmax_growing", "dlr", "gss", "s4", "h3", "h3_alone", "mega_ema"]
CONVOLVED += ["hyena", "hyena_of_order_four", "sgconv", "lssl"]


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", OF_POLYNOMIALS)
def test_a_memory_follows_the_time_between_its_steps(name):
    make, equation = CASES[name]
    follows_time(make, equation)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", TIMED)
def test_a_layer_follows_the_time_between_its_steps(name):
    follows_time(*CASES[name])


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", ["s4d", "dss", "gss", "s5_plain", "lru"])
def test_a_step_of_two_units_is_two_steps_with_the_input_held(name):
    layer, x = shaken(CASES[name][0]()), torch.randn(2, T, DIM)
    twice, last = layer(x.repeat_interleave(2, 1))
    once, also = layer(x, timespans=torch.full((2, T), 2.0))
    torch.testing.assert_close(once, twice[:, 1::2])
    torch.testing.assert_close(also, last)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", TIMED)
def test_wrong_timespans_are_refused(name):
    layer, x = CASES[name][0](), torch.randn(2, T, DIM)
    for wrong, message in (
        (torch.ones(2, T + 1), rf"timespans is torch.float64 \(2, 8\), expected a floating dtype and \(2, {T}\)"),
        (torch.ones(2, T, dtype=torch.int64), rf"timespans is torch.int64 \(2, {T}\), expected a floating dtype"),
        (0.5, "timespans is a float, expected a tensor"),
        (torch.ones(2, T, device="meta"), "timespans is on meta, expected cpu because of x"),
    ):
        with pytest.raises(ShapeError, match=rf"{layer.name}: {message}"):
            layer(x, timespans=wrong)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", CONVOLVED)
def test_a_convolution_is_the_recurrence(name):
    """The laws have sequences too short for the convolution; here it is cut anywhere, and laid beside the loop."""
    layer, x = shaken(CASES[name][0]()), torch.randn(2, 53, DIM)
    _, before = layer(torch.randn(2, 5, DIM))
    for state in (None, states.detach(before)):
        whole, last = layer(x, state)
        for size in (1, 7, 16, 17, 23, 36, 52):
            after, ys = state, []
            for piece in x.split(size, 1):
                y, after = layer(piece, after)
                ys.append(y)
            torch.testing.assert_close(torch.cat(ys, 1), whole)
            for (_, found), (_, expected) in zip(states.leaves(after), states.leaves(last), strict=True):
                torch.testing.assert_close(found, expected)
    torch.testing.assert_close(layer(x)[0][0], torch.stack(CASES[name][1](layer, list(x[0]))))


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", CONVOLVED)
@pytest.mark.parametrize("carried", [False, True])
def test_long_packed_sequences_equal_each_alone(name, carried):
    layer, x, cuts = shaken(CASES[name][0]()), torch.randn(1, 81, DIM).requires_grad_(), [0, 5, 5, 22, 64, 81]
    before = states.detach(layer(torch.randn(5, 5, DIM))[1]) if carried else None
    before = states.map_leaves(lambda leaf: leaf.requires_grad_(leaf.is_floating_point() or leaf.is_complex()), before)
    y, last = layer(x, before, cu_seqlens=torch.tensor(cuts))
    ys, ends = [], []
    for n, (start, end) in enumerate(pairwise(cuts)):
        alone, state = layer(x[:, start:end], states.index(before, slice(n, n + 1)))
        ys.append(alone)
        ends.append(state)
    wanted = [x, *(p for p in layer.parameters() if p.requires_grad)]
    wanted += [leaf for _, leaf in states.leaves(before) if leaf.requires_grad]
    found = []
    for output, after in ((y, last), (torch.cat(ys, 1), states.cat(ends))):
        parts = [leaf for _, leaf in states.leaves(after)]
        loss = (output.square() * torch.arange(81)[:, None]).sum()
        loss = loss + sum(leaf.abs().square().sum() for leaf in parts if leaf.requires_grad)
        found.append([output, *parts, *torch.autograd.grad(loss, wanted, materialize_grads=True, allow_unused=True)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)
    nothing, last = layer(x[:, :0], layer.init_state(0), cu_seqlens=torch.tensor([0]))
    assert nothing.shape == (1, 0, DIM)
    assert all(leaf.shape[0] == 0 for _, leaf in states.leaves(last))
    assert layer(torch.randn(0, 20, DIM))[0].shape == (0, 20, DIM)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", CONVOLVED)
def test_gradients_of_the_convolution(name, monkeypatch):
    layer, x = shaken(CASES[name][0]()), torch.randn(2, 21, DIM).requires_grad_()
    _, before = layer(torch.randn(2, 5, DIM))
    before = states.detach(before)

    def gradients():
        leaves = [leaf.clone().requires_grad_() for _, leaf in states.leaves(before)]
        places = iter(leaves)
        y, last = layer(x, states.map_leaves(lambda leaf: next(places), before))
        ends = [leaf.abs().square().sum() for _, leaf in states.leaves(last)]
        loss = (y.square() * torch.arange(21)[:, None]).sum() + sum(ends)
        return torch.autograd.grad(loss, [x, *leaves, *layer.parameters()])

    found = gradients()
    for module in (diagonal_ssm, s4_layer, dense_ssm):
        monkeypatch.setattr(module, "MAX_RECURRENT_STEPS", 100)
    torch.testing.assert_close(found, gradients())
    for module in (diagonal_ssm, s4_layer, dense_ssm):
        monkeypatch.setattr(module, "MAX_RECURRENT_STEPS", 0)
    short = torch.randn(1, 5, DIM).requires_grad_()
    assert torch.autograd.gradgradcheck(lambda x: layer(x)[0], (short,), fast_mode=True)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", ["s4d", "hyena", *(pytest.param(n, marks=pytest.mark.long) for n in ("s4", "h3"))])
def test_the_convolution_compiles(name):
    layer, x = shaken(CASES[name][0]()), torch.randn(2, 40, DIM)
    before = states.detach(layer(x)[1])
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager" if laws.ALL else "eager")
    torch.testing.assert_close(compiled(x, before), layer(x, before))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("dss", {"state_dim": 0}, "dss: state_dim is 0, expected at least 1"),
        ("dss", {"max_length": "softmax"}, "dss: max_length is 'softmax', expected an integer or None"),
        ("dss", {"init": "lim"}, "dss: unknown init 'lim'; did you mean 'lin'?"),
        ("dss", {"max_length": 0}, "dss: max_length is 0, expected at least 1"),
        ("dss_softmax", {"max_length": 0}, "dss_softmax: max_length is 0, expected at least 1"),
        ("dss_softmax", {"max_length": -1}, "dss_softmax: max_length is -1, expected at least 1"),
        ("dss", {"dt_min": 0.0}, "dss: dt_min is 0.0, expected more than 0"),
        ("dlr", {"state_dim": 0}, "dlr: state_dim is 0, expected at least 1"),
        ("dlr", {"variant": "rael"}, "dlr: unknown variant 'rael'; did you mean 'real'?"),
        ("dlr", {"dt_max": 1e-9}, "dlr: dt_max is 1e-09, expected at least dt_min=0.0001"),
        ("sgconv", {"max_length": 0}, "sgconv: max_length is 0, expected at least 1"),
        ("sgconv", {"conv_size": 0}, "sgconv: conv_size is 0, expected at least 1"),
        ("sgconv", {"decay_min": 3.0}, "sgconv: decay_max is 2.0, expected at least decay_min=3.0"),
        ("liquid_s4", {"degree": 0}, "liquid_s4: degree is 0, expected at least 1"),
        ("liquid_s4", {"state_dim": 3}, "liquid_s4: state_dim is 3, expected an even number"),
        ("lssl", {"state_dim": 0}, "lssl: state_dim is 0, expected at least 1"),
        ("lssl", {"learn": 3}, "lssl: learn is 3, expected 0 or 1 or 2"),
        ("gss", {"width": 0}, "gss: width is 0, expected at least 1"),
        ("gss", {"state_dim": 0}, "gss: state_dim is 0, expected at least 1"),
        ("gss", {"expand": 0.01}, "gss: expand is 0.01, expected at least 1/8 because of dim=8"),
    ],
)
def test_wrong_options_of_diagonal_layers_are_refused(name, options, message):
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        layers.build(name, DIM, **options)


@pytest.mark.usefixtures("double")
def test_what_is_not_decayed():
    assert without_decay(Mamba(8)) == dict.fromkeys(
        ("A_log", "D", "conv1d.weight", "conv1d.bias", "dt_proj.bias"), (0.0, None)
    )
    free = dict.fromkeys(("D", "kernel.C", "output_linear.0.weight", "output_linear.0.bias"), (0.0, None))
    slow = ("kernel.log_dt", "kernel.log_A_real", "kernel.A_imag")
    assert without_decay(S4D(8)) == free | dict.fromkeys(slow, (0.0, 1e-3))
    found = without_decay(S4(8))
    for name in ("inv_dt", "A_real", "A_imag", "B", "P"):
        assert found[f"layer.kernel.{name}"] == (0.0, 1e-3)
    assert found["layer.kernel.C"] == found["layer.D"] == (0.0, None)
    found = without_decay(H3(8, lr=1e-4))
    for name in ("kernel.kernel.log_dt", "kernel.kernel.B", "kernel.kernel.inv_A_real", "ssm_k_kernel.kernel.B"):
        assert found[name] == (0.0, 1e-4)
    assert found["kernel.kernel.C"] == found["ssm_k_kernel.kernel.C"] == found["D"] == (0.0, None)
    found = without_decay(Hyena(8, 16))
    assert found["filter_fn.pos_emb.z"] == (0.0, 1e-5)
    assert found["filter_fn.implicit_filter.2.weight"] == found["filter_fn.implicit_filter.1.freq"] == (0.0, 1e-3)
    slow_s5 = dict.fromkeys(("Lambda_re", "Lambda_im", "B", "log_step"), (0.0, 1e-3))
    assert without_decay(S5(8)) == slow_s5 | dict.fromkeys(("C", "D", "out2.bias"), (0.0, None))
    assert without_decay(S4D(8, lr=None)) == free | dict.fromkeys(slow, (0.0, None))
