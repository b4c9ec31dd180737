"""Decode steps of one engine at each of its caps and batch sizes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

from loadtests.bench.child.audit import Audit
from loadtests.bench.child.engine import (
    Generation,
    build_replay,
    generate,
    make_prompt,
    offloaded_bytes,
    open_engine,
    synchronize,
)
from loadtests.bench.child.gpu_memory import GpuMemory
from loadtests.bench.child.link import measure_link_bytes_per_s
from loadtests.bench.child.replay import Replay
from loadtests.bench.job import DecodeJob
from wisp_core.pager.registry import current_pager

Row = dict[str, Any]


def run_decode(job: DecodeJob) -> Iterator[Row]:
    """One row for each cap and batch."""
    memory = GpuMemory()
    link_bytes_per_s, link_source = measure_link_bytes_per_s()
    memory.restart()
    replay = build_replay(job.trace)
    started_s = time.perf_counter()
    with open_engine(job.engine, replay) as llm:
        engine_start_s = time.perf_counter() - started_s
        if job.engine.must_offload and offloaded_bytes() == 0:
            raise RuntimeError("nothing was offloaded: every weight is on the device")
        for index, cap in enumerate(job.caps):
            pager = current_pager()
            if pager is not None and pager.cap != cap:
                pager.set_cap(cap)
            if index > 0:
                memory.restart()
            # The largest first: it fills the slots.
            for batch in sorted(job.batches, reverse=True):
                row = {"mode": job.engine.mode, "batch": batch, "cap": cap}
                row |= _measure(llm, job, replay, batch, f"{cap}-{batch}")
                row |= {
                    "link_bytes_per_s": link_bytes_per_s,
                    "link_source": link_source,
                    "engine_start_s": engine_start_s,
                    "peak_gpu_bytes": memory.peak_bytes(),
                    "peak_gpu_source": memory.source,
                    "peak_torch_bytes": memory.torch_peak_bytes(),
                    "offloaded_bytes": offloaded_bytes(),
                }
                yield row


def _measure(llm: Any, job: DecodeJob, replay: Replay | None, batch: int, run: str) -> Row:
    prompts = [make_prompt(session, job.prompt_tokens, job.vocab_size, job.seed) for session in range(batch)]
    num_tokens = job.warmup_tokens + job.timed_tokens
    pager = current_pager()
    if pager is not None and pager.cap == pager.num_experts:
        # Once every expert that the trace needs is in its slot, what remains is the cost of paging itself.
        generate(llm, prompts, num_tokens, f"{run}-fill")
    audit = Audit(pager) if pager is not None and replay is not None else None
    if replay is not None:
        replay.steps.clear()
    counts_before = pager.counts_decode if pager is not None else None
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
    return row


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
