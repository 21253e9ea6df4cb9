"""`scanl generate RUN`."""

import sys
from collections.abc import Iterator, Sequence
from itertools import islice

import torch

from scanl.cli.parser import Parser
from scanl.errors import ConfigError
from scanl.learning import RunFolder
from scanl.models import LanguageModel


def run(argv: Sequence[str]) -> int:
    """Stream the prompt and its continuation to the standard output as raw bytes."""
    parser = Parser("generate", "Continue a prompt, byte by byte.")
    parser.add_argument("run", type=str, help="run folder")
    parser.add_argument("--prompt", type=str, default="", help="text to continue; none: the start of a file")
    parser.add_argument("--bytes", type=int, default=500, help="bytes to generate; 0: until interrupted")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest byte")
    parser.add_argument("--top-k", type=int | None, default=None, help="choose among the k likeliest")
    parser.add_argument("--top-p", type=float | None, default=None, help="choose among the likeliest of mass p")
    parser.add_argument("--seed", type=int | None, default=None, help="for the same text again")
    args = parser.parse(argv)
    if args.bytes < 0:
        raise ConfigError(f"generate: bytes is {args.bytes}, expected at least 0")
    folder = RunFolder.open(args.run)
    if (task := folder.config().task) is not None:
        raise ConfigError(f"generate: {args.run} was trained on {task}, expected a run on text; scanl eval scores it")
    model = folder.load_model()
    assert isinstance(model, LanguageModel)
    torch.set_num_threads(1)  # one byte at a time is too little work to share
    prompt = args.prompt.encode(errors="surrogateescape")
    tokens = model.generate(
        torch.tensor([list(prompt) or [0]]),
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
    )
    write(prompt)
    stream(tokens if args.bytes == 0 else islice(tokens, args.bytes))
    write(b"\n")
    return 0


def stream(tokens: Iterator[torch.Tensor]) -> None:
    """Write each byte as it comes."""
    for token in tokens:
        write(bytes([int(token)]))


def write(text: bytes) -> None:
    sys.stdout.buffer.write(text)
    sys.stdout.buffer.flush()
