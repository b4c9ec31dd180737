"""Small fleets for tests of routing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from wisp_core.routing.fleet import Fleet
from wisp_core.routing.route import route
from wisp_core.routing.views import ReplicaFigures, RoutingDecision, RoutingRequest, RoutingWeights, Uses
from wisp_core.working_set.signature import UseRates

NUM_LAYERS, NUM_EXPERTS = 2, 8
NOW_S = 1.0


def figures(**changes: float) -> ReplicaFigures:
    """An idle replica: free compute, 1 ms per expert copy and per prompt token."""
    values: dict[str, float] = {
        "at_s": 0.0,
        "is_healthy": 1.0,
        "is_draining": 0.0,
        "is_resizing": 0.0,
        "cap": 4.0,
        "copy_s": 0.001,
        "fixed_s": 0.0,
        "row_s": 0.0,
        "pass_s": 0.0,
        "pass_tokens": 100.0,
        "max_pass_tokens": 100.0,
        "use_share": 1.0,
        "prompt_token_s": 0.001,
        "prefill_share": 0.0,
        "block_tokens": 16.0,
        "kv_blocks": 100.0,
        "free_blocks": 100.0,
        "cached_blocks": 100.0,
        "max_num_seqs": 8.0,
        "turns": 0.0,
        "waiting_turns": 0.0,
        "mean_turns": 0.0,
        "window_s": 10.0,
        **changes,
    }
    return ReplicaFigures(**values)


@dataclass(frozen=True, eq=False)
class One:
    """A replica of a fleet; without figures its telemetry is missing."""

    replica_id: str
    figures: ReplicaFigures | None
    rates: UseRates | None = None


def one(replica_id: str, rates: UseRates | None = None, **changes: float) -> One:
    """A replica with figures."""
    return One(replica_id, figures(**changes), rates)


def blind(replica_id: str) -> One:
    """A replica without telemetry."""
    return One(replica_id, None)


def fleet_of(*replicas: One, weights: RoutingWeights | None = None) -> Fleet:
    """A fleet of these."""
    fleet = Fleet(weights)
    fleet.keep([replica.replica_id for replica in replicas])
    for replica in replicas:
        if replica.figures is not None:
            fleet.update(replica.replica_id, replica.figures)
        fleet.set_rates(replica.replica_id, replica.rates)
    return fleet


def decide(request: RoutingRequest, *replicas: One, weights: RoutingWeights | None = None) -> RoutingDecision:
    """Route in a fleet of these."""
    return route(request, fleet_of(*replicas, weights=weights), NOW_S)


def topic(*experts: int, rate: float = 0.5) -> UseRates:
    """The same few experts in each layer."""
    rates = np.zeros((NUM_LAYERS, NUM_EXPERTS), dtype=np.float32)
    rates[:, list(experts)] = rate
    return rates


def uses(*experts: int, rate: float = 0.5) -> Uses:
    """The same as a session's working set."""
    return Uses.of(topic(*experts, rate=rate))
