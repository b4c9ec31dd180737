"""The ingress as a Ray Serve deployment: HTTP in, replicas by handle."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

from services.config import ServiceConfig
from services.ingress.cluster import Cluster
from services.ingress.gateway import Gateway
from services.ingress.http import build_app
from services.ingress.limits import TurnLimiter
from services.ingress.metrics import IngressMetrics
from services.ingress.replicas import ReplicaClient
from services.ingress.tenants import TenantDirectory
from services.telemetry import Telemetry
from wisp_core.contracts import TenantSpec
from wisp_core.store.redis_store import RedisStore

POLICY_DEPLOYMENT = "PolicyService"


@serve.ingress()
class Ingress:
    """One ingress process. Everything shared between several of them is in Redis."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        config: dict[str, Any],
        redis_url: str,
        replicas: DeploymentHandle,
        *,
        policy_app: str,
        redis_password: str | None,
        admin_key: str,
        cache_salt_key: str,
        tenants: list[dict[str, Any]],
    ) -> None:
        """``config``: a ServiceConfig as JSON, ``tenants``: TenantSpecs as JSON; for the rest see build_ingress."""
        service = ServiceConfig.model_validate(config)
        self._telemetry = Telemetry()
        # Made here, in the event loop that uses it.
        self._store = RedisStore(redis_url, service.name, password=redis_password, timeout_s=service.redis.timeout_s)
        directory = TenantDirectory(self._store, [TenantSpec.model_validate(tenant) for tenant in tenants])
        limiter = TurnLimiter(self._store)
        self._gateway = Gateway(
            service,
            salt_secret=cache_salt_key,
            tenants=directory,
            store=self._store,
            limiter=limiter,
            replicas=ReplicaClient(replicas),
            metrics=IngressMetrics(self._telemetry),
        )
        cluster = Cluster(
            self._store,
            replicas,
            partial(serve.get_deployment_handle, POLICY_DEPLOYMENT, policy_app),
            self._telemetry,
            num_replicas=service.replica.count,
            stale_after_s=service.redis.stale_after_s,
        )
        self._app = build_app(self._gateway, cluster, service.http, admin_key)
        await directory.refresh()
        self._tasks = [
            asyncio.create_task(directory.refresh_forever(), name="wisp-tenants"),
            asyncio.create_task(limiter.renew_forever(), name="wisp-leases"),
        ]

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Serve's hook: the app of this process."""
        return self._app

    async def check_health(self) -> None:
        """Raises what ended a background task, so that Serve replaces this process."""
        for task in self._tasks:
            if task.done():
                error = None if task.cancelled() else task.exception()
                raise RuntimeError(f"{task.get_name()} has ended") from error

    async def __del__(self) -> None:
        """Serve calls and awaits this when the process stops."""
        if not hasattr(self, "_tasks"):
            return
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._gateway.drain()
        await self._store.close()
        self._telemetry.close()


def build_ingress(
    config: ServiceConfig,
    redis_url: str,
    replicas: serve.Application,
    *,
    policy_app: str,
    redis_password: str | None,
    admin_key: str,
    cache_salt_key: str,
    tenants: list[TenantSpec],
) -> serve.Application:
    """The deployment for ``config``: the application's root.

    Args:
        config: The service.
        redis_url: Where the store is, without a password.
        replicas: The replica deployment, with ``WispRouter`` as its router.
        policy_app: Name of the policy service's application, whose metrics are shown; it may come and go.
        redis_password: Overrides the URL's.
        admin_key: Opens ``/wisp/status``.
        cache_salt_key: Secret behind the salts of the prefix cache; the same in every ingress.
        tenants: Written to the store at start, and again whenever it has lost them.
    """
    deployment = serve.deployment(
        Ingress,
        name="Ingress",
        num_replicas=config.http.num_ingresses,
        max_ongoing_requests=4096,
        health_check_period_s=1.0,
        graceful_shutdown_timeout_s=config.replica.graceful_shutdown_timeout_s,
        ray_actor_options={"num_cpus": 0.1},
    )
    return deployment.bind(
        config.model_dump(mode="json"),
        redis_url,
        replicas,
        policy_app=policy_app,
        redis_password=redis_password,
        admin_key=admin_key,
        cache_salt_key=cache_salt_key,
        tenants=[tenant.model_dump(mode="json") for tenant in tenants],
    )
