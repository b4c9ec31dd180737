"""HTTP of the ingress: routes, bounded bodies and headers, errors as OpenAI's, streams that end with their client."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncGenerator, Coroutine
from functools import partial
from typing import Any, TypeVar
from urllib.parse import unquote

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from services.config import HttpSettings
from services.ingress.admin import TenantAdmin
from services.ingress.admin_routes import operator_routes
from services.ingress.body import read_body
from services.ingress.cluster import Cluster
from services.ingress.errors import ApiError, client_gone, unavailable, unknown_model
from services.ingress.gateway import Gateway
from services.ingress.openapi import routes
from services.ingress.request_fields import CHAT_PATH, COMPLETIONS_PATH
from services.ingress.turn import Reply
from wisp_core.errors import StoreUnavailableError

ResultT = TypeVar("ResultT")


class TurnStream(StreamingResponse):
    """A stream whose generator is closed as soon as its client has gone."""

    def __init__(self, reply: Reply, pieces: AsyncGenerator[bytes, None]) -> None:
        super().__init__(pieces, status_code=reply.status, headers={**reply.headers, "cache-control": "no-cache"})
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._pieces.aclose()


class HeadCheck:
    """ASGI middleware: requests whose head is too large or ambiguous are refused, URLs may name the host."""

    def __init__(self, app: ASGIApp, max_header_bytes: int) -> None:
        self._app = app
        self._max_header_bytes = max_header_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on what is well-formed."""
        error = self._error_of(scope)
        if error is not None:
            await _error_response(error)(scope, receive, send)
            return
        if origin := _ORIGIN.match(scope["raw_path"]):
            # RFC 9112, 3.2.2: every server takes a URL in absolute form, which proxies are sent.
            raw_path = scope["raw_path"][origin.end() :] or b"/"
            scope = {**scope, "raw_path": raw_path, "path": unquote(raw_path.decode("ascii"))}
        await self._app(scope, receive, send)

    def _error_of(self, scope: Scope) -> ApiError | None:
        num_bytes = sum(len(name) + len(value) for name, value in scope["headers"])
        if num_bytes + len(scope["path"]) + len(scope["query_string"]) > self._max_header_bytes:
            return ApiError(431, "The request's headers are too large.", code="headers_too_large")
        if {b"content-length", b"transfer-encoding"} <= {name for name, _ in scope["headers"]}:
            # RFC 9112, 6.1: a proxy in front may see the end of the body elsewhere, and another request behind it.
            message = "A request has Content-Length or Transfer-Encoding, not both."
            return ApiError(400, message, headers={"connection": "close"})
        return None


_ORIGIN = re.compile(rb"https?://[^/]*", re.IGNORECASE)


def build_app(
    gateway: Gateway,
    cluster: Cluster,
    tenants: TenantAdmin,
    http: HttpSettings,
    *,
    admin_key: str,
    metrics_key: str,
) -> Starlette:
    """The public HTTP interface."""
    operator = operator_routes(cluster, tenants, http, admin_key=admin_key, metrics_key=metrics_key)
    app = Starlette(
        routes=[*_openai_routes(gateway, http), *operator],
        middleware=[Middleware(HeadCheck, max_header_bytes=http.max_header_bytes)],
        exception_handlers={
            ApiError: _on_api_error,
            HTTPException: _on_http_error,
            StoreUnavailableError: _on_store_error,
            Exception: _on_any_error,
        },
    )
    # They would go out before any key is checked, to the host that the client names, by HTTP without TLS.
    app.router.redirect_slashes = False
    return app


def _openai_routes(gateway: Gateway, http: HttpSettings) -> list[Route]:
    created = int(time.time())
    card = {"id": gateway.model, "object": "model", "created": created, "owned_by": "wisp"}

    async def turn(path: str, request: Request) -> Response:
        tenant = await gateway.authenticate(request.headers)
        async with gateway.arriving(tenant) as arrival:
            body = await read_body(request, http.max_body_bytes, http.body_timeout_s)
            reply = await _while_connected(request, gateway.turn(path, request.headers, body, arrival))
        if isinstance(reply.body, bytes):
            return Response(reply.body, reply.status, reply.headers)
        return TurnStream(reply, reply.body)

    async def list_models(request: Request) -> Response:
        await gateway.authenticate(request.headers)
        return JSONResponse({"object": "list", "data": [card]})

    async def show_model(request: Request) -> Response:
        await gateway.authenticate(request.headers)
        if request.path_params["name"] != gateway.model:
            raise unknown_model(request.path_params["name"])
        return JSONResponse(card)

    return routes(
        chat=partial(turn, CHAT_PATH),
        completion=partial(turn, COMPLETIONS_PATH),
        list_models=list_models,
        show_model=show_model,
    )


async def _while_connected(request: Request, work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """``work``'s result, once the body is read. Raises ApiError (499), ``work`` cancelled, when the client leaves."""
    task, leaving = asyncio.ensure_future(work), asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait((task, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise client_gone()
        return task.result()
    finally:
        for future in (task, leaving):
            future.cancel()
        await asyncio.gather(task, leaving, return_exceptions=True)


def _error_response(error: ApiError) -> Response:
    return Response(error.body(), error.status, {**error.headers, "content-type": "application/json"})


async def _on_api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _error_response(error)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"Invalid URL ({request.method} {request.url.path[:256]})"
    return _error_response(ApiError(error.status_code, message, headers=error.headers))


async def _on_store_error(_: Request, error: Exception) -> Response:
    # Turns go on without the store; what an operator asks for does not.
    if isinstance(error, StoreUnavailableError) and error.may_have_run:
        return _error_response(unavailable("The store did not answer in time: what was asked for may be done. Retry."))
    return _error_response(unavailable("The store does not answer."))


async def _on_any_error(_: Request, error: Exception) -> Response:
    # The server logs it by itself; the client learns nothing of the inside.
    return _error_response(ApiError(500, "The server had an error while processing your request.", kind="server_error"))
