"""`scanl serve RUN|FOLDER`: an HTTP endpoint that continues texts."""

import argparse
import math
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch

from scanl.cli.parser import Parser
from scanl.errors import ConfigError
from scanl.files import check_folder
from scanl.learning import RunFolder
from scanl.learning.report import BYTES
from scanl.models import LanguageModel
from scanl.options import Range, options
from scanl.serve import Engine, Limits
from scanl.serve.texts import ByteText, NumberText, TokenizerText, VocabularyText

EXAMPLES = {"scanl serve runs/book-1 --port 8000": "a run on a text, at http://127.0.0.1:8000/v1"}
NOTES = {
    "what is served": {
        "POST /v1/completions": 'continue a prompt; "stream": true sends server-sent events, "session": ID goes on '
        "where the last request of the session ended",
        "GET /v1/models": "the model",
        "GET /health": "whether the server runs, and how many answers it writes",
        "SIGTERM": "ends the server when the answers that have begun are written",
    }
}


def run(argv: Sequence[str]) -> int:
    """Serve until SIGTERM or Ctrl-C."""
    args = _parser().parse(argv)
    limits = Limits(**{name: getattr(args, name) for name in options(Limits)})
    try:
        import uvicorn  # pyright: ignore[reportMissingImports]

        from scanl.serve.app import make_app
        from scanl.serve.connections import Connection
    except ImportError as error:
        raise ConfigError("serve: fastapi or uvicorn is not installed; pip install 'scanl[serve]'") from error
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    model, texts = load(args.path, "serve")
    app = make_app(Engine(model, texts, limits), args.name or Path(args.path).resolve().name, [args.host, *args.hosts])
    config = uvicorn.Config(
        app,
        log_level="info" if args.log else "warning",
        timeout_graceful_shutdown=round(limits.seconds + limits.idle),
        http=Connection,
        timeout_keep_alive=math.ceil(limits.idle),
        limit_concurrency=8 * limits.streams,
        server_header=False,
        ws="none",
    )
    signal.signal(signal.SIGTERM, lambda *_: None)  # which uvicorn restores, and raises again once it has ended
    with listening(args.host, args.port) as sock:
        host, port = sock.getsockname()[:2]
        print(f"serving {args.path} on http://{host}:{port}", flush=True)
        uvicorn.Server(config).run([sock])
    print("served all answers", file=sys.stderr)
    return 0


def listening(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=2048
        )
    except OSError as error:
        raise ConfigError(
            f"serve: {host}:{port} cannot be listened to: {error.strerror}; choose another --port"
        ) from error


def _parser() -> Parser:
    description = "Serve a language model: the usual completions interface, over HTTP."
    parser = Parser("serve", description, examples=EXAMPLES, notes=NOTES)
    add_model(parser)
    parser.add("--host", str, "address to listen on; 0.0.0.0 for all", "127.0.0.1")
    port = Annotated[int, Range("0 to 65535; 0 takes a free one", lambda number, _: 0 <= number < 2**16)]
    parser.add("--port", port, "port to listen on; 0 takes a free one", 8000)
    parser.add("--hosts", list[str], "names of the server beside its address", [])
    parser.add("--name", str | None, "of the model (default: that of the folder)")
    parser.add("--threads", int | None, "of the processor (default: torch's)")
    parser.add_argument("--log", action="store_true", help="log every request")
    for option in options(Limits).values():
        parser.add(f"--{option.name}", option.type, f"most {option.meaning}", option.default)
    return parser


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the argument that `load` reads."""
    parser.add_argument("path", type=str, metavar="RUN|FOLDER", help="run on text, or folder of a language model")


def load(path: str, who: str) -> tuple[LanguageModel, VocabularyText]:
    """Return the model in a folder, and its texts. It is a run on text, a model of `save`, or a checkpoint of
    transformers with a tokenizer."""
    folder = Path(path)
    check_folder(who, folder)
    if (folder / "config.json").is_file():
        from scanl.hub.checkpoints import language_model
        from scanl.hub.folders import read_tokenizer

        return language_model(folder), TokenizerText(read_tokenizer(folder, who))
    if (folder / "config.yaml").is_file():
        run = RunFolder.open(folder)
        if run.source.metric != BYTES:
            raise ConfigError(f"{who}: {path} was trained on {run.config().entry.name}, expected a run on text")
        return run.load_model(), ByteText()
    model = LanguageModel.load(folder)
    return model, ByteText() if model.vocab_size == 256 else NumberText()
