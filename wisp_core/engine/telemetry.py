"""Turns cumulative counters into the rates of a snapshot, over a sliding window."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from wisp_core.contracts import KvDemand, PagerCounts, ReplicaSnapshot, Split
from wisp_core.engine.reports import LayoutReport, MemoryReport, PagerReport, SchedulerReport


class _Sample(NamedTuple):
    time_s: float
    decode: PagerCounts
    prefill: PagerCounts


class Rates(NamedTuple):
    """Per second, over ``window_s`` seconds."""

    window_s: float
    decode_steps: float
    decode_tokens: float
    prefill_steps: float
    prefill_tokens: float


class RateWindow:
    """Keeps the counters of the last ``window_s`` seconds."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._samples: deque[_Sample] = deque()

    def observe(self, now_s: float, decode: PagerCounts, prefill: PagerCounts) -> Rates:
        """Add a reading and compare it with the oldest one inside the window; all zero for the first."""
        self._samples.append(_Sample(now_s, decode, prefill))
        # Keep one sample at or beyond the edge, so that the span covers the whole window.
        while len(self._samples) > 2 and self._samples[1].time_s <= now_s - self._window_s:
            self._samples.popleft()
        first = self._samples[0]
        span_s = now_s - first.time_s
        if span_s <= 0:
            return Rates(0.0, 0.0, 0.0, 0.0, 0.0)
        return Rates(
            span_s,
            (decode.steps - first.decode.steps) / span_s,
            (decode.tokens - first.decode.tokens) / span_s,
            (prefill.steps - first.prefill.steps) / span_s,
            (prefill.tokens - first.prefill.tokens) / span_s,
        )


def link_bytes_per_s(pager: PagerReport, emulated_bytes_per_s: float | None) -> float:
    """Speed of expert copies: the emulated one, or what was measured since the start (0 before any copy)."""
    if emulated_bytes_per_s is not None:
        return emulated_bytes_per_s
    seconds = pager.decode.link_seconds + pager.prefill.link_seconds
    moved_bytes = pager.decode.missed_bytes + pager.prefill.missed_bytes
    return moved_bytes / seconds if seconds > 0 else 0.0


def build_snapshot(
    *,
    replica_id: str,
    incarnation: str,
    model: str,
    facts: LayoutReport,
    scheduler: SchedulerReport,
    memory: MemoryReport,
    pager: PagerReport,
    rates: Rates,
    plan_revision: int,
    is_resizing: bool,
) -> ReplicaSnapshot:
    """Put the reports of one moment together."""
    return ReplicaSnapshot(
        replica_id=replica_id,
        incarnation=incarnation,
        model=model,
        layout=facts.layout,
        split=Split(cap=memory.cap, kv_blocks=scheduler.usable_blocks),
        plan_revision=plan_revision,
        is_resizing=is_resizing,
        budget_bytes=facts.budget_bytes,
        other_bytes=facts.other_bytes,
        resident_bytes=memory.resident_bytes,
        window_s=rates.window_s,
        decode=pager.decode,
        prefill=pager.prefill,
        decode_steps_per_s=rates.decode_steps,
        prefill_steps_per_s=rates.prefill_steps,
        prefill_tokens_per_s=rates.prefill_tokens,
        decode_tokens_per_s=rates.decode_tokens,
        decode_misses_by_cap=pager.decode_misses_by_cap,
        prefill_misses_by_cap=pager.prefill_misses_by_cap,
        link_bytes_per_s=link_bytes_per_s(pager, facts.emulated_link_bytes_per_s),
        is_link_emulated=facts.emulated_link_bytes_per_s is not None,
        kv=_within_range(scheduler.kv, facts.layout.max_kv_blocks),
        resident=pager.resident,
    )


def _within_range(kv: KvDemand, max_kv_blocks: int) -> KvDemand:
    """Cap the floor at what the address range holds: no split could honour more."""
    return kv.model_copy(update={"floor_blocks": min(kv.floor_blocks, max_kv_blocks)})
