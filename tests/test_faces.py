"""The public names of packages are those of their registries, in both directions."""

import inspect
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from scanl import data, faces, layers, models, ops, tasks
from scanl.layers.registry import channel_mixers

FAMILIES = sorted(f"scanl.layers.{path.parent.name}" for path in Path(layers.__path__[0]).glob("*/__init__.pyi"))


def test_public_layers_are_the_registered_ones():
    registered = {cls.__name__: cls for cls in layers.classes() if cls.__module__.startswith("scanl.")}
    assert set(dir(layers)) == registered.keys()
    assert {name: getattr(layers, name) for name in dir(layers)} == registered


@pytest.mark.parametrize("package", FAMILIES)
def test_a_family_has_its_layers(package):
    family = import_module(package)
    every = [*layers.classes(), *map(channel_mixers.get, channel_mixers.names())]
    assert {getattr(family, name) for name in dir(family)} == set(faces.members(package, every))
    assert dir(family)


def test_every_layer_is_in_a_family_or_a_body():
    public = {name for package in FAMILIES for name in dir(import_module(package))}
    bodies = {cls.__name__ for cls in layers.classes() if cls.__module__.count(".") == 2}
    assert set(dir(layers)) <= public | bodies


def test_stubs_are_those_of_the_registries(write):
    stale = [str(path) for path, text in write.stubs().items() if path.read_text(encoding="utf-8") != text]
    assert not stale, f"{', '.join(stale)} differ from the registry: run `make docs` (python docs/write.py)"


def test_a_name_that_no_layer_has():
    with pytest.raises(AttributeError, match=r"module 'scanl.layers.ssm' has no attribute 'Gru'"):
        getattr(layers.ssm, "Gru")  # noqa: B009
    assert not hasattr(layers, "Gru")


def test_a_new_layer_is_public_before_the_stub_knows_it(monkeypatch):
    monkeypatch.setattr(faces, "table", lambda package: {})
    assert layers.rnn.GRU is layers.get("gru")
    assert inspect.isclass(layers.Performer)


def test_one_layer_imports_no_other():
    code = """
import sys
import scanl.layers
layer = scanl.layers.build("gru", 8)
assert type(layer) is scanl.layers.GRU is scanl.layers.rnn.GRU
assert "scanl.layers.ssm.mamba" not in sys.modules
assert scanl.layers.get("Performer").name == "performer"  # in a file of another name
assert "scanl.layers.ssm.mamba" in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("package", [data, tasks])
def test_public_sources_are_the_registered_ones(package):
    registered = {data.sources.get(name) for name in data.sources.names()}
    own = {cls for cls in registered if cls.__module__.startswith(f"{package.__name__}.")}
    assert {getattr(package, name) for name in dir(package)} == own
    assert all(cls.__module__.startswith(("scanl.data.", "scanl.tasks.")) for cls in registered)


def test_public_tasks_are_the_registered_ones():
    public = {getattr(tasks, name) for name in dir(tasks)}
    assert {cls for cls in public if issubclass(cls, tasks.Task)} == {tasks.get(name) for name in tasks.names()}


def test_public_models_are_those_that_can_be_saved():
    public = {value for value in vars(models).values() if inspect.isclass(value) and issubclass(value, models.Saved)}
    made = {cls for cls in models.saving.ModelPart.classes.values() if issubclass(cls, models.Saved)}
    abstract = {models.Saved, models.reader.Reader, models.pooling.PooledReader}
    assert public - {models.Saved} == {cls for cls in made if cls.__module__.startswith("scanl.")} - abstract


def test_public_ops_are_the_registered_ones():
    of_ops = {op.name for op in ops.registry.every() if not _of_layers(op)}
    assert of_ops <= set(ops.__all__)


def _of_layers(op):
    return isinstance(op, ops.registry.Cell) and op.step.__module__.startswith("scanl.layers.")
