"""Which splits are feasible, and which of them costs least.

All layers share one cap, so there are at most E splits worth looking at: exact search is cheap, and unlike hulls or
gradients it is right at cliffs (a union of experts that just fits).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from wisp_core.allocation.floor import floor_blocks
from wisp_core.contracts import Marginals, MemoryLayout, ReplicaSnapshot, Split


class Rule(StrEnum):
    """What a split can violate; also a metric's label."""

    CAP_RANGE = "cap_range"
    KV_RANGE = "kv_range"
    OVER_BUDGET = "over_budget"
    BELOW_FLOOR = "below_floor"


@dataclass(frozen=True)
class Violation:
    """A rule that a split breaks, with the numbers."""

    rule: Rule
    message: str


@dataclass(frozen=True)
class Solution:
    """The cheapest feasible split and what one more byte would save in each pool there."""

    split: Split
    cost: float
    marginals: Marginals


def feasible_splits(snapshot: ReplicaSnapshot) -> list[Split]:
    """Every cap that leaves at least κ_min for KV, with all KV blocks that then fit; ascending in cap."""
    layout, floor = snapshot.layout, floor_blocks(snapshot)
    splits = (
        Split(cap=cap, kv_blocks=layout.kv_blocks_within(snapshot.budget_bytes - layout.experts_bytes_by_cap[cap]))
        for cap in range(layout.min_cap, layout.num_experts + 1)
    )
    return [split for split in splits if split.kv_blocks >= floor]


def explain_infeasible(snapshot: ReplicaSnapshot) -> str:
    """Why ``feasible_splits`` is empty, with the numbers."""
    layout, floor = snapshot.layout, floor_blocks(snapshot)
    experts_bytes = layout.experts_bytes_by_cap[layout.min_cap]
    return (
        f"infeasible: κ_min is {floor} KV blocks ({layout.kv_bytes(floor)} bytes) and cap {layout.min_cap} needs "
        f"{experts_bytes} bytes, together {layout.kv_bytes(floor) + experts_bytes} of a budget of "
        f"{snapshot.budget_bytes}; the address range holds {layout.max_kv_blocks} blocks"
    )


def violations(snapshot: ReplicaSnapshot, split: Split) -> list[Violation]:
    """The rules that ``split`` breaks on the replica of ``snapshot``; empty when it is feasible."""
    layout, floor, found = snapshot.layout, floor_blocks(snapshot), []
    if not layout.min_cap <= split.cap <= layout.num_experts:
        message = f"cap {split.cap} is outside {layout.min_cap}..{layout.num_experts}"
        return [Violation(Rule.CAP_RANGE, message)]
    if split.kv_blocks > layout.max_kv_blocks:
        message = f"{split.kv_blocks} KV blocks exceed the {layout.max_kv_blocks} of the address range"
        found.append(Violation(Rule.KV_RANGE, message))
    if layout.pool_bytes(split) > snapshot.budget_bytes:
        message = f"{layout.pool_bytes(split)} bytes exceed the budget of {snapshot.budget_bytes}"
        found.append(Violation(Rule.OVER_BUDGET, message))
    if split.kv_blocks < floor:
        found.append(Violation(Rule.BELOW_FLOOR, f"{split.kv_blocks} KV blocks are below κ_min, {floor}"))
    return found


def clamp(snapshot: ReplicaSnapshot, split: Split) -> Split | None:
    """The feasible split nearest to ``split`` in whole KV groups; None when nothing is feasible.

    The nearest feasible cap comes first; KV is then derived again: what ``split`` asks for, rounded down to whole
    groups, at most what fits beside that cap, and everything that fits where rounding would fall below κ_min.
    """
    feasible = feasible_splits(snapshot)
    if not feasible:
        return None
    widest = min(feasible, key=lambda s: (abs(s.cap - split.cap), s.cap))
    kv_blocks = min(_whole_groups(snapshot.layout, split.kv_blocks), widest.kv_blocks)
    return Split(cap=widest.cap, kv_blocks=kv_blocks if kv_blocks >= floor_blocks(snapshot) else widest.kv_blocks)


def largest_cap_within(snapshot: ReplicaSnapshot, experts_bytes: float) -> Split | None:
    """The feasible split of the largest cap whose experts take at most ``experts_bytes``, else of the smallest cap.

    None when nothing is feasible.
    """
    table = snapshot.layout.experts_bytes_by_cap
    feasible = feasible_splits(snapshot)
    within = [split for split in feasible if table[split.cap] <= experts_bytes]
    found = within[-1:] or feasible[:1]
    return found[0] if found else None


def smallest_cap_from(snapshot: ReplicaSnapshot, cap: int) -> Split | None:
    """The feasible split of the smallest cap from ``cap`` on, else of the largest one. None: nothing is feasible."""
    feasible = feasible_splits(snapshot)
    enough = [split for split in feasible if split.cap >= cap]
    found = enough[:1] or feasible[-1:]
    return found[0] if found else None


def solve(snapshot: ReplicaSnapshot, cost: Callable[[Split], float]) -> Solution | None:
    """The split of least ``cost`` among ``feasible_splits``; None when nothing is feasible.

    Exact over caps with all KV that fits beside each, and so over all pairs where cost never grows with KV blocks.
    Of equal costs the one nearest to the current cap wins, so solving again at the answer changes nothing.
    """
    feasible = feasible_splits(snapshot)
    if not feasible:
        return None
    costs = {split: cost(split) for split in feasible}
    best = min(feasible, key=lambda s: (costs[s], abs(s.cap - snapshot.split.cap), s.cap))
    return Solution(best, costs[best], marginals(snapshot.layout, best, cost))


def marginals(layout: MemoryLayout, split: Split, cost: Callable[[Split], float]) -> Marginals:
    """What a byte more would save in each pool, averaged over the bytes of the next cap (at the top: of the last)."""
    here = cost(split)
    experts_bytes = layout.experts_bytes_by_cap
    more_cap = _next_larger_cap(experts_bytes, split.cap)
    step_bytes = experts_bytes[more_cap] - experts_bytes[split.cap]
    experts_s = here - cost(split.model_copy(update={"cap": more_cap}))
    granule_bytes = step_bytes or max(1, experts_bytes[split.cap] - experts_bytes[split.cap - 1])
    more_blocks = layout.kv_blocks_within(layout.kv_bytes(split.kv_blocks) + _whole_group_bytes(layout, granule_bytes))
    kv_step_bytes = layout.kv_bytes(more_blocks) - layout.kv_bytes(split.kv_blocks)
    kv_s = here - cost(split.model_copy(update={"kv_blocks": more_blocks}))
    return Marginals(
        experts_s_per_byte=experts_s / step_bytes if step_bytes else 0.0,
        kv_s_per_byte=kv_s / kv_step_bytes if kv_step_bytes else 0.0,
    )


def _next_larger_cap(experts_bytes: Sequence[int], cap: int) -> int:
    """The next cap that takes more whole pages; ``cap`` itself when none does."""
    larger = (c for c in range(cap + 1, len(experts_bytes)) if experts_bytes[c] > experts_bytes[cap])
    return next(larger, cap)


def _whole_groups(layout: MemoryLayout, kv_blocks: int) -> int:
    if kv_blocks >= layout.max_kv_blocks:
        return layout.max_kv_blocks
    return layout.kv_blocks_within((kv_blocks + 1) * layout.block_bytes)


def _whole_group_bytes(layout: MemoryLayout, num_bytes: int) -> int:
    return -(-num_bytes // layout.kv_group_bytes) * layout.kv_group_bytes
