"""Processes and threads that share a folder of states lose none, damage none and keep its limit, also when killed.

    python benchmarks/quality/states.py                   # both parts: five minutes each
    python benchmarks/quality/states.py tight --seconds 60

Two processes of two threads, each thread with a store of its own, put states, look texts up and open the folder again,
as drawn. Every so often one process gets SIGKILL, and another takes its place. A state is a function of its text, so
each state that is found is compared with what it must be. roomy: every text that was put, by whomever, is found from
then on.   tight: the folder has room for a part of the states, and keeps to it. A warning ends the run.
"""

import itertools
import os
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from array import array
from pathlib import Path
from typing import Any

import torch

from scanl.layers.state import State, leaves, map_leaves
from scanl.models import LanguageModel, Stack, StateStore

sys.path.append(str(Path(__file__).parents[1]))
from harness import Results, parse, parser

PARTS = {"roomy": 2**30, "tight": 40_000}  # and the bytes of their folders
PROCESSES = THREADS = 2
LONGEST = 7  # tokens of a text, of two kinds


class Thread:
    """A thread that works on the folder until `end`, and writes what it has put to a log of its own."""

    def __init__(self, model: LanguageModel, folder: Path, limit: int, seed: str, end: float) -> None:
        self.model, self.folder, self.limit, self.end = model, folder, limit, end
        self.draw, self.roomy = random.Random(seed), limit == PARTS["roomy"]
        self.log = folder / f"log-{seed}"

    def opened(self) -> StateStore:
        return StateStore(self.model, limit=10_000, folder=self.folder, folder_limit=self.limit)

    def work(self) -> None:
        store = self.opened()
        while time.monotonic() < self.end:
            text = array("i", self.draw.choices(range(2), k=self.draw.randint(1, LONGEST)))
            action = self.draw.random()
            if action < 0.5:
                store.put(text, state_of(self.model, text))
                assert store.bytes_on_disk <= self.limit
                with self.log.open("a") as log:
                    print("".join(map(str, text)), file=log)
            elif action < 0.95:
                known = put(self.folder) if self.roomy else set[str]()
                length, state = store.longest(text)
                least = max((n for n in range(1, len(text) + 1) if "".join(map(str, text[:n])) in known), default=0)
                assert length >= least, f"of {text} the first {least} tokens were put, and {length} are found"
                assert length == 0 or equal(state, state_of(self.model, text[:length])), f"{text[:length]} is damaged"
            else:
                store = self.opened()


def state_of(model: LanguageModel, text: Any) -> State:
    """Return numbers in the form of a state, which are a function of the text."""
    generator = torch.Generator().manual_seed(int("1" + "".join(map(str, text))))
    return map_leaves(lambda leaf: torch.randn(leaf.shape, generator=generator), model.init_state(1))


def equal(one: State, other: State) -> bool:
    return all(torch.equal(a, b) for (_, a), (_, b) in zip(leaves(one), leaves(other), strict=True))


def put(folder: Path) -> set[str]:
    """Return the texts that were put. The last line of a log may be cut off."""
    return {line for log in folder.glob("log-*") for line in log.read_text().split("\n")[:-1]}


def begun(model: LanguageModel, folder: Path, limit: int, number: int, end: float) -> int:
    """Return the number of a forked process that works on the folder."""
    if (pid := os.fork()) == 0:
        failed = []

        def work(thread: Thread) -> None:
            try:
                thread.work()
            except BaseException:
                failed.append(traceback.format_exc())

        warnings.simplefilter("error")
        workers = [
            threading.Thread(target=work, args=[Thread(model, folder, limit, f"{number}-{at}", end)])
            for at in range(THREADS)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        sys.stderr.write("".join(failed))
        sys.stderr.flush()
        os._exit(len(failed))
    return pid


def run(results: Results, part: str, seconds: float, kills: float) -> None:
    """Add the row of a part. kills: mean seconds between two of them."""
    limit, model = PARTS[part], LanguageModel(2, Stack(8, 1, "min_gru")).eval()
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
        warnings.simplefilter("error")
        folder, numbers, end = Path(name), itertools.count(), time.monotonic() + seconds
        processes = [begun(model, folder, limit, next(numbers), end) for _ in range(PROCESSES)]
        while time.monotonic() < end - 2:
            time.sleep(min(random.expovariate(1 / kills), max(0, end - 2 - time.monotonic())))
            one = processes.pop(random.randrange(PROCESSES))
            os.kill(one, signal.SIGKILL)
            status = os.waitpid(one, 0)[1]
            assert os.WIFSIGNALED(status), f"a process has ended by itself with {status}"
            processes.append(begun(model, folder, limit, next(numbers), end))
        for one in processes:
            assert os.waitpid(one, 0)[1] == 0, "a process has failed"
        store = StateStore(model, folder=folder, folder_limit=limit)
        assert store.folder is not None
        states = list(store.folder.glob("[!.]*"))
        assert sum(path.stat().st_size for path in states) == store.bytes_on_disk <= limit
        texts = [array("i", map(int, text)) for text in put(folder)]
        kept = sum(store.longest(text)[0] == len(text) for text in texts)
        assert kept == (len(texts) if part == "roomy" else len(states))
        lines = sum(log.read_text().count("\n") for log in folder.glob("log-*"))
    results.add(part=part, seconds=seconds, killed=next(numbers) - PROCESSES, put=lines, texts=len(texts), kept=kept)


def main() -> None:
    arguments = parser(__doc__, PARTS)
    arguments.add_argument("--seconds", type=float, default=300.0, help="of each part")
    arguments.add_argument("--kills", type=float, default=2.0, help="mean seconds between two of them")
    options = parse(arguments)
    torch.set_num_threads(1)  # the processes are forked
    results = Results("states", options)
    for part in options.names:
        if not results.has(part=part):
            run(results, part, options.seconds, options.kills)


if __name__ == "__main__":
    main()
