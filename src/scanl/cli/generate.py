"""`scanl generate RUN`, and `scanl generate --hub PATH` for a checkpoint of transformers."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from scanl.cli.parser import Parser
from scanl.errors import CheckpointError, ConfigError
from scanl.learning import RunFolder
from scanl.models import LanguageModel


def run(argv: Sequence[str]) -> int:
    """Stream the prompt and its continuation to standard output."""
    parser = Parser("generate", "Continue a prompt: byte by byte with a run, token by token with a hub's model.")
    parser.add_argument("run", type=str | None, nargs="?", default=None, help="run folder")
    parser.add_argument(
        "--hub", type=str | None, default=None, metavar="PATH", help="in its place: a checkpoint folder, or OWNER/NAME"
    )
    parser.add_argument("--prompt", type=str, default="", help="text to continue; none: the start of a file")
    parser.add_argument(
        "--prompt-file",
        type=str | None,
        default=None,
        metavar="PATH",
        help="its contents instead; - is the standard input",
    )
    parser.add_argument("--bytes", type=int | None, default=None, help="of a run: bytes, 500; 0: until interrupted")
    parser.add_argument("--tokens", type=int | None, default=None, help="with --hub: tokens, 200; 0: until it ends")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest")
    parser.add_argument("--top-k", type=int | None, default=None, help="choose among the k likeliest")
    parser.add_argument("--top-p", type=float | None, default=None, help="choose among the likeliest of mass p")
    parser.add_argument("--seed", type=int | None, default=None, help="for the same text again")
    args = parser.parse(argv)
    if (args.run is None) == (args.hub is None):
        found = "neither a run nor --hub is" if args.run is None else "a run and --hub are both"
        raise ConfigError(f"generate: {found} given, expected one of them; name a run folder, or --hub PATH")
    count, other = ("bytes", "tokens") if args.hub is None else ("tokens", "bytes")
    if getattr(args, other) is not None:
        whose = "a run" if args.hub is None else "a model of --hub"
        raise ConfigError(
            f"generate: {other} is {getattr(args, other)}, but {whose} generates {count}; give --{count} instead"
        )
    if (getattr(args, count) or 0) < 0:
        raise ConfigError(f"generate: {count} is {getattr(args, count)}, expected at least 0")
    prompt = _prompt(args.prompt, args.prompt_file)
    torch.set_num_threads(1)  # one token at a time is too little work for several threads
    sampling = {name: getattr(args, name) for name in ("temperature", "top_k", "top_p", "seed")}
    if args.hub is None:
        _of_run(args.run, prompt, 500 if args.bytes is None else args.bytes, sampling)
    else:
        _of_hub(
            args.hub, prompt.decode(errors="surrogateescape"), 200 if args.tokens is None else args.tokens, sampling
        )
    write(b"\n")
    return 0


def _prompt(text: str, file: str | None) -> bytes:
    if file is None:
        return text.encode(errors="surrogateescape")
    if text:
        raise ConfigError("generate: prompt and prompt_file are both given, expected one of them; leave one out")
    try:
        return sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except OSError as error:
        raise ConfigError(f"generate: prompt_file is {file}, which cannot be read: {error.strerror}") from error


def _of_run(path: str, prompt: bytes, count: int, sampling: dict[str, Any]) -> None:
    folder = RunFolder.open(path)
    config = folder.config()
    if not config.source().reads_bytes:
        raise ConfigError(
            f"generate: {path} was trained on {config.data.task}, expected a run on text; scanl eval scores it"
        )
    model = folder.load_model()
    assert isinstance(model, LanguageModel)
    tokens = model.generate(torch.tensor([list(prompt) or [0]]), **sampling)
    write(prompt)
    stream(tokens if count == 0 else islice(tokens, count))


def _of_hub(path: str, prompt: str, count: int, sampling: dict[str, Any]) -> None:
    from scanl.hub.checkpoints import load
    from scanl.hub.folders import locate

    folder = locate(path)
    model, tokenizer = load(folder), _tokenizer(folder)
    read = tokenizer(prompt)["input_ids"]
    if not read:
        read = [token for token in (tokenizer.bos_token_id, tokenizer.eos_token_id) if token is not None][:1]
    if not read:
        raise ConfigError("generate: prompt is empty, expected some text because the tokenizer has no token to start")
    if max(read) >= model.vocab_size:
        found = f"token {max(read)}, expected less than {model.vocab_size} because of the model"
        raise CheckpointError(f"generate: the tokenizer of {folder} gives {found}")
    tokens = map(int, model.generate(torch.tensor([read]), max_new_tokens=count or None, **sampling))
    until_end = iter(lambda: next(tokens, tokenizer.eos_token_id), tokenizer.eos_token_id)
    write(prompt.encode(errors="surrogateescape"))
    for text in whole_characters(tokenizer.decode, read, until_end):
        write(text.encode())


def _tokenizer(folder: Path) -> Any:
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ConfigError("generate: --hub reads text with transformers; pip install transformers") from error
    # Without tokenizer files transformers makes an empty tokenizer instead of failing.
    if not any(file.name.startswith(("tokenizer", "vocab")) for file in folder.iterdir()):
        raise CheckpointError(f"generate: {folder} has no tokenizer, expected tokenizer.json")
    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0]
        raise CheckpointError(f"generate: {folder} has no tokenizer that transformers reads: {reason}") from error


def whole_characters(decode: Callable[..., str], read: Sequence[int], tokens: Iterable[int]) -> Iterator[str]:
    """Yield the text of `tokens`, which follow the tokens `read`, as soon as its characters are complete.

    Each token is decoded together with a few tokens before it, because its text may depend on its neighbours.
    """
    kept = list(read)[-8:]
    before = _text(decode, kept)
    for token in tokens:
        kept.append(token)
        text = _text(decode, kept)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):  # it stands for an incomplete character
            yield text[len(before) :]
            kept = kept[-8:]
            before = _text(decode, kept)
    yield _text(decode, kept)[len(before) :]


def _text(decode: Callable[..., str], tokens: list[int]) -> str:
    return decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def stream(tokens: Iterator[torch.Tensor]) -> None:
    """Write each byte as it comes."""
    for token in tokens:
        write(bytes([int(token)]))


def write(text: bytes) -> None:
    sys.stdout.buffer.write(text)
    sys.stdout.buffer.flush()
