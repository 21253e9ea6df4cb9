"""Machine code on disk."""

from pathlib import Path

import pytest
import torch
from llvmlite import binding

from scanl.ops._compiler import machine_code
from scanl.ops._compiler.recorded import RecordedFunction
from scanl.ops._cpu import _elementary


def test_machine_code_is_read_from_disk_unless_it_is_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    compiled, compile_module = [], machine_code._compiled
    monkeypatch.setattr(machine_code, "_compiled", lambda *args: (compiled.append(args), compile_module(*args))[1])
    x, content = torch.randn(3, 5), b""
    for change, count in (("none", 1), ("none", 1), ("a byte", 2), ("half", 3)):
        machine_code.address.cache_clear()
        if content:
            (path,) = tmp_path.rglob("*.o")
            content = path.read_bytes()
            if change == "a byte":
                path.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
            elif change == "half":
                path.write_bytes(content[: len(content) // 2])
        torch.testing.assert_close(RecordedFunction(lambda x: x * 3 + 1, x)(x), x * 3 + 1)
        assert len(compiled) == count
        (path,) = tmp_path.rglob("*.o")
        assert not content or path.read_bytes() == content
        content = path.read_bytes()


def test_an_elementary_function_shows_its_own_name_alone() -> None:
    """numba counts functions in each process, so two that come from disk may have one name of numba's."""
    module = binding.parse_assembly(_elementary.source("tanh", "float", "tanh_of_a_test"))
    shown = {each.name: each.linkage.name for each in module.functions if not each.is_declaration}
    assert len(shown) > 1
    assert [name for name, linkage in shown.items() if linkage != "internal"] == ["tanh_of_a_test"]
