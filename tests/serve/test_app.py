"""The HTTP interface: answers, events, and a sentence for every mistake."""

import asyncio
import json
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("fastapi", reason="fastapi is not installed: pip install 'scanl[serve]'")

from starlette.testclient import TestClient

from scanl.models import LanguageModel, Stack
from scanl.ops import exact
from scanl.serve import Engine, Limits
from scanl.serve.app import DISCARDED_BYTES, Completion, Guard, _pieces, make_app
from scanl.serve.engine import AnswerPiece
from scanl.serve.texts import ByteText

LIMITS = Limits(streams=2, body=1000, tokens=50, idle=5)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return LanguageModel(256, Stack(8, 1, "lru")).eval()


@pytest.fixture(scope="module")
def client(model):
    with TestClient(make_app(Engine(model, ByteText(), LIMITS), "tiny")) as client:
        yield client


def expected(model, prompt, **options):
    with exact():
        return [int(token) for token in model.generate(torch.tensor([list(prompt)]), **options)]


def complete(client, **request):
    response = client.post("/v1/completions", json=request)
    assert response.status_code == 200, response.text
    return response.json()


def test_an_answer(model, client):
    body = complete(client, prompt="hello", max_tokens=5, seed=3, model="tiny", echo=True, user="someone")
    tokens = expected(model, b"hello", max_new_tokens=5, seed=3)
    (choice,) = body["choices"]
    assert choice["token_ids"] == tokens
    assert choice["text"] == "hello" + bytes(tokens).decode(errors="replace")
    assert choice["finish_reason"] == "length"
    assert body["usage"] == {"prompt_tokens": 5, "completion_tokens": 5, "total_tokens": 10}
    assert complete(client, prompt=[104, 105], temperature=0)["choices"][0]["token_ids"] == expected(
        model, b"hi", max_new_tokens=16, temperature=0
    )


def test_events(model, client):
    request = {
        "prompt": ["hello"],
        "max_tokens": 5,
        "seed": 3,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    response = client.post("/v1/completions", json=request)
    assert response.headers["content-type"].startswith("text/event-stream")
    *lines, last = [line for line in response.text.split("\n\n") if line]
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert last == "data: [DONE]"
    assert events.pop()["usage"]["completion_tokens"] == 5
    assert [event["choices"][0]["token_ids"] for event in events] == [
        [token] for token in expected(model, b"hello", max_new_tokens=5, seed=3)
    ]
    assert [event["choices"][0]["finish_reason"] for event in events] == [None] * 4 + ["length"]


def test_a_session_and_a_stop(model, client):
    first = complete(client, prompt="a", max_tokens=3, temperature=0, session="one")["choices"][0]["token_ids"]
    second = complete(client, prompt="b", max_tokens=3, temperature=0, session="one")["choices"][0]["token_ids"]
    assert second == expected(model, [97, *first, 98], max_new_tokens=3, temperature=0)
    text = bytes(expected(model, b"q", max_new_tokens=9, seed=1)).decode("latin1")
    stop = next(letter for letter in text if letter.isascii())
    choice = complete(client, prompt="q", max_tokens=9, seed=1, stop=stop)["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert stop not in choice["text"]
    assert len(choice["token_ids"]) == text.index(stop) + 1


def test_models_and_health(client):
    assert client.get("/health").json() == {"status": "ok", "streams": 0, "limit": 2}
    assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["tiny"]
    assert client.get("/v1/models/tiny").json()["object"] == "model"


MISTAKES = {
    b'{"a":': (400, "the body is not JSON: EOF while parsing"),
    b"\xff": (400, "the body is not JSON"),
    b"[" * 900: (400, "the body is not JSON: recursion limit exceeded"),
    b"[]": (400, "the body is not a JSON object"),
    b'{"prompt": 5}': (400, "prompt is 5: Input should be a valid string, or Input should be a valid array"),
    b'{"max_tokens": -1}': (400, "max_tokens is -1: Input should be greater than or equal to 1"),
    b'{"max_tokens": 51}': (400, "max_tokens is 51, expected at most 50"),
    b'{"temperature": NaN}': (400, "temperature is nan: Input should be a finite number"),
    b'{"max_tokens": 1' + b"0" * 400 + b"}": (400, "max_tokens is 1000000000000"),
    b'{"stop": null, "file": null}': (400, "file is no field"),
    b'{"n": 2}': (400, "n is 2: Input should be 1"),
    b'{"file": "/etc/passwd"}': (400, "file is no field, expected model, prompt, max_tokens"),
    b'{"session": "../a"}': (400, "session is '../a': String should match pattern"),
    b'{"model": "other"}': (404, "model is 'other', expected 'tiny'"),
    b" " * 1001: (413, "the body has more than 1000 bytes, expected at most 1000"),
}


@pytest.mark.parametrize("body", MISTAKES, ids=lambda body: body[:24])
def test_a_mistake_gets_a_sentence(client, body):
    status, message = MISTAKES[body]
    response = client.post("/v1/completions", content=body)
    assert response.status_code == status
    assert response.json()["error"]["message"].startswith(f"completions: {message}")
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_a_body_of_exactly_the_limit_is_taken(client):
    body = b'{"prompt": "a", "max_tokens": 1}'.ljust(LIMITS.body)
    assert client.post("/v1/completions", content=body).status_code == 200


def test_other_paths_and_methods_are_refused(client):
    assert client.get("/etc").json()["error"]["message"] == "GET /etc: Not Found"
    assert client.get("/v1/completions").status_code == 405
    assert client.get("/v1/models/x").status_code == 404


def called(receive, limits=LIMITS, app=None):
    """Call the guard with an application that must not be reached, or with this one; return what is sent."""
    sent = []

    async def unreached(scope, receive, send):
        raise AssertionError("the application was called")

    async def send(message):
        sent.append(message)

    asyncio.run(Guard(app or unreached, limits)({"type": "http"}, receive, send))
    return sent


def test_a_large_body_is_read_and_dropped_up_to_a_limit():
    read = 0

    async def receive():
        nonlocal read
        read += 2**24
        return {"type": "http.request", "body": bytes(2**24), "more_body": True}

    sent = called(receive)
    assert sent[0]["status"] == 413
    assert read == DISCARDED_BYTES + 2**24


def test_a_body_that_does_not_come_is_refused():
    async def receive():
        await asyncio.sleep(60)

    sent = called(receive, Limits(idle=0.01))
    assert sent[0]["status"] == 408
    assert b"has not come within 0.01 seconds" in sent[1]["body"]


def test_a_client_that_takes_nothing_is_given_up():
    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    async def app(scope, receive, send):
        await send({"type": "http.response.start"})
        raise AssertionError("the client was waited for")

    async def stuck(message):
        await asyncio.sleep(60)

    asyncio.run(Guard(app, Limits(idle=0.01))({"type": "http"}, receive, stuck))


def test_a_client_that_vanishes_frees_its_stream(model):
    app = make_app(engine := Engine(model, ByteText(), Limits()), "tiny")
    body = json.dumps({"prompt": "a", "max_tokens": 4000, "stream": True}).encode()
    messages = [{"type": "http.request", "body": body, "more_body": False}]
    gone, sent = asyncio.Event(), []

    async def receive():
        if messages:
            return messages.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)
        if len(sent) == 4:
            gone.set()

    async def run():
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}
        await app({**scope, "asgi": {"spec_version": "2.4"}}, receive, send)
        while engine.active:
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(run(), 600))
    assert len(sent) < 1000
    engine.close()


def test_null_is_as_no_field(model, client):
    body = complete(client, **dict.fromkeys(Completion.model_fields) | {"prompt": "a", "temperature": 0})
    assert body["choices"][0]["token_ids"] == expected(model, b"a", max_new_tokens=16, temperature=0)
    complete(client, **dict.fromkeys(Completion.model_fields) | {"presence_penalty": 0.0, "frequency_penalty": 0.0})
    events = {"prompt": "a", "max_tokens": 1, "stream": True, "stream_options": {"include_usage": None}}
    assert b'"usage"' not in client.post("/v1/completions", json=events).content


FOREIGN = [
    ({"host": "evil.example"}, 403, "Host is 'evil.example', expected 'testserver' or one of --hosts"),
    ({"host": "testserver.evil.example"}, 403, "Host is"),
    ({"host": "[::1]"}, 403, "Host is"),
    ({"origin": "http://evil.example"}, 403, "Origin is 'http://evil.example', expected none or that of this server"),
    ({"origin": "http://testserver:3000"}, 403, "Origin is"),
    ({"origin": "null"}, 403, "Origin is"),
    ({"content-type": "text/plain"}, 415, "Content-Type is 'text/plain', expected 'application/json'"),
    ({"content-type": "application/x-www-form-urlencoded"}, 415, "Content-Type is"),
    ({"content-type": ""}, 415, "Content-Type is"),
    ({"origin": "http://testserver", "content-type": "Application/JSON; charset=utf-8"}, 200, ""),
    ({"host": "TestServer:99"}, 200, ""),
]


@pytest.mark.parametrize(("headers", "status", "message"), FOREIGN)
def test_pages_of_other_sites_are_refused(client, headers, status, message):
    response = client.post("/v1/completions", content=b'{"max_tokens": 1}', headers=headers)
    assert response.status_code == status
    if status != 200:
        assert response.json()["error"]["message"].startswith(f"completions: {message}")


HOSTS = [  # the address of the connection, a Host, whether it is a name of the server
    ("127.0.0.1", "localhost:8000", True),
    ("127.0.0.1", "[::1]:8000", True),
    ("::1", "127.0.0.1", True),
    ("127.0.0.1", "127.0.0.1.", True),
    ("127.0.0.1", "10.0.0.1", False),
    ("127.0.0.1", "rebound.example", False),
    ("10.0.0.1", "10.0.0.1:8000", True),
    ("10.0.0.1", "localhost", False),
    ("10.0.0.1", "10.0.0.2", False),
    ("2001:db8::1", "[2001:DB8:0::1]:80", True),
    ("10.0.0.1", "Models.Example:443", True),
    ("10.0.0.1", "models.example.evil", False),
    ("10.0.0.1", "", False),
]


@pytest.mark.parametrize(("address", "host", "is_own"), HOSTS)
def test_a_host_is_the_address_or_a_given_name(address, host, is_own):
    scope = {"headers": [(b"host", host.encode())], "server": (address, 8000), "method": "GET"}
    guard = Guard(None, LIMITS, hosts=["models.Example"])
    assert (guard._foreign(scope) is None) is is_own
    if is_own:
        for origin, is_foreign in (
            (f"https://{host}", False),
            ("https://models.example", False),
            ("https://models.example:444", True),
            (f"http://{address}:1", True),
        ):
            with_origin = scope | {"headers": [*scope["headers"], (b"origin", origin.encode())]}
            assert (guard._foreign(with_origin) is not None) is is_foreign


def test_the_address_alone_is_no_origin():
    """A page of another server of this machine, which is at the usual port."""
    guard = Guard(None, LIMITS, hosts=["127.0.0.1"])
    headers = [(b"host", b"127.0.0.1:8000"), (b"origin", b"http://127.0.0.1")]
    assert guard._foreign({"headers": headers, "server": ("127.0.0.1", 8000)}) is not None


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_fails_is_one_line(stream):
    torch.manual_seed(0)
    broken = LanguageModel(256, Stack(8, 1, "lru")).eval()
    broken.embedding.weight.data[ord("z")] = torch.nan
    with TestClient(make_app(Engine(broken, ByteText(), LIMITS), "tiny")) as client:
        response = client.post("/v1/completions", json={"prompt": "az", "stream": stream, "session": "a"})
        if stream:
            line, last, _ = response.text.split("\n\n")
            assert last == "data: [DONE]"
            content = json.loads(line.removeprefix("data: "))
        else:
            assert response.status_code == 422
            content = response.json()
        assert content["error"]["message"].startswith("completions: sample: the largest logit of the next token is nan")
        begun = complete(client, prompt="a", max_tokens=3, temperature=0, session="a")
        assert begun["choices"][0]["token_ids"] == expected(broken, b"a", max_new_tokens=3, temperature=0)


@pytest.mark.parametrize(("events", "stream"), [(0, True), (3, True), (0, False)])
def test_a_session_has_what_was_sent_before_its_client_went(model, events, stream):
    """The client goes when `events` events are sent; the send of the next one does not return."""
    app = make_app(engine := Engine(model, ByteText(), Limits()), "tiny")
    body = json.dumps({"prompt": "a", "max_tokens": 3000, "stream": stream, "temperature": 0, "session": "s"}).encode()
    messages, gone, sent = [{"type": "http.request", "body": body, "more_body": False}], asyncio.Event(), []

    async def receive():
        if messages:
            return messages.pop()
        if not stream:
            await asyncio.sleep(0.1)
            return {"type": "http.disconnect"}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        if len(sent) == events + 1 and stream:
            gone.set()
            await asyncio.sleep(60)
        sent.append(message)

    async def run():
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}
        await app({**scope, "asgi": {"spec_version": "2.3"}}, receive, send)
        while engine.active:
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(run(), 600))
    tokens = expected(model, b"a", max_new_tokens=events, temperature=0) if events else []
    bytes_of = bytes(tokens).decode(errors="ignore").encode()
    kept = engine._sessions["s"].tokens.tolist() if "s" in engine._sessions else []
    assert kept == ([97, *bytes_of] if events else [])
    engine.close()


def test_a_piece_that_comes_as_its_client_goes_is_not_taken():
    cancelled, queue = [], asyncio.Queue()
    queue.put_nowait(AnswerPiece("a", (97,)))
    engine = SimpleNamespace(cancel=lambda answer, seen: cancelled.append(seen))
    answer = SimpleNamespace(wish=SimpleNamespace(is_whole=False))

    async def receive():
        return {"type": "http.disconnect"}

    async def run():
        return [piece async for piece in _pieces(engine, answer, queue, SimpleNamespace(receive=receive))]

    assert asyncio.run(run()) == []
    assert cancelled == [None]
