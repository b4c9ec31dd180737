"""The public port: handed to each server in turn, none of its connections refused or cut, and real back-pressure."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import h11
import httpx
import pytest
from ingress_in_process import HEAD, KEY, Service

from services.config import HttpSettings
from services.free_port import free_port
from services.ingress import server
from services.ingress.listener import Listener, take_listener
from services.ingress.server import PublicServer
from wisp_core.errors import ConfigurationError

Send = Callable[[Any], Awaitable[None]]
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture
async def listener(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> AsyncIterator[Listener]:
    monkeypatch.setattr(server, "LEAVE_S", 0.2)
    opened = Listener(HttpSettings(port=free_port()), tmp_path)
    yield opened
    opened.close()


def url_of(listener: Listener) -> str:
    with take_listener(listener.state_dir) as taken:
        return f"http://127.0.0.1:{taken.getsockname()[1]}"


class Named:
    """An app that answers with its name, after a while."""

    def __init__(self, name: str, delay_s: float = 0.0) -> None:
        self._name, self._delay_s = name, delay_s

    async def __call__(self, scope: Any, receive: Any, send: Send) -> None:
        await asyncio.sleep(self._delay_s)
        headers = [(b"content-length", str(len(self._name)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": self._name.encode()})


class Reading(Named):
    """Answers when the body has come."""

    def __init__(self) -> None:
        super().__init__("read")

    async def __call__(self, scope: Any, receive: Any, send: Send) -> None:
        while (await receive()).get("more_body"):
            pass
        await super().__call__(scope, receive, send)


@asynccontextmanager
async def serving(listener: Listener, app: Any) -> AsyncIterator[PublicServer]:
    public = PublicServer(app, take_listener(listener.state_dir), max_header_bytes=2000)
    task = asyncio.create_task(public.run())
    yield public
    await public.stop()
    await task


async def test_a_connection_waits_for_the_next_server(listener: Listener) -> None:
    async with httpx.AsyncClient(base_url=url_of(listener), timeout=5) as client:
        asked = asyncio.create_task(client.get("/"))
        await asyncio.sleep(0.05)
        assert not asked.done()
        async with serving(listener, Named("late")):
            assert (await asked).text == "late"


async def test_clients_move_from_one_server_to_the_next_and_lose_nothing(listener: Listener) -> None:
    names, is_over = list[str](), False

    async def ask_on(client: httpx.AsyncClient) -> None:
        while not is_over:
            names.append((await client.get("/")).raise_for_status().text)
            await asyncio.sleep(0.001)

    async with (
        httpx.AsyncClient(base_url=url_of(listener), timeout=5) as one,
        httpx.AsyncClient(base_url=url_of(listener), timeout=5) as other,
    ):
        clients = [asyncio.create_task(ask_on(client)) for client in (one, other)]
        for turn in range(4):
            async with serving(listener, Named(f"server {turn}", delay_s=0.002)):
                await asyncio.sleep(0.05)
        async with serving(listener, Named("last")):
            is_over = True
            await asyncio.gather(*clients)
    assert sorted(set(names)) == ["last", "server 0", "server 1", "server 2", "server 3"]


async def test_a_server_stops_after_its_last_answer(listener: Listener) -> None:
    async with httpx.AsyncClient(base_url=url_of(listener), timeout=5) as client:
        async with serving(listener, Named("whole", delay_s=0.3)):
            asked = asyncio.create_task(client.get("/"))
            await asyncio.sleep(0.05)
        answer = await asked
    assert (answer.text, answer.headers["connection"]) == ("whole", "close")


_SERVER = """
import asyncio, sys
from pathlib import Path
from services.ingress.listener import take_listener
from services.ingress.server import PublicServer

async def app(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"8")]})
    await send({"type": "http.response.body", "body": b"some", "more_body": True})
    await asyncio.sleep(60)

asyncio.run(PublicServer(app, take_listener(Path(sys.argv[1])), max_header_bytes=2000).run())
"""


async def test_a_killed_server_takes_only_its_own_answers_with_it(listener: Listener) -> None:
    killed = await asyncio.create_subprocess_exec(sys.executable, "-c", _SERVER, str(listener.state_dir))
    async with httpx.AsyncClient(base_url=url_of(listener), timeout=20) as client:
        async with client.stream("GET", "/") as begun:
            assert begun.status_code == 200
            killed.kill()
            await killed.wait()
            with pytest.raises(httpx.HTTPError):
                await begun.aread()
        asked = asyncio.create_task(client.get("/"))
        await asyncio.sleep(0.05)
        assert not asked.done()
        async with serving(listener, Named("next")):
            assert (await asked).text == "next"


def test_signals_stay_ray_s(listener: Listener) -> None:
    before = signal.getsignal(signal.SIGTERM)

    async def run() -> None:
        async with serving(listener, Named("x")):
            await asyncio.sleep(0.05)
            assert signal.getsignal(signal.SIGTERM) is before

    asyncio.run(run())


async def send_until_cut_off(listener: Listener, begin: bytes, piece: bytes, pause_s: float = 0.0) -> int:
    """Bytes that a server took, at most 8 MiB, of a request that never ends."""
    _, writer = await asyncio.open_connection("127.0.0.1", int(url_of(listener).rpartition(":")[2]))
    sent = begin
    num_bytes = 0
    with contextlib.suppress(ConnectionError):
        while num_bytes < 8 << 20:
            writer.write(sent)
            await writer.drain()
            num_bytes += len(sent)
            sent = piece
            await asyncio.sleep(pause_s)
    writer.close()
    return num_bytes


CHUNKED = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"


@pytest.mark.parametrize(
    "begin", [b"GET / HTTP/1.1\r\nhost: x\r\n", b"GET /", CHUNKED], ids=["head", "path", "trailer"]
)
@pytest.mark.parametrize("piece", [b"x: " + b"a" * 997 + b"\r\n", b"a" * 1000], ids=["lines", "one line"])
async def test_what_has_no_end_is_cut_off(listener: Listener, begin: bytes, piece: bytes) -> None:
    async with serving(listener, Reading()):
        num_bytes = await asyncio.wait_for(send_until_cut_off(listener, begin, piece), 20)
    assert num_bytes < 4 << 20, "more than sockets' buffers hold"


async def test_a_head_that_comes_too_slowly_is_cut_off(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "KEEP_ALIVE_S", 0.3)
    monkeypatch.setattr(server, "SWEEP_S", 0.05)
    async with serving(listener, Named("x", delay_s=0.6)):
        dripping = asyncio.create_task(send_until_cut_off(listener, b"GET / HTTP/1.1\r\n", b"x: y\r\n", pause_s=0.02))
        async with httpx.AsyncClient(base_url=url_of(listener)) as client:
            assert (await client.get("/")).text == "x", "a request that is here may take its time"
        assert await asyncio.wait_for(dripping, 5) < 2000, "not for its size"


def test_a_taken_socket_says_that_it_is_tcp(listener: Listener) -> None:
    # asyncio turns Nagle's algorithm off only then; answers would wait 40 ms for it.
    with take_listener(listener.state_dir) as taken:
        assert taken.proto == socket.IPPROTO_TCP


def test_a_closed_port_is_given_to_nobody(tmp_path: Path) -> None:
    Listener(HttpSettings(port=free_port()), tmp_path).close()
    with pytest.raises(FileNotFoundError):
        take_listener(tmp_path)


async def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.005)


async def test_a_client_that_leaves_before_its_answer_cancels_the_turn(listener: Listener) -> None:
    service = Service()
    service.handle.scripts = [[HEAD, lambda: asyncio.sleep(60)]]
    async with serving(listener, service.app), httpx.AsyncClient(base_url=url_of(listener)) as client:
        headers = {"authorization": f"Bearer {KEY}"}
        with pytest.raises(httpx.ReadTimeout):
            await client.post("/v1/chat/completions", json=CHAT, headers=headers, timeout=0.2)
        await wait_until(lambda: service.handle.calls[0].is_cancelled)
        await service.gateway.drain()
    assert 'wisp_ingress_turns_total{status="499",tenant="a"} 1.0' in service.telemetry.scrape()


async def test_a_client_that_takes_nothing_is_cut_off_with_bounded_memory(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "SEND_TIMEOUT_S", 0.2)
    event = b'data: {"choices": [{"delta": {"content": "' + b"x" * (1 << 18) + b'"}}]}\n\n'
    service = Service()
    service.handle.scripts = [[HEAD, *[event] * 400]]  # 100 MB
    async with serving(listener, service.app):
        body = b'{"model": "tiny", "stream": true, "messages": [{"role": "user", "content": "hello"}]}'
        _, writer = await asyncio.open_connection("127.0.0.1", int(url_of(listener).rpartition(":")[2]))
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n"
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        await wait_until(lambda: bool(service.handle.calls) and service.handle.calls[0].is_cancelled)
        await service.gateway.drain()
        assert len(list(service.handle.calls[0]._script)) > 300, "read on for a client that takes nothing"
        writer.close()
    assert 'wisp_ingress_turns_total{status="499",tenant="a"} 1.0' in service.telemetry.scrape()


class Large(Named):
    """Answers each request with 4 MiB at once."""

    def __init__(self) -> None:
        super().__init__("x" * (4 << 20))


async def test_who_takes_nothing_of_whole_answers_is_cut_off_and_holds_up_no_stop(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "SEND_TIMEOUT_S", 0.3)
    monkeypatch.setattr(server, "KEEP_ALIVE_S", 0.3)
    monkeypatch.setattr(server, "SWEEP_S", 0.05)
    port = int(url_of(listener).rpartition(":")[2])
    async with asyncio.timeout(10), serving(listener, Large()) as public:
        writers = []
        for _ in range(3):
            _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 10)
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n" * 5)
            writers.append(writer)
        connections = public._server.server_state.connections
        await wait_until(lambda: len(connections) == 3)
        await wait_until(lambda: not connections)
        for _ in range(3):
            _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 10)
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n" * 5)
            writers.append(writer)
        await wait_until(lambda: len(connections) == 3)
    for writer in writers:
        writer.close()


async def answers_to(listener: Listener, request: bytes) -> list[tuple[int, dict[str, str], bytes]]:
    """Status, headers and body of each answer to ``request``, until the service closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url_of(listener).rpartition(":")[2]))
    writer.write(request)
    connection, answers = h11.Connection(h11.CLIENT), []
    connection.send(h11.Request(method=request.partition(b" ")[0], target="/", headers=[("host", "x")]))
    connection.receive_data(await asyncio.wait_for(reader.read(), 5))
    writer.close()
    connection.receive_data(b"")
    status, headers, body = 0, dict[str, str](), b""
    while not isinstance(event := connection.next_event(), h11.ConnectionClosed):
        match event:
            case h11.Response():
                status, headers, body = event.status_code, {k.decode(): v.decode() for k, v in event.headers}, b""
            case h11.Data():
                body += bytes(event.data)
            case h11.EndOfMessage():
                answers.append((status, headers, body))
    return answers


LAST = b"host: x\r\nconnection: close\r\n"


async def test_what_is_no_http_is_refused_in_openai_s_form(listener: Listener) -> None:
    async with serving(listener, Service().app):
        for request in (b"GET no HTTP\r\n\r\n", b"GET /healthz HTTP/1.1\r\n" + LAST + b"x\r\n\r\n"):
            ((status, headers, body),) = await answers_to(listener, request)
            assert (status, headers["content-type"]) == (400, "application/json")
            assert json.loads(body)["error"]["type"] == "invalid_request_error"


async def test_a_url_may_name_the_host(listener: Listener) -> None:
    async with serving(listener, Service().app):
        for origin in (b"http://proxied.example:8000", b"HTTPS://[::1]", b""):
            request = b"GET " + origin + b"/v1/models%2Ftiny?x=http://y/ HTTP/1.1\r\n" + LAST
            ((status, _, body),) = await answers_to(listener, request + f"authorization: Bearer {KEY}\r\n\r\n".encode())
            assert (status, json.loads(body)["id"]) == (200, "tiny")
        ((status, _, _),) = await answers_to(listener, b"GET http://nothing HTTP/1.1\r\n" + LAST + b"\r\n")
        assert status == 404


async def test_head_is_answered_as_get_without_a_body(listener: Listener) -> None:
    service = Service()
    async with serving(listener, service.app):
        for path, expected in ((b"/healthz", 200), (b"/readyz", 503)):
            ((status, headers, body),) = await answers_to(listener, b"HEAD " + path + b" HTTP/1.1\r\n" + LAST + b"\r\n")
            assert (status, body) == (expected, b"")
            assert int(headers["content-length"]) > 0


async def test_a_body_of_two_lengths_is_refused_and_what_follows_is_not_read(listener: Listener) -> None:
    lengths = b"host: x\r\ncontent-length: 4\r\ntransfer-encoding: chunked\r\n\r\n"
    smuggled = b"GET /healthz HTTP/1.1\r\n" + LAST + b"\r\n"
    async with serving(listener, Service().app):
        ((status, headers, body),) = await answers_to(
            listener, b"POST /v1/completions HTTP/1.1\r\n" + lengths + b"0\r\n\r\n" + smuggled
        )
    assert (status, headers["connection"]) == (400, "close")
    assert "not both" in json.loads(body)["error"]["message"]


async def test_what_comes_after_an_early_answer_closes_quietly(listener: Listener) -> None:
    errors = list[dict[str, Any]]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    async with serving(listener, Named("no")):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url_of(listener).rpartition(":")[2]))
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.write(b"zzz\r\n")
        assert (await reader.read()).endswith(b"no")
        writer.close()
    assert errors == []


async def test_too_many_connections_are_closed_at_once(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 1)
    port = int(url_of(listener).rpartition(":")[2])
    async with serving(listener, Named("served")) as public:
        _, idle = await asyncio.open_connection("127.0.0.1", port)
        await wait_until(lambda: len(public._server.server_state.connections) == 1)
        reader, refused = await asyncio.open_connection("127.0.0.1", port)
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), 5) == b""
        for writer in (idle, refused):
            writer.close()


def test_a_long_directory_is_no_obstacle(tmp_path: Path) -> None:
    state_dir = tmp_path / ("long" * 40)
    listener = Listener(HttpSettings(port=free_port()), state_dir)
    take_listener(state_dir).close()
    listener.close()
    # A service that was killed leaves its socket behind.
    again = Listener(HttpSettings(port=free_port()), state_dir)
    take_listener(state_dir).close()
    again.close()


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="state_dir"):
        Listener(HttpSettings(port=free_port()), tmp_path / "file")


POST = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
FLOODS = {
    "chunks of one byte": POST + b"1\r\nx\r\n" * 400_000,
    "pipelined requests": b"GET / HTTP/1.1\r\nhost: x\r\n\r\n" * 4000,
    "lines of a head": b"GET / HTTP/1.1\r\nhost: x\r\n" + b"a:\r\n" * 400_000,
    "lines of a trailer": POST + b"0\r\n" + b"a:\r\n" * 400_000,
}


@pytest.mark.parametrize("flood", FLOODS.values(), ids=FLOODS)
@pytest.mark.parametrize("app", [Named("early"), Reading()], ids=["answered early", "read"])
async def test_one_connection_keeps_nobody_waiting(listener: Listener, flood: bytes, app: Named) -> None:
    port = int(url_of(listener).rpartition(":")[2])

    async def send_all() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(flood)
        with contextlib.closing(writer), contextlib.suppress(ConnectionError):
            await reader.read()

    lags_s = list[float]()

    async def note_lags() -> None:
        while True:
            since_s = time.thread_time()  # CPU: however busy the machine is
            await asyncio.sleep(0)
            lags_s.append(time.thread_time() - since_s)

    async with serving(listener, app), httpx.AsyncClient(base_url=url_of(listener), timeout=10) as client:
        await client.get("/")
        flooding, noting = asyncio.create_task(send_all()), asyncio.create_task(note_lags())
        for _ in range(10):
            await asyncio.sleep(0.01)
            since_s = time.thread_time()
            await client.get("/")
            assert time.thread_time() - since_s < 0.5
        for task in (flooding, noting):
            task.cancel()
        await asyncio.gather(flooding, noting, return_exceptions=True)
    assert max(lags_s) < 0.1, "what the loop gives to one connection at once"


async def test_a_body_in_too_many_chunks_is_refused(listener: Listener) -> None:
    chunks = b"1\r\nx\r\n" * server.MAX_CHUNKS
    async with serving(listener, Reading()):
        ((status, _, _),) = await answers_to(listener, POST.replace(b"host: x\r\n", LAST) + chunks + b"0\r\n\r\n")
        assert status == 200
        ((status, headers, body),) = await answers_to(listener, POST + chunks + b"1\r\nx\r\n")
    assert (status, headers["connection"]) == (400, "close")
    assert "more than 4096 chunks" in json.loads(body)["error"]["message"]


class Echo(Named):
    """Answers each request with its body."""

    async def __call__(self, scope: Any, receive: Any, send: Send) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message["body"], message["more_body"]
            await asyncio.sleep(0)
        await Named(body.decode())(scope, receive, send)


async def test_what_is_parsed_in_turns_loses_nothing(listener: Listener) -> None:
    bodies = [str(number).encode() * length for number, length in enumerate((1, 1000, 1023, 200_000, 7, 1 << 20, 1))]
    pieces = list[bytes]()
    for number, body in enumerate(bodies):
        head = b"POST / HTTP/1.1\r\n" + (LAST if number == len(bodies) - 1 else b"host: x\r\n")
        if number % 2:
            chunks = [body[at : at + 700] for at in range(0, len(body), 700)]
            pieces += [head, b"transfer-encoding: chunked\r\n\r\n"]
            pieces += [b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in [*chunks, b""]]
        else:
            pieces.append(head + b"content-length: %d\r\n\r\n" % len(body) + body)
    async with serving(listener, Echo("")):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url_of(listener).rpartition(":")[2]))
        writer.write(b"".join(pieces))
        received = await asyncio.wait_for(reader.read(), 20)
        writer.close()
    for body in bodies:
        head, _, received = received.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        assert received[: len(body)] == body
        received = received[len(body) :]
    assert received == b""
