"""Turns cumulative counters into the rates of a snapshot."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from wisp_core.contracts import CostFit, KvDemand, ReplicaSnapshot, Split
from wisp_core.engine.cost_fit import Reading, StepFit
from wisp_core.engine.reports import LayoutReport, MemoryReport, PagerReport, SchedulerReport
from wisp_core.working_set.forgetting import Forgetting

_FIT_WINDOWS = 12.0
"""The fit looks back this many windows: an engine's constants change slower than its work."""


class Rates(NamedTuple):
    """Per second; what is ``memory_s`` seconds old weighs 1/e. ``window_s`` is the span looked at so far."""

    window_s: float
    decode_steps: float
    decode_tokens: float
    prefill_steps: float
    prefill_tokens: float
    busy_s: float
    fit: CostFit


class RateMeter:
    """Turns cumulative counters into decayed rates, and fits the engine's constants to them."""

    def __init__(self, memory_s: float) -> None:
        self._memory = Forgetting(memory_s)
        self._fit = StepFit(_FIT_WINDOWS * memory_s)
        self._last: tuple[float, Reading] | None = None
        self._span_s = 0.0
        self._sums = [0.0] * 5
        self._steps: deque[tuple[float, int, float]] = deque()  # when, steps, seconds of the last scheduler reports

    def observe_reports(self, now_s: float, pager: PagerReport, scheduler: SchedulerReport) -> Rates:
        """`observe` what both tell of one moment: counts of a device that works are a report old."""
        at_s = now_s if pager.counted_at_s is None else pager.counted_at_s
        self._steps.append((now_s, scheduler.steps, scheduler.step_seconds))
        while len(self._steps) > 1 and abs(self._steps[1][0] - at_s) <= abs(self._steps[0][0] - at_s):
            self._steps.popleft()
        _, steps, step_seconds = self._steps[0]
        return self.observe(now_s, Reading(pager.decode, pager.prefill, steps, step_seconds))

    def observe(self, now_s: float, reading: Reading) -> Rates:
        """Add a reading; all rates are zero for the first, and counters that went back start anew."""
        fit = self._fit.observe(now_s, reading)
        keep = self._memory.keep(now_s)
        if self._last is not None and reading.steps >= self._last[1].steps:
            last_s, last = self._last
            pairs = zip(_totals(reading), _totals(last), strict=True)
            self._sums = [keep * old + now - before for old, (now, before) in zip(self._sums, pairs, strict=True)]
            self._span_s = keep * self._span_s + now_s - last_s
        self._last = (now_s, reading)
        decode_steps, decode_tokens, passes, prompt_tokens, busy_s = (
            amount / self._span_s if self._span_s > 0 else 0.0 for amount in self._sums
        )
        return Rates(self._span_s, decode_steps, decode_tokens, passes, prompt_tokens, busy_s, fit)


def _totals(reading: Reading) -> tuple[float, float, float, float, float]:
    decode, prefill = reading.decode, reading.prefill
    return decode.steps, decode.tokens, prefill.steps, prefill.tokens, reading.step_seconds


def link_bytes_per_s(pager: PagerReport, emulated_bytes_per_s: float | None) -> float:
    """Speed of expert copies: the emulated one, or what was measured since the start (0 before any copy)."""
    if emulated_bytes_per_s is not None:
        return emulated_bytes_per_s
    # Where prefills read host memory in place, their transfers are not timed.
    timed = [counts for counts in (pager.decode, pager.prefill) if counts.link_seconds > 0]
    seconds = sum(counts.link_seconds for counts in timed)
    return sum(counts.missed_bytes for counts in timed) / seconds if timed else 0.0


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
    is_draining: bool = False,
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
        is_draining=is_draining,
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
        decode_union_by_batch=pager.decode_union_by_batch,
        busy_s_per_s=rates.busy_s,
        fit=rates.fit,
        link_bytes_per_s=link_bytes_per_s(pager, facts.emulated_link_bytes_per_s),
        is_link_emulated=facts.emulated_link_bytes_per_s is not None,
        kv=_within_pool(scheduler.kv, scheduler.usable_blocks),
    )


def _within_pool(kv: KvDemand, usable_blocks: int) -> KvDemand:
    """Cap the floor at what the pool holds.

    vLLM admits turns by their prompts, so what they will need may be more. A pool that had to grow with it would admit
    more turns again, until no slot is left to give; what suits them is a policy's to say, and a small pool preempts.
    """
    return kv.model_copy(update={"floor_blocks": min(kv.floor_blocks, usable_blocks)})
