"""The choice of a configuration, and that all there are to choose from give the same numbers."""

import pytest
import torch

import laws
from scanl.ops import registry

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402
from triton import Config  # noqa: E402
from triton.runtime.autotuner import Autotuner  # noqa: E402

from scanl.ops._triton import _low_rank, _matrix_memory, _tuned  # noqa: E402
from tests.ops._triton.test_low_rank import draw  # noqa: E402

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a device measures for itself")


@pytest.fixture
def measured(monkeypatch):
    """A clock in place of a device's, to which the second configuration is the fastest; what it has timed."""
    found = []

    def clock(call, quantiles):
        call()
        found.append(len(found))
        return [0.0 if len(found) == 2 else 1.0] * len(quantiles)

    monkeypatch.setattr(_tuned, "IS_INTERPRETER", False)
    monkeypatch.setattr(Autotuner, "do_bench", property(lambda self: clock))
    return found


def plus(p, n, start, K: tl.constexpr, STEP: tl.constexpr):
    """In place."""
    i = tl.arange(0, K)
    tl.store(p + i, tl.load(p + i, mask=i < n) + STEP + start, mask=i < n)


def test_a_kind_is_measured_once_and_left_as_it_was(measured):
    kernel = _tuned.tuned([Config({"STEP": step}) for step in (1, 2, 3)], ("K", "absent"), ("p",))(triton.jit(plus))
    for length in (32, 31):
        x = torch.zeros(length)
        kernel[(1,)](x, length, 0, K=32)
        assert x.tolist() == [2.0] * length
        assert kernel.best_config.kwargs == {"STEP": 2}
    assert len(measured) == 3
    kernel[(1,)](torch.zeros(4, dtype=torch.float64), 4, 0, K=32)
    assert len(measured) == 6, "another dtype is another kind"
    x = torch.zeros(4)
    kernel[(1,)](x, 4, 0, K=8)
    assert (x.tolist(), len(measured)) == ([1.0] * 4, 6), "too narrow to be measured"


def test_the_interpreter_takes_the_first():
    kernel = _tuned.tuned([Config({"STEP": step}) for step in (1, 2)], ("K",))(triton.jit(plus))
    x = torch.zeros(32)
    kernel[(1,)](x, 32, 0, K=32)
    assert x.tolist() == [1.0] * 32


@pytest.mark.parametrize(
    ("name", "decay"),
    [
        ("delta_rule", "BTHK"),
        ("dplr_scan", "BTH"),
        pytest.param("delta_rule", "BTH", marks=pytest.mark.long),
        pytest.param("dplr_scan", "BTHK", marks=pytest.mark.long),
    ],
)
def test_measuring_leaves_nothing_behind(name, decay, measured, monkeypatch):
    """What a kernel adds to, changes in place, or writes in some of its configurations alone."""
    monkeypatch.setattr(_tuned, "MAX_CHANNELS", 64)
    for table in (_matrix_memory.APPLY, _matrix_memory.KEYS, _low_rank.FORWARD, _low_rank.PAIRS):
        monkeypatch.setitem(table, (True, decay == "BTHK"), table[False, decay == "BTHK"])
    for cache in (_tuned.cut, _tuned.of_memory):
        cache.cache_clear()
    laws.truth(registry.get(name), draw(registry.get(name), 18, decay, K=40, V=20), {}, "triton", torch.float32)
    for cache in (_tuned.cut, _tuned.of_memory):
        cache.cache_clear()
    assert len(measured) > 12


@pytest.mark.parametrize(
    ("name", "decay"),
    [
        ("linear_attention", "BTH"),
        ("delta_rule", "BTHK"),
        pytest.param("delta_rule", "BTH", marks=pytest.mark.long),
        pytest.param("dplr_scan", "BTHK", marks=pytest.mark.long),
    ],
)
def test_every_tile_of_a_memory_gives_the_same_numbers(name, decay, monkeypatch):
    sample = draw(registry.get("dplr_scan" if name == "linear_attention" else name), 20, decay, K=40, V=36)
    for operand in set(sample.operands) - set(registry.get(name).names):
        del sample.operands[operand]
    monkeypatch.setattr(_tuned, "MAX_CHANNELS", 64)
    _tuned.cut.cache_clear()
    tables = _matrix_memory.APPLY, _matrix_memory.KEYS, _low_rank.FORWARD, _low_rank.PAIRS
    tried = {}
    for half in (False, True):
        for table in tables if half else ():
            monkeypatch.setitem(table, (True, decay == "BTHK"), table[False, decay == "BTHK"])
        if half:
            monkeypatch.setitem(_low_rank.SOLVE, True, _low_rank.SOLVE[False])
        for i in range(4):

            def chosen(kernel, tiles, restored=(), i=i):
                tried.setdefault(kernel, set()).add(tiles[i % len(tiles)])
                return _tuned.of_memory(kernel, (tiles[i % len(tiles)],), restored)

            for module in (_matrix_memory, _low_rank):
                monkeypatch.setattr(module, "of_memory", chosen)
            laws.truth(registry.get(name), sample, {}, "triton", torch.float32)
    _tuned.cut.cache_clear()
    assert len(tried) == (3 if name == "linear_attention" else 6)
    assert all(len(tiles) > 2 for tiles in tried.values())
