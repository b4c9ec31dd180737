"""From scores to an order of replicas: sticky unless moving pays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from wisp_core.routing.views import RoutingDecision, RoutingRequest, RoutingWeights, Score


def first(chosen: str, order: Sequence[str]) -> tuple[str, ...]:
    """``order`` with ``chosen`` in front."""
    return (chosen, *(replica_id for replica_id in order if replica_id != chosen))


def pick_by_score(
    request: RoutingRequest, scores: dict[str, Score], ties: Mapping[str, float], weights: RoutingWeights
) -> RoutingDecision:
    """Least predicted seconds first; a session leaves home only for a gain.

    Args:
        request: The turn.
        scores: Of the replicas worth a look, the home among them if it can take the turn.
        ties: Each one's of `hash_fractions`, for differences that mean nothing.
        weights: Constants.
    """
    costs_s = {name: score.total_s + weights.tie_s * ties[name] for name, score in scores.items()}
    order = sorted(costs_s, key=lambda name: (costs_s[name], name))
    best, home = order[0], request.home
    if home is None or home not in scores:
        why = "new session" if home is None else "its replica cannot take it"
        return RoutingDecision(ranking=tuple(order), reason=f"{why}: least predicted {scores[best]}", scores=scores)
    gain_s = scores[home].total_s - scores[best].total_s
    if gain_s > max(weights.migrate_gain_s, weights.migrate_gain_fraction * scores[home].total_s):
        return RoutingDecision(
            ranking=tuple(order), reason=f"moves: saves {gain_s:.3f} s, predicted {scores[best]}", scores=scores
        )
    reason = "stays home, which is best" if best == home else f"stays home: moving saves only {max(gain_s, 0):.3f} s"
    return RoutingDecision(ranking=first(home, order), reason=reason, scores=scores)
