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

from services.ingress.placement import PlacementDirectory, Turn
from services.ingress.routers import RouterConfig
from wisp_core.routing.hashing import hash_order

logger = logging.getLogger(__name__)

SUSPECT_S = 5.0
"""How long a replica that did not answer is tried last."""
MAX_REMEMBERED_TURNS = 10_000
"""Turns whose attempts are remembered, so that a repeated one goes elsewhere."""
DECISION_AGE_S = 2.0
"""A turn that finds every replica full asks again after each pause of Serve's; its order is made anew this often."""


class WispRouter(RequestRouter):  # type: ignore[misc]  # Ray is not typed here
    """Sends each turn to the replica that ``wisp_core.routing`` ranks first; the others are spill-over, in order.

    Keyword arguments of the handle call that it reads: the fields of ``services.ingress.placement.Turn``.
    """

    def initialize_state(self, **kwargs: Any) -> None:
        """Serve's hook: ``kwargs`` are RouterConfig's fields. Raises ValidationError if they are not."""
        self._config = RouterConfig.model_validate(kwargs)
        self._directory: PlacementDirectory | None = None
        self._refresher: asyncio.Task[None] | None = None
        self._by_id: dict[str, RunningReplica] = {}
        self._suspects: dict[str, float] = {}
        self._began_s: dict[str, float] = {}
        self._tried: OrderedDict[str, list[str]] = OrderedDict()
        self._orders: OrderedDict[str, tuple[float, tuple[str, ...]]] = OrderedDict()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Serve's hook: ranks of replicas, tried in order. Never raises."""
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        if not candidate_replicas:
            return []
        request_id = pending_request.metadata.internal_request_id
        try:
            made_at_s, order = self._orders.get(request_id, (0.0, ()))
            is_repeated = time.monotonic() - made_at_s < DECISION_AGE_S
            if not is_repeated:
                order = await self._order(Turn.of(pending_request.kwargs), request_id)
            return self._ranks(order, candidate_replicas, has_waited=is_repeated)
        except Exception:  # an exception here would hang the request for ever
            logger.exception("routing failed: falling back to consistent hash")
            by_id = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
            session_key = pending_request.metadata.session_id or request_id
            return [[by_id[replica_id]] for replica_id in hash_order(session_key, by_id)[:8]]

    async def _order(self, turn: Turn, request_id: str) -> tuple[str, ...]:
        """Replicas for a turn, the best first."""
        directory = await self._ready_directory()
        suspects = {replica_id for replica_id, until_s in self._suspects.items() if until_s > time.monotonic()}
        tried = self._tried.get(turn.turn_id)
        if tried or request_id in self._orders:
            turn = turn.without_home()  # It was read before the first attempt.
        excluded = suspects.union(tried or ())
        ranking = (await directory.rank(turn, frozenset(excluded))).ranking
        order = tuple(replica_id for replica_id in ranking if replica_id not in excluded) or ranking
        self._orders[request_id] = (time.monotonic(), order)
        if len(self._orders) > MAX_REMEMBERED_TURNS:
            self._orders.popitem(last=False)
        return order

    def _ranks(
        self, order: tuple[str, ...], candidates: list[RunningReplica], *, has_waited: bool
    ) -> list[list[RunningReplica]]:
        """The best replica alone, then the next ones; all others only for a turn that has found these full before.

        Serve asks each replica of a rank whose queue it does not know for its length, so that ranks stay short.
        """
        known = [self._by_id[replica_id] for replica_id in order if replica_id in self._by_id]
        if not known:
            return [candidates]
        ranks = [known[:1], known[1:]]
        if has_waited and len(known) > 1:
            ranks.append([replica for replica in candidates if replica not in known])
        return [rank for rank in ranks if rank]

    async def _ready_directory(self) -> PlacementDirectory:
        if self._directory is None:
            # Here, in the event loop that uses the store.
            self._directory = PlacementDirectory(self._config.store.open(), self._config)
            self._directory.keep_replicas(self._by_id)
            self._refresher = asyncio.get_running_loop().create_task(self._directory.refresh_forever())
        return self._directory

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Serve's hook: the replicas that exist now."""
        super().update_replicas(replicas)
        self._by_id = {replica.replica_id.unique_id: replica for replica in replicas}
        self._suspects = {replica_id: s for replica_id, s in self._suspects.items() if replica_id in self._by_id}
        if self._directory is not None:
            self._directory.keep_replicas(self._by_id)

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
        self._orders.pop(pending_request.metadata.internal_request_id, None)
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
