"""What holds of every inspector: its declaration, its form, and which layers it serves or refuses."""

from pathlib import Path

import pytest
import torch
from torch import nn

from scanl import inspect, layers
from scanl.errors import ConfigError, ScanlError, ShapeError
from scanl.inspect import inspectors, readings
from scanl.inspect.base import Inspection, noise, prepared
from scanl.layers.registry import layers as registered
from scanl.models import LanguageModel, Stack

FAMILIES = {  # a layer of each family, and the inspectors that refuse it
    "gla": {"orbits", "reconstruction"},
    "rwkv5": {"orbits", "reconstruction"},
    "lru": {"orbits", "reconstruction"},
    "hippo": {"mixing_matrix", "orbits"},
    "plrnn": {"mixing_matrix", "reconstruction"},
    "ctrnn": {"mixing_matrix", "orbits", "reconstruction"},
    "window_attention": {"orbits", "reconstruction"},
    "hyena": {"memory_capacity", "orbits", "reconstruction"},
}
DIM, STEPS = 12, 40


@pytest.mark.parametrize("name", inspectors.names())
def test_an_inspector_says_what_it_is(name):
    one = inspectors.get(name)
    assert one.name == name
    assert all((one.title, one.equation, one.takes))
    assert "arXiv:" in one.source or "report" in one.source
    assert one.__doc__
    assert "Return" in one.__doc__
    assert getattr(inspect, name) is one


def own_signal(name, layer):
    """What an inspector reads that makes a signal of its own, in short."""
    if name == "memory_capacity":
        return noise(1, 400, 1) * torch.ones(layer.dim, dtype=torch.float64)
    return noise(1, STEPS, layer.dim)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_inspector_serves_a_layer_or_says_why_not(family):
    torch.manual_seed(0)
    layer = layers.build(family, DIM, **layers.get(family).sample)
    x, refusals = noise(2, STEPS, DIM), {}
    for name in inspectors.names():
        one = inspectors.get(name)
        options = {"steps": STEPS} if name == "state_norms" else {"lengths": (1,)} if name == "orbits" else {}
        options |= {"count": 2} if name == "lyapunov_exponents" else {}
        try:
            inspection = one(layer, own_signal(name, layer) if one.own_signal else x, **options)
        except ScanlError as error:
            refusals[name] = str(error)
            continue
        assert isinstance(inspection, Inspection)
        assert inspection.figures()
        assert len({len(column) for column in inspection.columns().values()}) == 1
        assert inspection.panels()
    assert refusals.keys() == FAMILIES[family], refusals
    for name, reason in refusals.items():
        assert reason.startswith(f"{name}: ")
        assert "expected" in reason


def test_the_layers_of_the_law_are_of_all_families():
    families = {cls.__module__.split(".")[2] for cls in map(registered.get, registered.names())}
    folders = {name for name in families if cls_folder(name)}
    assert {layers.get(name).__module__.split(".")[2] for name in FAMILIES} == folders


def cls_folder(name):
    """Whether a name below scanl.layers is that of a family, and not of a body."""
    return hasattr(layers, name) and hasattr(getattr(layers, name), "__path__")


def test_an_inspector_leaves_the_layer_as_it_was():
    layer = layers.GRU(4)
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    inspect.gradient_norms(layer, noise(1, 12, 4).float())
    assert layer.training
    assert all(parameter.grad is None and parameter.requires_grad for parameter in layer.parameters())
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())


def test_an_inspector_reads_a_copy_that_drops_nothing():
    layer, x = layers.build("gru", 3).train(), torch.randn(2, 4, 3, requires_grad=True)
    copy, read = prepared("it", layer, x, 9)
    assert layer.training
    assert not any(module.training for module in copy.modules())
    assert all(parameter.requires_grad for parameter in layer.parameters())
    assert not any(parameter.requires_grad or parameter.dtype is not torch.float64 for parameter in copy.parameters())
    assert {p.data_ptr() for p in copy.parameters()}.isdisjoint(p.data_ptr() for p in layer.parameters())
    assert not read.requires_grad
    assert torch.equal(read, x.detach().double())


def test_columns_name_the_place_of_each_number():
    """Numbers of which no two are equal, by their indices."""
    numbers = torch.arange(24.0).double()
    cube = numbers.view(1, 2, 4, 3)
    for inspection, names, value, expected in (
        (inspect.ImpulseResponse(cube, torch.tensor([5, 7])), ("into", "steps", "out_of"), "mean",
         {(c, k, d): cube[0, i, k, d] for i, c in enumerate((5, 7)) for k in range(4) for d in range(3)}),
        (inspect.GradientNorms(cube[0, 0]), ("row", "distance"), "norm",
         {(b, k): cube[0, 0, b, k] for b in range(4) for k in range(3)}),
        (inspect.LyapunovExponents(cube[0, 0]), ("row", "number"), "exponent",
         {(b, 1 + m): cube[0, 0, b, m] for b in range(4) for m in range(3)}),
        (inspect.StateNorms(torch.tensor([1, 4, 9, 16]), cube[0, 1], torch.ones(4), ("a", "b", "c")),
         ("tensor", "steps"), "norm",
         {(name, n): cube[0, 1, at, p] for at, n in enumerate((1, 4, 9, 16)) for p, name in enumerate("abc")}),
        (inspect.MixingMatrix(1 + numbers.view(1, 6, 2, 2), "op"), ("head", "t", "s"), "value",
         {(h, t, s): 1 + 4 * h + 2 * t + s for h in range(6) for t in range(2) for s in range(2)}),
    ):  # fmt: skip
        columns = inspection.columns()
        places = list(zip(*(columns[name] for name in names), strict=True))
        assert len(set(places)) == len(places) == len(expected)
        assert dict(zip(places, columns[value], strict=True)) == {at: float(number) for at, number in expected.items()}


def test_what_no_inspector_takes():
    with pytest.raises(ConfigError, match=r"eigenvalues: layer is a GRU, expected a scanl.layers.Layer"):
        inspect.eigenvalues(nn.GRU(3, 3))  # type: ignore[arg-type]
    for shape in ((3, 4), (1, 5, 3), (0, 5, 4), (1, 0, 4)):
        with pytest.raises(
            ShapeError, match=r"x has shape .*, expected \(B, T, 4\) of the layer, with B and T at least"
        ):
            prepared("gradient_norms", layers.LRU(4), torch.zeros(shape), 8)
    with pytest.raises(ConfigError, match="eigenvalues: layer is bidirectional, which reads the whole sequence"):
        inspect.eigenvalues(layers.build("bidirectional", 4, **layers.get("bidirectional").sample))


def test_what_each_layer_of_a_model_reads():
    model = LanguageModel(7, Stack(8, 3, ["lru", "gru"]))
    with readings(model) as read:
        model(torch.zeros(2, 5, dtype=torch.int64))
        model(torch.zeros(2, 6, dtype=torch.int64))
    assert [(name, type(layer), tuple(x.shape)) for name, (layer, x) in read.items()] == [
        ("0 lru", layers.LRU, (2, 5, 8)),
        ("1 gru", layers.GRU, (2, 5, 8)),
        ("2 lru", layers.LRU, (2, 5, 8)),
    ]
    first, x = read["0 lru"]
    torch.testing.assert_close(x, model.stack.blocks[0].mixer_norm(model.embedding(torch.zeros(2, 5).long())))
    assert not first._forward_pre_hooks
    with pytest.raises(ConfigError, match="readings: model is a Linear, expected one with a stack of layers"):
        readings(nn.Linear(2, 2)).__enter__()


def test_the_guide_has_every_inspector():
    page = (Path(__file__).parents[2] / "docs" / "inspect.md").read_text(encoding="utf-8")
    rows = [line.split("`")[1] for line in page.splitlines() if line.startswith("| `")]
    assert sorted(rows) == inspectors.names()
