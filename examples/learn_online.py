"""Learn from a stream that does not end, sample by sample: answer, score, learn. Say when the stream has changed.

    python learn_online.py                      a sensor that is simulated; its rhythm changes half way
    tail -f readings.txt | python learn_online.py -     a number a line

Needs `pip install -e '.[online]'`, for river's detector of drift. No sample is kept, so memory does not grow.
"""

import argparse
import itertools
import math
import random
import sys
from typing import Any

from river.drift import ADWIN
from river.metrics import MAE
from river.utils import Rolling

from scanl.learning import Online
from scanl.models import Stack

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("source", nargs="?", choices=["sensor", "-"], default="sensor", help="- is the standard input")
parser.add_argument("--layer", default="lru")
parser.add_argument("--lr", type=float, nargs="+", default=[1e-3, 1e-2], help="rates; the best one so far answers")
options = parser.parse_args()

noise = random.Random(0)
sensor = (math.sin(2 * math.pi * t / (25 if t < 2000 else 10)) + noise.gauss(0, 0.1) for t in range(4000))
stream = map(float, sys.stdin) if options.source == "-" else sensor
learner = Online(Stack(16, 1, options.layer), lr=options.lr, block=4, compile_after=None)
drift = ADWIN()
error: Any = Rolling(MAE, 500)  # has the methods of the metric
for t, (value, following) in enumerate(itertools.pairwise(stream), start=1):
    answer = learner.predict_one(value)  # before the next value is known
    learner.learn_one(value, following)
    error.update(following, answer)
    drift.update(abs(answer - following))
    if drift.drift_detected:
        print(f"sample {t}: the errors have changed")
    if t % 500 == 0:
        print(f"sample {t}: MAE of the last 500 {error.get():.3f}", flush=True)
