"""The HTTP server of one ingress process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol

from services.ingress.errors import bad_request
from services.ingress.listener import BACKLOG

logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 30.0
"""A connection without a whole request for this long is closed. Clients keep idle ones for less, so that they do not
write to a closed one."""
SEND_TIMEOUT_S = 30.0
"""A client that takes nothing of what waits for it is cut off after this long."""
SWEEP_S = 5.0
"""How often connections are looked at that have timers of their own for neither."""
MAX_CONNECTIONS = 8192
"""Others are closed at once."""
LEAVE_S = 2.0
"""How long connections may take to move to another ingress, each after an answer, before idle ones are closed."""
_HEAD_MARGIN_BYTES = 16 << 10
"""Heads that are larger than the app allows by less than this still get its answer; the others are cut off."""
MAX_CHUNKS = 4096
"""A body in more chunks is refused: each costs 10 µs, whatever it brings."""
_SLICE_BYTES = 1 << 10
"""What one connection sends is parsed in pieces of this size: that many bytes hold 170 chunks at most."""
_EVENTS_PER_TURN = 64
"""After so many requests, chunks and ends the event loop serves others before the connection's next slice."""


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
                http=_Connection,
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
        """Cut off connections that go on sending a head, or were closed and never take what was sent to them."""
        waiting: dict[Any, tuple[Any, float]] = {}
        while True:
            await asyncio.sleep(SWEEP_S)
            now_s, before = time.monotonic(), waiting
            waiting = {}
            connections: list[Any] = list(self._server.server_state.connections)
            for connection in connections:
                if (state := connection.waits_in()) is None:
                    continue
                seen, since_s = before.get(connection, (state, now_s))
                waiting[connection] = (state, since_s if seen == state else now_s)
                if now_s - waiting[connection][1] > KEEP_ALIVE_S:
                    connection.transport.abort()

    async def _call(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_on(message: Message) -> None:
            if self._is_leaving and message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"connection", b"close")]
            await send(message)

        await self._app(scope, receive, send_on)


class _Parser(h11.Connection):
    """h11's, with a bound for the chunks of a body."""

    num_events = 0
    """Parsed since whoever drives it has set this to 0."""
    refusal: str | None = None
    """What is wrong with a request that is HTTP, but is not taken."""
    _num_chunks = 0

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """h11's next event. Raises h11.RemoteProtocolError for what is no HTTP, and for too many chunks."""
        event = super().next_event()
        self.num_events += 1
        if isinstance(event, h11.Request):
            self._num_chunks = 0
        elif isinstance(event, h11.Data) and event.chunk_start:
            self._num_chunks += 1
            if self._num_chunks > MAX_CHUNKS:
                self.refusal = f"The body comes in more than {MAX_CHUNKS} chunks."
                raise h11.RemoteProtocolError(self.refusal)
        return event


class _Flow(FlowControl):
    """uvicorn's flow control of a connection that goes on with what it has, before it reads more."""

    def __init__(self, transport: asyncio.Transport, go_on: Callable[[], None]) -> None:
        super().__init__(transport)
        self._go_on = go_on

    def resume_reading(self) -> None:
        """The app takes more."""
        if self.read_paused:
            self.read_paused = False
            self._go_on()


class _Connection(H11Protocol):
    """uvicorn's connection, cut off when its client takes nothing, and parsed in turns.

    Of uvicorn's two parsers this one, slower by 0.06 ms a request, has a bound for heads and trailers. The event loop
    delivers up to 256 KiB at once, which may hold 43,000 chunks: parsed in one go they would keep all others waiting.
    """

    conn: _Parser
    _stalled: asyncio.TimerHandle | None = None
    _next_turn: asyncio.Handle | None = None

    def __init__(self, config: uvicorn.Config, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        assert config.h11_max_incomplete_event_size is not None
        self.conn = _Parser(h11.SERVER, config.h11_max_incomplete_event_size)
        self._unparsed = bytearray()

    def waits_in(self) -> tuple[int, bool] | None:
        """A name for the state in which it waits for its client; None while the app is at work."""
        is_closing = self.transport.is_closing()
        is_answered = self.cycle is None or self.cycle.response_complete
        return (id(self.cycle), is_closing) if is_closing or is_answered else None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a client, unless there are too many."""
        super().connection_made(transport)
        self.flow = _Flow(transport, self._go_on)
        if len(self.connections) > MAX_CONNECTIONS:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has gone, or was cut off."""
        self._unset_stalled()
        self._unparsed.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """The client has sent this."""
        self._unset_keepalive_if_required()
        self._unparsed += data
        if self._next_turn is None:
            self._take_turn()

    def _take_turn(self) -> None:
        """Parse what is here until the app has enough or it is the others' turn; read on when all is parsed."""
        self._next_turn = None
        self.conn.num_events = 0
        while self._unparsed and self._may_parse() and self.conn.num_events < _EVENTS_PER_TURN:
            piece = bytes(self._unparsed[:_SLICE_BYTES])
            del self._unparsed[:_SLICE_BYTES]
            self.conn.receive_data(piece)
            self.handle_events()
        if self._may_parse():
            self._go_on()

    def _may_parse(self) -> bool:
        return not self.flow.read_paused and not self.transport.is_closing()

    def _go_on(self) -> None:
        """Parse the rest in the loop's next round; without one read on."""
        if self.transport.is_closing():
            return
        if not self._unparsed:
            self.transport.resume_reading()
            return
        self.transport.pause_reading()
        if self._next_turn is None:
            self._next_turn = self.loop.call_soon(self._take_turn)

    def pause_writing(self) -> None:
        """More waits for the client than it should."""
        super().pause_writing()
        self._stalled = self.loop.call_later(SEND_TIMEOUT_S, self._cut_off)

    def resume_writing(self) -> None:
        """The client has taken most of it."""
        self._unset_stalled()
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP, as any other request is refused; after an answer that came early just close."""
        body = bad_request(self.conn.refusal or msg).body()
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        with contextlib.suppress(h11.LocalProtocolError):
            head = h11.Response(status_code=400, headers=headers, reason="Bad Request")
            for event in (head, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event))
        self.transport.close()

    def _cut_off(self) -> None:
        logger.info("a client that took nothing for %.0f s was cut off", SEND_TIMEOUT_S)
        self.transport.abort()

    def _unset_stalled(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None


class _Server(uvicorn.Server):
    def capture_signals(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        """None: the process is Ray's."""
        return contextlib.nullcontext()
