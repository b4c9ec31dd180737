"""One POST to an ASGI app in this process, as an async generator: the head, then the body in pieces."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

Message = MutableMapping[str, Any]
AsgiApp = Callable[[Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]]

COALESCE_S = 0.02
"""Least time between two pieces of one body: sending by handle costs the same for one token as for many."""


@dataclass(frozen=True)
class ResponseHead:
    """Status line and headers, names in lower case."""

    status: int
    headers: dict[str, str]


class AsgiRequest:
    """A request on its way through ``app``. Use ``stream`` once; closing the generator aborts the request."""

    def __init__(self, app: AsgiApp, *, path: str, headers: Mapping[str, str], body: bytes) -> None:
        """``path``: without a query. Nothing runs before ``stream``."""
        self._app = app
        self._scope = _scope(path, headers, len(body))
        self._body: bytes | None = body
        self._has_left = asyncio.Event()
        self._news = asyncio.Event()
        self._head: ResponseHead | None = None
        self._pieces: list[bytes] = []

    async def stream(self, *, until: asyncio.Event) -> AsyncGenerator[ResponseHead | bytes, None]:
        """Yield the head together with the first piece, then a piece at most every ``COALESCE_S`` seconds.

        Ends early, without an error of its own, once ``until`` is set: the caller knows what that means. Raises what
        the app raises before it has sent a head.
        """
        task = asyncio.ensure_future(self._app(self._scope, self._receive, self._send))
        ending = asyncio.ensure_future(until.wait())
        for future in (task, ending):
            future.add_done_callback(lambda _: self._news.set())
        try:
            async for piece in self._read(task, ending):
                yield piece
        finally:
            ending.cancel()
            await self._leave(task)

    async def _read(
        self, task: asyncio.Future[None], ending: asyncio.Future[Any]
    ) -> AsyncGenerator[ResponseHead | bytes, None]:
        is_head_sent = False
        last_sent_s = 0.0
        while True:
            await self._news.wait()
            if not task.done() and not ending.done():
                await self._coalesce(last_sent_s, task, ending)
            # Looked at before the pieces are taken, so that what comes in between is seen in the next round.
            is_last = task.done() or ending.done()
            self._news.clear()
            if self._head is not None and not is_head_sent and (self._pieces or is_last):
                yield self._head
                is_head_sent = True
            if self._pieces:
                piece, self._pieces = b"".join(self._pieces), []
                last_sent_s = time.monotonic()
                yield piece
            if is_last:
                if task.done() and not is_head_sent:
                    task.result()
                return

    async def _coalesce(self, last_sent_s: float, *ends: asyncio.Future[Any]) -> None:
        """Let more pieces come, but not once there can be no more."""
        remaining_s = last_sent_s + COALESCE_S - time.monotonic()
        if self._pieces and remaining_s > 0:
            await asyncio.wait(ends, timeout=remaining_s, return_when=asyncio.FIRST_COMPLETED)

    async def _leave(self, task: asyncio.Future[None]) -> None:
        """Tell the app that the client has gone, and make sure that it ends."""
        self._has_left.set()
        if not task.done():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(task), timeout=0.5)
        task.cancel()
        # What it raises after its head was sent has nowhere to go; vLLM has logged it.
        await asyncio.gather(task, return_exceptions=True)

    async def _receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._has_left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in message["headers"]}
            self._head = ResponseHead(message["status"], headers)
        elif message["type"] == "http.response.body" and message.get("body"):
            self._pieces.append(message["body"])
            self._news.set()


def _scope(path: str, headers: Mapping[str, str], body_bytes: int) -> Message:
    sent = {**headers, "content-length": str(body_bytes)}
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(name.encode("latin-1"), value.encode("latin-1")) for name, value in sent.items()],
        "client": ("127.0.0.1", 0),
        "server": ("127.0.0.1", 80),
        "state": {},
    }
