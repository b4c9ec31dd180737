"""The routing decision."""

from __future__ import annotations

import dataclasses

import numpy as np

from wisp_core.routing.filter import Mask, eligible, known
from wisp_core.routing.fleet import Fleet
from wisp_core.routing.hashing import hash_fractions
from wisp_core.routing.pick import first, pick_by_score
from wisp_core.routing.score import costs, costs_at_home, experts_s, output_tokens
from wisp_core.routing.shortlist import shortlist, sketched_experts_s
from wisp_core.routing.views import RoutingDecision, RoutingRequest


def route(request: RoutingRequest, fleet: Fleet, now_s: float) -> RoutingDecision:
    """Order the best replicas of ``fleet`` for a turn.

    Depends on its arguments only: two processes with the same fleet decide the same. Replicas whose figures are
    older than ``stale_after_s`` at ``now_s`` count as unknown: they come after known ones, but keep their sessions.

    Raises:
        ValueError: ``fleet`` is empty.
    """
    if not len(fleet):
        raise ValueError("no replica to route to")
    is_known = known(fleet, now_s)
    candidates = eligible(request, fleet, is_known)
    home = None if request.home is None else fleet.position.get(request.home)
    if home is not None and candidates[home] and not is_known[home]:
        return dataclasses.replace(
            _by_hash(request, fleet, candidates, home), reason="stays home, whose telemetry is stale"
        )
    scorable = candidates & is_known
    if not scorable.any():
        return _by_hash(request, fleet, candidates, home)
    decision = _by_score(request, fleet, scorable, home)
    if home is None or candidates[home] or request.home in request.excluded:
        return decision
    is_lent = bool(is_known[home]) and fleet.column("is_draining")[home] > 0
    return dataclasses.replace(decision, is_for_this_turn_only=True) if is_lent else decision


def _by_hash(request: RoutingRequest, fleet: Fleet, candidates: Mask, home: int | None) -> RoutingDecision:
    """Without telemetry: the session's home if it can take the turn, else its hash decides."""
    found = np.flatnonzero(candidates)
    fractions = hash_fractions(request.session_key, fleet.hashes[found])
    best = found[np.argsort(fractions, kind="stable")[: fleet.weights.num_scored]]
    order = [fleet.ids[at] for at in best]
    if home is not None and candidates[home]:
        return RoutingDecision(ranking=first(fleet.ids[home], order), reason="no telemetry: stays home")
    return RoutingDecision(ranking=tuple(order), reason="no telemetry: consistent hash")


def _by_score(request: RoutingRequest, fleet: Fleet, candidates: Mask, home: int | None) -> RoutingDecision:
    weights, load = fleet.weights, fleet.load
    tokens = output_tokens(request, weights)
    known_costs = costs(request, load, tokens=tokens, missing_tokens=float(request.prompt_tokens))
    ties = hash_fractions(request.session_key, fleet.hashes)
    if len(fleet) <= weights.num_scored:
        at = np.flatnonzero(candidates)
    else:
        total_s = known_costs.total_s + sketched_experts_s(request.uses, fleet, tokens) + weights.tie_s * ties
        # The home is always among them, so that its own load and costs are needed there only.
        at = shortlist(total_s, candidates, weights.num_scored, home)
    turns, home_costs = load.turns[at], None
    if home is not None:
        home_load, home_costs = costs_at_home(request, fleet, home, tokens)
        turns = np.where(at == home, home_load.turns, turns)
    copies_s = experts_s(request, fleet, at, turns, tokens)
    names = [fleet.ids[position] for position in at.tolist()]
    scores = dict(zip(names, known_costs.at(at, home, home_costs).scores(copies_s), strict=True))
    return pick_by_score(request, scores, dict(zip(names, ties[at].tolist(), strict=True)), weights)
