"""Decode steps of one engine at each of its caps and batch sizes."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from loadtests.bench.child.audit import Audit
from loadtests.bench.child.bench import Bench, open_bench
from loadtests.bench.child.engine import Generation, generate, synchronize
from loadtests.bench.job import DecodeJob
from loadtests.rows import Row


def run_decode(job: DecodeJob) -> Iterator[Row]:
    """One row for each cap and batch."""
    with open_bench(job.engine) as bench:
        yield from decode_rows(bench, job)


def decode_rows(bench: Bench, job: DecodeJob) -> Iterator[Row]:
    """The same, with an engine that runs."""
    for index, cap in enumerate(job.caps):
        bench.set_cap(cap)
        if index > 0:
            bench.memory.restart()
        # The largest first: it fills the slots.
        for batch in sorted(job.batches, reverse=True):
            row = {"mode": bench.mode, "batch": batch, "cap": cap}
            yield row | _measure(bench, job, batch, f"{cap}-{batch}") | bench.facts()


def _measure(bench: Bench, job: DecodeJob, batch: int, run: str) -> Row:
    llm, pager, replay = bench.llm, bench.pager, bench.replay
    prompts = [job.engine.prompt(session, job.prompt_tokens) for session in range(batch)]
    num_tokens = job.warmup_tokens + job.timed_tokens
    if pager is not None and pager.cap == pager.num_experts:
        # Once every expert that the trace needs is in its slot, what remains is the cost of paging itself.
        generate(llm, prompts, num_tokens, f"{run}-fill")
    can_guess = hasattr(pager, "prefetched")  # where the device decides
    guesses = pager.settings.prefetch if can_guess else 0
    # The audit's tables know nothing of guesses.
    audit = Audit(pager) if pager is not None and replay is not None and not guesses else None
    if replay is not None:
        replay.steps.clear()
    counts_before = pager.counts_decode if pager is not None else None
    prefetched_before = pager.prefetched if can_guess else None
    generation = generate(llm, prompts, num_tokens, run)
    synchronize()
    row = _times(generation, job)
    row["output_hash"] = generation.output_hash(job.compared_tokens)
    row["full_output_hash"] = generation.output_hash(num_tokens)
    row["missed_bytes_per_step"] = 0.0
    if audit is not None and replay is not None and pager is not None:
        recount = audit.recount(replay, replay.steps)
        steps = zip(recount.per_step, replay.steps, strict=True)
        # The prefill gives the first token and decode step i token i + 1.
        timed = [misses for misses, step in steps if step.is_decode][job.warmup_tokens - 1 : num_tokens - 1]
        row["missed_bytes_per_step"] = sum(timed) * pager.expert_bytes / len(timed)
        row["is_recount_equal"] = recount.is_equal
        row["misses_counted"], row["misses_recounted"] = recount.counted, sum(recount.per_step)
    elif counts_before is not None and pager is not None:
        counts = pager.counts_decode
        row["missed_bytes_per_step"] = (counts.missed_bytes - counts_before.missed_bytes) / (
            counts.steps - counts_before.steps
        )
    if can_guess:
        row |= {"prefetch": guesses} | _prefetched(pager, prefetched_before)
    return row


def _prefetched(pager: Any, before: Any) -> Row:
    """Bytes fetched on guesses in the whole run; what is neither used nor wasted still waits in its slot."""
    now = pager.prefetched
    return {
        "prefetched_bytes": (now.fetched - before.fetched) * pager.expert_bytes,
        "prefetch_used_bytes": (now.used - before.used) * pager.expert_bytes,
        "prefetch_wasted_bytes": (now.wasted - before.wasted) * pager.expert_bytes,
    }


def _times(generation: Generation, job: DecodeJob) -> Row:
    ms = [seconds * 1e3 for seconds in generation.step_times_s(job.warmup_tokens)]
    deciles = statistics.quantiles(ms, n=10)
    return {
        "ms_per_step": statistics.fmean(ms),
        "ms_per_step_median": statistics.median(ms),
        "ms_per_step_p10": deciles[0],
        "ms_per_step_p90": deciles[-1],
        "timed_steps": len(ms),
        "first_token_ms": max(generation.first_token_s) * 1e3,
    }
