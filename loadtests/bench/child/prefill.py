"""Time to first token of one engine, by length and number of prompts."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from loadtests.bench.child.engine import build_replay, generate, make_prompt, offloaded_bytes, open_engine, synchronize
from loadtests.bench.child.gpu_memory import GpuMemory
from loadtests.bench.child.link import measure_link_bytes_per_s
from loadtests.bench.job import PrefillJob
from wisp_core.pager.registry import current_pager

Row = dict[str, Any]


def run_prefill(job: PrefillJob) -> Iterator[Row]:
    """One row for each number and length of prompts."""
    memory = GpuMemory()
    link_bytes_per_s, link_source = measure_link_bytes_per_s()
    memory.restart()
    replay = build_replay(job.trace)
    with open_engine(job.engine, replay) as llm:
        if job.engine.must_offload and offloaded_bytes() == 0:
            raise RuntimeError("nothing was offloaded: every weight is on the device")
        chunk_tokens = llm.llm_engine.vllm_config.scheduler_config.max_num_batched_tokens
        for prompt_tokens in job.prompt_tokens:
            for batch in job.batches:
                row = {"mode": job.engine.mode, "batch": batch, "cap": job.cap, "prompt_tokens": prompt_tokens}
                row |= {"chunk_tokens": chunk_tokens, "passes": -(-batch * prompt_tokens // chunk_tokens)}
                row |= _measure(llm, job, batch, prompt_tokens)
                row |= {
                    "link_bytes_per_s": link_bytes_per_s,
                    "link_source": link_source,
                    "peak_gpu_bytes": memory.peak_bytes(),
                    "peak_gpu_source": memory.source,
                    "offloaded_bytes": offloaded_bytes(),
                }
                yield row


def _measure(llm: Any, job: PrefillJob, batch: int, prompt_tokens: int) -> Row:
    """The first of the runs warms up. Two tokens each, so that the hash sees a decode step on the new KV."""
    pager = current_pager()
    first_ms, last_ms, hashes = [], [], set()
    missed_bytes = 0
    for repeat in range(job.repeats + 1):
        prompts = [make_prompt(session, prompt_tokens, job.vocab_size, job.seed) for session in range(batch)]
        before = pager.counts_prefill.missed_bytes if pager is not None else 0
        generation = generate(llm, prompts, 2, f"{batch}-{prompt_tokens}-{repeat}")
        synchronize()
        hashes.add(generation.output_hash(2))
        if repeat > 0:
            first_ms.append(min(generation.first_token_s) * 1e3)
            last_ms.append(max(generation.first_token_s) * 1e3)
            missed_bytes = pager.counts_prefill.missed_bytes - before if pager is not None else 0
    return {
        "first_token_ms": statistics.median(first_ms),
        "last_first_token_ms": statistics.median(last_ms),
        "last_first_token_ms_min": min(last_ms),
        "last_first_token_ms_max": max(last_ms),
        "missed_bytes": missed_bytes,
        "output_hash": min(hashes),
        "is_repeatable": len(hashes) == 1,
    }
