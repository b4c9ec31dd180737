"""The budget in proportion to the bytes that each pool's work touches, whatever a miss costs in either."""

from __future__ import annotations

from dataclasses import dataclass

from wisp_core.allocation.floor import floor_blocks
from wisp_core.allocation.solver import explain_infeasible, largest_cap_within
from wisp_core.contracts import Decision, ReplicaSnapshot
from wisp_core.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class WorkingSetProportional:
    """``coverage`` is the share of the avoidable misses, and of the reused prompt tokens, that a working set covers.

    The experts' working set is the smallest cap that avoids this share of the decode misses between the smallest cap
    and all experts; KV's is the larger of the peak demand and the distance that covers this share of the reuse.
    """

    coverage: float = 0.9

    def __post_init__(self) -> None:
        if not 0 < self.coverage <= 1:
            raise ConfigurationError(f"policy.settings.coverage: {self.coverage} is outside 0 to 1")

    def initial_state(self) -> None:
        """Nothing to remember."""

    def decide(self, snapshot: ReplicaSnapshot, state: None) -> tuple[Decision, None]:
        """The largest feasible cap within the experts' share."""
        if len(snapshot.decode_misses_by_cap) != snapshot.layout.num_experts + 1:
            return Decision(split=snapshot.split, reason="hold: no miss curve of decode steps yet"), None
        cap, blocks = self._experts_cap(snapshot), self._kv_blocks(snapshot)
        experts_bytes = snapshot.layout.experts_bytes_by_cap[cap]
        share = experts_bytes / (experts_bytes + snapshot.layout.kv_bytes(blocks))
        split = largest_cap_within(snapshot, share * snapshot.budget_bytes)
        if split is None:
            return Decision(split=snapshot.split, reason=f"hold: {explain_infeasible(snapshot)}"), None
        reason = f"working sets of {cap} slots and {blocks} KV blocks: {share:.0%} of the budget for experts"
        return Decision(split=split, reason=reason), None

    def _experts_cap(self, snapshot: ReplicaSnapshot) -> int:
        misses, least = snapshot.decode_misses_by_cap, snapshot.layout.min_cap
        allowed = misses[-1] + (1 - self.coverage) * (misses[least] - misses[-1])
        return next(cap for cap in range(least, len(misses)) if misses[cap] <= allowed or cap == len(misses) - 1)

    def _kv_blocks(self, snapshot: ReplicaSnapshot) -> int:
        kv = snapshot.kv
        wanted, covered, distance = self.coverage * sum(one.tokens_per_s for one in kv.reuse), 0.0, 0
        for one in kv.reuse:
            if covered >= wanted:
                break
            covered, distance = covered + one.tokens_per_s, one.blocks
        return min(max(distance, kv.demand_blocks, floor_blocks(snapshot)), snapshot.layout.max_kv_blocks)
