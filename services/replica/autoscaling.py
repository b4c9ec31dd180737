"""How many replicas a service needs: by turns, and by the time that replicas spend copying experts.

More replicas split sessions by topic, so that each one's union of working sets is smaller: where the link is the
bound, a second replica can be worth more than twice the first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.config import AutoscalingSettings
from wisp_core.contracts import ReplicaSnapshot

TURNS, COPY_SHARE = "wisp_turns", "wisp_copy_share"
"""Names of the figures that replicas report to Serve."""
_SPARE = 0.8
"""Part of what is allowed that must suffice after a replica has gone, so that it is not started again at once."""


@dataclass(frozen=True)
class ReplicaWork:
    """What one replica does."""

    turns: float
    """Mean of running and waiting turns."""
    copy_share: float
    """Part of the time that decode steps spend copying experts."""


def work_of(snapshot: ReplicaSnapshot) -> dict[str, float]:
    """The figures that a replica reports, by name."""
    by_cap = snapshot.decode_misses_by_cap
    misses = by_cap[snapshot.split.cap] if by_cap else 0.0
    speed = snapshot.link_bytes_per_s
    copy_s = misses * snapshot.layout.expert_bytes / speed if speed > 0 else 0.0
    return {TURNS: snapshot.kv.mean_turns, COPY_SHARE: min(1.0, copy_s * snapshot.decode_steps_per_s)}


def desired_replicas(
    work: Sequence[ReplicaWork], current: int, queued: float, *, target_turns: float, max_copy_share: float
) -> int:
    """Replicas to have, before Serve's bounds and delays.

    Args:
        work: Of the replicas that have reported.
        current: Replicas that run or start now.
        queued: Turns that no replica has accepted yet.
        target_turns: Turns that a replica should have at once.
        max_copy_share: Part of the time that a replica with several turns may spend copying experts.
    """
    if not work:
        return current
    turns = queued + sum(one.turns for one in work)
    by_turns = max(1, math.ceil(turns / target_turns))
    copy_share = sum(one.copy_share for one in work) / len(work)
    # A replica with one turn gains nothing from another one; and what the last one brought is waited for.
    if copy_share > max_copy_share and turns > current and len(work) >= current:
        return max(by_turns, current + 1)
    if by_turns >= current:
        return by_turns
    left = current - 1
    is_spare = turns <= _SPARE * target_turns * left and copy_share * current / left <= _SPARE * max_copy_share
    return left if is_spare else current


class WorkingSetAutoscaling:
    """Serve's autoscaling policy: runs in its controller, and so only counts."""

    def __init__(self, target_turns: float, max_copy_share: float) -> None:
        self._target_turns = target_turns
        self._max_copy_share = max_copy_share

    def __call__(self, ctx: Any) -> tuple[int, dict[str, Any]]:
        """Serve's hook."""
        metrics: Mapping[str, Mapping[Any, float]] = ctx.aggregated_metrics or {}
        turns, shares = metrics.get(TURNS, {}), metrics.get(COPY_SHARE, {})
        work = [ReplicaWork(turns[replica], shares[replica]) for replica in turns if replica in shares]
        count = desired_replicas(
            work,
            ctx.target_num_replicas,
            ctx.total_queued_requests or 0.0,
            target_turns=self._target_turns,
            max_copy_share=self._max_copy_share,
        )
        return count, {}


def autoscaling_config(count: int, settings: AutoscalingSettings) -> dict[str, Any]:
    """Serve's ``autoscaling_config`` for ``count`` replicas or more; one that goes ends its turns first.

    Without ``initial_replicas``: Serve would go back to that number at every upgrade.
    """
    return {
        "min_replicas": count,
        "max_replicas": max(count, settings.max_count),
        "upscale_delay_s": settings.up_delay_s,
        "downscale_delay_s": settings.down_delay_s,
        "policy": {
            "policy_function": f"{WorkingSetAutoscaling.__module__}:{WorkingSetAutoscaling.__name__}",
            "policy_kwargs": {"target_turns": settings.target_turns, "max_copy_share": settings.max_copy_share},
        },
    }
