"""What one client of the public port can take: memory, time, connections, and the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time

import httpx
import pytest
from ingress_in_process import HEAD, KEY, Service
from public_servers import LAST, POST, Named, Reading, answers_to, serving, url_of, wait_until

from services.ingress import server
from services.ingress.listener import Listener


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
