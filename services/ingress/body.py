"""A request's body: bounded in bytes and in time."""

from __future__ import annotations

import asyncio

from starlette.requests import Request

from services.ingress.errors import ApiError


async def read_body(request: Request, max_bytes: int, timeout_s: float) -> bytes:
    """The body, never more than ``max_bytes`` of it in memory. Raises ApiError: 413, or 408 after ``timeout_s``."""
    too_large = ApiError(413, f"The body is larger than {max_bytes} bytes.", code="request_too_large")
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for piece in request.stream():
                body += piece
                if len(body) > max_bytes:
                    raise too_large
    except TimeoutError as error:
        message = f"The body did not come within {timeout_s:g} s."
        raise ApiError(408, message, code="request_timeout", headers={"connection": "close"}) from error
    return bytes(body)
