"""A bounded buffer between a producer that knows no back-pressure and a client that may be slow."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator


class SlowClientError(Exception):
    """More bytes wait for the client than it may have in flight."""


async def buffered(source: AsyncIterator[bytes], max_bytes: int) -> AsyncGenerator[bytes, None]:
    """Yield ``source``'s pieces, read ahead of the client.

    Ray's handles cannot tell a replica to wait, so reading stops only by ending the turn: SlowClientError once more
    than ``max_bytes`` wait, after what waits was yielded. What ``source`` raises is raised in its turn. Closing this
    generator stops the reading.
    """
    pieces: deque[bytes] = deque()
    news = asyncio.Event()
    waiting_bytes = 0

    async def read() -> None:
        nonlocal waiting_bytes
        try:
            async for piece in source:
                pieces.append(piece)
                waiting_bytes += len(piece)
                news.set()
                if waiting_bytes > max_bytes:
                    raise SlowClientError
        finally:
            news.set()

    reader = asyncio.create_task(read())
    try:
        while True:
            await news.wait()
            news.clear()
            while pieces:
                piece = pieces.popleft()
                waiting_bytes -= len(piece)
                yield piece
            if reader.done() and not pieces:
                reader.result()
                return
            if reader.done():
                news.set()
    finally:
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
