"""Published models by name: layers with other options, and whole models that are a pattern of layers.

What a preset adds to its layer is tried here: its name, its options, and the laws that depend on options. All other
laws are its layer's, and run there; a preset that declares `own_path` is under every law of tests/test_layers.py.
"""

import contextlib
import io
import pickle
import re

import pytest
import torch

import tests.test_layers as laws
from scanl import layers
from scanl.cli import main
from scanl.cli.layers import describe, options_of, state_size
from scanl.errors import ConfigError
from scanl.layers import registry
from scanl.layers.state import leaves
from scanl.models import LanguageModel, Stack, presets

COVERS = ["models/presets"]

pytestmark = pytest.mark.cells_by_loop("preset_name")

PRESETS = [name for name in layers.names() if name not in layers.names(presets=False)]
each_preset = pytest.mark.parametrize("preset_name", PRESETS)


@each_preset
def test_a_preset_is_its_layer_with_its_options(preset_name):
    """The same parameters, numbers and state from the same seed; and so after a pickle."""
    cls = layers.get(preset_name)
    base, options = cls.preset_of, {**cls.preset_options, **cls.sample}
    torch.manual_seed(0)
    named = layers.build(preset_name, 12, **cls.sample)
    torch.manual_seed(0)
    spelt = base(12, **options)
    assert type(named) is cls
    assert isinstance(named, base)
    assert cls.preset_options
    assert cls.preset_options.items() <= {option.name: option.default for option in options_of(preset_name)}.items()
    x = torch.randn(2, 5, 12)
    for layer in (named, pickle.loads(pickle.dumps(named))):
        torch.testing.assert_close(layer.state_dict(), spelt.state_dict(), rtol=0, atol=0)
        torch.testing.assert_close(layer(x), spelt(x), rtol=0, atol=0)


@each_preset
def test_a_preset_declares_what_it_is(preset_name):
    """Itself, not by its layer; and what it is at all is the law of every layer."""
    assert {"equation", "source", "__doc__"} <= {key for key, value in vars(layers.get(preset_name)).items() if value}
    laws.test_every_layer_declares_what_it_is(preset_name)


@pytest.mark.parametrize("preset_name", laws.SHORT)
def test_a_preset_keeps_the_laws_that_depend_on_options(preset_name):
    if not layers.get(preset_name).bidirectional:
        laws.test_tokens_equal_the_whole(preset_name)
        laws.test_any_cut_equals_the_whole(preset_name)
    laws.test_packed_sequences_equal_each_alone(preset_name, carried=True)
    laws.test_the_state_does_not_grow(preset_name)


@pytest.fixture(scope="module")
def listed():
    """What `scanl list --long` prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(["list", "--long"]) == 0
    return out.getvalue()


@each_preset
def test_list_and_show_have_every_preset(preset_name, listed):
    cls = layers.get(preset_name)
    line = re.escape(f"{cls.__doc__.splitlines()[0]} A preset of {cls.preset_of.name}.")
    assert re.search(rf"^{preset_name} +{line}$", listed, re.MULTILINE)
    shown = " ".join(describe(preset_name, 64).split())
    for option, value in cls.preset_options.items():
        assert re.search(rf"preset of {cls.preset_of.name} with .*{option}={value!r}", shown)
    for part in (cls.equation, cls.source, *cls.__doc__.split("\n\n")):
        assert " ".join(part.split()) in shown


def test_a_caller_overrides_the_options_of_a_preset():
    @registry.preset("test_preset", r_min=0.5, state_dim=3)
    class Example(layers.LRU):
        """An LRU of three channels."""

    try:
        assert layers.build("test_preset", 4).state_dim == 3
        assert layers.build("test_preset", 4, state_dim=5).state_dim == 5
        assert Example(4, 7).state_dim == 7
        with pytest.raises(ConfigError, match=r"unknown option of test_preset 'state_dmi'; did you mean 'state_dim'\?"):
            layers.build("test_preset", 4, state_dmi=5)
        assert Stack(4, 1, "test_preset", layer_options={"r_max": 0.9}).blocks[0].mixer.name == "test_preset"

        class User(Example):
            pass

        assert User(4).state_dim == 3
        assert User.preset_of is None
    finally:
        registry.layers.remove("test_preset")
    with pytest.raises(ConfigError, match=r"unknown option of test_preset 'state_dmi'; did you mean 'state_dim'\?"):
        registry.preset("test_preset", state_dmi=3)(type("Example", (layers.LRU,), {}))


def test_no_name_is_a_layer_s_and_a_whole_model_s():
    with pytest.raises(ConfigError, match="whole model 'lru' is registered twice: LRU and Other"):
        presets.add("lru")(type("Other", (), {}))
    with pytest.raises(ConfigError, match="layer 'griffin' is registered twice: Griffin and Other"):
        layers.register("griffin")(type("Other", (layers.LRU,), {}))
    with pytest.raises(
        ConfigError, match=r"'griffin' is a whole model, expected a layer; use Stack\(dim, depth, 'griffin'\)"
    ):
        layers.build("griffin", 8)


@pytest.fixture(params=presets.names())
def model(request):
    return request.param


def test_every_whole_model_declares_what_it_is(model):
    cls = presets.get(model)
    assert cls.equation
    assert cls.source
    assert cls.__doc__
    assert cls.layers
    assert set(cls.layers) <= set(layers.names())


def test_list_has_every_whole_model(model, listed):
    assert re.search(rf"^{model} +{re.escape(presets.get(model).__doc__.splitlines()[0])}$", listed, re.MULTILINE)
    assert presets.get(model).equation in listed


def test_show_says_what_a_whole_model_is(model, capsys):
    cls = presets.get(model)
    assert main(["show", model, "--dim", "64"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for part in (cls.equation, cls.source, ", ".join(cls.layers), *cls.__doc__.split("\n\n")):
        assert " ".join(part.split()) in shown
    stack = Stack(64, len(cls.layers), model)
    assert f"{sum(p.numel() for p in stack.parameters()):,} in {len(cls.layers)} blocks of dim 64" in shown
    floats = sum(leaf.numel() for _, leaf in leaves(stack.init_state(1)))
    assert state_size(stack) == floats
    assert f"state {floats:,} floats a sequence" in shown
    assert describe(model, 64).splitlines()[0] in shown


def test_the_nearest_name_is_suggested(capsys):
    for command in (["show", "grifin"], ["train", "--layer", "grifin", "--steps", "1"]):
        assert main(command) == 2
        assert "unknown layer 'grifin'; did you mean 'griffin'?" in capsys.readouterr().err


def test_a_whole_model_is_its_pattern_of_layers(model):
    cls = presets.get(model)
    depth = len(cls.layers) + 1
    torch.manual_seed(0)
    named = LanguageModel(11, Stack(64, depth, model))
    torch.manual_seed(0)
    spelt = LanguageModel(11, Stack(64, depth, cls.layers))
    kinds = [type(block.mixer).name for block in named.stack.blocks]
    assert kinds == [*cls.layers, cls.layers[0]]
    tokens = torch.randint(11, (2, 9))
    assert torch.equal(named(tokens)[0], spelt(tokens)[0])
    with pytest.raises(ConfigError, match="unknown layer in layer_options 'lru'"):
        LanguageModel(11, Stack(64, depth, model, layer_options={"lru": {}}))


@pytest.mark.usefixtures("short_sample")
def test_presets_and_whole_models_train_by_name_from_the_command_line(tmp_path, capfd):
    (tmp_path / "text.txt").write_bytes(b"a state, a transition and a readout. " * 200)
    run = tmp_path / "run"
    command = ["train", "--data", str(tmp_path / "text.txt"), "--layer", "griffin,rfa"]
    command += ["--layer-options", "{hawk: {num_heads: 2}, rfa: {num_heads: 2}}"]
    sizes = ["--dim", "32", "--depth", "4", "--steps", "2", "--sequence-length", "32", "--held-out", "0.5"]
    assert main([*command, *sizes, "--accelerator", "cpu", "--out", str(run)]) == 0
    assert "griffin" in capfd.readouterr().err
    assert main(["generate", str(run), "--prompt", "a", "--bytes", "2"]) == 0


def test_names_leave_presets_out_when_asked():
    """The lists of the tests above are made of this: were it wrong, they would be empty and nothing would fail."""
    assert {"performer", "aft_full"} <= set(layers.names()) - set(layers.names(presets=False))
    assert {"linear_attention", "aft"} <= set(layers.names(presets=False))
    assert [name for name in layers.names() if layers.get(name).preset_of is not None] == PRESETS
