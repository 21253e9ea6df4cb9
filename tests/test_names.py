"""Names of layers, whole models, sources and channel mixers: every usual spelling finds one class."""

import re
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from scanl import models
from scanl.cli import main
from scanl.data import sources
from scanl.errors import ConfigError, ShapeError
from scanl.layers import Layer, build, get, registry
from scanl.layers import state as states
from scanl.layers.designation import layer_class, recorded
from scanl.learning.algorithms import algorithms
from scanl.models import (
    Forecaster,
    LanguageModel,
    SequenceClassifier,
    SequenceLabeler,
    SequenceRegressor,
    Stack,
    Tokens,
    presets,
)
from scanl.models.presets import wholes
from scanl.registry import look_up

COVERS = ["layers/designation", "registry"]

pytestmark = pytest.mark.cells_by_loop("name")

SPELLINGS = {
    "LinearRNN": "linear_rnn",
    "S6": "mamba",
    "LRU": "lru",
    "RWKV": "rwkv4",
    "rwkv-6": "rwkv6",
    "Finch": "rwkv6",
    "GatedDeltaNet": "gated_deltanet",
    "gated-delta-net": "gated_deltanet",
    "Mamba-2": "mamba2",
    "coRNN": "cornn",
    "xLSTM": "xlstm",
    "HiPPO-LegS": "hippo",
    "MultiScaleRNN": "multi_scale",
    "AFT full": "aft_full",
}
# The names of the models, algorithms and tasks in the documents that the library was made from, and what they are.
LITERATURE = tomllib.loads((Path(__file__).parent / "literature.toml").read_text("utf-8"))
# Names of what is a part of others, and some words of the one sentence that says of which.
PARTS = {
    "ShortConvolution": "scanl.layers.ShortConvolution",
    "chrono": "lstm",
    "chrono initialisation": "lstm",
    "layer normalization": "norm",
    "gradient clipping": "--",
    "Transformer": "attention",
    "vanilla Transformer": "attention",
    "TransNormer": "diag_attention",
    "FlashAttention": "attention",
    "FlashAttention-2": "attention",
    "FlashConv": "h3",
    "DEER": "newton",
    "LCP": "rbp",
    "limit cycle": "elman",
    "SCYFI": "scanl.inspect.orbits",
}
SOURCES = {
    "sMNIST": "mnist",
    "psMNIST": "psmnist",
    "lra_text": "imdb",
    "LRA-Image": "lra_image",
    "LRA-Path-X": "lra_path_x",
    "WikiText-103": "wikitext103",
    "Speech Commands": "speech_commands",
}


@pytest.mark.parametrize(("spelling", "name"), SPELLINGS.items())
def test_a_layer_is_found_by_every_usual_spelling(spelling, name):
    found = presets.get(spelling) if presets.find(spelling) else get(spelling)
    assert found.name == name


@pytest.mark.parametrize("meaning", LITERATURE)
def test_a_name_of_the_literature_is_found(meaning):
    """As it is written there, in capitals and with other punctuation."""
    for name in LITERATURE[meaning].split(", "):
        others = (name.replace("-", " "),) if name in ("hGRU", "HGRU") else (name.upper(), name.replace("-", " "))
        for spelling in (name, *others):
            registry, known = look_up(spelling)[0]
            assert f"{registry.kind}: {known}" == meaning, spelling


@pytest.mark.parametrize("name", PARTS)
def test_a_name_of_a_part_says_what_has_it(name, capsys):
    assert look_up(name) == []
    with pytest.raises(ConfigError, match=re.escape(PARTS[name])):
        get(name)
    for command in ("show", "list"):
        assert main([command, name]) == 2
        error = capsys.readouterr().err
        assert PARTS[name] in error
        assert error.count("\n") == 1
        assert len(error) < 200


@pytest.mark.parametrize("name", ["Longformer", "Reformer", "nonsense", "x", "ModernTCN", "\n", "layer", "s" * 200])
def test_an_unknown_name_gets_a_few_near_ones_and_the_way_to_all(name, capsys):
    for command in ("show", "list"):
        assert main([command, name]) == 2
        error = capsys.readouterr().err
        assert error.endswith("`scanl list` prints all\n")
        near = re.search("the nearest: (.*); ", error)
        assert near is None or set(near[1].split(", ")) <= {*registry.layers.names(), *presets.names()}
        assert error.count(",") <= 2
        assert "did you mean" not in error


def test_a_layer_that_is_asked_for_by_the_name_of_another_thing_says_what_that_is():
    for name, kind, use in (
        ("hGRU", "whole model", "scanl.models.HorizontalGRU"),
        ("Memformer", "whole model", "scanl.models.TransformerEncoder"),
        ("P-TNCN", "whole model", "scanl.models.PTNCN"),
        ("RTRL", "algorithm", "scanl train --algorithm rtrl"),
        ("adding problem", "task", "scanl train --data adding"),
        ("GLU", "channel mixer", "Stack(dim, depth, layer, channel_mixer='glu')"),
    ):
        with pytest.raises(ConfigError, match=rf"is an? {kind}, expected a layer; use {re.escape(use)}$"):
            get(name)
    with pytest.raises(ConfigError, match="'GRU' is a layer, expected an algorithm; use "):
        algorithms.get("GRU")
    assert get("HGRU").name == "hgrn"


@pytest.mark.parametrize("make", [wholes.get(name).make for name in wholes.names()], ids=lambda make: make.__name__)
def test_a_whole_model_is_found_where_it_says(make):
    assert getattr(models, make.__name__) is make


def test_list_and_show_have_whole_models_and_algorithms(capsys):
    assert main(["list"]) == 0
    listed = capsys.readouterr().out
    for kind in (wholes, algorithms):
        for name in kind.names():
            assert f"\n{name} " in listed
            assert main(["show", name]) == 0
            assert kind.usage(name) in capsys.readouterr().out
    assert main(["list", "hGRU", "S6", "P-TNCN", "BPTT"]) == 0
    some = capsys.readouterr().out
    assert re.findall(r"^(\w+)  ", some, re.MULTILINE) == ["hgru", "ptncn", "mamba", "p_tncn", "bptt"]
    assert main(["list", "gau", "flash", "rmt", "tlb", "transformer_xl"]) == 0
    some = capsys.readouterr().out
    assert some.startswith("Attention: over all steps, in a window, with recurrence or memory:\n")
    assert re.findall(r"^\S.*:$", some, re.MULTILINE) == [some.splitlines()[0]]


@pytest.mark.parametrize(("spelling", "name"), SOURCES.items())
def test_a_source_is_found_by_every_usual_spelling(spelling, name):
    assert sources.get(spelling).name == name


@pytest.mark.parametrize("family", [registry.layers, presets, registry.channel_mixers, sources])
def test_no_spelling_stands_for_two_classes(family):
    by_spelling: dict[str, set[str]] = {}
    for spelling, name in family.spellings():
        by_spelling.setdefault(spelling, set()).add(name)
    assert {spelling: found for spelling, found in by_spelling.items() if len(found) > 1} == {}


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("DEER", "unknown layer 'DEER'; it is Newton's method over time, .* solver 'newton'"),
        ("hwak", "unknown layer 'hwak'; did you mean 'hawk'"),
        ("Griffin", "'Griffin' is a whole model, expected a layer; use Stack\\(dim, depth, 'griffin'\\)"),
    ],
)
def test_a_known_name_that_is_no_layer_gets_advice(name, advice):
    with pytest.raises(ConfigError, match=advice):
        get(name)


def test_a_stack_takes_other_spellings_in_its_pattern_and_in_its_options():
    torch.manual_seed(0)
    stack = Stack(8, 3, ["Hawk", "hawk", "L-R-U"], layer_options={"HAWK": {"width": 8, "num_heads": 2}})
    torch.manual_seed(0)
    same = Stack(8, 3, ["hawk", "hawk", "lru"], layer_options={"hawk": {"width": 8, "num_heads": 2}})
    x = torch.randn(1, 5, 8)
    torch.testing.assert_close(stack(x)[0], same(x)[0], rtol=0, atol=0)


class Leaky(Layer):
    """A leaky sum, as a user would write it: the state is a dict."""

    def __init__(self, dim: int, decay: float = 0.5) -> None:
        super().__init__()
        self.dim, self.decay, self.into = dim, decay, nn.Linear(dim, dim)

    def init_state(self, batch_size, *, device=None, dtype=None):
        return {"h": self._zeros(batch_size, self.dim, device=device, dtype=dtype)}

    def run(self, x: Tensor, state, cu_seqlens: Tensor | None):
        state = self._begin(x, state, cu_seqlens)
        h, outputs = state["h"], []
        for step in self.into(x).unbind(1):
            h = self.decay * h + step
            outputs.append(h)
        return torch.stack(outputs, 1), {"h": h}


MODELS = {
    "language model": lambda layer: LanguageModel(7, Stack(8, 2, layer)),
    "classifier": lambda layer: SequenceClassifier(3, Stack(8, 2, layer), Tokens(7)),
    "regressor": lambda layer: SequenceRegressor(1, Stack(8, 2, layer), Tokens(7)),
    "labeler": lambda layer: SequenceLabeler(3, Stack(8, 2, layer), Tokens(7)),
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layer", [Leaky, f"{__name__}:Leaky", Leaky(8), [Leaky, "lru"]], ids=str)
def test_a_class_of_the_users_own_stands_wherever_a_name_does(model, layer, tmp_path):
    tokens = torch.randint(7, (2, 6))
    made = MODELS[model](layer).eval()
    whole, _ = made(tokens)
    assert whole.isfinite().all()
    assert type(made.stack.blocks[0].mixer) is Leaky
    assert made.stack.blocks[0].mixer is not layer
    made.save(tmp_path)
    torch.testing.assert_close(type(made).load(tmp_path)(tokens)[0], whole, rtol=0, atol=0)
    if model == "language model":
        first, carried = made(tokens[:, :4])
        rest, _ = made(tokens[:, 4:], carried)
        torch.testing.assert_close(torch.cat([first, rest], 1), whole)
        assert len(list(made.generate(tokens[:, :1], max_new_tokens=3))) == 3


def test_options_of_a_class_go_by_its_name():
    assert Stack(8, 2, Leaky, layer_options={"decay": 0.25}).blocks[1].mixer.decay == 0.25
    assert Stack(8, 2, [Leaky, "lru"], layer_options={"Leaky": {"decay": 0.25}}).blocks[0].mixer.decay == 0.25
    with pytest.raises(ConfigError, match=r"unknown option of Leaky 'dekay'; did you mean 'decay'\?"):
        Stack(8, 1, Leaky, layer_options={"dekay": 0.25})


def test_each_block_has_a_copy_of_an_instance():
    layer = Leaky(8, 0.25)
    stack = Stack(8, 2, layer)
    mixers = [block.mixer for block in stack.blocks]
    assert len({id(layer), *map(id, mixers)}) == 3
    torch.testing.assert_close(mixers[1].into.weight, layer.into.weight)
    with pytest.raises(ConfigError, match="Leaky: dim is 8, expected 16 of the stack"):
        Stack(16, 1, layer)
    with pytest.raises(ConfigError, match=r"Leaky: options are \{'decay': 1\}, expected none because the layer is"):
        Stack(8, 1, layer, layer_options={"decay": 1})


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.GRU, "expected a registered name, a subclass of scanl.layers.Layer or a Layer"),
        (nn.Linear(8, 8), "layer is a Linear, .* expected a registered name"),
        ("no.such.module:Layer", "layer is 'no.such.module:Layer', expected module:Class that Python can import: No"),
        (f"{__name__}:Nothing", "expected module:Class that Python can import: .* has no attribute 'Nothing'"),
        ("torch.nn:GRU", "layer is torch.nn:GRU, expected a registered name, a subclass"),
        (3, "layer is a int, 3, expected a registered name"),
    ],
    ids=str,
)
def test_what_is_no_layer_is_refused(layer, message):
    with pytest.raises(ConfigError, match=message):
        Stack(8, 1, [layer])


def test_a_model_is_saved_with_a_class_that_can_be_imported_alone(tmp_path):
    class Local(Leaky):
        pass

    with pytest.raises(ConfigError, match=r"save: layer is the class .*Local of .*, expected one that another program"):
        LanguageModel(7, Stack(8, 1, Local)).save(tmp_path)
    with pytest.raises(ConfigError, match=r"save: layer is the class .*Local of .*, expected one that another program"):
        LanguageModel(7, Stack(8, 1, Local(8))).save(tmp_path)
    assert layer_class(recorded(Leaky)) is Leaky
    assert recorded(get("lru")) == "lru"


def test_a_forecaster_takes_a_class_of_the_users_own():
    model = Forecaster(2, Stack(8, 1, Leaky))
    forecast, _ = model(torch.randn(2, 10, 1))
    assert forecast.isfinite().all()


@pytest.mark.usefixtures("short_sample")
def test_the_command_line_trains_a_class_of_the_users_own(tmp_path, monkeypatch, capsys):
    module = """
        from scanl.layers.ssm.lru import LRU

        class Mine(LRU):
            "A layer of one's own."
    """
    (tmp_path / "layers_of_mine.py").write_text(textwrap.dedent(module))
    (tmp_path / "text.txt").write_bytes(bytes(range(32, 127)) * 200)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    options = "--layer layers_of_mine:Mine --dim 16 --depth 1 --steps 2 --batch-size 2 --sequence-length 16 --out run"
    assert main(["train", "--data", "text.txt", *options.split()]) == 0
    assert main(["eval", "run"]) == 0
    assert main(["train", "--data", "text.txt", "--layer", "layers_of_mine:Other"]) == 2
    assert "expected module:Class that Python can import" in capsys.readouterr().err


def test_layers_are_listed_by_family(capsys):
    assert main(["list"]) == 0
    out = capsys.readouterr().out
    family = out.partition("State-space models and diagonal recurrences:\n")[2].partition("\n\n")[0]
    assert "\nmamba " in family
    assert "\ngla " not in family
    assert main(["show", "S6", "--dim", "8"]) == 0
    assert capsys.readouterr().out.startswith("mamba: ")


def test_a_built_layer_is_the_one_of_its_name():
    assert type(build("Gated-LinearAttention", 8)) is get("gla")


def test_a_state_may_be_a_dict(tmp_path):
    layer, x = Leaky(4), torch.randn(3, 5, 4)
    whole, last = layer(x)
    first, state = layer(x[:, :2])
    states.save(state, tmp_path / "state.safetensors")
    read = states.load(tmp_path / "state.safetensors", layer.init_state(3))
    for carried in (state, states.detach(state), read, states.to(state, dtype=torch.float32)):
        torch.testing.assert_close(torch.cat([first, layer(x[:, 2:], carried)[0]], 1), whole)
    turned = states.index(last, [2, 0])
    torch.testing.assert_close(turned["h"], last["h"][[2, 0]])
    torch.testing.assert_close(states.cat([turned, turned])["h"], last["h"][[2, 0, 2, 0]])
    assert [path for path, _ in states.leaves(last)] == ["state.h"]
    with pytest.raises(ShapeError, match=r"Leaky: state has {'state.g': \(3, 4\)}, expected {'state.h': \(3, 4\)}"):
        layer(x, {"g": last["h"]})


def test_a_part_that_holds_no_tensors_is_refused():
    with pytest.raises(ShapeError, match="state: it holds a str, expected tensors, or tuples, NamedTuples, lists and"):
        states.detach((torch.zeros(1), "abc"))
    with pytest.raises(ShapeError, match="state: it holds a int, expected tensors"):
        list(states.leaves([1]))
