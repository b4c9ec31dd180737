"""What Serve takes by itself: behind its HTTP proxy an ingress that streams from one replica by handle, and no more.

``wisp bench overhead`` measures it, and the same answer without Serve. The ingress has the settings of ours.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import ray
from fastapi import FastAPI, Request, Response
from ray import serve

from services.environment import ingress_environment
from services.ingress.replicas import by_message
from services.ray_cluster import LOGGING

_NAME = "baseline"
_HOST = "127.0.0.1"


class Echo:
    """Answers with what it was sent."""

    async def http(self, *, body: bytes) -> AsyncGenerator[dict[str, Any], None]:
        """One item, as a turn of one token has."""
        yield {"status": 200, "headers": {}, "replica_id": "", "first": body}


@serve.ingress()
class BaselineIngress:
    """Passes a body on."""

    def __init__(self, replicas: Any) -> None:
        self._replicas = by_message(replicas)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Serve's hook: the app of this process."""
        app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
        app.add_api_route("/", self._turn, methods=["POST"])
        return app

    async def _turn(self, request: Request) -> Response:
        stream = self._replicas.options(stream=True, session_id="one").http.remote(body=await request.body())
        items = [item async for item in stream]
        return Response(items[0]["first"], media_type="application/json")


def echo_app() -> FastAPI:
    """An app that gives the same answer without Serve."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    async def turn(request: Request) -> Response:
        return Response(await request.body(), media_type="application/json")

    app.add_api_route("/", turn, methods=["POST"])
    return app


@contextlib.contextmanager
def running(port: int) -> Iterator[str]:
    """The application on a Ray of its own; gives its URL."""
    ray.init(
        address="local",
        include_dashboard=False,
        object_store_memory=100 << 20,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    try:
        serve.start(http_options={"host": _HOST, "port": port}, logging_config=LOGGING)
        _deploy()
        yield f"http://{_HOST}:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()


def _deploy() -> None:
    echo = serve.deployment(Echo, name="Echo", max_ongoing_requests=64, ray_actor_options={"num_cpus": 0.1})
    ingress = serve.deployment(
        BaselineIngress,
        name="BaselineIngress",
        ray_actor_options={"num_cpus": 0.1, "runtime_env": {"env_vars": ingress_environment()}},
    )
    serve.run(ingress.bind(echo.bind()), name=_NAME, logging_config=LOGGING)
