"""Servers on a public port, small apps behind them, and clients that speak HTTP byte by byte."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import h11

from services.ingress.listener import Listener, take_listener
from services.ingress.server import PublicServer

Send = Callable[[Any], Awaitable[None]]
LAST = b"host: x\r\nconnection: close\r\n"
"""Headers of a request that ends its connection."""
POST = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"


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


async def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.005)


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
