"""Half of the budget for each pool, whatever the work: the split that needs no measurement."""

from __future__ import annotations

from dataclasses import dataclass

from wisp_core.allocation.solver import explain_infeasible, largest_cap_within
from wisp_core.contracts import Decision, ReplicaSnapshot


@dataclass(frozen=True, kw_only=True)
class FiftyFifty:
    """The largest feasible cap whose experts take at most half of the pooled budget. No settings, no memory."""

    def initial_state(self) -> None:
        """Nothing to remember."""

    def decide(self, snapshot: ReplicaSnapshot, state: None) -> tuple[Decision, None]:
        """That cap with all KV that fits beside it."""
        split = largest_cap_within(snapshot, snapshot.budget_bytes / 2)
        if split is None:
            return Decision(split=snapshot.split, reason=f"hold: {explain_infeasible(snapshot)}"), None
        share = snapshot.layout.experts_bytes_by_cap[split.cap] / snapshot.budget_bytes
        return Decision(split=split, reason=f"half for each pool: cap {split.cap} takes {share:.0%}"), None
