"""Time to first token of one engine, by length and number of prompts and by tokens per pass."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from loadtests.bench.child.bench import Bench, open_bench
from loadtests.bench.child.engine import Generation, generate, synchronize
from loadtests.bench.job import PrefillJob
from loadtests.rows import Row

_HIT_RATE_TOKENS = 48  # of each request, before and after a long prompt


def run_prefill(job: PrefillJob) -> Iterator[Row]:
    """One row for each chunk size, length and number of prompts, and one for the hit rate around a long prompt."""
    with open_bench(job.engine) as bench:
        yield from prefill_rows(bench, job)


def prefill_rows(bench: Bench, job: PrefillJob) -> Iterator[Row]:
    """The same, with an engine that runs."""
    bench.set_cap(job.cap)
    bench.memory.restart()
    yield from prompt_rows(bench, job)
    if bench.pager is not None:
        yield _hit_rates(bench, job)


def prompt_rows(bench: Bench, job: PrefillJob) -> Iterator[Row]:
    """Times of prompts, at the cap and memory as they are."""
    for chunk_tokens in sorted(job.chunk_tokens, reverse=True):
        bench.set_chunk_tokens(chunk_tokens)
        for batch in job.batches:
            for prompt_tokens in job.prompt_tokens:
                if batch * prompt_tokens > job.max_total_tokens:
                    continue
                row: Row = {"mode": bench.mode, "batch": batch, "cap": job.cap, "prompt_tokens": prompt_tokens}
                row |= {"chunk_tokens": chunk_tokens, "passes": -(-batch * prompt_tokens // chunk_tokens)}
                yield row | _measure(bench, job, batch, prompt_tokens) | bench.facts()


def _measure(bench: Bench, job: PrefillJob, batch: int, prompt_tokens: int) -> Row:
    """Two tokens each, so that the hash sees a decode step on the new KV."""
    runs: list[Generation] = []
    missed_bytes = 0
    while len(runs) <= job.repeats:
        before = _missed_bytes(bench)
        runs.append(_ask(bench, job, batch, prompt_tokens, 2, f"{batch}-{prompt_tokens}-{len(runs)}"))
        missed_bytes = _missed_bytes(bench) - before
        if sum(max(run.first_token_s) for run in runs) >= job.enough_s:
            break
    timed = runs[1:] or runs  # the first one warms up, if another one follows
    last_ms = [max(run.first_token_s) * 1e3 for run in timed]
    hashes = {run.output_hash(2) for run in runs}
    return {
        "first_token_ms": statistics.median(min(run.first_token_s) * 1e3 for run in timed),
        "last_first_token_ms": statistics.median(last_ms),
        "last_first_token_ms_min": min(last_ms),
        "last_first_token_ms_max": max(last_ms),
        "timed_runs": len(timed),
        "is_warmed_up": len(runs) > 1,
        "missed_bytes": missed_bytes,
        "output_hash": min(hashes),
        "is_repeatable": len(hashes) == 1,
    }


def _hit_rates(bench: Bench, job: PrefillJob) -> Row:
    """Share of the needed experts that decode steps find in slots, before and after the longest prompt."""
    batch, longest = max(job.batches), max(job.prompt_tokens)
    rates = []
    for moment in ("before", "after"):
        # Once for the working set, once for the figure; after the long prompt, the figure counts at once.
        if moment == "before":
            _ask(bench, job, batch, min(job.prompt_tokens), _HIT_RATE_TOKENS, "fill")
        counts = bench.pager.counts_decode
        _ask(bench, job, batch, min(job.prompt_tokens), _HIT_RATE_TOKENS, moment)
        after = bench.pager.counts_decode
        rates.append((after.hits - counts.hits) / (after.distinct - counts.distinct))
        if moment == "before":
            _ask(bench, job, 1, longest, 1, "long")
    return {
        "mode": bench.mode,
        "measure": "decode hit rate around a prefill",
        "cap": job.cap,
        "batch": batch,
        "prompt_tokens": longest,
        "hit_rate_before": rates[0],
        "hit_rate_after": rates[1],
    }


def _ask(bench: Bench, job: PrefillJob, batch: int, prompt_tokens: int, num_tokens: int, run: str) -> Generation:
    sessions = range(job.first_session, job.first_session + batch)
    prompts = [job.engine.prompt(session, prompt_tokens) for session in sessions]
    generation = generate(bench.llm, prompts, num_tokens, run, first_session=job.first_session)
    synchronize()
    return generation


def _missed_bytes(bench: Bench) -> int:
    return int(bench.pager.counts_prefill.missed_bytes) if bench.pager is not None else 0
