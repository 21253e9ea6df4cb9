"""The HTTP interface: answers, events, and a sentence for every mistake."""

import asyncio
import json

import pytest
import torch

pytest.importorskip("fastapi", reason="fastapi is not installed: pip install 'scanl[serve]'")

from starlette.testclient import TestClient

from scanl.models import LanguageModel, Stack
from scanl.ops import exact
from scanl.serve import Engine, Limits
from scanl.serve.app import DISCARDED, Guard, make_app
from scanl.serve.texts import Bytes

LIMITS = Limits(streams=2, body=1000, tokens=50, idle=5)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return LanguageModel(256, Stack(8, 1, "lru")).eval()


@pytest.fixture(scope="module")
def client(model):
    with TestClient(make_app(Engine(model, Bytes(), LIMITS), "tiny")) as client:
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
    assert read == DISCARDED + 2**24


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
    app = make_app(engine := Engine(model, Bytes(), Limits()), "tiny")
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
