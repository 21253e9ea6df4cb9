"""Classify series: handwritten digits, read pixel by pixel, 64 steps each.

    python classify_series.py
    python classify_series.py --layer lru

Needs `pip install -e '.[sklearn]'`. The 1,797 digits come with scikit-learn. Without a layer, random linear
recurrences read the series, and a readout of them is fitted in closed form, in seconds. With a layer, a stack of it is
trained.
"""

import argparse
import time

from sklearn.datasets import load_digits
from sklearn.metrics import confusion_matrix
from sklearn.model_selection import train_test_split

from scanl.learning.estimators import SeriesClassifier

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--layer", help="train a stack of this layer")
parser.add_argument("--steps", type=int, default=500, help="of its training")
parser.add_argument("--count", type=int, help="of the digits; without it, all")


def main() -> None:
    options = parser.parse_args()
    digits = load_digits()
    X, y = digits.data[: options.count, :, None] / 16, digits.target[: options.count]  # series (n, T, channels)
    train_X, test_X, train_y, test_y = train_test_split(X, y, test_size=0.25, random_state=0, stratify=y)

    if options.layer is None:
        model = SeriesClassifier(random_state=0)
    else:
        # Where a pixel is matters, so the last step classifies, after it has read them all.
        model = SeriesClassifier(
            method="stack",
            layer=options.layer,
            dim=64,
            steps=options.steps,
            pool="last",
            random_state=0,
            verbose=1,
        )

    began = time.perf_counter()
    model.fit(train_X, train_y)
    print(f"{len(train_X)} series learnt in {time.perf_counter() - began:.1f} s")
    print(f"accuracy on {len(test_X)} others: {model.score(test_X, test_y):.1%}")

    print("true classes in rows, answers in columns:")
    print(confusion_matrix(test_y, model.predict(test_X)))
    print("the least sure answer has a probability of", f"{model.predict_proba(test_X).max(1).min():.2f}")


if __name__ == "__main__":
    main()
