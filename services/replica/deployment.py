"""The replica as a Ray Serve deployment: one paged vLLM engine, its OpenAI API by handle, and the tasks around it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from ray import serve
from ray.serve._private.constants import SERVE_LOGGER_NAME
from ray.serve.config import RequestRouterConfig

from services.background import BackgroundTasks
from services.config import ModelSettings, ReplicaSettings, ServiceConfig
from services.environment import replica_environment
from services.logs import log_to_stderr
from services.replica.asgi import AsgiRequest, ResponseHead
from services.replica.autoscaling import autoscaling_config, work_of
from services.replica.metrics import ReplicaMetrics
from services.replica.reporter import Reporter
from services.replica.resizing import PlanFollower
from services.replica.state import ReplicaState
from services.replica.supervisor import Supervisor
from services.store_address import StoreAddress
from wisp_core.errors import EngineUnavailableError
from wisp_core.settings import EngineSettings, WispSettings

logger = logging.getLogger(__name__)

CHANGED_IN_PLACE = {"count", "autoscaling", "max_ongoing_turns", "graceful_shutdown_timeout_s"}
"""Settings that Serve applies to replicas that run."""


def without_traceback(record: logging.LogRecord) -> bool:
    """A filter of Serve's log: a turn whose engine ended is one line there, for its caller tries elsewhere."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, EngineUnavailableError):
        record.msg, record.args, record.exc_info = f"{record.getMessage()} {error}", (), None
    return True


class Replica:
    """One engine and its reporter, plan follower and supervisor, all in one event loop."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, model: dict[str, Any], replica: dict[str, Any], store: dict[str, Any]
    ) -> None:
        """Start the engine, 20 to 60 s. Raises ConfigurationError.

        ``model`` are ModelSettings as JSON, ``replica`` ReplicaSettings without those of ``CHANGED_IN_PLACE``,
        ``store`` a StoreAddress.
        """
        # Here, not at the top: the driver and the router import this module, and vLLM takes seconds.
        from wisp_core.engine.engine import EngineRequest, WispEngine

        log_to_stderr()
        logging.getLogger(SERVE_LOGGER_NAME).addFilter(without_traceback)
        served, settings = ModelSettings.model_validate(model), ReplicaSettings.model_validate(replica)
        replica_id = serve.get_replica_context().replica_tag
        request = EngineRequest(
            model=served.path,
            served_name=served.name,
            engine_args=settings.engine,
            settings=wisp_settings(settings),
            replica_id=replica_id,
        )
        engine = await WispEngine.start(request)
        self._store = StoreAddress.model_validate(store).open()
        self._state = ReplicaState(replica_id=replica_id, engine=engine, store=self._store, metrics=ReplicaMetrics())
        reporter = Reporter(self._state, settings.snapshot_period_s)
        self._tasks = BackgroundTasks(
            reporter=reporter.run(),
            plan_follower=PlanFollower(self._state).run(),
            supervisor=Supervisor(self._state).run(),
        )

    async def http(
        self,
        *,
        path: str,
        body: bytes,
        headers: Mapping[str, str],
        session_key: str = "",
        prompt_key: str = "",
        **routing: Any,
    ) -> AsyncGenerator[dict[str, Any] | bytes, None]:
        """Answer one OpenAI POST: ``{"status", "headers", "replica_id", "first"}``, then more pieces as they come.

        ``headers``: names in lower case. ``first`` is the body's first piece: each item by handle costs a millisecond.

        ``routing`` is for the router only. The status is 503 while the engine is being started again. Raises
        EngineUnavailableError when it ends meanwhile; if nothing was yielded yet, the caller may try elsewhere.
        """
        if not self._state.can_serve:
            # Not raised: Serve would log a traceback of each turn that asks meanwhile.
            yield self._head(ResponseHead(503, {}), b"")
            return
        ended = self._state.engine_ended
        if session_key and prompt_key:
            self._state.prompt_groups.note(session_key, prompt_key)
        request = AsgiRequest(self._state.engine.app, path=path, headers=headers, body=body)
        head: ResponseHead | None = None
        is_cut = has_begun = False
        async with contextlib.aclosing(request.stream(until=ended)) as pieces:
            async for piece in pieces:
                if isinstance(piece, ResponseHead):
                    head = piece
                    # Comes together with the first piece, which may be vLLM's words for a dead engine.
                    if head.status >= 500 and self._state.engine.is_dead:
                        break
                    continue
                # vLLM's words for a dead engine are not the rest of an answer: who asked is told that it was lost.
                if is_cut := self._state.engine.is_dead:
                    break
                if not has_begun:
                    assert head is not None, "an ASGI app sends its head first"
                    has_begun = True
                    yield self._head(head, piece)
                    continue
                yield piece
        if is_cut or ended.is_set() or (not has_begun and self._state.engine.is_dead):
            self._state.metrics.count_turn(0)
            raise EngineUnavailableError("the engine ended during this turn")
        if not has_begun and head is not None:
            yield self._head(head, b"")
        self._state.metrics.count_turn(head.status if head else 0)

    def _head(self, head: ResponseHead, first: bytes) -> dict[str, Any]:
        return {"status": head.status, "headers": head.headers, "replica_id": self._state.replica_id, "first": first}

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Serve's hook, read by `WorkingSetAutoscaling`; nothing before the first snapshot."""
        return {} if self._state.last_snapshot is None else work_of(self._state.last_snapshot)

    async def scrape(self) -> tuple[str, str]:
        """The replica's id, and its own and vLLM's metrics in Prometheus text format."""
        return self._state.replica_id, self._state.metrics.scrape()

    async def health(self) -> dict[str, Any]:
        """``replica_id``, and whether its engine serves (``is_healthy``)."""
        return {"replica_id": self._state.replica_id, "is_healthy": self._state.can_serve}

    async def pids(self) -> dict[str, Any]:
        """``replica_id``, this process's ``pid`` and the engine's ``engine_pids``."""
        return {
            "replica_id": self._state.replica_id,
            "pid": os.getpid(),
            "engine_pids": self._state.engine.engine_pids(),
        }

    async def check_integrity(self) -> str:
        """The replica's id, if free + used = total everywhere. Raises IntegrityError."""
        await self._state.engine.check_integrity()
        return self._state.replica_id

    async def check_health(self) -> None:
        """Raises what ended one of the tasks, so that Serve replaces this process; a restarting engine is no reason."""
        self._tasks.check()

    async def __del__(self) -> None:
        """Serve calls and awaits this when the replica stops."""
        if not hasattr(self, "_tasks"):
            return
        await self._tasks.stop()
        await self._state.engine.shutdown()
        await self._store.close()
        self._state.metrics.close()


def wisp_settings(replica: ReplicaSettings) -> WispSettings:
    """What the engine needs of a replica's settings."""
    shared = replica.model_dump(include=set(EngineSettings.model_fields))
    return WispSettings(cap=replica.initial_cap, vram_budget_bytes=replica.vram_budget_bytes, **shared)


def build_replica(
    config: ServiceConfig,
    store: StoreAddress,
    *,
    name: str,
    count: int,
    code: str,
    request_router_class: str,
    request_router_kwargs: dict[str, Any],
) -> serve.Application:
    """A deployment of ``count`` replicas that run ``code``, a ``code_version``, to be bound into the application.

    Deployed again with the same code, replicas that run go on if nothing has changed but what is ``CHANGED_IN_PLACE``,
    routing, or what does not concern them; otherwise Serve replaces them one at a time, each after its turns.
    """
    arguments = (
        config.model.model_dump(mode="json"),
        config.replica.model_dump(mode="json", exclude=CHANGED_IN_PLACE),
        store.model_dump(mode="json"),
    )
    replica, scaling = config.replica, config.replica.autoscaling
    deployment = serve.deployment(
        Replica,
        name=name,
        **({"num_replicas": count} if scaling is None else {"autoscaling_config": autoscaling_config(count, scaling)}),
        max_ongoing_requests=replica.max_ongoing_turns,
        # Counts at the first start only, where a retry fails for the same reason: a setting.
        max_constructor_retry_count=1,
        health_check_period_s=1.0,
        health_check_timeout_s=60.0,
        graceful_shutdown_timeout_s=replica.graceful_shutdown_timeout_s,
        graceful_shutdown_wait_loop_s=0.5,
        request_router_config=RequestRouterConfig(
            request_router_class=request_router_class, request_router_kwargs=request_router_kwargs
        ),
        ray_actor_options={
            "num_cpus": replica.num_cpus,
            "num_gpus": replica.num_gpus,
            "runtime_env": {"env_vars": replica_environment(config)},
        },
    )
    # Serve gives every deployment a version of its own, so that each `serve.run` would replace every replica.
    return deployment.options(version=version_of(code, *arguments), _internal=True).bind(*arguments)


def version_of(code: str, *arguments: dict[str, Any]) -> str:
    """Equal for replicas that need not be replaced by one another: same code, same arguments."""
    return hashlib.sha256(json.dumps([code, arguments], sort_keys=True).encode()).hexdigest()[:16]
