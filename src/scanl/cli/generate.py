"""`scanl generate RUN`, and `scanl generate --hub PATH` for a checkpoint of transformers."""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from scanl.cli.forecast import check_output
from scanl.cli.parser import Parser
from scanl.cli.text_model import text_model
from scanl.data import Table
from scanl.data.base import Signal, SignalSource
from scanl.data.series.generate import ENDINGS, openings, write_series
from scanl.errors import CheckpointError, ConfigError
from scanl.learning import RunFolder
from scanl.learning.report import BYTES
from scanl.models import Forecaster, LanguageModel, PromptLookup
from scanl.models.byte_models import byte_model_names
from scanl.options import NaturalOrNone
from scanl.serve.texts import Characters

EXAMPLES = {
    "scanl generate runs/book-1 --prompt 'It was'": "continue a text",
    "scanl generate --hub OWNER/NAME --prompt 'It was'": "with a pretrained model of the Hugging Face hub",
}
NOTES = {
    "what is written": {
        "a text": "bytes to the standard output, behind the prompt; with --hub, characters",
        "a signal": "a file: .wav of a recording and .png of a picture, with what was read of the prompt before it",
        "a table": "a file, .csv or .npy: the steps that follow each series of --prompt-file, or of the run's table; "
        "with --prompt-steps, those after its first rows",
    }
}


def run(argv: Sequence[str]) -> int:
    """Stream the prompt and its continuation to standard output, or write a signal to a file."""
    args = _parser().parse(argv)
    if (args.run is None) == (args.hub is None):
        problem = "neither a run nor --hub is" if args.run is None else "a run and --hub are both"
        raise ConfigError(f"generate: {problem} given, expected exactly one of them; name a run folder, or --hub PATH")
    if args.hub is None and args.tokens is not None:
        raise ConfigError(
            f"generate: tokens is {args.tokens}, but a run generates bytes or steps; give --bytes or --steps instead"
        )
    torch.set_num_threads(1)  # one token at a time is too little work for several threads
    if args.hub is not None:
        _refuse_unused(args, "a model of --hub", "tokens", "draft")
        prompt = _prompt(args.prompt, args.prompt_file).decode(errors="surrogateescape")
        _of_hub(args.hub, prompt, 200 if args.tokens is None else args.tokens, args.draft, _sampling(args, 0.8))
        return 0
    if not os.path.isdir(args.run) or (folder := RunFolder.open(args.run)).source.metric == BYTES:
        _refuse_unused(args, "a model of text", "bytes", "draft")
        prompt = _prompt(args.prompt, args.prompt_file)
        _of_text(args.run, prompt, 500 if args.bytes is None else args.bytes, args.draft, _sampling(args, 0.8))
        return 0
    source = folder.source
    signal = source.signal if isinstance(source, SignalSource) else None
    if signal is None and not isinstance(source, Table):
        raise ConfigError(
            f"generate: {args.run} was trained on {folder.config().entry.name}, expected a run on text, a signal or a "
            "table; scanl eval scores it"
        )
    used = ["steps", "prompt_steps", "out", *(["freq"] if signal is None else [])]
    _refuse_unused(args, "a run on a signal", *used)
    if args.prompt:
        raise ConfigError(f"generate: prompt is {args.prompt!r}, but the run is on a signal; give --prompt-file")
    if args.prompt_file is not None and not Path(args.prompt_file).is_file():
        raise ConfigError(f"generate: prompt_file is {args.prompt_file}, which is not a file; name a file to continue")
    if signal is None:
        assert isinstance(source, Table)
        print(_of_table(folder, source, args))
    else:
        print(_of_signal(folder, signal, args))
    return 0


def _parser() -> Parser:
    description = "Continue a text, a recording, a picture or the series of a table."
    parser = Parser("generate", description, examples=EXAMPLES, notes=NOTES)
    names = ", ".join(byte_model_names())
    parser.add("run", str | None, f"run folder; {names}: a model that comes with scanl", nargs="?")
    parser.add("--hub", str | None, "instead of a run: a checkpoint folder, or OWNER/NAME", metavar="PATH")
    parser.add("--prompt", str, "text to continue; none: the start of a file", "")
    parser.add(
        "--prompt-file",
        str | None,
        "file to continue, as the run reads it; -: standard input",
        metavar="PATH",
    )
    parser.add("--prompt-steps", NaturalOrNone, "signals only: steps of it to read (default: all)")
    parser.add("--bytes", NaturalOrNone, "text only: bytes to generate; 0: no end (default: 500)")
    parser.add("--tokens", NaturalOrNone, "--hub only: tokens to generate (default: 200); 0: until the text ends")
    parser.add(
        "--steps",
        NaturalOrNone,
        "signals and tables: steps to generate (default: to the signal's usual end; 100 for a table)",
    )
    parser.add(
        "--freq",
        str | None,
        "tables only: frequency of the new steps, as pandas names it: h, D, B, ME (default: the table's)",
    )
    parser.add(
        "--out", str | None, "signals and tables: file to write (default: `sample` in the run folder)", metavar="PATH"
    )
    parser.add("--temperature", float | None, "0 takes the likeliest token (default: 0.8; 1 for signals and tables)")
    parser.add("--top-k", int | None, "sample from the k likeliest tokens")
    parser.add("--top-p", float | None, "sample from the likeliest of total probability p")
    parser.add("--seed", int | None, "seed of the sampling")
    parser.add(
        "--draft",
        str | None,
        "text only: what proposes tokens that are read together, for speed: the text before (lookup), or a smaller "
        "run or checkpoint",
        metavar="lookup|MODEL",
    )
    return parser


def _refuse_unused(args: Any, whose: str, *used: str) -> None:
    """Raise ConfigError for an option that this kind of model does not read."""
    for name in ("bytes", "steps", "prompt_steps", "out", "freq", "draft"):
        if name not in used and getattr(args, name) is not None:
            count = name in ("bytes", "steps")
            hint = f"generates {used[0]}; give --{used[0]} instead" if count else "does not use it; leave it out"
            raise ConfigError(f"generate: {name} is {getattr(args, name)}, but {whose} {hint}")


def _sampling(args: Any, temperature: float) -> dict[str, Any]:
    options = {name: getattr(args, name) for name in ("temperature", "top_k", "top_p", "seed")}
    return options if args.temperature is not None else {**options, "temperature": temperature}


def _prompt(text: str, file: str | None) -> bytes:
    if file is None:
        return text.encode(errors="surrogateescape")
    if text:
        raise ConfigError("generate: prompt and prompt_file are both given, expected one of them; leave one out")
    try:
        return sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except OSError as error:
        raise ConfigError(f"generate: prompt_file is {file}, which cannot be read: {error.strerror}") from error


def _of_text(name: str, prompt: bytes, count: int, draft: str | None, sampling: dict[str, Any]) -> None:
    model = text_model("generate", name)
    proposing = _draft(draft, lambda path: RunFolder.open(path).load_model())
    first = torch.tensor([list(prompt) or [0]])
    write(prompt)
    stream(model.generate(first, draft=proposing, max_new_tokens=count or None, **sampling))
    write(b"\n")


def _of_signal(folder: RunFolder, signal: Signal, args: Any) -> Path:
    """Write a recording or a picture: what was read of the prompt, and its continuation."""
    prompt = [] if args.prompt_file is None else signal.read(Path(args.prompt_file))[: args.prompt_steps].tolist()
    remaining = max(0, signal.steps - len(prompt))
    steps = remaining if args.steps is None else args.steps
    if steps < 1 or (signal.fixed and steps != remaining):
        expected = f"the remaining {remaining} of {signal.steps}" if signal.fixed and remaining else "at least 1"
        raise ConfigError(
            f"generate: steps is {steps} after {len(prompt)} steps of the prompt, expected {expected}; give other "
            "--steps or --prompt-steps"
        )
    path = _out(folder, args.out, (signal.ending,))
    model = folder.load_model()
    assert isinstance(model, LanguageModel)
    tokens = model.generate(torch.tensor([[signal.first, *prompt]]), max_new_tokens=steps, **_sampling(args, 1.0))
    signal.write(chain(prompt, map(int, tokens)), path)
    return path


def _of_table(folder: RunFolder, source: Table, args: Any) -> Path:
    """Write the steps that follow each series of a table."""
    steps = 100 if args.steps is None else args.steps
    for name, wrong in (("top_k", args.top_k), ("top_p", args.top_p)):
        if wrong is not None:
            raise ConfigError(
                f"generate: {name} is {wrong}, but a table has numbers, which use no {name}; give --temperature"
            )
    if steps < 1:
        raise ConfigError("generate: steps is 0, expected at least 1")
    path = _out(folder, args.out, ENDINGS)
    model = folder.load_model()
    if not isinstance(model, Forecaster) or model.ahead > 1:
        raise ConfigError(
            f"generate: {folder.path} was trained to {source.ask}, which does not go step by step, expected a run with "
            "--question generate or --recursive"
        )
    prompts = openings(source, args.prompt_file and Path(args.prompt_file), args.prompt_steps, steps, args.freq)
    sampling = {name: value for name, value in _sampling(args, 1.0).items() if not name.startswith("top")}
    numbers = []
    for number, prompt in enumerate(prompts):
        batch, later = prompt.batch.tensors(), {}
        read = batch.inputs
        for name, ahead in (("future", "following"), ("timespans", "lasting")):
            if (known := getattr(read, name)) is not None:
                read = read._replace(**{name: known[:, : batch.length + model.horizon]})
                later[ahead] = iter(known[:, batch.length + 1 :].unbind(1))
        # Each series has random numbers of its own, so they do not depend on the others' lengths.
        seed = None if args.seed is None else args.seed + number
        drawn = model.generate(read, max_steps=steps, **{**sampling, "seed": seed}, **later)
        numbers.append(torch.cat(list(drawn)).numpy())
    write_series(path, prompts, np.stack(numbers), source.targets)
    return path


def _out(folder: RunFolder, file: str | None, endings: Sequence[str]) -> Path:
    path = folder.path / f"sample{endings[0]}" if file is None else Path(file)
    check_output("generate", "out", path, endings)
    return path


def _draft(draft: str | None, load: Callable[[str], object]) -> "PromptLookup | LanguageModel | None":
    if draft is None:
        return None
    if draft == "lookup":
        return PromptLookup()
    model = load(draft)
    if not isinstance(model, LanguageModel):
        raise ConfigError(f"generate: draft is {draft}, a {type(model).__name__}, expected lookup or a model of text")
    return model


def _of_hub(path: str, prompt: str, count: int, draft: str | None, sampling: dict[str, Any]) -> None:
    from scanl.hub.checkpoints import language_model
    from scanl.hub.folders import locate, read_tokenizer

    folder = locate(path)
    model, tokenizer = language_model(folder), read_tokenizer(folder, "generate")
    prompt_ids = tokenizer(prompt)["input_ids"]
    if not prompt_ids:
        prompt_ids = [token for token in (tokenizer.bos_token_id, tokenizer.eos_token_id) if token is not None][:1]
    if not prompt_ids:
        raise ConfigError("generate: prompt is empty, expected some text because the tokenizer has no token to start")
    if max(prompt_ids) >= model.vocab_size:
        problem = f"token {max(prompt_ids)}, expected less than {model.vocab_size} because of the model"
        raise CheckpointError(f"generate: the tokenizer of {folder} gives {problem}")
    proposing = _draft(draft, lambda path: language_model(locate(path)))
    generated = model.generate(torch.tensor([prompt_ids]), max_new_tokens=count or None, draft=proposing, **sampling)
    tokens = map(int, generated)
    until_end = iter(lambda: next(tokens, tokenizer.eos_token_id), tokenizer.eos_token_id)
    write(prompt.encode(errors="surrogateescape"))
    for text in whole_characters(tokenizer.decode, prompt_ids, until_end):
        write(text.encode())
    write(b"\n")


def whole_characters(decode: Callable[..., str], prompt: Sequence[int], tokens: Iterable[int]) -> Iterator[str]:
    """Yield the text of `tokens`, which follow the prompt, as soon as its characters are complete."""
    characters = Characters(decode, prompt)
    for token in tokens:
        yield characters.add(token)
    yield characters.end()


def stream(tokens: Iterator[torch.Tensor]) -> None:
    """Write each byte as it comes."""
    for token in tokens:
        write(bytes([int(token)]))


def write(text: bytes) -> None:
    sys.stdout.buffer.write(text)
    sys.stdout.buffer.flush()
