"""What Serve's HTTP proxy is given to put in front of every request, before the ingress sees it."""

from __future__ import annotations

from starlette.middleware import Middleware
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from services.ingress.errors import bad_request


class ReadableHeaders:
    """Refuses header values that are not UTF-8: the proxy decodes some, and would answer those with a 500."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 400, or pass the request on."""
        if scope["type"] == "http" and not all(map(_is_text, (value for _, value in scope["headers"]))):
            error = bad_request("The request's headers are not UTF-8.", code="headers_not_readable")
            await Response(error.body(), error.status, media_type="application/json")(scope, receive, send)
            return
        await self._app(scope, receive, send)


def middlewares() -> list[Middleware]:
    """Serve calls this in its proxy (RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH)."""
    return [Middleware(ReadableHeaders)]


def _is_text(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True
