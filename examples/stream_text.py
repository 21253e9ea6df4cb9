"""Train a language model of bytes on a text, then write with it one byte at a time, in constant memory.

    python stream_text.py book.txt --steps 1000

Without a file it reads the source of Python's standard library. The weights and the state after the text are saved, so
that a later run can go on from there.
"""

import argparse
import sys
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

from scanl.data import standard_library
from scanl.layers.state import detach, load, save
from scanl.models import LanguageModel, Stack

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("file", nargs="?", type=Path, help="a text")
parser.add_argument("--layer", default="hawk", help="`scanl list` prints them all")
parser.add_argument("--steps", type=int, default=500)
parser.add_argument("--bytes", type=int, default=300, help="to write")
parser.add_argument("--out", type=Path, default=Path("runs/stream_text"))


def batches(text: bytes, streams: int, length: int):
    """Yield (B, T + 1) forever: each row goes on where it ended in the batch before."""
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    rows = tokens[: len(tokens) // streams * streams].view(streams, -1)
    length = min(length, rows.shape[1] - 1)
    while True:
        for begin in range(0, rows.shape[1] - length, length):
            yield rows[:, begin : begin + length + 1], begin == 0


def main() -> None:
    options = parser.parse_args()
    files = [options.file] if options.file else list(standard_library().values())[:100]
    text = b"".join(path.read_bytes() for path in files)

    torch.manual_seed(0)
    model = LanguageModel(256, Stack(128, 3, options.layer))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    state = None
    for step, (tokens, first) in zip(range(options.steps), batches(text, streams=16, length=128), strict=False):
        if first:
            state = None  # the text begins again
        logits, state = model(tokens[:, :-1], state)
        loss = cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        state = detach(state)  # the next batch reads the state, and sends no gradient into this one
        if step % 50 == 0:
            print(f"step {step}: {loss.item() / 0.6931:.2f} bits per byte", file=sys.stderr)

    model.eval()
    with torch.inference_mode():
        _, state = model(torch.tensor([list(text[-1001:-1])]))  # read the end of the text, but for its last byte
    model.save(options.out)
    save(state, options.out / "state.safetensors")

    again = LanguageModel.load(options.out)
    state = load(options.out / "state.safetensors", like=again.init_state(1))
    for token in again.generate(
        torch.tensor([[text[-1]]]), state, max_new_tokens=options.bytes, temperature=0.7, seed=0
    ):
        sys.stdout.buffer.write(bytes([int(token)]))
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
