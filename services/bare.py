"""An application of nothing but Serve: an ingress that streams from one replica by handle, as a turn does, set as ours.

``wisp bench overhead`` measures it, and the same answer without Serve, to tell what Serve takes by itself.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from fastapi import FastAPI, Request, Response
from ray import serve

from services.environment import ingress_environment
from services.ingress.replicas import by_message

ROUTE = "/bare"
_NAME = "bare"


class Echo:
    """Answers with what it was sent."""

    async def http(self, *, body: bytes) -> AsyncGenerator[dict[str, Any], None]:
        """One item, as a turn of one token has."""
        yield {"status": 200, "headers": {}, "replica_id": "", "first": body}


@serve.ingress()
class BareIngress:
    """Passes a body on."""

    def __init__(self, replicas: Any) -> None:
        self._replicas = by_message(replicas)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Serve's hook: the app of this process."""
        app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
        app.add_api_route("/", self._turn, methods=["POST"])
        return app

    async def _turn(self, request: Request) -> Response:
        stream = self._replicas.options(stream=True, session_id="bare").http.remote(body=await request.body())
        items = [item async for item in stream]
        return Response(items[0]["first"], media_type="application/json")


def echo_app() -> FastAPI:
    """An app that gives the same answer without Serve."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    async def turn(request: Request) -> Response:
        return Response(await request.body(), media_type="application/json")

    app.add_api_route("/", turn, methods=["POST"])
    return app


def start() -> None:
    """Add the application to the Serve instance that runs."""
    echo = serve.deployment(Echo, name="Echo", max_ongoing_requests=64, ray_actor_options={"num_cpus": 0.1})
    ingress = serve.deployment(
        BareIngress,
        name="BareIngress",
        ray_actor_options={"num_cpus": 0.1, "runtime_env": {"env_vars": ingress_environment()}},
    )
    serve.run(ingress.bind(echo.bind()), name=_NAME, route_prefix=ROUTE)
