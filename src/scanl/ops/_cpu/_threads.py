"""The number of threads that a kernel may run on. It is read without numba."""

import os

import torch

_forked = False


def threads() -> int:
    """Return on how many threads a kernel may run."""
    return 1 if _forked else torch.get_num_threads()


def _after_fork() -> None:
    global _forked
    _forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
