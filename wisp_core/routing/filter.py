"""Which replicas may take a turn at all."""

from __future__ import annotations

from collections.abc import Sequence

from wisp_core.routing.views import ReplicaFigures, ReplicaView, RoutingRequest


def blocks_needed(request: RoutingRequest, figures: ReplicaFigures) -> int:
    """KV blocks that the turn holds when it has grown to its full length."""
    return -(-(request.prompt_tokens + request.max_tokens) // figures.block_tokens)


def _fits(request: RoutingRequest, replica: ReplicaView) -> bool:
    figures = replica.figures
    return figures is None or blocks_needed(request, figures) <= figures.kv_blocks


def eligible(request: RoutingRequest, replicas: Sequence[ReplicaView]) -> Sequence[ReplicaView]:
    """Replicas that are healthy, did not just fail this turn, and whose KV pool can hold it.

    Where no replica passes, the last condition that left none is dropped: a turn is never left without a
    candidate, since what is known here may be old. Empty only when ``replicas`` is.
    """
    remaining = replicas
    conditions = (
        lambda replica: replica.replica_id not in request.excluded,
        lambda replica: replica.is_healthy,
        lambda replica: _fits(request, replica),
    )
    for condition in conditions:
        remaining = [replica for replica in remaining if condition(replica)] or remaining
    return remaining
