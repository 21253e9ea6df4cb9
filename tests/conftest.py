"""Set before anything imports triton: without a GPU its kernels run in the interpreter."""

import gc
import importlib.util
import os
from pathlib import Path

# Set before torch is imported. One thread: a worker with more waits in every operation for a core that the other worker
# has, and sums over several threads may differ in the last bit. A test on two threads would spin for that core.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    # torch's own keeps the stack of every call, for devices that may come: two milliseconds a call.
    torch.manual_seed = torch.default_generator.manual_seed

import pytest
from _pytest.runner import runtestprotocol
from hypothesis import settings

if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton"):
    from interpreter import quicken

    quicken()

import costs

settings.register_profile("short", max_examples=30, derandomize=True)  # the same for all who run it
settings.register_profile("long", max_examples=1000)
settings.load_profile("short")
torch.utils.deterministic.fill_uninitialized_memory = True


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="the long cases too, and every law over every sample")
    parser.addoption("--failures", metavar="FILE", help="append each failure to this file when it happens")
    parser.addoption("--costs", action="store_true", help="end with the table of what each law costs of each layer")


def pytest_configure(config):
    for mark in (
        "early(n): its file is the n-th that the workers take",
        "cells_by_loop(*parameters): cells of the layers that the parameters name run their loop; without names, all",
        "cells_by_kernel: cells run their kernels all the same",
    ):
        config.addinivalue_line("markers", mark)
    config.addinivalue_line("markers", "long: much time for a case that others come near; runs with --all")
    if config.getoption("--all"):
        os.environ["SCANL_TEST_ALL"] = "1"  # laws.py reads it; the worker processes inherit it
    if config.getoption("--failures") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Failures(Path(config.getoption("--failures"))))
    if config.getoption("--costs"):
        config.pluginmanager.register(costs.Costs())


class Failures:
    """A plugin that appends failures to a file at once, for a machine whose time may end before the run does."""

    def __init__(self, path: Path):
        self.path = path

    def pytest_runtest_logreport(self, report):
        if report.failed:
            with self.path.open("a") as file:
                file.write(f"### {report.when} {report.nodeid}\n{report.longreprtext}\n")


def pytest_collection_modifyitems(config, items):
    items.sort(key=_turn)
    if not config.getoption("--all"):
        long = [item for item in items if item.get_closest_marker("long")]
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if not item.get_closest_marker("long")]
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _turn(item):
    """Workers take files in this order. Early ones make most kernels, each other ones; later files read them."""
    mark = item.get_closest_marker("early")
    return float("inf") if mark is None else mark.args[0]


def pytest_collection_finish():
    """Spare the cases and modules from garbage collection: to walk through them takes a second each time.

    To count them, as `scanl learn` does, takes a tenth of that: they are counted once.
    """
    gc.collect()
    gc.freeze()
    count = gc.get_freeze_count()
    gc.get_freeze_count = lambda: count


def pytest_runtest_protocol(item, nextitem):
    """In a worker, report only the call of a case and what did not pass: each report to the other process takes CPU."""
    if not hasattr(item.config, "workerinput"):
        return None
    for report in runtestprotocol(item, nextitem=nextitem, log=False):
        if report.when == "call" or not report.passed:
            item.ihook.pytest_runtest_logreport(report=report)
    return True


def pytest_runtest_setup(item):
    """A law that a layer declares itself excused from is skipped, and the report says the layer's reason."""
    from scanl import layers

    given = item.callspec.params if hasattr(item, "callspec") else {}
    name = given.get("name", given.get("streaming"))
    excused = layers.get(name).excused if name in layers.names() else {}
    law = item.originalname.removeprefix("test_") if isinstance(item, pytest.Function) else ""
    if law in excused:
        pytest.skip(f"{name}: {excused[law]}")


@pytest.fixture
def empty_picture(monkeypatch):
    """A run writes its loss curve as an empty file: to draw one takes longer than a small training."""
    from scanl.files import written_whole
    from scanl.learning.run import train

    def save(folder, *_):
        with written_whole(folder.picture) as temporary:
            temporary.touch()

    monkeypatch.setattr(train, "save_loss_curve", save)


@pytest.fixture
def short_sample(empty_picture, monkeypatch):
    """And it ends with a sample of a few bytes: to generate one of 600 takes as long again."""
    from scanl.learning.questions import next_token

    monkeypatch.setattr(next_token, "SAMPLE_BYTES", 20)


@pytest.fixture
def alone_in_a_group():
    """Ends the group of processes, of which there is one, and takes back what Lightning says of it to others."""
    before = dict(os.environ)
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    for name in os.environ.keys() - before.keys():
        del os.environ[name]


@pytest.fixture
def registered():
    """Takes the cells that a page or a script declares out of the registry."""
    from scanl.ops.registry import REGISTRY

    before = dict(REGISTRY)
    yield
    REGISTRY.clear()
    REGISTRY.update(before)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _threads():
    """A test or a command that sets the number of threads sets it for itself alone."""
    yield
    if torch.get_num_threads() != 1:
        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _cells_by_their_loop(request):
    """Cells of marked tests run their loop: the kernels take seconds to compile, and laws of cells test them."""
    from scanl import ops

    mark = request.node.get_closest_marker("cells_by_loop")
    if mark is None or request.node.get_closest_marker("cells_by_kernel") or not _has_cell(request.node, mark.args):
        yield
    else:
        with ops.backend("reference"):
            yield


def _has_cell(node, parameters):
    """Return whether a parameter of these names stands for a layer whose op is a cell. Without names: True."""
    from scanl import layers, ops

    given = node.callspec.params if hasattr(node, "callspec") else {}
    for name in filter(lambda value: isinstance(value, str), map(given.get, parameters)):
        prefixes = [each for each in layers.names() if f"{name}_".startswith(f"{each}_")]
        return bool(prefixes) and layers.get(max(prefixes, key=len)).op in {cell.name for cell in ops.registry.cells()}
    return not parameters


@pytest.fixture
def double():
    """float64 wherever no dtype is said."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="session")
def write():
    """docs/write.py, which `make docs` runs."""
    spec = importlib.util.spec_from_file_location("write_docs", Path(__file__).parents[1] / "docs" / "write.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
