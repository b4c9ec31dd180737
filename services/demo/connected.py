"""What everything needs that drives a service from beside it: its tenants' clients, and all replicas' first reports."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from services.config import ServiceConfig
from services.secret_files import read_or_create
from wisp_core.contracts import ReplicaSnapshot
from wisp_core.errors import ConfigurationError
from wisp_core.store.interface import Store

_SETTLE_S = 60.0


@asynccontextmanager
async def tenant_clients(
    config: ServiceConfig, url: str, *, timeout_s: float = 300.0
) -> AsyncIterator[dict[str, AsyncOpenAI]]:
    """A client for each tenant of the file, which tries nothing twice, so that a failure is seen.

    Raises ConfigurationError for a tenant whose key is in no file.
    """
    async with AsyncExitStack() as stack:
        clients = {}
        for tenant in config.tenants:
            if tenant.key_file is None:
                raise ConfigurationError(f"tenants.{tenant.tenant_id}.key_file: without it there is no key to send")
            key = read_or_create(tenant.key_file)
            direct = DefaultAsyncHttpxClient(trust_env=False)  # not by a proxy that the environment names
            client = AsyncOpenAI(
                base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=timeout_s, http_client=direct
            )
            clients[tenant.tenant_id] = await stack.enter_async_context(client)
        yield clients


async def first_snapshots(store: Store, num_replicas: int, *, cap: int | None = None) -> list[ReplicaSnapshot]:
    """Snapshots once all replicas have reported, and have ``cap`` slots if that is given. Raises TimeoutError."""
    deadline_s = time.monotonic() + _SETTLE_S
    while True:
        snapshots = await store.list_snapshots()
        if len(snapshots) >= num_replicas and all(cap in (None, one.split.cap) for one in snapshots):
            return snapshots
        if time.monotonic() > deadline_s:
            found = [one.split.cap for one in snapshots]
            raise TimeoutError(f"cap {cap} of {num_replicas} replicas was not seen within {_SETTLE_S:g} s: {found}")
        await asyncio.sleep(0.2)
