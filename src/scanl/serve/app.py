"""The HTTP interface: /v1/completions, /v1/models and /health."""

import asyncio
import contextlib
import ipaddress
import json
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping, Sequence
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Request  # pyright: ignore[reportMissingImports]
from fastapi.responses import JSONResponse, Response, StreamingResponse  # pyright: ignore[reportMissingImports]
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from starlette.exceptions import HTTPException  # pyright: ignore[reportMissingImports]

from scanl.errors import DivergenceError, ScanlError
from scanl.serve.engine import Answer, AnswerPiece, BusyError, Engine, SessionBusyError, Wish
from scanl.serve.limits import Limits

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

# of errors; 400 for others
STATUS: dict[type[ScanlError], int] = {BusyError: 429, SessionBusyError: 409, DivergenceError: 422}
KINDS = {429: "rate_limit_error", 500: "server_error", 503: "server_error"}  # invalid_request_error for others
MAX_SHOWN_LETTERS = 60  # letters of a wrong value in a sentence
DISCARDED_BYTES = 256 * 2**20  # bytes of a body beyond the limit that are read, so that the client can read the answer


class RequestFields(BaseModel):
    """Fields of a JSON object. null is as no field, because clients send it for what they do not set."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_null(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {name: value for name, value in data.items() if value is not None or name not in cls.model_fields}


class StreamOptions(RequestFields):
    """Options of a stream. include_usage: whether a last event has the numbers of tokens."""

    include_usage: bool = False


class Completion(RequestFields):
    """A request of the completions interface. Fields that this server cannot honor have their usual defaults alone.

    session: id of a text that the prompt continues; the server keeps its state.   user: is not read.
    """

    model: str | None = None
    prompt: str | list[int] | Annotated[list[str], Field(min_length=1, max_length=1)] = ""
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] = 16
    temperature: Annotated[float, Field(ge=0, le=1e6)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    stop: Annotated[str, Field(min_length=1)] | Annotated[list[str], Field(max_length=4)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    echo: bool = False
    session: Annotated[str, Field(pattern=r"^[\w.-]{1,64}$")] | None = None
    user: str | None = None
    n: Literal[1] = 1
    best_of: Literal[1] = 1
    logprobs: None = None
    suffix: None = None
    presence_penalty: Annotated[float, Field(ge=0, le=0)] = 0
    frequency_penalty: Annotated[float, Field(ge=0, le=0)] = 0
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None

    def stops(self) -> list[str]:
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [stop for stop in stops if stop]

    def wish(self) -> Wish:
        prompt = self.text() or [token for token in self.prompt if isinstance(token, int)]
        options = (self.max_tokens, self.temperature, self.top_k, self.top_p, self.seed, self.stops(), self.session)
        return Wish(prompt, *options, is_whole=not self.stream)

    def text(self) -> str:
        """Return the prompt as text; "" for a list of tokens."""
        if isinstance(self.prompt, str):
            return self.prompt
        return "".join(text for text in self.prompt if isinstance(text, str))


def make_app(engine: Engine, name: str, hosts: Sequence[str] = ()) -> FastAPI:
    """Return the application. name: of the model, in the interface.   hosts: see `Guard`."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await asyncio.to_thread(engine.close)

    app = FastAPI(title="scanl", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(Guard, limits=engine.limits, hosts=hosts)
    began = int(time.time())
    described = {"id": name, "object": "model", "created": began, "owned_by": "scanl"}

    @app.exception_handler(ScanlError)
    async def _refused(_: Request, error: ScanlError) -> Response:
        return refusal(STATUS.get(type(error), 400), str(error))

    @app.exception_handler(ValidationError)
    async def _invalid(_: Request, error: ValidationError) -> Response:
        return refusal(400, sentence(error))

    @app.exception_handler(HTTPException)
    async def _failed(request: Request, error: HTTPException) -> Response:
        return refusal(error.status_code, f"{request.method} {request.url.path[:MAX_SHOWN_LETTERS]}: {error.detail}")

    @app.get("/health")
    async def _health() -> dict[str, Any]:
        return {"status": "ok", "streams": engine.active, "limit": engine.limits.streams}

    @app.get("/v1/models")
    async def _models() -> dict[str, Any]:
        return {"object": "list", "data": [described]}

    @app.get("/v1/models/{model}")
    async def _model(model: str) -> Any:
        return described if model == name else unknown(model)

    def unknown(model: str) -> Response:
        return refusal(404, f"completions: model is {model[:MAX_SHOWN_LETTERS]!r}, expected {name!r}")

    @app.post("/v1/completions")
    async def _completions(request: Request) -> Any:
        body = Completion.model_validate_json(await request.body())
        if body.model not in (None, name):
            return unknown(body.model)
        queue, loop = asyncio.Queue[AnswerPiece](), asyncio.get_running_loop()

        def deliver(piece: AnswerPiece) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(queue.put_nowait, piece)

        answer = engine.submit(body.wish(), deliver)
        pieces = _pieces(engine, answer, queue, request)
        head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": name,
        }
        if body.stream:
            return StreamingResponse(_events(body, answer, pieces, head), media_type="text/event-stream")
        text, tokens, last = body.text() if body.echo else "", list[int](), None
        async for piece in pieces:
            text, last = text + piece.text, piece
            tokens.extend(piece.tokens)
        if last is None or last.finish is None:  # the client has gone
            return Response(status_code=499)
        if last.finish == "error":
            return refusal(*_failure(last))
        return head | {"choices": [_choice(text, tokens, last.finish)], "usage": _usage(answer, len(tokens))}

    return app


async def _pieces(
    engine: Engine, answer: Answer, queue: "asyncio.Queue[AnswerPiece]", request: Request
) -> AsyncIterator[AnswerPiece]:
    """Yield the pieces of an answer until it ends, or its client has gone: its session then keeps what was taken."""
    gone, seen, is_over = asyncio.create_task(_until_gone(request)), None, False
    coming = None
    try:
        while True:
            coming = asyncio.create_task(queue.get())
            await asyncio.wait({coming, gone}, return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                return
            piece = coming.result()
            yield piece
            is_over = piece.finish is not None
            if is_over:
                return
            if not answer.wish.is_whole:
                seen = (seen or 0) + len(piece.tokens)
    finally:
        for task in (gone, coming):
            if task is not None:
                task.cancel()
        if not is_over:
            engine.cancel(answer, seen)


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _events(
    body: Completion, answer: Answer, pieces: AsyncIterator[AnswerPiece], head: dict[str, Any]
) -> AsyncIterator[str]:
    """Yield the server-sent events of an answer."""
    count = 0
    if body.echo:
        yield _event(head | {"choices": [_choice(body.text(), [], None)]})
    async with contextlib.aclosing(pieces) as open_pieces:  # type: ignore[type-var]
        async for piece in open_pieces:
            count += len(piece.tokens)
            if piece.finish == "error":
                yield _event(_error(*_failure(piece)))
                break
            yield _event(head | {"choices": [_choice(piece.text, list(piece.tokens), piece.finish)]})
    if body.stream_options is not None and body.stream_options.include_usage:
        yield _event(head | {"choices": [], "usage": _usage(answer, count)})
    yield "data: [DONE]\n\n"


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"


def _choice(text: str, tokens: list[int], finish: str | None) -> dict[str, Any]:
    return {"index": 0, "text": text, "token_ids": tokens, "logprobs": None, "finish_reason": finish}


def _usage(answer: Answer, count: int) -> dict[str, int]:
    prompt = len(answer.prompt)
    return {"prompt_tokens": prompt, "completion_tokens": count, "total_tokens": prompt + count}


def sentence(error: ValidationError) -> str:
    """Return the sentence for the first mistake that pydantic has seen."""
    first, *others = error.errors()
    if first["type"] == "json_invalid":
        return f"completions: the body is not JSON: {first.get('ctx', {}).get('error')}"
    if not first["loc"]:
        return "completions: the body is not a JSON object, expected one with the fields of a request"
    field = first["loc"][0]
    if first["type"] == "extra_forbidden":
        return (
            f"completions: {str(field)[:MAX_SHOWN_LETTERS]} is no field, expected {', '.join(Completion.model_fields)}"
        )
    shown = repr(first["input"])
    shown = shown if len(shown) <= MAX_SHOWN_LETTERS else f"{shown[:MAX_SHOWN_LETTERS]}..."
    kinds = dict.fromkeys(
        mistake["msg"] for mistake in (first, *others) if mistake["loc"][:1] == (field,)
    )  # of a union
    return f"completions: {field} is {shown}: {', or '.join(kinds)}"


def refusal(status: int, message: str) -> JSONResponse:
    """Return an error as the interface has it."""
    headers = {"Retry-After": "1"} if status in (429, 503) else None
    return JSONResponse(_error(status, message), status_code=status, headers=headers)


def _error(status: int, message: str) -> dict[str, Any]:
    kind = KINDS.get(status, "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}


def _failure(last: AnswerPiece) -> tuple[int, str]:
    """Return the status and the sentence of an answer that has ended with an error."""
    if last.error is None:
        return 500, "completions: the server failed; its log has the reason"
    return STATUS.get(type(last.error), 400), f"completions: {last.error}"


class Guard:
    """Middleware that reads the body within the limits before anything else, and gives up clients that take nothing.

    It refuses what a page of another site can make a browser send: requests with a Host that is no name of this server
    (the site's own name, which then points here), with a foreign Origin, or with a body that is declared as another
    type than JSON. A browser names the Origin of every body, with a type or without.

    hosts: names of this server beside its address, and beside "localhost" if that is a loopback address.
    """

    def __init__(self, app: Callable[..., Awaitable[None]], limits: Limits, hosts: Sequence[str] = ()) -> None:
        self.app, self.limits = app, limits
        self.hosts = frozenset(host.lower() for host in hosts)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        limits, body = self.limits, bytearray()
        try:
            async with asyncio.timeout(limits.idle):
                size = await _read(receive, body, limits.body)
        except TimeoutError:
            problem = f"the body has not come within {limits.idle:g} seconds, expected a shorter or a faster one"
            await _close(408, problem)(scope, receive, send)
            return
        if size is None:
            return
        if size > limits.body:
            problem = f"the body has more than {limits.body} bytes, expected at most {limits.body}"
            await _close(413, problem)(scope, receive, send)
            return
        foreign = self._foreign(scope)
        if foreign is not None:
            await foreign(scope, receive, send)
            return
        messages = [{"type": "http.request", "body": bytes(body), "more_body": False}]

        async def again() -> Message:
            return messages.pop() if messages else await receive()

        async def within(message: Message) -> None:
            async with asyncio.timeout(limits.idle):
                await send(message)

        with contextlib.suppress(TimeoutError):
            await self.app(scope, again, within)

    def _foreign(self, scope: Message) -> JSONResponse | None:
        """Return the refusal of a request that may come from a page of another site, None for others."""
        headers = [(name, value.decode("latin1")) for name, value in scope.get("headers", ())]
        address = (scope.get("server") or ("", None))[0]
        own = {value.lower() for name, value in headers if name == b"host"}
        for value in own:
            if not self._is_own(_host(value), address):
                return refusal(
                    403, f"completions: Host is {value[:MAX_SHOWN_LETTERS]!r}, expected {address!r} or one of --hosts"
                )
        for value in (value.lower() for name, value in headers if name == b"origin"):
            if value.partition("://")[2] not in own | (self.hosts - {address}):
                return refusal(
                    403, f"completions: Origin is {value[:MAX_SHOWN_LETTERS]!r}, expected none or that of this server"
                )
        for value in (value for name, value in headers if name == b"content-type"):
            if value.partition(";")[0].strip().lower() != "application/json":
                return refusal(
                    415, f"completions: Content-Type is {value[:MAX_SHOWN_LETTERS]!r}, expected 'application/json'"
                )
        return None

    def _is_own(self, host: str, address: str) -> bool:
        if host == address or host in self.hosts:
            return True
        try:
            bound = ipaddress.ip_address(address)
            if bound.is_loopback:
                return host == "localhost" or ipaddress.ip_address(host).is_loopback
            return ipaddress.ip_address(host) == bound
        except ValueError:  # a name
            return False


def _host(value: str) -> str:
    """Return the name in a Host header, without its port and the brackets of IPv6."""
    name = value[1:].partition("]")[0] if value.startswith("[") else value.partition(":")[0]
    return name.removesuffix(".")


async def _read(receive: Receive, body: bytearray, limit: int) -> int | None:
    """Read a body, and keep what is within the limit. Return its size; None if the client has gone.

    More is read and dropped, up to `DISCARDED_BYTES`.
    """
    size = 0
    while size <= DISCARDED_BYTES:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        piece = message.get("body", b"")
        size += len(piece)
        if size <= limit:
            body += piece
        if not message.get("more_body", False):
            break
    return size


def _close(status: int, problem: str) -> JSONResponse:
    response = refusal(status, f"completions: {problem}")
    response.headers["Connection"] = "close"
    return response
