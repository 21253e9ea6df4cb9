"""Learn from a stream that does not end, sample by sample: answer, score, learn. Say when the stream has changed.

    python learn_online.py                      a sensor that is simulated; its rhythm changes half way
    tail -f readings.txt | python learn_online.py -     a number a line

Needs `pip install 'scanl[online]'`, for river's detector of drift. No sample is kept, so memory does not grow.
"""

import argparse
import math
import random
import sys
from collections.abc import Iterator

from river.drift import ADWIN

from scanl.learning.online import AnswerNumbers, Scores, make_loop
from scanl.learning.run.config import StackConfig

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("source", nargs="?", choices=["sensor", "-"], default="sensor", help="- is the standard input")
parser.add_argument("--samples", type=int, default=4000, help="of the sensor")
parser.add_argument("--layer", default="lru")
parser.add_argument("--lr", type=float, nargs="+", default=[1e-3, 1e-2], help="rates; the best one so far answers")


def sensor(samples: int) -> Iterator[float]:
    noise = random.Random(0)
    for t in range(samples):
        period = 25 if t < samples // 2 else 10
        yield math.sin(2 * math.pi * t / period) + noise.gauss(0, 0.1)


def main() -> None:
    options = parser.parse_args()
    stream = map(float, sys.stdin) if options.source == "-" else sensor(options.samples)

    kind = AnswerNumbers(count=1, span=10_000, feedback=False)  # the answer is one number
    scores = Scores(kind, ["MAE"], window=500, fade=0.99)
    stack = StackConfig(layer=options.layer, dim=16, depth=1)
    loop = make_loop(
        kind, inputs=1, stack=stack, algorithm="bptt", block=4, lr=options.lr, scores=scores, compile_after=None
    )

    drift = ADWIN()
    previous = next(stream)
    for t, value in enumerate(stream, start=1):
        answer = loop.answer([previous])  # before the value is known
        loop.learn(value)
        drift.update(abs(answer - value))
        if drift.drift_detected:
            print(f"sample {t}: the errors have changed")
        if t % 500 == 0:
            shown = ", ".join(f"{name} {score:.3f}" for name, score in scores.get().items())
            print(f"sample {t}: {shown}", flush=True)
        previous = value


if __name__ == "__main__":
    main()
