"""WiSP's router on Ray Serve's inner deployment of replicas.

Serve pickles this module by value, so it holds no state: each process that has a handle owns one ``WispRouter``.
Two rules of Serve shape it: an exception in ``choose_replicas`` hangs the request for ever, so none leaves it; an
answer without ``should_backoff`` spins, so that is always set.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from services.ingress.placement import PlacementDirectory, RouterConfig, Turn
from wisp_core.routing.hashing import hash_order
from wisp_core.store.redis_store import RedisStore

logger = logging.getLogger(__name__)

SUSPECT_S = 5.0
"""How long a replica that did not answer is tried last."""
MAX_REMEMBERED_TURNS = 10_000
"""Turns whose attempts are remembered, so that a repeated one goes elsewhere."""


def open_directory(config: RouterConfig) -> PlacementDirectory:
    """The directory of this process, on Redis. Call in the event loop that will use it."""
    password = None if config.redis_password_file is None else config.redis_password_file.read_text().strip()
    store = RedisStore(config.redis_url, config.service, password=password, timeout_s=config.timeout_s)
    return PlacementDirectory(store, config)


class WispRouter(RequestRouter):  # type: ignore[misc]  # Ray is not typed here
    """Sends each turn to the replica that ``wisp_core.routing`` ranks first; the others are spill-over, in order.

    Keyword arguments of the handle call that it reads: the fields of ``services.ingress.placement.Turn``.
    """

    def initialize_state(self, **kwargs: Any) -> None:
        """Serve's hook: ``kwargs`` are RouterConfig's fields. Raises ValidationError if they are not."""
        self._config = RouterConfig.model_validate(kwargs)
        self._directory: PlacementDirectory | None = None
        self._refresher: asyncio.Task[None] | None = None
        self._suspects: dict[str, float] = {}
        self._began_s: dict[str, float] = {}
        self._tried: OrderedDict[str, list[str]] = OrderedDict()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Serve's hook: ranks of replicas, tried in order. Never raises."""
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        by_id = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        if not by_id:
            return []
        try:
            return await self._rank(Turn.of(pending_request.kwargs), by_id)
        except Exception:  # an exception here would hang the request for ever
            logger.exception("routing failed: falling back to consistent hash")
            session_key = pending_request.metadata.session_id or pending_request.metadata.internal_request_id
            return [[by_id[replica_id]] for replica_id in hash_order(session_key, by_id)]

    async def _rank(self, turn: Turn, by_id: dict[str, RunningReplica]) -> list[list[RunningReplica]]:
        directory = await self._ready_directory()
        suspects = {replica_id for replica_id, until_s in self._suspects.items() if until_s > time.monotonic()}
        excluded = suspects.union(self._tried.get(turn.turn_id, ()))
        decision = await directory.rank(turn, list(by_id), frozenset(excluded))
        if turn.pin in by_id:
            return [[by_id[turn.pin]]]
        order = [replica_id for replica_id in decision.ranking if replica_id not in excluded] or decision.ranking
        home, *others = [by_id[replica_id] for replica_id in order]
        return [[home], others] if others else [[home]]

    async def _ready_directory(self) -> PlacementDirectory:
        if self._directory is None:
            self._directory = open_directory(self._config)
            self._refresher = asyncio.get_running_loop().create_task(self._directory.refresh_forever())
        return self._directory

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Serve's hook: the replicas that exist now."""
        super().update_replicas(replicas)
        present = {replica.replica_id.unique_id for replica in replicas}
        self._suspects = {replica_id: s for replica_id, s in self._suspects.items() if replica_id in present}
        if self._directory is not None:
            self._directory.keep_replicas(present)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Serve's hook: drops the replica at once."""
        super().on_replica_actor_died(replica_id)
        self._suspects[replica_id.unique_id] = time.monotonic() + 10 * SUSPECT_S

    def on_replica_actor_unavailable(self, replica_id: ReplicaID) -> None:
        """Serve's hook: the replica did not answer a call."""
        super().on_replica_actor_unavailable(replica_id)
        self._suspects[replica_id.unique_id] = time.monotonic() + SUSPECT_S

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Serve's hook: a replica has accepted the request."""
        self._began_s[pending_request.metadata.internal_request_id] = time.monotonic()
        turn_id = pending_request.kwargs.get("turn_id", "")
        if turn_id:
            self._tried.setdefault(turn_id, []).append(replica_id.unique_id)
            if len(self._tried) > MAX_REMEMBERED_TURNS:
                self._tried.popitem(last=False)
        if self._directory is not None:
            self._directory.begin_turn(replica_id.unique_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Serve's hook: an accepted request has ended, in whatever way."""
        began_s = self._began_s.pop(internal_request_id, None)
        if began_s is not None and self._directory is not None:
            self._directory.end_turn(replica_id.unique_id, time.monotonic() - began_s)
