"""Which replicas may take a turn at all."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from wisp_core.routing.fleet import Fleet
from wisp_core.routing.views import RoutingRequest

Mask = npt.NDArray[np.bool_]
"""One yes or no per replica, [N]."""


def known(fleet: Fleet, now_s: float) -> Mask:
    """Replicas whose figures are there and not stale."""
    is_fresh: Mask = fleet.column("at_s") >= now_s - fleet.weights.stale_after_s
    return is_fresh & (fleet.column("is_known") > 0)


def eligible(request: RoutingRequest, fleet: Fleet, is_known: Mask) -> Mask:
    """Replicas that did not just fail this turn, are healthy, are not drained and whose KV pool can hold it.

    Where no replica passes, the last condition that left none is dropped: a turn is never left without a
    candidate, since what is known here may be old.
    """
    remaining = np.ones(len(fleet), dtype=np.bool_)
    excluded = [fleet.position[replica_id] for replica_id in request.excluded if replica_id in fleet.position]
    if 0 < len(excluded) < len(fleet):
        remaining[excluded] = False
    is_unknown = ~is_known
    conditions = (
        fleet.column("is_healthy") > 0,
        fleet.column("is_draining") == 0,
        fleet.load.kv_tokens >= request.prompt_tokens + request.max_tokens,
    )
    everything: Mask = remaining & (is_unknown | (conditions[0] & conditions[1] & conditions[2]))
    if everything.any():
        return everything
    for condition in conditions:
        narrowed = remaining & (condition | is_unknown)
        remaining = narrowed if narrowed.any() else remaining
    return remaining
