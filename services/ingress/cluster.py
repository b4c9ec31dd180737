"""What the ingress shows of the whole service: readiness, status, metrics."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Generic, TypeVar

from ray.serve.exceptions import RayServeException

from services.ingress.replicas import ReplicaHandle, broadcast
from services.telemetry import Telemetry, merge_expositions
from wisp_core.contracts import ReplicaSnapshot
from wisp_core.store.interface import Store

STATUS_SESSIONS = 200
STATUS_RECORDS = 20
SHARED_S = 0.5
"""For how long those who ask for what needs no key get the same answer: they may be many, and it asks all replicas."""

AnswerT = TypeVar("AnswerT")


class _Shared(Generic[AnswerT]):
    """An answer that all share who ask for it within ``SHARED_S``."""

    def __init__(self, ask: Callable[[], Awaitable[AnswerT]]) -> None:
        self._ask = ask
        self._lock = asyncio.Lock()
        self._asked_s = -math.inf
        self._answer: AnswerT

    async def __call__(self) -> AnswerT:
        async with self._lock:
            if time.monotonic() - self._asked_s > SHARED_S:
                self._answer = await self._ask()
                self._asked_s = time.monotonic()
            return self._answer


class Cluster:
    """Read-only views over the store and the replicas."""

    def __init__(
        self,
        store: Store,
        replicas: Sequence[ReplicaHandle],
        find_policy: Callable[[], ReplicaHandle],
        telemetry: Telemetry,
        *,
        num_replicas: int,
        stale_after_s: float,
        service_started_s: float,
        find_ingresses: Callable[[], ReplicaHandle] | None = None,
    ) -> None:
        """``replicas``: the handle of each deployment of replicas, ``num_replicas`` in all.

        ``find_ingresses``: the handle of the ingresses, if there are others than this one.
        The store outlives the service: sessions without a turn since ``service_started_s``, Unix time, are not shown.
        """
        self._store = store
        self._replicas = replicas
        self._telemetry = telemetry
        self._find_policy = find_policy
        self._find_ingresses = find_ingresses
        self._num_replicas = num_replicas
        self._stale_after_s = stale_after_s
        self._service_started_s = service_started_s
        self.readiness = _Shared(self._readiness)
        """Whether every replica's engine serves, and what each one says. Asks the replicas themselves."""
        self.metrics = _Shared(self._metrics)
        """One Prometheus page of all ingresses, the policy service and all replicas."""

    async def _readiness(self) -> tuple[bool, dict[str, Any]]:
        answers = await self._ask_replicas("health")
        healthy = [answer for answer in answers if answer["is_healthy"]]
        details = {
            "replicas": sorted(answers, key=lambda answer: str(answer["replica_id"])),
            "healthy": len(healthy),
            "expected": self._num_replicas,
        }
        return len(healthy) >= self._num_replicas and len(healthy) == len(answers), details

    async def status(self) -> dict[str, Any]:
        """Replicas with their outcomes and decisions, and the sessions that were active last.

        Raises StoreUnavailableError.
        """
        snapshots = await self._store.list_snapshots()
        replicas = await asyncio.gather(*(self._replica_status(snapshot) for snapshot in snapshots))
        newest = await self._store.list_sessions(STATUS_SESSIONS)
        sessions = [one for one in newest if one.last_turn_at_s >= self._service_started_s]
        keys = [session.session_key for session in sessions]
        placements = await self._store.read_placements(keys)
        signatures = await self._store.read_signatures(keys)
        rows = []
        for session in sessions:
            placement, signature = placements.get(session.session_key), signatures.get(session.session_key)
            rows.append(
                {
                    **session.model_dump(mode="json"),
                    "home": None if placement is None else placement.replica_id,
                    "moves": 0 if placement is None else placement.version - 1,
                    "placement_reason": None if placement is None else placement.reason,
                    "expert_lookups": 0 if signature is None else signature.lookups,
                    "expert_hits": 0 if signature is None else signature.hits,
                }
            )
        return {"at_s": time.time(), "replicas": replicas, "sessions": rows}

    async def recording(self, num_turns: int) -> dict[str, Any]:
        """What replicas report now, the turns that ended last, newest first, and their sessions' signatures.

        Raises StoreUnavailableError.
        """
        snapshots = await self._store.list_snapshots()
        turns = await self._store.list_turns(num_turns)
        signatures = await self._store.read_signatures({turn.session_key for turn in turns})
        return {
            "snapshots": [one.model_dump(mode="json") for one in snapshots],
            "turns": [turn.model_dump(mode="json") for turn in turns],
            "signatures": [one.model_dump(mode="json") for one in signatures.values()],
        }

    async def _replica_status(self, snapshot: ReplicaSnapshot) -> dict[str, Any]:
        plan, outcomes, decisions = await asyncio.gather(
            self._store.read_plan(snapshot.replica_id),
            self._store.list_outcomes(snapshot.replica_id, STATUS_RECORDS),
            self._store.list_decisions(snapshot.replica_id, STATUS_RECORDS),
        )
        return {
            "snapshot": snapshot.model_dump(mode="json", exclude={"decode_misses_by_cap", "prefill_misses_by_cap"}),
            "is_stale": snapshot.is_stale(time.time(), self._stale_after_s),
            "plan": None if plan is None else plan.model_dump(mode="json"),
            "outcomes": [outcome.model_dump(mode="json") for outcome in outcomes],
            "decisions": [decision.model_dump(mode="json") for decision in decisions],
        }

    async def _ask_replicas(self, method_name: str) -> list[Any]:
        """What the replicas of every deployment answer."""
        answers = await asyncio.gather(*(broadcast(handle, method_name) for handle in self._replicas))
        return [answer for some in answers for answer in some]

    async def _metrics(self) -> str:
        replicas, policies, ingresses = await asyncio.gather(
            self._ask_replicas("scrape"), _scrape(self._find_policy), _scrape(self._find_ingresses)
        )
        pages = [*(ingresses or [("ingress", self._telemetry.scrape())]), *replicas, *policies]
        return await asyncio.to_thread(merge_expositions, pages)


async def _scrape(find: Callable[[], ReplicaHandle] | None) -> list[tuple[str, str]]:
    if find is None:
        return []
    try:
        # Asks Serve's controller, which blocks.
        handle = await asyncio.to_thread(find)
    except (RayServeException, KeyError):  # Stopped, or being changed: serving does not depend on it.
        return []
    return await broadcast(handle, "scrape")
