"""`scanl serve` under 200 concurrent streams, with clients that vanish, bad requests, and a SIGTERM in the middle.

    python benchmarks/quality/serve.py [NAME ...] [--streams 200] [--tokens 48]

A model with random weights is served by a process of its own. Each part fails unless all it says holds.

streams: as many answers at once, as events, as one body, and in sessions, from prompts of 1 to 300 bytes. Every fifth
client vanishes in the middle. Each token of the others is the one that `generate` gives within `exact`. Then no stream
is left.
bodies: 8 bodies of 100 MB at once, and 8 of 900 kB that come slowly, while streams are written.
mistakes: malformed JSON, wrong fields, wrong methods. Each is answered by 4xx and a sentence.
beyond: more answers than the limit. The others are refused by 429, and those within the limit are right.
sigterm: SIGTERM while answers are written. All end as they would have, and the process ends with 0.

memory: bytes that the server has more than before the part, at its end.
Needs `pip install 'scanl[serve]'`. The rows are in benchmarks/results/serve.csv.
"""

import asyncio
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.append(str(Path(__file__).parents[1]))
from harness import Results, parse, parser, resident
from scanl.models import LanguageModel, Stack
from scanl.ops import exact

LAYER, OPTIONS = "gated_deltanet", {"num_heads": 2}
MEBIBYTE = 2**20
MISTAKES = {  # name: method, path, body
    "half an object": ("POST", "/v1/completions", b'{"prompt": "a"'),
    "not JSON": ("POST", "/v1/completions", b"prompt=a"),
    "empty": ("POST", "/v1/completions", b""),
    "a list": ("POST", "/v1/completions", b"[]"),
    "deep": ("POST", "/v1/completions", b"[" * 100_000),
    "not UTF-8": ("POST", "/v1/completions", b'{"prompt": "\xff"}'),
    "half a surrogate": ("POST", "/v1/completions", b'{"prompt": "\\ud800"}'),
    "not a number": ("POST", "/v1/completions", b'{"prompt": "a", "temperature": NaN}'),
    "infinite": ("POST", "/v1/completions", b'{"prompt": "a", "temperature": 1e999}'),
    "negative": ("POST", "/v1/completions", b'{"prompt": "a", "max_tokens": -1}'),
    "too many tokens": ("POST", "/v1/completions", b'{"prompt": "a", "max_tokens": 1000000000000}'),
    "a number as prompt": ("POST", "/v1/completions", b'{"prompt": 5}'),
    "a token outside": ("POST", "/v1/completions", b'{"prompt": [256]}'),
    "unknown field": ("POST", "/v1/completions", b'{"prompt": "a", "file": "/etc/passwd"}'),
    "a path as session": ("POST", "/v1/completions", b'{"prompt": "a", "session": "../../etc"}'),
    "another model": ("POST", "/v1/completions", b'{"prompt": "a", "model": "/etc"}'),
    "no path": ("GET", "/etc/passwd", b""),
    "a method": ("GET", "/v1/completions", b""),
}


class Answer(NamedTuple):
    """What a client has got. content: the body, or the last event but one.   tokens: of all events."""

    status: int
    content: dict[str, Any]
    tokens: list[int]

    @property
    def message(self) -> str:
        return self.content["error"]["message"]


class Server:
    """A server of a model in a process of its own."""

    def __init__(self, folder: Path, *options: str) -> None:
        words = [sys.executable, "-m", "scanl.cli", "serve", str(folder), "--port", "0", "--threads", "1", *options]
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert "http://" in line, f"the server has not begun: {line}"
        self.port = int(line.rsplit(":", 1)[1])

    async def ask(
        self, method: str, path: str, body: bytes = b"", *, events: int | None = None, pause: float = 0.0
    ) -> Answer | None:
        """Send a request and read the answer. events: after which the client vanishes, and the result is None.

        pause: seconds between two pieces of the body.
        """
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            head = ["Host: 127.0.0.1", f"Content-Length: {len(body)}", "Connection: close", "", ""]
            writer.write("\r\n".join([f"{method} {path} HTTP/1.1", *head]).encode())
            for at in range(0, len(body), 2**16):
                writer.write(body[at : at + 2**16])
                await writer.drain()
                if pause:
                    await asyncio.sleep(pause)
            status = int((await reader.readline()).split()[1])
            is_stream, seen, tokens, content, lines = False, 0, list[int](), dict[str, Any](), list[bytes]()
            while line := (await reader.readline()).strip():
                is_stream |= line == b"content-type: text/event-stream; charset=utf-8"
            if not is_stream:
                return Answer(status, json.loads(await reader.read()), [])
            while line := await reader.readline():
                lines.append(line)
                if not line.startswith(b"data: {"):
                    continue
                content = json.loads(line[6:])
                tokens += content["choices"][0]["token_ids"]
                seen += 1
                if seen == events:
                    return None
            assert b"data: [DONE]\n" in lines, "a stream has ended before its end"
            return Answer(status, content, tokens)
        finally:
            writer.transport.abort() if events else writer.close()

    async def complete(self, request: dict[str, Any], events: int | None = None) -> Answer | None:
        return await self.ask("POST", "/v1/completions", json.dumps(request).encode(), events=events)

    async def idle(self) -> None:
        """Wait until no stream is left."""
        begin = time.perf_counter()
        while (answer := await self.ask("GET", "/health")) and answer.content["streams"]:
            assert time.perf_counter() - begin < 60, f"{answer.content['streams']} streams are left"
            await asyncio.sleep(0.1)

    def memory(self) -> int:
        return resident("VmRSS", self.process.pid)


def requests(count: int, tokens: int, seed: int) -> list[dict[str, Any]]:
    """Return requests that differ in everything."""
    random = torch.Generator().manual_seed(seed)
    made = []
    for i in range(count):
        length = int(torch.randint(1, 301, (1,), generator=random))
        prompt = torch.randint(256, (length,), generator=random).tolist()
        request = {
            "prompt": prompt,
            "max_tokens": max(1, tokens - i % 7),
            "temperature": 0.0 if i % 3 == 0 else 1.0,
            "seed": i,
        }
        made.append(request | {"stream": i % 4 != 1} | ({"session": f"s{seed}-{i}"} if i % 6 == 0 else {}))
    return made


@torch.inference_mode()
def expected(model: LanguageModel, request: dict[str, Any], before: list[int] | None = None) -> list[int]:
    """Return the tokens that `generate` gives. before: of the session."""
    prompt = torch.tensor([(before or []) + request["prompt"]])
    options = {"temperature": request["temperature"], "seed": request["seed"]}
    with exact():
        return [int(token) for token in model.generate(prompt, max_new_tokens=request["max_tokens"], **options)]


def received(answer: Answer) -> list[int]:
    assert answer.status == 200, f"{answer.status}: {answer.content}"
    return answer.tokens or answer.content["choices"][0]["token_ids"]


def check(model: LanguageModel, asked: list[dict[str, Any]], answers: list[Answer | None]) -> int:
    """Check each token of the answers, and return their number."""
    count = 0
    for request, answer in zip(asked, answers, strict=True):
        if answer is not None:
            tokens = received(answer)
            assert tokens == expected(model, request), f"request {request['seed']} has other tokens than generate"
            count += len(tokens)
    return count


async def streams(server: Server, model: LanguageModel, options: Any) -> dict[str, Any]:
    asked = requests(options.streams, options.tokens, 1)
    vanishing = [2 + i % 3 if i % 5 == 4 and request["stream"] else None for i, request in enumerate(asked)]
    calls = [server.complete(request, events) for request, events in zip(asked, vanishing, strict=True)]
    answers = await asyncio.gather(*calls)
    await server.idle()
    begun = [(r, a) for r, a in zip(asked, answers, strict=True) if "session" in r and a is not None]
    again = [dict(request, prompt=[65], stream=True) for request, _ in begun]
    followed = await asyncio.gather(*map(server.complete, again))
    for request, later, (first, answer) in zip(again, followed, begun, strict=True):
        before = first["prompt"] + received(answer)
        assert later is not None
        assert received(later) == expected(model, request, before), "a session has gone on from another text"
    gone = sum(answer is None for answer in answers)
    return {"requests": len(asked), "vanished": gone, "sessions": len(again), "tokens": check(model, asked, answers)}


async def bodies(server: Server, model: LanguageModel, options: Any) -> dict[str, Any]:
    asked = requests(8, options.tokens, 2)
    large = json.dumps({"prompt": "a" * (100 * MEBIBYTE if not options.quick else 2 * MEBIBYTE)}).encode()
    slow = json.dumps({"prompt": "a" * 900_000, "max_tokens": 1, "file": ""}).encode()
    sent = [server.ask("POST", "/v1/completions", large) for _ in range(8)]
    slowly = [server.ask("POST", "/v1/completions", slow, pause=0.05) for _ in range(8)]
    answers = await asyncio.gather(*map(server.complete, asked), *sent, *slowly)
    for answer in answers[8:16]:
        assert answer is not None
        assert answer.status == 413, answer
        assert "expected at most" in answer.message
    for answer in answers[16:]:
        assert answer is not None
        assert answer.status == 400, answer
    return {"requests": len(answers), "refused": 16, "tokens": check(model, asked, answers[:8])}


async def mistakes(server: Server, model: LanguageModel, options: Any) -> dict[str, Any]:
    for name, (method, path, body) in MISTAKES.items():
        answer = await server.ask(method, path, body)
        assert answer is not None
        assert 400 <= answer.status < 500, f"{name}: {answer}"
        assert len(answer.message.split()) > 3, f"{name}: {answer}"
        print(f"  {name}: {answer.status} {answer.message[:110]}")
    return {"requests": len(MISTAKES), "refused": len(MISTAKES)}


async def beyond(server: Server, model: LanguageModel, options: Any) -> dict[str, Any]:
    asked = requests(2 * options.streams, options.tokens, 3)
    answers = await asyncio.gather(*map(server.complete, asked))
    refused = [answer for answer in answers if answer is not None and answer.status == 429]
    assert refused, "no answer was refused"
    assert all("try again later" in answer.message for answer in refused)
    kept = [None if answer in refused else answer for answer in answers]
    return {"requests": len(asked), "refused": len(refused), "tokens": check(model, asked, kept)}


async def sigterm(server: Server, model: LanguageModel, options: Any) -> dict[str, Any]:
    asked = requests(min(50, options.streams), options.tokens, 4)
    calls = [asyncio.create_task(server.complete(request)) for request in asked]
    while (answer := await server.ask("GET", "/health")) and answer.content["streams"] < len(asked) // 2:
        await asyncio.sleep(0.01)
    server.process.send_signal(signal.SIGTERM)
    answers = await asyncio.gather(*calls)
    code = await asyncio.to_thread(server.process.wait, 60)
    assert code == 0, f"the server has ended with {code}"
    return {"requests": len(asked), "tokens": check(model, asked, answers)}


PARTS: dict[str, Callable[[Server, LanguageModel, Any], Awaitable[dict[str, Any]]]] = {
    part.__name__: part for part in (streams, bodies, mistakes, beyond, sigterm)
}


def main() -> None:
    made = parser(__doc__, PARTS)
    made.add_argument("--streams", type=int, default=200, help="answers at once")
    made.add_argument("--tokens", type=int, default=48, help="most tokens of an answer")
    options = parse(made)
    if options.quick:
        options.streams, options.tokens = 12, 8
    results = Results("serve", options)
    missing = [name for name in options.names if not results.has(part=name, streams=options.streams)]
    if not missing:
        return
    torch.manual_seed(0)
    model = LanguageModel(256, Stack(64, 2, LAYER, layer_options=OPTIONS)).eval()
    with tempfile.TemporaryDirectory() as scratch:
        model.save(Path(scratch, "model"))
        server = Server(Path(scratch, "model"), "--streams", str(options.streams), "--memory", "64", "--idle", "300")
        try:
            for name in missing:
                asyncio.run(server.complete({"prompt": "warm"}))
                before, begin = server.memory(), time.perf_counter()
                found = asyncio.run(PARTS[name](server, model, options))
                seconds = time.perf_counter() - begin
                grown = None if name == "sigterm" else server.memory() - before
                assert grown is None or grown < 256 * MEBIBYTE, f"{name}: the server has grown by {grown} bytes"
                results.add(part=name, streams=options.streams, **found, seconds=seconds, memory=grown)
        finally:
            server.process.kill()
            server.process.wait()


if __name__ == "__main__":
    main()
