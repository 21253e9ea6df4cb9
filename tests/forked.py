"""A command in a process of its own, forked from this one: to import torch anew takes seconds."""

import multiprocessing
import os
import runpy
import sys
import warnings
from collections.abc import Callable
from multiprocessing.process import BaseProcess

from scanl.cli import main


def _run(words: tuple[str, ...]) -> None:
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        for descriptor in (1, 2):
            os.dup2(nowhere.fileno(), descriptor)
        sys.stdout = sys.stderr = nowhere  # pytest has put its own files there
        raise SystemExit(main([*words]))


def _script(path: object, words: tuple[str, ...]) -> None:
    sys.argv = [str(path), *words]
    runpy.run_path(str(path), run_name="__main__")


def begun(*words: object) -> BaseProcess:
    """Begin `scanl WORDS`, silently."""
    return _start(_run, tuple(map(str, words)))


def begun_script(path: object, *words: object) -> BaseProcess:
    """Begin `python PATH WORDS`. What it says is that of the test."""
    return _start(_script, path, tuple(map(str, words)))


def _start(work: Callable[..., None], *arguments: object) -> BaseProcess:
    process = multiprocessing.get_context("fork").Process(target=work, args=arguments)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*multi-threaded, use of fork", DeprecationWarning)
        process.start()
    return process
