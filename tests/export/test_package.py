"""Packages of torch: what they are made from, and what is refused."""

import pytest
import torch

from scanl.errors import ConfigError
from scanl.export import write_package
from scanl.export.flat import FlatModel, one_step
from scanl.layers import build


@pytest.mark.long
def test_a_package_equals_its_model(tmp_path):
    layer = build("gru", 4)
    flat = FlatModel(layer)
    write_package(layer, tmp_path / "step.pt2")
    run = torch._inductor.aoti_load_package(str(tmp_path / "step.pt2"))
    operands = torch.randn(3, 1, 4), *flat.start(3)
    with torch.no_grad():
        torch.testing.assert_close(tuple(run(*operands)), flat(*operands))


def test_a_step_is_operations_of_torch_for_any_batch():
    torch.manual_seed(0)
    flat = FlatModel(build("hawk", 4))
    program = one_step(flat)
    assert not [node for node in program.graph.nodes if str(node.target).startswith("scanl")]
    operands = torch.randn(5, 1, 4), *flat.start(5)
    with torch.no_grad():
        torch.testing.assert_close(program.module()(*operands), flat(*operands))


def test_a_compiler_is_needed(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match=r"step\.pt2 needs a C\+\+ compiler, and there is no no-such-compiler"):
        write_package(build("gru", 4), tmp_path / "step.pt2")
