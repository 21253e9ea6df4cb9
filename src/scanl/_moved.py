"""Keep old module names importable: an import by the old name returns the module at its new name."""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_LAYERS = {
    "memory": "deltanet gated_deltanet gateloop gla linear_attention mlstm mlstm_large retnet",
    "rwkv": "aft rwkv4 rwkv6 rwkv7 rwkv_time_mix",
    "ssm": "h3 hawk hyena lru mamba mamba2 mega_ema rglru s4 s4d s5",
    "rnn": "hgrn mingru slstm",
    "attention": "softmax_attention window_attention",
    "channel": "rwkv_channel_mix",
    "parts": "depth dense_ssm diagonal_ssm feature_map hippo hyena_filter norm positions query_key_value rotary "
    "short_convolution time_step timespans",
}
_RUN = "callbacks checkpoint config metrics optimizer picture train"
MOVED = {
    **{f"scanl.layers.{name}": f"scanl.layers.{room}.{name}" for room, all in _LAYERS.items() for name in all.split()},
    **{f"scanl.learning.{name}": f"scanl.learning.run.{name}" for name in _RUN.split()},
    "scanl.layers.torch_cells": "scanl.layers",
    "scanl.learning.bptt": "scanl.learning.run.module",
    "scanl.tasks.text": "scanl.data.text",
}
ROOMS = {"scanl.hub.mixers": "scanl.hub.patches", "scanl.hub.families": "scanl.hub.formats"}


def moved(name: str) -> str | None:
    """Return the new name of a module; None if it has not moved."""
    for old, new in ROOMS.items():
        if name == old or name.startswith(f"{old}."):
            return new + name.removeprefix(old)
    return MOVED.get(name)


class Moved(MetaPathFinder, Loader):
    """Import hook that finds old names and imports the modules by their new names."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return None if moved(fullname) is None else ModuleSpec(fullname, self)

    def exec_module(self, module: ModuleType) -> None:
        new = moved(module.__name__)
        assert new is not None
        sys.modules[module.__name__] = import_module(new)


def install() -> None:
    """Install the hook, before all other finders: Python's own would load a moved file a second time."""
    sys.meta_path.insert(0, Moved())
