"""What ingress and router add to a turn, against the replica's own OpenAI app behind a plain HTTP server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import uvicorn

from loadtests.placement import serve_baseline
from loadtests.rows import Row
from loadtests.service.running import service_file, tenant
from services.app import Service
from services.config import ServiceConfig
from services.environment import replica_environment, set_in_this_process
from services.free_port import free_port
from services.ingress.sessions import SESSION_HEADER
from services.preflight import checked_start
from services.replica.deployment import wisp_settings
from services.secret_files import read_or_create
from wisp_core.tiny_model.tiny import TinyModelConfig, write_tiny_model

Call = Callable[[], Awaitable[Any]]

SERVED_NAME = "tiny-moe"
_WARM_UP = 50
_BLOCK = 50
"""Calls of one kind in a row."""
_BODY = {"model": SERVED_NAME, "prompt": " a", "max_tokens": 1, "temperature": 0}


@dataclass(frozen=True, kw_only=True)
class OverheadConfig:
    """An idle service with one replica, asked for one token at a time."""

    name: str = "overhead"
    requests: int = 1000
    num_replicas: int = 1
    vram_budget_bytes: int = 70 << 20
    activation_bytes: int = 8 << 20
    max_model_len: int = 1024


def measure(config: OverheadConfig, directory: Path, say: Callable[[str], None]) -> list[Row]:
    """Rows of latencies: ``direct``, ``service``, and ``serve``, an application of Serve's parts alone.

    ``echo`` is the last one's answer without Serve: like ``direct`` by plain HTTP, from a server in this process.
    """
    write_tiny_model(directory / "model", TinyModelConfig())
    of_service = _service_config(config, directory)
    set_in_this_process(replica_environment(of_service))
    say("direct: the engine's app behind uvicorn")
    rows = asyncio.run(_direct(config, of_service))
    say("through the service")
    with checked_start(of_service), Service(of_service) as service:
        rows += asyncio.run(_through(config, service))
    say("through nothing but Serve")
    with serve_baseline.running(free_port()) as url:
        rows += asyncio.run(_through_serve(config, url))
    return rows


def summarize(rows: Sequence[Row]) -> Row:
    """Medians in milliseconds; Serve's own part is what an application takes that only passes bodies on.

    As with the service, what the same answer takes by plain HTTP is no part of it.
    """
    medians = {row["path"]: row["p50_ms"] for row in rows}
    serve_ms = medians["serve"] - medians["echo"]
    overhead_ms = medians["service"] - medians["direct"]
    limit_ms = max(3.0, serve_ms + 1.0)
    return {
        "overhead_ms": round(overhead_ms, 3),
        "overhead_stream_ms": round(medians["service_stream"] - medians["direct_stream"], 3),
        "serve_ms": round(serve_ms, 3),
        "limit_ms": round(limit_ms, 3),
        "is_within_limit": overhead_ms <= limit_ms,
    }


async def _direct(config: OverheadConfig, of_service: ServiceConfig) -> list[Row]:
    # Here, not at the top: vLLM takes seconds.
    from wisp_core.engine.engine import EngineRequest, WispEngine

    replica = of_service.replica
    request = EngineRequest(
        model=of_service.model.path,
        served_name=SERVED_NAME,
        engine_args=replica.engine,
        settings=wisp_settings(replica),
        replica_id="direct",
    )
    engine = await WispEngine.start(request)
    try:
        async with (
            _listening(engine.app) as url,
            httpx.AsyncClient(base_url=url, timeout=30, trust_env=False) as client,
        ):
            rows = await _timed(config.requests, _turns(client, "direct"))
    finally:
        await engine.shutdown()
    async with (
        _listening(serve_baseline.echo_app()) as url,
        httpx.AsyncClient(base_url=url, timeout=30, trust_env=False) as client,
    ):
        return [*rows, *await _timed(config.requests, {"echo": lambda: _ask(client)})]


@asynccontextmanager
async def _listening(app: Any) -> AsyncIterator[str]:
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error", lifespan="off", interface="asgi3"))
    serving = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110  # uvicorn tells it by this flag only
        await asyncio.sleep(0.05)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        await serving


async def _through(config: OverheadConfig, service: Service) -> list[Row]:
    key_file = service.config.tenants[0].key_file
    assert key_file is not None, "the bench writes its own tenant"
    headers = {"authorization": f"Bearer {read_or_create(key_file)}", SESSION_HEADER: "overhead"}
    async with httpx.AsyncClient(base_url=service.url, headers=headers, timeout=30, trust_env=False) as client:
        return await _timed(config.requests, _turns(client, "service"))


async def _through_serve(config: OverheadConfig, url: str) -> list[Row]:
    async with httpx.AsyncClient(base_url=url, timeout=30, trust_env=False) as client:
        return await _timed(config.requests, {"serve": lambda: _ask(client)})


async def _ask(client: httpx.AsyncClient) -> None:
    (await client.post("/", json=_BODY)).raise_for_status()


def _turns(client: httpx.AsyncClient, path: str) -> dict[str, Call]:
    """A turn whole, and as a stream."""

    async def ask(fields: dict[str, Any]) -> None:
        (await client.post("/v1/completions", json=fields)).raise_for_status()

    return {path: lambda: ask(_BODY), f"{path}_stream": lambda: ask(_BODY | {"stream": True})}


async def _timed(requests: int, calls: Mapping[str, Call]) -> list[Row]:
    """A row for each kind of call, one call after the other, so that nothing waits for anything else.

    The kinds take turns, some calls at a time: whatever drifts on this machine drifts for all of them, and what one
    leaves to be done after its answer is its own.
    """
    seconds: dict[str, list[float]] = {path: [] for path in calls}
    for call in calls.values():
        for _ in range(_WARM_UP):
            await call()
    while any(len(taken) < requests for taken in seconds.values()):
        for path, call in calls.items():
            for _ in range(min(_BLOCK, requests - len(seconds[path]))):
                began_s = time.perf_counter()
                await call()
                seconds[path].append(time.perf_counter() - began_s)
    return [
        {"path": path, "requests": requests}
        | {f"p{p}_ms": round(float(np.percentile(taken, p)) * 1000, 3) for p in (5, 50, 95, 99)}
        for path, taken in seconds.items()
    ]


def _service_config(config: OverheadConfig, directory: Path) -> ServiceConfig:
    replica = {
        "count": config.num_replicas,
        "vram_budget_bytes": config.vram_budget_bytes,
        "activation_bytes": config.activation_bytes,
        "graceful_shutdown_timeout_s": 10,
        "engine": {"max_model_len": config.max_model_len, "max_num_seqs": 8, "block_size": 32},
    }
    file = service_file("wisp-overhead", directory, SERVED_NAME, replica, [tenant(directory, "acme")])
    return ServiceConfig.model_validate(file)
