"""A command in a process of its own, forked from this one: to import torch anew takes seconds."""

import multiprocessing
import os
import sys
import warnings
from multiprocessing.process import BaseProcess

from scanl.cli import main


def _run(words: tuple[str, ...]) -> None:
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        for descriptor in (1, 2):
            os.dup2(nowhere.fileno(), descriptor)
        sys.stdout = sys.stderr = nowhere  # pytest has put its own files there
        raise SystemExit(main([*words]))


def begun(*words: object) -> BaseProcess:
    """Begin `scanl WORDS`, silently."""
    process = multiprocessing.get_context("fork").Process(target=_run, args=(tuple(map(str, words)),))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*multi-threaded, use of fork", DeprecationWarning)
        process.start()
    return process
