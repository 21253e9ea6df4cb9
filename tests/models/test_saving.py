"""Models as nested configurations: what a file holds of a model, and that the same model is made from it."""

import ast
import json
import shutil
import subprocess
import sys
import textwrap
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import scanl
from scanl import models
from scanl.digests import load_tensors, save_tensors
from scanl.errors import CheckpointError, ConfigError
from scanl.layers import Layer
from scanl.models import (
    PTNCN,
    Channels,
    Dynamics,
    EncoderDecoder,
    Features,
    Forecaster,
    GraphNetwork,
    HorizontalGRU,
    ImageClassifier,
    LanguageModel,
    MegalodonStack,
    Normalization,
    Patches,
    RandomFilters,
    Saved,
    SequenceClassifier,
    SequenceLabeler,
    SequenceRegressor,
    SpaceTimeNet,
    Stack,
    StrandModel,
    Tokens,
)
from scanl.models.saving import ModelPart, recorded, restored
from scanl.models.stack import Backbone

SOURCE = Path(scanl.__file__).parent
# The pretrained forecaster and the tuned one read series and simple forecasts; their own tests save them.
OTHERS = {Saved, models.PretrainedForecaster, models.TunedForecaster}
HEADS = {cls for cls in vars(models).values() if isinstance(cls, type) and issubclass(cls, Saved)} - OTHERS


class Leaky(Layer):
    """A leaky sum, as a user would write it."""

    def __init__(self, dim: int, decay: float = 0.5) -> None:
        super().__init__()
        self.dim, self.decay, self.into = dim, decay, nn.Linear(dim, dim)

    def init_state(self, batch_size, *, device=None, dtype=None):
        return self._zeros(batch_size, self.dim, device=device, dtype=dtype)

    def run(self, x: Tensor, state, cu_seqlens: Tensor | None):
        h, outputs = self._begin(x, state, cu_seqlens), []
        for step in self.into(x).unbind(1):
            h = self.decay * h + step
            outputs.append(h)
        return torch.stack(outputs, 1), h


class Odd(Leaky):
    """A layer with an option of any kind."""

    def __init__(self, dim: int, more: Any = None) -> None:
        super().__init__(dim)


class Doubled(Stack):
    """A stack of the user's own."""

    def __init__(self, dim: int, layer: Layer | str = "lru") -> None:
        super().__init__(dim, 2, layer, channel_mixer="none")


class Bytes(LanguageModel):
    """A model of the user's own, with arguments of its own."""

    def __init__(self, dim: int, tie: bool = False) -> None:
        super().__init__(256, Stack(dim, 1, "lru"), tie_embeddings=tie)


TOKENS, NUMBERS = torch.tensor([[1, 2, 3, 0]]), torch.linspace(-1, 1, 8).view(1, 4, 2)
MODELS = {
    LanguageModel: lambda stack: (LanguageModel(5, stack, embedding_norm=True, logit_cap=3.0, padding_idx=2), TOKENS),
    SequenceClassifier: lambda stack: (SequenceClassifier(3, stack, Tokens(5), pool="last"), TOKENS),
    SequenceRegressor: lambda stack: (
        SequenceRegressor(2, stack, Features(2, [[0, 1], [2, 3]]), distribution="gaussian", output_scales=[(1, 2)] * 2),
        NUMBERS,
    ),
    SequenceLabeler: lambda stack: (SequenceLabeler(3, stack, Features(2, missing=True)), NUMBERS),
    Forecaster: lambda stack: (
        Forecaster(3, stack, Channels(target=2, scales=((0, 1), (1, 2))), lags=2, normalization=Normalization(5.0)),
        NUMBERS,
    ),
    ImageClassifier: lambda stack: (ImageClassifier(3, stack, Patches((2, 4), 1, 2)), NUMBERS.view(1, 1, 2, 4)),
    StrandModel: lambda stack: (StrandModel(12, stack, swap_strands=True), TOKENS + 7),
    EncoderDecoder: lambda stack: (EncoderDecoder(4, stack, Stack(8, 1, "lru"), Tokens(5)), (TOKENS, TOKENS)),
    SpaceTimeNet: lambda _: (SpaceTimeNet(8, 1, 4, 2), NUMBERS[..., :1]),
    Dynamics: lambda _: (Dynamics(2, 8, Leaky, {"decay": 0.25}), NUMBERS),
    PTNCN: lambda _: (PTNCN(2, 3, output="sigmoid"), NUMBERS),
    GraphNetwork: lambda _: (GraphNetwork([[0, 1]], 2, 1, 3, 1), NUMBERS[..., None]),
    RandomFilters: lambda _: (RandomFilters(3, Features(2), 6, known=True), NUMBERS),
    HorizontalGRU: lambda _: (HorizontalGRU((3, 3), 1, 2, 1, kernel=3), torch.ones(1, 2, 1, 3, 3)),
}  # fmt: skip
WITHOUT_STACK = {SpaceTimeNet, Dynamics, PTNCN, GraphNetwork, HorizontalGRU, RandomFilters}
STACKS = {
    "a class": lambda: Stack(8, 2, Leaky, layer_options={"decay": 0.25}),
    "its name": lambda: Stack(8, 2, f"{__name__}:Leaky"),
    "an instance": lambda: Stack(8, 2, Leaky(8, 0.25)),
    "a pattern": lambda: Stack(8, 2, (Leaky(8, 0.75), "lru"), layer_options={"lru": {"r_min": 0.5}}, norm="layernorm"),
    "a channel mixer": lambda: Stack(8, 1, "lru", channel_mixer=Leaky, channel_options={"decay": 0.25}),
    "its own instance": lambda: Stack(8, 1, "lru", channel_mixer=Leaky(8, 0.25)),
    "inside another": lambda: Stack(8, 1, "reverse_complement", layer_options={"layer": Leaky(4, 0.25)}),
    "a stack of one's own": lambda: Doubled(8, Leaky(8, 0.25)),
}


def fits(kind, stack):
    if kind in WITHOUT_STACK:
        return stack == "a class"
    return stack != "inside another" or kind not in (LanguageModel, Forecaster)  # it is bidirectional


def output(model, x):
    y = model(*x) if isinstance(x, tuple) else model(x)
    return y[0] if isinstance(y, tuple) else y


def test_no_constructor_of_a_model_has_more_than_seven_arguments():
    assert set(MODELS) == HEADS
    assert {cls.__name__: len(signature(cls).parameters) for cls in HEADS if len(signature(cls).parameters) > 7} == {}


def test_no_constructor_reads_its_arguments_by_locals():
    calls = [
        path.relative_to(SOURCE)
        for path in SOURCE.rglob("*.py")
        if "locals" in (text := path.read_text(encoding="utf-8"))
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Name) and node.id == "locals"
    ]
    assert calls == []


@pytest.mark.parametrize(("kind", "stack"), [(kind, stack) for kind in MODELS for stack in STACKS if fits(kind, stack)])
def test_every_model_comes_back_with_layers_of_the_users_own(kind, stack, tmp_path):
    torch.manual_seed(0)
    model, x = MODELS[kind](STACKS[stack]())
    model.eval().save(tmp_path)
    again = Saved.load(tmp_path)
    assert type(again) is kind
    assert torch.equal(output(again, x), output(model, x))
    assert recorded(again) == recorded(model)
    if kind not in WITHOUT_STACK:
        assert [type(mixer) for mixer in again.stack.mixers()] == [type(mixer) for mixer in model.stack.mixers()]
        assert [recorded(mixer) for mixer in again.stack.mixers()] == [
            recorded(mixer) for mixer in model.stack.mixers()
        ]


def test_a_file_holds_a_nested_configuration(tmp_path):
    model = SequenceClassifier(3, Stack(8, 1, Leaky(8)), Features(2))
    model.save(tmp_path)
    about = load_tensors(tmp_path / "model.safetensors", "test")[1]
    stack = about["config"].pop("stack")
    assert (about["class"], about["config"]) == (
        "SequenceClassifier",
        {
            "num_classes": 3,
            "inputs": {"class": "Features", "config": {"channels": 2, "scales": None, "missing": False}},
            "pool": "mean",
            "filters": None,
        },
    )
    assert stack["class"] == "Stack"
    assert stack["config"].keys() == signature(Stack).parameters.keys()
    assert stack["config"]["layer"] == {"class": f"{__name__}:Leaky", "config": {"dim": 8, "decay": 0.5}}


WHOLE = {
    "hgrn": lambda: models.hgrn(9, 8, 2),
    "mega": lambda: models.mega(9, 8, 1, layer_options={"z_dim": 4, "chunk_size": 3}),
    "megalodon": lambda: models.megalodon(9, 8, 1, swiglu=True, layer_options={"z_dim": 4, "chunk_size": 3}),
    "sashimi": lambda: models.sashimi(9, 8, pool=(2,), depth=1, state_dim=4),
    "hyena_dna": lambda: models.hyena_dna(8, 1, 6, 9),
    "a tuple among the options": lambda: LanguageModel(
        9, Stack(8, 1, "sashimi", layer_options={"pool": (2, 2), "state_dim": 4})
    ),
}


@pytest.mark.parametrize("name", WHOLE)
def test_whole_models_are_language_models_over_stacks(name, tmp_path):
    model = WHOLE[name]().eval()
    model.save(tmp_path)
    again = LanguageModel.load(tmp_path)
    assert type(again) is type(model) is LanguageModel
    assert type(again.stack) is type(model.stack)
    assert torch.equal(again(TOKENS)[0], model(TOKENS)[0])


def test_an_object_of_a_configuration_is_made_again():
    stack = restored(json.loads(json.dumps(recorded(MegalodonStack(8, 1, layer_options={"z_dim": 4})))))
    assert isinstance(stack, MegalodonStack)
    assert stack.config == {
        "dim": 8, "depth": 1, "expand": 2.5, "swiglu": False, "layer_options": {"z_dim": 4},
    }  # fmt: skip


def test_two_heads_may_share_a_stack():
    stack = Stack(8, 1, "lru")
    language, classifier = LanguageModel(5, stack), SequenceClassifier(2, stack, Tokens(5))
    assert language.stack is classifier.stack is stack


def test_classes_of_the_users_own_are_loaded_by_another_program(tmp_path):
    """A model, a stack and a layer that are defined in a file, and nowhere else."""
    module = """
        from scanl.layers import LRU
        from scanl.models import LanguageModel, Stack

        class Mine(LRU):
            "A layer of one's own."

        class MyStack(Stack):
            def __init__(self, dim: int, layer=Mine) -> None:
                super().__init__(dim, 1, layer)

        class MyModel(LanguageModel):
            def __init__(self, dim: int) -> None:
                super().__init__(7, MyStack(dim))
    """
    (tmp_path / "of_mine.py").write_text(textwrap.dedent(module))
    begin = "import of_mine; from scanl.models import *; "
    save = "of_mine.MyModel(8).save('one'); LanguageModel(7, of_mine.MyStack(8, of_mine.Mine(8))).save('two'); "
    save += "LanguageModel(7, of_mine.MyStack(8, 'lru')).save('three')"
    load = "from scanl.models import Saved; "
    load += "print(*(type(Saved.load(name).stack).__name__ for name in ('three', 'two', 'one')))"
    for code, expected in ((begin + save, ""), (load, "MyStack MyStack MyStack")):
        done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
        assert (done.returncode, done.stdout.strip()) == (0, expected), done.stderr


def test_a_model_of_the_users_own_has_its_own_configuration(tmp_path):
    model = Bytes(8, tie=True)
    model.save(tmp_path)
    about = load_tensors(tmp_path / "model.safetensors", "test")[1]
    assert about == {"sha256": about["sha256"], "class": f"{__name__}:Bytes", "config": {"dim": 8, "tie": True}}
    again = LanguageModel.load(tmp_path)
    assert type(again) is Bytes
    assert again.head is None


@pytest.mark.parametrize(
    ("about", "message"),
    [
        ({}, "holds no model of scanl, expected LanguageModel; name a folder that `save` has written"),
        ({"class": "Stack", "config": {"dim": 8, "depth": 1}}, "holds Stack, expected LanguageModel; name a folder"),
        ({"class": "no.such:Model", "config": {}}, "not here: class is 'no.such:Model', expected module:Cl"),
        (
            {"class": "LanguageModel", "config": {"dim": 8}},
            "a configuration that cannot be made: LanguageModel: missing",
        ),
        (
            {"class": "LanguageModel", "config": {"vocab_size": 5, "stack": {"class": "Stck", "config": {}}}},
            "a configuration that cannot be made: unknown layer 'Stck'",
        ),
        (
            {"class": "LanguageModel", "config": recorded(LanguageModel(5, Stack(8, 1, "lru")))["config"]},
            "does not fit its own header",
        ),
    ],
)
def test_a_file_that_holds_no_model_is_refused(about, message, tmp_path):
    save_tensors({"weight": torch.zeros(1)}, tmp_path / "model.safetensors", about)
    with pytest.raises(CheckpointError, match=message):
        LanguageModel.load(tmp_path)


def test_a_value_that_no_file_holds_is_named(tmp_path):
    model = LanguageModel(5, Stack(8, 1, Odd, layer_options={"more": torch.float32}))
    with pytest.raises(ConfigError, match=r"'more': torch.float32.* expected what JSON can hold"):
        model.save(tmp_path)


def test_a_configuration_does_not_change_with_the_arguments_of_the_caller():
    options, pattern = {"lru": {"r_min": 0.5}}, ["lru", "mingru"]
    stack = Stack(8, 2, pattern, layer_options=options)
    options["lru"]["r_min"] = 0.9
    pattern.pop()
    assert (stack.config["layer"], stack.config["layer_options"]) == (["lru", "mingru"], {"lru": {"r_min": 0.5}})


def test_numbers_of_numpy_are_saved_as_numbers(tmp_path):
    model = LanguageModel(np.int64(5), Stack(np.int32(8), np.int64(1), "lru", dropout=np.float32(0.5)))
    model.save(tmp_path)
    again = LanguageModel.load(tmp_path)
    assert recorded(again) == recorded(model)
    assert again.stack.config["dim"] == 8


def test_classes_of_scanl_have_names_of_their_own():
    """A class of the user's with the name of one of scanl has its module in its name, so it does not replace it."""
    kind = type(Stack)("Stack", (Stack,), {"__module__": "elsewhere", "__doc__": "Another."})
    assert ModelPart.classes["Stack"] is Stack
    assert ModelPart.classes["elsewhere:Stack"] is kind
    assert issubclass(kind, Backbone)


@pytest.fixture(scope="module")
def grown(tmp_path_factory):
    """The path of a copy of scanl in which one file is changed: `Stack` has an argument more."""
    path = tmp_path_factory.mktemp("grown")
    shutil.copytree(SOURCE, path / "scanl", ignore=shutil.ignore_patterns("__pycache__", "*.nbi", "*.nbc"))
    file = path / "scanl" / "models" / "stack.py"
    text = file.read_text(encoding="utf-8")
    last = "        two_hop: Annotated["
    assert text.count(last) == 1
    more = '        glow: Annotated[float, at_least(0), "how it glows"] = 0.0,\n'
    file.write_text(text.replace(last, more + last), encoding="utf-8")
    return path


def test_an_argument_more_of_a_stack_changes_one_file(grown):
    """It is an option of `scanl train` and of a configuration, it is checked, and it is saved."""
    code = """
        from scanl.cli.train import options_parser
        from scanl.data import Text
        from scanl.errors import ConfigError
        from scanl.learning.run.config import TrainConfig, build_model
        from scanl.models import LanguageModel

        config = TrainConfig.of(layer="lru", dim=8, depth=1, glow=2.0)
        model = build_model(config, Text.question)
        model.save("model")
        print(model.stack.config["glow"], LanguageModel.load("model").stack.config["glow"])
        print("glow: 2.0" in config.to_yaml())
        parser = options_parser("train", "", config)
        print(parser.parse(["--glow", "3"]).stack.glow, "how it glows" in parser.format_help())
        try:
            TrainConfig.of(glow=-1.0).check()
        except ConfigError as error:
            print(error)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=grown, capture_output=True, text=True, env={"PYTHONPATH": str(grown), "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    expected = ["2.0 2.0", "True", "3.0 True", "stack: glow is -1.0, expected at least 0"]
    assert done.stdout.splitlines() == expected, done.stderr
