"""The HTTP server of one ingress process."""

from __future__ import annotations

import asyncio
import socket
import time

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.ingress.listener import BACKLOG

KEEP_ALIVE_S = 30.0
"""An idle connection is closed after this long: clients close theirs before, and do not write to a closed one."""
LEAVE_S = 2.0
"""How long connections may take to move to another ingress, each after an answer, before idle ones are closed."""


class PublicServer:
    """Serves ``app`` on a listening socket that other processes share, until told to stop."""

    def __init__(self, app: ASGIApp, listener: socket.socket) -> None:
        self._app = app
        self._listener = listener
        self._is_leaving = False
        self._ended = asyncio.Event()
        self._server = uvicorn.Server(
            uvicorn.Config(
                self._call,
                interface="asgi3",
                lifespan="off",
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
        try:
            await self._server.serve(sockets=[self._listener])
        finally:
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

    async def _call(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_on(message: Message) -> None:
            if self._is_leaving and message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"connection", b"close")]
            await send(message)

        await self._app(scope, receive, send_on)
