"""`scanl eval RUN`: a model's bits per byte beside what general compressors need for the same bytes."""

import gzip
import lzma
from collections.abc import Sequence

from scanl.cli.parser import Parser
from scanl.learning import RunFolder, bits_per_byte
from scanl.tasks import read_corpus
from scanl.tasks.text import Bytes


def run(argv: Sequence[str]) -> int:
    """Measure a run on all of its held-out text."""
    parser = Parser("eval", "Bits per byte of a run on its held-out text.")
    parser.add_argument("run", type=str, help="run folder")
    args = parser.parse(argv)
    folder = RunFolder.open(args.run)
    config = folder.config()
    model = folder.load_model()
    held_out = read_corpus(config.data, config.held_out).held_out
    print(compared(bits_per_byte(model, held_out), held_out))
    return 0


def compressed(data: Bytes) -> dict[str, float]:
    """Bits per byte of `gzip -9` and `xz`, each given these bytes alone."""
    text = data.tobytes()
    return {
        "gzip -9": 8 * len(gzip.compress(text, 9)) / len(text),
        "xz": 8 * len(lzma.compress(text)) / len(text),
    }


def compared(bits: float, data: Bytes) -> str:
    """A table of the model and the compressors."""
    rows = {"this model": bits, **compressed(data)}
    lines = [f"bits per byte on {len(data):,} held-out bytes:"]
    return "\n".join(lines + [f"  {name:<12}{value:.3f}" for name, value in rows.items()])
