"""The policy service as a Ray Serve deployment: one replica, which runs the control loop as a task."""

from __future__ import annotations

from typing import Any

from ray import serve

from services.background import BackgroundTasks
from services.config import PolicySettings, ServiceConfig
from services.logs import log_to_stderr
from services.policy.loop import PolicyLoop
from services.policy.metrics import PolicyMetrics
from services.policy.runner import PolicyRunner
from services.store_address import StoreAddress
from wisp_core.contracts import Barrier
from wisp_core.store.interface import Store


class PolicyService:
    """Owns the loop, the policy's process and the metrics. Policy settings come by ``reconfigure``, also later."""

    def __init__(
        self,
        store: dict[str, Any],
        *,
        stale_after_s: float = 10.0,
        barrier: str = Barrier.BALLOON.value,
    ) -> None:
        """Nothing runs before ``reconfigure``. ``store``: a StoreAddress as JSON; the others as in ``PolicyLoop``."""
        log_to_stderr()
        self._connect = StoreAddress.model_validate(store).open
        self._stale_after_s = stale_after_s
        self._barrier = Barrier(barrier)
        self._metrics = PolicyMetrics()
        self._store: Store | None = None
        self._runner: PolicyRunner | None = None
        self._tasks: BackgroundTasks | None = None

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Run the policy of ``user_config``, the fields of PolicySettings, from now on.

        Raises ConfigurationError when it cannot be loaded; what ran before has ended then.
        """
        settings = PolicySettings.model_validate(user_config)
        await self._stop()
        # Made here, not in the constructor: the client belongs to the event loop that uses it.
        self._store = self._connect()
        self._runner = PolicyRunner(settings, self._metrics)
        await self._runner.start()
        loop = PolicyLoop(
            self._store,
            self._runner,
            self._metrics,
            settings,
            stale_after_s=self._stale_after_s,
            barrier=self._barrier,
        )
        self._tasks = BackgroundTasks(policy=loop.run())

    async def check_health(self) -> None:
        """Raises what ended the loop, so that Serve replaces this replica."""
        if self._tasks is not None:
            self._tasks.check()

    async def scrape(self) -> tuple[str, str]:
        """The service's name on the page of all, and its metrics in Prometheus text format."""
        return "policy", self._metrics.scrape()

    async def __del__(self) -> None:
        """Serve calls and awaits this when the replica stops."""
        await self._stop()
        self._metrics.close()

    async def _stop(self) -> None:
        if self._tasks is not None:
            await self._tasks.stop()
            self._tasks = None
        if self._runner is not None:
            await self._runner.close()
            self._runner = None
        if self._store is not None:
            await self._store.close()
            self._store = None


def build_policy_service(config: ServiceConfig, store: StoreAddress) -> serve.Application:
    """The deployment for ``config``, to be bound into the service's application."""
    deployment = serve.deployment(
        PolicyService,
        name="PolicyService",
        num_replicas=1,
        ray_actor_options={"num_cpus": 0.1},
        user_config=config.policy.model_dump(mode="json"),
        health_check_period_s=1.0,
        graceful_shutdown_timeout_s=10.0,
    )
    return deployment.bind(
        store.model_dump(mode="json"),
        stale_after_s=config.redis.stale_after_s,
        barrier=config.replica.barrier.value,
    )
