"""The ingress as a Ray Serve deployment: HTTP in, on the public port itself, replicas by handle."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle

from services.background import BackgroundTasks
from services.config import ServiceConfig
from services.environment import ingress_environment
from services.ingress.admin import TenantAdmin
from services.ingress.cluster import Cluster
from services.ingress.gateway import Gateway
from services.ingress.http import build_app
from services.ingress.limits import TurnLimiter
from services.ingress.listener import take_listener
from services.ingress.metrics import IngressMetrics
from services.ingress.replicas import ReplicaClient, by_message
from services.ingress.server import PublicServer
from services.ingress.tenants import TenantDirectory
from services.logs import log_to_stderr
from services.secret_files import ServiceSecrets, tenant_specs
from services.store_address import StoreAddress
from services.telemetry import Telemetry

DEPLOYMENT = "Ingress"
POLICY_DEPLOYMENT = "PolicyService"
OPERATOR_TIMEOUT_S = 2.0
"""What an operator asks for may wait longer for the store than a turn does."""


class Ingress:
    """One ingress process. Everything shared between several of them is in Redis.

    It serves HTTP by itself: Serve's proxy would carry each turn through one more process, there and back, and knows no
    back-pressure.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        config: dict[str, Any],
        store: dict[str, Any],
        replicas: DeploymentHandle,
        dedicated: dict[str, DeploymentHandle],
        *,
        policy_app: str,
        service_began_s: float,
        service_started_s: float,
    ) -> None:
        """``config``: a ServiceConfig as JSON, ``store``: a StoreAddress as JSON; for the rest see build_ingress."""
        log_to_stderr()
        service, address = ServiceConfig.model_validate(config), StoreAddress.model_validate(store)
        secrets = ServiceSecrets.load(service.state_dir)
        self._telemetry = Telemetry()
        # Made here, in the event loop that uses them.
        self._store, self._operator_store = address.open(), address.open(OPERATOR_TIMEOUT_S)
        directory = TenantDirectory(self._store, partial(tenant_specs, service), service_began_s=service_began_s)
        limiter, metrics = TurnLimiter(self._store), IngressMetrics(self._telemetry)

        def client(handle: DeploymentHandle) -> ReplicaClient:
            return ReplicaClient(by_message(handle), metrics.count_retry)

        self._gateway = Gateway(
            service,
            salt_secret=secrets.cache_salt_key,
            tenants=directory,
            store=self._store,
            limiter=limiter,
            replicas=client(replicas),
            dedicated={tenant_id: client(handle) for tenant_id, handle in dedicated.items()},
            metrics=metrics,
        )
        cluster = Cluster(
            self._operator_store,
            [replicas, *dedicated.values()],
            partial(serve.get_deployment_handle, POLICY_DEPLOYMENT, policy_app),
            self._telemetry,
            num_replicas=service.num_replicas,
            stale_after_s=service.redis.stale_after_s,
            service_started_s=service_started_s,
            find_ingresses=_find_ingresses if service.http.num_ingresses > 1 else None,
        )
        key_files = {tenant.tenant_id: tenant.key_file for tenant in service.tenants}
        admin = TenantAdmin(self._operator_store, directory, key_files)
        keys = {"admin_key": secrets.admin_key, "metrics_key": secrets.metrics_key}
        app = build_app(self._gateway, cluster, admin, service.http, **keys)
        await directory.refresh()
        taken = take_listener(service.state_dir)
        self._server = PublicServer(app, taken, max_header_bytes=service.http.max_header_bytes)
        self._tasks = BackgroundTasks(
            http=self._server.run(), tenants=directory.refresh_forever(), leases=limiter.renew_forever()
        )

    async def scrape(self) -> tuple[str, str]:
        """This process's name and its metrics in Prometheus text format."""
        return f"ingress-{serve.get_replica_context().replica_id.unique_id}", self._telemetry.scrape()

    async def check_health(self) -> None:
        """Raises what ended a background task, so that Serve replaces this process."""
        self._tasks.check()

    async def __del__(self) -> None:
        """Serve calls and awaits this when the process stops."""
        if not hasattr(self, "_tasks"):
            return
        await self._server.stop()
        await self._tasks.stop()
        await self._gateway.drain()
        await self._store.close()
        await self._operator_store.close()
        self._telemetry.close()


def _find_ingresses() -> DeploymentHandle:
    return serve.get_deployment_handle(DEPLOYMENT, serve.get_replica_context().app_name)


def build_ingress(
    config: ServiceConfig,
    store: StoreAddress,
    replicas: serve.Application,
    dedicated: Mapping[str, serve.Application],
    *,
    host: str | None,
    policy_app: str,
    service_began_s: float,
    service_started_s: float,
) -> serve.Application:
    """The deployment for ``config``: the application's root. Secrets are read from ``config.state_dir``.

    Args:
        config: The service.
        store: Where the store is.
        replicas: The replica deployment, with ``WispRouter`` as its router.
        dedicated: By tenant id, the deployment of a tenant's own replicas.
        host: Ray's resource of the host where the public port is, if there may be others.
        policy_app: Name of the policy service's application, whose metrics are shown; it may come and go.
        service_began_s: Unix time, of the start or the last upgrade. The file's tenants replace what the store knows
            from before.
        service_started_s: Unix time of the start.
    """
    deployment = serve.deployment(
        Ingress,
        name=DEPLOYMENT,
        num_replicas=config.http.num_ingresses,
        # The new ones serve before an old one stops, which it does when its last stream ends: minutes, perhaps.
        max_surge_percent=100,
        health_check_period_s=1.0,
        graceful_shutdown_timeout_s=config.replica.graceful_shutdown_timeout_s,
        ray_actor_options={
            "num_cpus": 0.1,
            "resources": {} if host is None else {host: 0.001},
            "runtime_env": {"env_vars": ingress_environment()},
        },
    )
    return deployment.bind(
        config.model_dump(mode="json"),
        store.model_dump(mode="json"),
        replicas,
        dict(dedicated),
        policy_app=policy_app,
        service_began_s=service_began_s,
        service_started_s=service_started_s,
    )
