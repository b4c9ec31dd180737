"""A request to an ASGI app in process: pieces are coalesced, and the last one does not wait for others."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from services.replica import asgi
from services.replica.asgi import AsgiRequest, ResponseHead


def app_of(*pieces: bytes, pause_s: float = 0.0) -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"X-Name", b"value")]})
        for piece in pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            await asyncio.sleep(pause_s)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    return app


async def answer(app: Any) -> list[ResponseHead | bytes]:
    request = AsgiRequest(app, path="/", headers={}, body=b"")
    return [piece async for piece in request.stream(until=asyncio.Event())]


async def test_pieces_that_come_soon_after_another_are_one() -> None:
    head, first, *rest = await answer(app_of(*(b"%d" % n for n in range(9)), pause_s=asgi.COALESCE_S / 20))
    assert head == ResponseHead(200, {"x-name": "value"})
    assert (first, b"".join(rest)) == (b"0", b"12345678")
    assert len(rest) < 8


async def test_the_end_is_not_held_back(monkeypatch: Any) -> None:
    monkeypatch.setattr(asgi, "COALESCE_S", 5.0)
    began_s = time.monotonic()
    assert (await answer(app_of(b"a", b"b")))[1:] == [b"a", b"b"]
    assert time.monotonic() - began_s < 2.5
