"""Connections: a client that sends nothing, or takes nothing, is closed, and no other one."""

import asyncio
import contextlib
import socket

import pytest

pytest.importorskip("uvicorn", reason="uvicorn is not installed: pip install 'scanl[serve]'")

import uvicorn

from scanl.serve.connections import Connection

IDLE = 0.25  # seconds
WHOLE = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
LARGE = 2**24  # bytes, more than the system buffers


async def application(scope, receive, send):
    assert scope["type"] == "http"
    if scope["path"] == "/slow":
        await asyncio.sleep(2 * IDLE)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % LARGE)]})
    for part in range(2):  # the second one waits until the first is taken
        await send({"type": "http.response.body", "body": bytes(LARGE // 2), "more_body": not part})


async def pausing(scope, receive, send):
    """Send much, wait until it is taken, and longer than a client may idle; then send the rest."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % (LARGE + 3))]})
    await send({"type": "http.response.body", "body": bytes(LARGE), "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": True})
    await asyncio.sleep(1.5 * IDLE)
    await send({"type": "http.response.body", "body": b"end"})


async def small(scope, receive, send):
    if scope["path"] == "/slow":
        await asyncio.sleep(2 * IDLE)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@contextlib.asynccontextmanager
async def serving(app):
    config = uvicorn.Config(app, http=Connection, timeout_keep_alive=IDLE, log_level="error", lifespan="off", ws="none")
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as sock:
        running = asyncio.create_task(server._serve([sock]))
        while not server.started:
            await asyncio.sleep(0.005)
        yield sock.getsockname()[1], server.server_state.connections
        server.should_exit = True
        await running


async def closed_after(port, *parts, pause=0.0):
    """Send parts, one after another, and return what came, and the seconds until the server closed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    begin = asyncio.get_running_loop().time()

    async def send():
        with contextlib.suppress(ConnectionError):
            for part in parts:
                writer.write(part)
                await asyncio.sleep(pause)

    sending = asyncio.create_task(send())
    got = b""
    with contextlib.suppress(ConnectionError):
        got = await asyncio.wait_for(reader.read(), 60)
    seconds = asyncio.get_running_loop().time() - begin
    sending.cancel()
    writer.close()
    return got, seconds


def test_a_client_that_sends_no_whole_request_is_closed():
    async def run():
        async with serving(small) as (port, _):
            drip = [b"GET / HTTP/1.1\r\n", *(b"X: 1\r\n" for _ in range(200))]
            return await asyncio.gather(
                closed_after(port),
                closed_after(port, b"GET / HT"),
                closed_after(port, *drip, pause=IDLE / 5),
                closed_after(port, WHOLE),
                closed_after(port, WHOLE, b"GET /", pause=IDLE / 5),
                closed_after(port, WHOLE, *drip, pause=IDLE / 5),
                closed_after(port, WHOLE + b"GET / HT"),
            )

    nothing = asyncio.run(run())
    assert [got.count(b"200 OK") for got, _ in nothing] == [0, 0, 0, 1, 1, 1, 1]
    for _, seconds in nothing:
        assert IDLE * 0.9 < seconds < 20 * IDLE


def test_an_answer_may_take_longer_than_a_client():
    async def run():
        async with serving(small) as (port, _):
            slow = WHOLE.replace(b"/", b"/slow", 1)
            return await asyncio.gather(closed_after(port, slow), closed_after(port, WHOLE + slow + WHOLE))

    (one, _), (three, _) = asyncio.run(run())
    assert one.endswith(b"ok")
    assert three.count(b"200 OK") == 3


def test_a_client_that_takes_nothing_is_closed():
    async def run():
        async with serving(application) as (port, connections):
            with socket.socket() as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                client.connect(("127.0.0.1", port))
                client.send(WHOLE.replace(b"/", b"/large", 1))
                await asyncio.sleep(IDLE / 2)
                assert len(connections) == 1
                begin = asyncio.get_running_loop().time()
                while connections:
                    assert asyncio.get_running_loop().time() - begin < 60
                    await asyncio.sleep(IDLE / 10)

    asyncio.run(run())


def test_a_client_that_takes_all_is_not_closed():
    async def run():
        async with serving(application) as (port, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**16)
            writer.write(WHOLE.replace(b"/", b"/large", 1))
            await reader.readuntil(b"\r\n\r\n")
            got = 0
            while got < LARGE:
                piece = await reader.read(2**21)
                assert piece
                got += len(piece)
            writer.close()

    asyncio.run(run())


def test_a_client_that_has_taken_all_may_wait_for_the_rest():
    async def run():
        async with serving(pausing) as (port, _):
            return await closed_after(port, WHOLE)

    got, _ = asyncio.run(run())
    assert got.endswith(b"end")
    assert len(got) > LARGE
