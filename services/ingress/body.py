"""A request's body: bounded in bytes and in time."""

from __future__ import annotations

import asyncio

from starlette.requests import ClientDisconnect, Request

from services.ingress.errors import ApiError, client_gone


async def read_body(request: Request, max_bytes: int, timeout_s: float) -> bytes:
    """The body, at most ``max_bytes`` in memory. Raises ApiError: 413, 408 after ``timeout_s``, 499."""
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
    except ClientDisconnect as error:
        raise client_gone() from error
    except TimeoutError as error:
        message = f"The body did not come within {timeout_s:g} s."
        raise ApiError(408, message, code="request_timeout", headers={"connection": "close"}) from error
    return bytes(body)
