"""Laws over every layer of what surrounds it: sizes by default, autocast, export, the meta device, dtypes, repr."""

import contextlib
import copy
import inspect
import math

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import laws
from scanl import layers, ops
from scanl.cli import main
from scanl.errors import ConfigError, ShapeError
from scanl.layers import state as states
from scanl.learning import RunFolder
from scanl.learning.run.metrics import read_metrics
from scanl.models import Stack
from tests.test_layers import CASES, DIM, EXPORTED, LAYERS, REGISTERED, STREAMING, inputs, make, shapes, some, stood_for

pytestmark = [pytest.mark.early(4), pytest.mark.cells_by_loop("name")]

WIDTHS = (128, 256, 1024)
STEPS_KEPT = ("max_length", "l_max", "window", "chunk_size")  # options: how many steps the state keeps as they are


def state_size(layer):
    """Floats of state a sequence; a complex number counts as two."""
    parts = [leaf for _, leaf in states.leaves(layer.init_state(1, device="meta"))]
    return sum((2 if leaf.is_complex() else 1) * leaf.numel() for leaf in parts)


@pytest.mark.parametrize("dim", WIDTHS)
@pytest.mark.parametrize("name", REGISTERED)
def test_default_sizes_are_in_proportion(name, dim):
    """At most 8 D² parameters and 400 D (maps of a few numbers a channel).

    Of state at most 2 D² (a matrix memory of one head of twice the width has 4 / H of them) and 300 D, and a
    key and a value of D for each step that is kept. Sizes that do not follow D leave this at one width or another.
    """
    with torch.device("meta"):
        layer = layers.build(name, dim)
    assert sum(p.numel() for p in layer.parameters()) <= 8 * dim**2 + 400 * dim
    defaults = {option: p.default for option, p in inspect.signature(layers.get(name)).parameters.items()}
    kept = sum(defaults.get(option) or 0 for option in STEPS_KEPT)
    assert state_size(layer) <= 2 * dim**2 + 300 * dim + 2 * kept * dim


def test_the_default_widths_of_gated_deltanet_are_the_published_ones():
    """Queries and keys of 3/4 D, values of 3/2 D: Yang et al., arXiv:2412.06464; 6 heads of 256 at their 2,048."""
    with torch.device("meta"):
        for dim in (64, 256, 1024, 2048):
            layer = layers.build("gated_deltanet", dim)
            assert (layer.q_proj.out_features, layer.k_proj.out_features) == (3 * dim // 4, 3 * dim // 4)
            assert (layer.v_proj.out_features, layer.g_proj.out_features) == (3 * dim // 2, 3 * dim // 2)
        assert layer.memory == (6, 256, 512)
        # Where 6 heads do not divide 3/4 D: the nearest whole head.
        assert [layers.build("gated_deltanet", dim).head_dim for dim in (1, 12, 100)] == [1, 2, 12]
        assert layers.build("gated_deltanet", 64, num_heads=4).head_dim == 12


def test_the_default_widths_of_qwen3_next_deltanet_are_in_the_released_proportions():
    """Queries and keys of D, values of 2 D: config.json of Qwen3-Next has 16 and 32 heads of 128 at its 2,048."""
    with torch.device("meta"):
        for dim in (64, 256, 1024, 2048):
            layer = layers.build("qwen3_next_deltanet", dim)
            assert (layer.q_proj.out_features, layer.k_proj.out_features) == (dim, dim)
            assert (layer.v_proj.out_features, layer.g_proj.out_features) == (2 * dim, 2 * dim)
            assert layer.memory == (32, dim // 16, dim // 16)


def trained(layer, x, autocast=False):
    """The output, the state, and the gradient of every parameter, in float64; without one where there is none."""
    layer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y, state = layer(x)
    y.double().square().mean().backward()
    return y, state, {name: p.grad for name, p in layer.named_parameters()}


def distance(found, exact, least=0.0):
    """The largest error, relative to the largest number, which counts as `least` at least."""
    return ((found.double() - exact).abs().max() / exact.abs().max().clamp(min=least)).item()


@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_trains_under_autocast(name):
    """As far from float64 as the same layer wholly in bfloat16 at most twice, and one rounding.

    The error of a tensor, relative to its largest number, is compared in the output, and its worst over all gradients,
    which are finite for every parameter; one that is 0 but for rounding, as of AFT's bias of the keys, is compared with
    one rounding of the largest of all. What recurs stays in float32.
    """
    layer, x = make(name, torch.float32), inputs(3, 40, dtype=torch.float32)
    exact, _, slopes = trained(make(name, torch.float32).double(), x.double())
    own, _, own_slopes = trained(make(name, torch.float32).bfloat16(), x.bfloat16())
    for given in (x, x.bfloat16()):
        y, state, found = trained(layer, given, autocast=True)
        eps = torch.finfo(torch.bfloat16).eps
        assert distance(y, exact) <= 2 * (distance(own, exact) + eps)
        assert all(slope is not None and slope.isfinite().all() for slope in found.values())
        least = eps * max(slope.abs().max().item() for slope in slopes.values())
        worst, own_worst = (max(distance(g[key], slopes[key], least) for key in slopes) for g in (found, own_slopes))
        assert worst <= 2 * (own_worst + eps)
        if name in REGISTERED:
            assert all(leaf.dtype in (torch.float32, torch.complex64, torch.int64) for _, leaf in states.leaves(state))


def test_a_stack_trains_under_autocast():
    pattern = ("s4", "gru", "mlstm")
    stack = Stack(DIM, 3, pattern, layer_options={name: dict(layers.get(name).sample) for name in pattern})
    x = inputs(2, 40, dtype=torch.float32)
    exact, _, _ = trained(copy.deepcopy(stack).double(), x.double())
    own, _, _ = trained(copy.deepcopy(stack).bfloat16(), x.bfloat16())
    y, _, slopes = trained(stack, x, autocast=True)
    assert distance(y, exact) <= 2 * (distance(own, exact) + torch.finfo(torch.bfloat16).eps)
    assert all(slope.isfinite().all() for slope in slopes.values())


@pytest.mark.usefixtures("short_sample")
def test_the_trainer_trains_in_mixed_precision(tmp_path):
    text, run = tmp_path / "text.txt", tmp_path / "run"
    text.write_bytes(b"a state, a transition and a readout. " * 200)
    command = ["train", "--data", str(text), "--layer", "s4,gru", "--precision", "bf16-mixed", "--accelerator", "cpu"]
    sizes = ["--dim", "16", "--depth", "2", "--steps", "2", "--sequence-length", "32", "--held-out", "0.5"]
    assert main([*command, *sizes, "--out", str(run)]) == 0
    rows = read_metrics(RunFolder.open(run))
    assert rows
    assert all(math.isfinite(float(row["loss"])) for row in rows if row["loss"])


@pytest.mark.parametrize("name", REGISTERED)
def test_the_meta_device_tells_shapes(name):
    """Built there, and run there whole, packed away from any value, onward and by a step."""
    # A loop over the steps; more than a chunk of an op; or, without an op, three segments of the samples.
    steps = 3 if stood_for(name) else 17 if layers.get(name).op else 7
    with torch.device("meta"):
        layer = layers.build(name, DIM, **layers.get(name).sample)
        assert all(tensor.is_meta for tensor in (*layer.parameters(), *layer.buffers()))
        x = torch.empty(2, steps, DIM)
    real = CASES[name]()
    y, state = layer(x)
    assert_form((y, state), real(torch.zeros(2, steps, DIM)))
    y, state = layer(x[:, :2], state)
    assert_form(y, x[:, :2])
    y.sum().backward()
    if not layer.bidirectional:
        y, after = layer.step(x[:, 0], state)
        assert_form(y, x[:, 0])
        assert_form(after, state)


def assert_form(found, expected):
    form = [[(place, leaf.shape, leaf.dtype) for place, leaf in states.leaves(each)] for each in (found, expected)]
    assert form[0] == form[1]


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize(
    ("name", "own"),
    [*((name, torch.float32) for name in REGISTERED)]
    + [
        pytest.param(*case.values, own, marks=case.marks)
        for case in some(REGISTERED)
        for own in (torch.float64, torch.bfloat16)
    ],
)
def test_a_state_of_another_dtype_is_read_in_the_layer_s_own(name, own):
    """As if it had been cast to the layer's dtype first, and what comes back has that dtype."""
    layer, x = make(name, own), inputs(2, 20, dtype=own)
    state = states.detach(layer(x)[1])
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        other = states.to(state, dtype=dtype)
        if any(leaf.dtype is torch.complex32 for _, leaf in states.leaves(other)):
            with pytest.raises(ShapeError, match=rf"{name}: state\S* is torch.complex32, expected torch.complex\d+"):
                layer(x, other)
            continue
        cast = states.map_leaves(lambda leaf, like: leaf.to(like.dtype), other, state)
        # Many steps with one that is wider than most layers and one that is narrower: a state is cast before any step.
        for steps in (0, 1, 20) if laws.ALL or dtype in (torch.float64, torch.bfloat16) else (0, 1):
            expected, last = layer(x[:, :steps], cast)
            y, found = layer(x[:, :steps], other)
            torch.testing.assert_close(y, expected)
            assert_form(y, x[:, :steps])
            if steps:
                assert_form(found, last)


@pytest.mark.parametrize("name", REGISTERED)
def test_a_state_of_another_kind_of_number_is_refused(name):
    layer = make(name)
    state = layer.init_state(2)

    def another(leaf):
        return torch.zeros_like(leaf, dtype=torch.complex128 if leaf.is_floating_point() else torch.float64)

    with pytest.raises(ShapeError, match=rf"{name}: state\S* is torch.\w+, expected torch.\w+ because of the layer"):
        layer(inputs(2, 3), states.map_leaves(another, state))


def test_bidirectional_refuses_what_is_no_way_to_make_a_layer():
    wrapper, who = layers.Bidirectional, "bidirectional"
    with pytest.raises(ConfigError, match=rf"^{who}: layer is a Mamba, expected a registered name or a function"):
        wrapper(DIM, layer=layers.Mamba(DIM))
    with pytest.raises(ConfigError, match=rf"^{who}: layer is 3, expected text or a class or a function"):
        wrapper(DIM, layer=3)
    with pytest.raises(ConfigError, match=rf"^{who}: layer makes a Linear, expected a Layer of dim={DIM}"):
        wrapper(DIM, layer=lambda dim: nn.Linear(dim, dim))
    with pytest.raises(ConfigError, match=rf"^{who}: layer makes a Mamba of dim=5, expected a Layer of dim={DIM}"):
        wrapper(DIM, layer=lambda _: layers.Mamba(5))
    wrapper(DIM, layer=layers.Mamba)
    wrapper(DIM, layer=lambda dim: layers.Mamba(dim, state_dim=4))


@pytest.mark.parametrize("name", [name for name in LAYERS if name not in STREAMING])
def test_a_layer_that_sees_the_future_refuses_to_step(name):
    layer = make(name)
    with pytest.raises(ConfigError, match=r"\w+: step is called, expected forward over the whole sequence because the"):
        layer.step(inputs(2), layer.init_state(2))


@pytest.mark.parametrize("name", LAYERS)
def test_repr_shows_sizes(name):
    """The width of the layer; and something of each module in it that has parameters of its own."""
    layer = make(name, torch.float32)
    assert f"dim={layer.dim}" in "".join(repr(layer).splitlines()[:2])
    for place, module in layer.named_modules():
        if next(module.parameters(recurse=False), None) is not None:
            assert module.extra_repr(), place


def limit(layer):
    """The length of the longest sequence that a layer reads; None where it reads any."""
    longest = layer.config.get("max_length")
    if longest is None:
        return None
    try:
        layer(inputs(1, longest + 1))
    except ShapeError:
        return longest
    return None


@pytest.mark.cells_by_kernel
@pytest.mark.parametrize("name", some(REGISTERED, EXPORTED))
@torch._dynamo.config.patch(fake_tensor_cache_enabled=False)  # no call of an op is like another where sizes are open
def test_an_exported_layer_takes_any_length(name):
    """`torch.export` with the batch and the length open: the same numbers, the same state at other sizes."""
    layer = make(name)
    longest = limit(layer)
    sizes = {0: torch.export.Dim("B"), 1: torch.export.Dim("T", max=longest)}
    program = torch.export.export(layer, (inputs(2, 20),), dynamic_shapes=(sizes,), strict=False).module()
    few = stood_for(name)
    for batch, steps in ((3, 33), (4, 2), (5, 70)):
        x = inputs(batch, steps)
        with ops.backend("reference") if few else contextlib.nullcontext():
            y, state = layer(x)
        with FakeTensorMode(allow_non_fake_inputs=True) if few else contextlib.nullcontext():
            z, last = program(x)
        assert shapes((z, last)) == shapes((y, state))
        if few:
            continue
        torch.testing.assert_close(z, y)
        for (place, found), (_, expected) in zip(states.leaves(last), states.leaves(state), strict=True):
            torch.testing.assert_close(found, expected, msg=place)
