"""The published rule: KV gets its peak demand and a headroom, experts get what is left."""

from __future__ import annotations

import math
from dataclasses import dataclass

from wisp_core.allocation.floor import floor_blocks
from wisp_core.allocation.solver import explain_infeasible, feasible_splits
from wisp_core.contracts import Decision, ReplicaSnapshot
from wisp_core.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class KvPeak:
    """``headroom_fraction`` is what KV gets above its recent peak, as a fraction of the peak.

    The peak is of the blocks that running and waiting turns need in full. Prefixes that are only cached do not count,
    as in the rule's published form.
    """

    headroom_fraction: float = 0.25

    def __post_init__(self) -> None:
        if not 0 <= self.headroom_fraction < math.inf:
            raise ConfigurationError(f"policy.settings.headroom_fraction: {self.headroom_fraction} is below 0")

    def initial_state(self) -> None:
        """Nothing to remember: the snapshot's peak looks back itself."""

    def decide(self, snapshot: ReplicaSnapshot, state: None) -> tuple[Decision, None]:
        """The largest feasible cap that leaves peak and headroom to KV, else the smallest one."""
        feasible = feasible_splits(snapshot)
        if not feasible:
            return Decision(split=snapshot.split, reason=f"hold: {explain_infeasible(snapshot)}"), None
        peak = snapshot.kv.demand_blocks
        wanted = max(floor_blocks(snapshot), math.ceil(peak * (1 + self.headroom_fraction)))
        split = max((s for s in feasible if s.kv_blocks >= wanted), key=lambda s: s.cap, default=feasible[0])
        short = "" if split.kv_blocks >= wanted else ", of which the smallest cap leaves as many as it can"
        reason = f"KV peak of {peak} blocks and {self.headroom_fraction:.0%}: {wanted} blocks{short}"
        return Decision(split=split, reason=reason), None
