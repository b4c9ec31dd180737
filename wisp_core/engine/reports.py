"""What the scheduler and the worker answer to commands: plain JSON on the wire, these types on both ends."""

from __future__ import annotations

from typing import Self

from wisp_core.contracts import KvDemand, MemoryLayout, PagerCounts, Value
from wisp_core.pager.interface import ExpertPager
from wisp_core.pager.resident_experts import ResidentExperts


class TakeReport(Value):
    """Answer to ``take``: the groups, none of them when it was not possible, and why."""

    groups: tuple[int, ...]
    available_groups: int
    floor_blocks: int
    usable_blocks: int
    """Before it."""


class SchedulerReport(Value):
    """The scheduler's view of the KV pool."""

    usable_blocks: int
    taken_groups: tuple[int, ...]
    steps: int = 0
    """Steps since the start."""
    step_seconds: float = 0.0
    """Time since the start in which a step was under way."""
    kv: KvDemand


class MemoryReport(Value):
    """The worker's view of both pools."""

    cap: int
    kv_groups: tuple[int, ...]
    resident_bytes: int


class LayoutReport(Value):
    """What does not change while an engine lives."""

    layout: MemoryLayout
    budget_bytes: int
    other_bytes: int
    measured_other_bytes: int
    """What dense weights and activations took at start; ``other_bytes`` is that, or what was configured."""
    worker_pid: int
    emulated_link_bytes_per_s: float | None


class PagerReport(Value):
    """Expert lookups and curves of the pager."""

    decode: PagerCounts
    prefill: PagerCounts
    decode_misses_by_cap: tuple[float, ...]
    prefill_misses_by_cap: tuple[float, ...]
    decode_union_by_batch: tuple[float, ...] = ()
    counted_at_s: float | None = None
    """Moment of the counts on the host's monotonic clock; None: now."""

    @classmethod
    def of(cls, pager: ExpertPager | ResidentExperts) -> Self:
        """What ``pager`` tells without waiting for a device."""
        return cls(
            decode=pager.counts_decode,
            prefill=pager.counts_prefill,
            decode_misses_by_cap=pager.decode_misses_by_cap(),
            prefill_misses_by_cap=pager.prefill_misses_by_cap(),
            decode_union_by_batch=pager.decode_union_by_batch(),
            counted_at_s=pager.counted_at_s,
        )
