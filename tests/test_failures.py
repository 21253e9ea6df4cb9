"""`--failures FILE`: what a run that is stopped leaves behind."""

from types import SimpleNamespace

import conftest


def test_failures_are_written_at_once(tmp_path):
    path = tmp_path / "failures"
    plugin = conftest.Failures(path)
    for failed, name in ((False, "passes"), (True, "fails")):
        plugin.pytest_runtest_logreport(
            SimpleNamespace(failed=failed, when="call", nodeid=f"tests/test_a.py::{name}", longreprtext="E  1 != 2")
        )
        assert path.exists() is failed
    assert path.read_text() == "### call tests/test_a.py::fails\nE  1 != 2\n"
