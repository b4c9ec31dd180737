"""The HTTP server of one ingress process."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.ingress.listener import BACKLOG

KEEP_ALIVE_S = 30.0
"""A connection without a whole request for this long is closed. Clients keep idle ones for less, so that they do not
write to a closed one."""
SWEEP_S = 5.0
"""How often connections are looked at that send a request's head, but do not come to its end."""
LEAVE_S = 2.0
"""How long connections may take to move to another ingress, each after an answer, before idle ones are closed."""
_HEAD_MARGIN_BYTES = 16 << 10
"""Heads that are larger than the app allows by less than this still get its answer; the others are cut off."""


class PublicServer:
    """Serves ``app`` on a listening socket that other processes share, until told to stop."""

    def __init__(self, app: ASGIApp, listener: socket.socket, *, max_header_bytes: int) -> None:
        """No connection takes much more memory than ``max_header_bytes`` before the app sees its request."""
        self._app = app
        self._listener = listener
        self._is_leaving = False
        self._ended = asyncio.Event()
        self._server = _Server(
            uvicorn.Config(
                self._call,
                interface="asgi3",
                lifespan="off",
                # The other parser, faster by 0.06 ms a request, takes heads and trailers without an end.
                http="h11",
                h11_max_incomplete_event_size=max_header_bytes + _HEAD_MARGIN_BYTES,
                ws="none",
                backlog=BACKLOG,
                timeout_keep_alive=int(KEEP_ALIVE_S),
                proxy_headers=False,
                server_header=False,
                access_log=False,
                log_config=None,
                log_level="error",
            )
        )

    async def run(self) -> None:
        """Serve; returns after ``stop``."""
        sweeping = asyncio.create_task(self._sweep_forever())
        try:
            await self._server.serve(sockets=[self._listener])
        finally:
            sweeping.cancel()
            self._ended.set()

    async def stop(self) -> None:
        """Accept no more, and return when the last answer is out.

        A client that writes to an idle connection just when it is closed loses that request. So connections are first
        closed by the answers on them, which tell their clients; idle ones only when no answer has come for long enough.
        """
        for server in getattr(self._server, "servers", ()):
            server.close()
        self._is_leaving = True
        deadline_s = time.monotonic() + LEAVE_S
        while self._server.server_state.connections and time.monotonic() < deadline_s:  # noqa: ASYNC110  # no event
            await asyncio.sleep(0.05)
        self._server.should_exit = True
        await self._ended.wait()

    async def _sweep_forever(self) -> None:
        """Close connections that go on sending a head: the server's own timer is for those that send nothing."""
        waiting: dict[Any, tuple[Any, float]] = {}
        while True:
            await asyncio.sleep(SWEEP_S)
            now_s, before = time.monotonic(), waiting
            waiting = {}
            connections: list[Any] = list(self._server.server_state.connections)
            for connection in connections:
                last = connection.cycle
                if last is not None and not last.response_complete:
                    continue
                seen, since_s = before.get(connection, (last, now_s))
                waiting[connection] = (last, since_s if seen is last else now_s)
                if now_s - waiting[connection][1] > KEEP_ALIVE_S:
                    connection.transport.close()

    async def _call(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_on(message: Message) -> None:
            if self._is_leaving and message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"connection", b"close")]
            await send(message)

        await self._app(scope, receive, send_on)


class _Server(uvicorn.Server):
    def capture_signals(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        """None: the process is Ray's."""
        return contextlib.nullcontext()
