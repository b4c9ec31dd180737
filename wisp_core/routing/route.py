"""The routing decision."""

from __future__ import annotations

from collections.abc import Sequence

from wisp_core.routing.filter import eligible
from wisp_core.routing.hashing import hash_order
from wisp_core.routing.pick import first, pick_by_hash, pick_by_score
from wisp_core.routing.score import score
from wisp_core.routing.views import ReplicaView, RoutingDecision, RoutingRequest, RoutingWeights


def route(
    request: RoutingRequest, replicas: Sequence[ReplicaView], weights: RoutingWeights | None = None
) -> RoutingDecision:
    """Order ``replicas`` for a turn.

    Depends on its arguments only: two processes with the same views decide the same. The ranking lists every
    replica once, those that should not take the turn last.

    Raises:
        ValueError: ``replicas`` is empty.
    """
    if not replicas:
        raise ValueError("no replica to route to")
    weights = weights or RoutingWeights()
    all_ids = [replica.replica_id for replica in replicas]
    if request.pin in all_ids:
        order = first(request.pin, hash_order(request.session_key, all_ids))
        return RoutingDecision(ranking=order, reason="pinned by the caller")
    candidates = eligible(request, replicas)
    known = [replica for replica in candidates if replica.figures is not None]
    unknown = [replica.replica_id for replica in candidates if replica.figures is None]
    if known:
        decision = pick_by_score(request, score(request, known, weights), unknown, weights)
    else:
        decision = pick_by_hash(request, unknown, "no telemetry")
    others = hash_order(request.session_key, set(all_ids).difference(decision.ranking))
    return RoutingDecision(ranking=(*decision.ranking, *others), reason=decision.reason, scores=decision.scores)
