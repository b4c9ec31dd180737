"""From scores to an order of replicas: sticky unless moving pays."""

from __future__ import annotations

from collections.abc import Sequence

from wisp_core.routing.hashing import hash_fraction, hash_order
from wisp_core.routing.views import RoutingDecision, RoutingRequest, RoutingWeights, Score


def first(chosen: str, order: Sequence[str]) -> tuple[str, ...]:
    """``order`` with ``chosen`` moved to the front."""
    return (chosen, *(replica_id for replica_id in order if replica_id != chosen))


def pick_by_hash(request: RoutingRequest, candidates: Sequence[str], why: str) -> RoutingDecision:
    """Without telemetry: the session's home if it can take the turn, else its hash decides."""
    order = hash_order(request.session_key, candidates)
    if request.home is not None and request.home in candidates:
        return RoutingDecision(ranking=first(request.home, order), reason=f"{why}: stays home")
    return RoutingDecision(ranking=tuple(order), reason=f"{why}: consistent hash")


def pick_by_score(
    request: RoutingRequest, scores: dict[str, Score], unscored: Sequence[str], weights: RoutingWeights
) -> RoutingDecision:
    """Least predicted seconds first, replicas without fresh telemetry last; a session leaves home only for a gain."""

    def cost(replica_id: str) -> tuple[float, str]:
        tie_s = weights.tie_s * hash_fraction(request.session_key, replica_id)
        return scores[replica_id].total_s + tie_s, replica_id

    order = [*sorted(scores, key=cost), *hash_order(request.session_key, unscored)]
    best, home = order[0], request.home
    if home is not None and home in unscored:
        return RoutingDecision(ranking=first(home, order), reason="stays home, whose telemetry is stale", scores=scores)
    if home is None or home not in scores:
        why = "new session" if home is None else "its replica cannot take it"
        return RoutingDecision(ranking=tuple(order), reason=f"{why}: least predicted {scores[best]}", scores=scores)
    gain_s = scores[home].total_s - scores[best].total_s
    if gain_s > weights.migrate_gain_s:
        return RoutingDecision(
            ranking=tuple(order), reason=f"moves: saves {gain_s:.3f} s, predicted {scores[best]}", scores=scores
        )
    reason = "stays home, which is best" if best == home else f"stays home: moving saves only {max(gain_s, 0):.3f} s"
    return RoutingDecision(ranking=first(home, order), reason=reason, scores=scores)
