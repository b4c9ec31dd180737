"""HTTP of the ingress: routes, bounded bodies and headers, errors as OpenAI's, streams that end with their client."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Coroutine
from functools import partial
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from services.config import HttpSettings
from services.ingress.admin import TenantAdmin
from services.ingress.admin_routes import add_operator_routes
from services.ingress.body import read_body
from services.ingress.cluster import Cluster
from services.ingress.errors import ApiError, bad_request, unavailable, unknown_model
from services.ingress.gateway import Gateway
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


class HeaderLimit:
    """ASGI middleware: 431 for requests whose headers are too large."""

    def __init__(self, app: ASGIApp, max_header_bytes: int) -> None:
        self._app = app
        self._max_header_bytes = max_header_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on what is small enough."""
        if scope["type"] == "http":
            num_bytes = sum(len(name) + len(value) for name, value in scope["headers"])
            if num_bytes + len(scope["path"]) + len(scope["query_string"]) > self._max_header_bytes:
                error = ApiError(431, "The request's headers are too large.", code="headers_too_large")
                await _error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def build_app(
    gateway: Gateway, cluster: Cluster, tenants: TenantAdmin, http: HttpSettings, *, admin_key: str
) -> FastAPI:
    """The public HTTP interface."""
    app = FastAPI(title="WiSP", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(HeaderLimit, max_header_bytes=http.max_header_bytes)
    _add_error_handlers(app)
    _add_openai_routes(app, gateway, http)
    add_operator_routes(app, cluster, tenants, http, admin_key)
    return app


def _add_openai_routes(app: FastAPI, gateway: Gateway, http: HttpSettings) -> None:
    created = int(time.time())
    card = {"id": gateway.model, "object": "model", "created": created, "owned_by": "wisp"}

    async def turn(path: str, request: Request) -> Response:
        """One turn."""
        tenant = await gateway.authenticate(request.headers)
        body = await read_body(request, http.max_body_bytes, http.body_timeout_s)
        reply = await _while_connected(request, gateway.turn(path, request.headers, body, tenant))
        if isinstance(reply.body, bytes):
            return Response(reply.body, reply.status, reply.headers)
        return TurnStream(reply, reply.body)

    for path in (CHAT_PATH, COMPLETIONS_PATH):
        # Starlette's own route: the body is not FastAPI's to read.
        app.add_route(path, partial(turn, path), methods=["POST"])

    @app.get("/v1/models")
    async def list_models(request: Request) -> dict[str, object]:
        """The models served: one."""
        await gateway.authenticate(request.headers)
        return {"object": "list", "data": [card]}

    @app.get("/v1/models/{name:path}")
    async def show_model(request: Request, name: str) -> dict[str, object]:
        """One model."""
        await gateway.authenticate(request.headers)
        if name != gateway.model:
            raise unknown_model(name)
        return card


async def _while_connected(request: Request, work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """``work``'s result, once the body is read. Raises ClientDisconnect, ``work`` cancelled, when the client leaves."""
    task, leaving = asyncio.ensure_future(work), asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait((task, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for future in (task, leaving):
            future.cancel()
        await asyncio.gather(task, leaving, return_exceptions=True)


def _error_response(error: ApiError) -> Response:
    return Response(error.body(), error.status, {**error.headers, "content-type": "application/json"})


def _add_error_handlers(app: FastAPI) -> None:
    async def on_api_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return _error_response(error)

    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = f"Invalid URL ({request.method} {request.url.path[:256]})"
        answer = ApiError(error.status_code, message, headers=error.headers)
        return _error_response(answer)

    async def on_store_error(_: Request, error: Exception) -> Response:
        # Turns go on without the store; what an operator asks for does not.
        return _error_response(unavailable("The store does not answer."))

    async def on_disconnect(_: Request, error: Exception) -> Response:
        return _error_response(bad_request("The request ended early."))  # Nobody reads it.

    async def on_any_error(_: Request, error: Exception) -> Response:
        # The server logs it by itself; the client learns nothing of the inside.
        return _error_response(
            ApiError(500, "The server had an error while processing your request.", kind="server_error")
        )

    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(StoreUnavailableError, on_store_error)
    app.add_exception_handler(ClientDisconnect, on_disconnect)
    app.add_exception_handler(Exception, on_any_error)
