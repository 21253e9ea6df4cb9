"""Modules that have moved are imported by their old names too, as the same module and not as a second copy."""

import subprocess
import sys
from importlib import import_module

import pytest

from scanl import _moved

FILES = ("scanl.hub.mixers.mamba", "scanl.hub.mixers", "scanl.hub.families.rwkv", "scanl.hub.families")


@pytest.mark.parametrize("old", [*_moved.MOVED, *FILES])
def test_an_old_name_is_the_module(old):
    if old.startswith("scanl.hub"):
        pytest.importorskip("transformers", reason="needs the extra `hub`")
    new = _moved.moved(old)
    assert new is not None
    assert import_module(old) is import_module(new)
    assert sys.modules[new].__name__ == new


def test_in_a_fresh_process_too():
    """Before anything has imported the new name, and by each form of the statement."""
    lines = (
        "from scanl.layers.rwkv_channel_mix import RWKV4ChannelMix",
        "from scanl.layers import hippo",
        "import scanl.layers.hippo as again",
        "from scanl.tasks.text import read_corpus",
        "from scanl.layers.attention import Attention",
        "import scanl.layers",
        "assert again is hippo is scanl.layers.parts.hippo",
        "assert RWKV4ChannelMix is scanl.layers.channel.rwkv_channel_mix.RWKV4ChannelMix",
        "assert Attention is scanl.layers.Attention",
    )
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_state_of_a_classifier_has_its_old_name_too():
    assert import_module("scanl.models.classifier").ClassifierState is import_module("scanl.models.pooling").PooledState


def test_names_that_never_were_are_not_found():
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'scanl\.layers\.hipo'"):
        import_module("scanl.layers.hipo")
    assert _moved.moved("scanl.hub.mixersx") is None
