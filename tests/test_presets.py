"""Whole models by name: declared as layers are, listed, shown, suggested, built and trained."""

import re

import pytest
import torch

from scanl import layers
from scanl.cli import main
from scanl.cli.layers import describe, state_size
from scanl.errors import ConfigError
from scanl.layers.state import leaves
from scanl.models import LanguageModel, Stack, presets


@pytest.fixture(params=presets.names())
def name(request):
    return request.param


def test_every_preset_declares_what_it_is(name):
    cls = presets.get(name)
    assert cls.equation
    assert cls.source
    assert cls.id.startswith("S-")
    assert cls.__doc__
    assert cls.layers
    assert set(cls.layers) <= set(layers.names())
    assert name not in layers.names()


def test_list_has_every_preset(name, capsys):
    assert main(["list"]) == 0
    listed = capsys.readouterr().out
    assert re.search(rf"^{name} +{re.escape(presets.get(name).__doc__.splitlines()[0])}$", listed, re.MULTILINE)
    assert presets.get(name).equation in listed
    assert main(["list", "--markdown"]) == 0
    page = capsys.readouterr().out
    assert f"| [`{name}`](#{name}) | {presets.get(name).id} |" in page
    assert f"## {name}\n" in page


def test_show_says_what_a_preset_is(name, capsys):
    cls = presets.get(name)
    assert main(["show", name, "--dim", "64"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for part in (cls.equation, cls.source, ", ".join(cls.layers), *cls.__doc__.split("\n\n")):
        assert " ".join(part.split()) in shown
    stack = Stack(64, len(cls.layers), name)
    assert f"{sum(p.numel() for p in stack.parameters()):,} in {len(cls.layers)} blocks of dim 64" in shown
    floats = sum(leaf.numel() for _, leaf in leaves(stack.init_state(1)))
    assert state_size(stack) == floats
    assert f"state {floats:,} floats a sequence" in shown
    assert describe(name, 64).splitlines()[0] in shown


def test_the_nearest_name_is_suggested(capsys):
    for command in (["show", "grifin"], ["train", "--layer", "grifin", "--steps", "1"]):
        assert main(command) == 2
        assert "unknown layer 'grifin'; did you mean 'griffin'?" in capsys.readouterr().err


def test_a_preset_is_its_pattern_of_layers(name):
    cls = presets.get(name)
    depth = len(cls.layers) + 1
    torch.manual_seed(0)
    named = LanguageModel(11, 64, depth, name)
    torch.manual_seed(0)
    spelt = LanguageModel(11, 64, depth, cls.layers)
    kinds = [type(block.mixer).name for block in named.stack.blocks]
    assert kinds == [*cls.layers, cls.layers[0]]
    tokens = torch.randint(11, (2, 9))
    assert torch.equal(named(tokens)[0], spelt(tokens)[0])
    with pytest.raises(ConfigError, match="unknown layer in layer_options 'lru'"):
        LanguageModel(11, 64, depth, name, layer_options={"lru": {}})


def test_a_preset_trains_from_the_command_line(tmp_path, capfd):
    (tmp_path / "text.txt").write_bytes(b"a state, a transition and a readout. " * 200)
    run = tmp_path / "run"
    command = ["train", "--data", str(tmp_path / "text.txt"), "--layer", "griffin"]
    command += ["--layer-options", "{hawk: {num_heads: 2}}"]
    sizes = ["--dim", "32", "--depth", "3", "--steps", "2", "--sequence-length", "32", "--held-out", "0.5"]
    assert main([*command, *sizes, "--accelerator", "cpu", "--out", str(run)]) == 0
    assert "griffin" in capfd.readouterr().err
    assert main(["generate", str(run), "--prompt", "a", "--bytes", "2"]) == 0
