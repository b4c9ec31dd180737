"""A session that comes back after a pause: its prefix still on the device, in host memory, or to be computed again."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from loadtests.bench.child.engine import Generation, engine_arguments, generate
from loadtests.bench.child.gpu_memory import GpuMemory
from loadtests.bench.child.link import measure_link_bytes_per_s
from loadtests.bench.job import ReturnJob
from loadtests.bench.modes import PrefixPlace
from loadtests.rows import Row
from wisp_core.engine.offline import OfflineEngine
from wisp_core.settings import WispSettings

_NEW = 1 << 20
"""Added to a session's number for the prompt of its second turn."""


def run_return(job: ReturnJob) -> Iterator[Row]:
    """One row for each number of new tokens and each place where the prefix may be."""
    memory = GpuMemory()
    link_bytes_per_s, _ = measure_link_bytes_per_s()
    memory.restart()
    engine = OfflineEngine(job.engine.model, engine_arguments(job.engine), WispSettings.model_validate(job.engine.wisp))
    try:
        for new_tokens in job.new_tokens:
            for mode in PrefixPlace:
                row = _measure(engine, job, mode, new_tokens)
                snapshot = engine.snapshot()
                layout = snapshot.layout
                yield row | {
                    "cap": snapshot.split.cap,
                    "pass_tokens": layout.max_pass_tokens,
                    "kv_bytes_per_token": layout.block_bytes / layout.block_tokens,
                    "fetch_bytes_per_s": snapshot.kv.fetch_bytes_per_s,
                    "link_bytes_per_s": link_bytes_per_s,
                    "peak_gpu_bytes": memory.peak_bytes(),
                }
        engine.check_integrity()
    finally:
        engine.shutdown()


def _measure(engine: OfflineEngine, job: ReturnJob, mode: PrefixPlace, new_tokens: int) -> Row:
    """A session for each run; the first one warms up."""
    runs: list[Generation] = []
    missed_bytes = 0
    for session in range(job.repeats + 1):
        before = engine.snapshot().prefill.missed_bytes
        first_bytes, generation = _come_back(engine, job, mode, new_tokens, session)
        missed_bytes = engine.snapshot().prefill.missed_bytes - before - first_bytes
        runs.append(generation)
    times_ms = [run.first_token_s[0] * 1e3 for run in runs[1:]]
    return {
        "mode": mode.value,
        "prompt_tokens": job.prompt_tokens + job.answer_tokens + new_tokens,
        "new_tokens": new_tokens,
        "cached_tokens": runs[-1].cached_tokens,
        "first_token_ms": statistics.median(times_ms),
        "first_token_ms_min": min(times_ms),
        "first_token_ms_max": max(times_ms),
        "timed_runs": len(times_ms),
        "missed_bytes": missed_bytes,
        "output_hashes": [run.output_hash(job.answer_tokens) for run in runs],
    }


def _come_back(
    engine: OfflineEngine, job: ReturnJob, mode: PrefixPlace, new_tokens: int, session: int
) -> tuple[int, Generation]:
    """Expert bytes of a session's first turn, and its second one."""
    engine.settle()
    engine.llm.reset_prefix_cache(reset_connector=True)
    name = f"{mode.value}-{new_tokens}-{session}"
    before = engine.snapshot().prefill.missed_bytes
    prompt = job.engine.prompt(session, job.prompt_tokens)
    first = generate(engine.llm, [prompt], job.answer_tokens, f"{name}-first")
    first_bytes = engine.snapshot().prefill.missed_bytes - before
    engine.settle()
    if mode is not PrefixPlace.RESIDENT:
        # What others' turns leave of an idle session's prefix on the device: nothing.
        engine.llm.reset_prefix_cache(reset_connector=mode is PrefixPlace.COMPUTED)
    said = job.engine.prompt(_NEW + session, new_tokens)
    return first_bytes, generate(engine.llm, [[*prompt, *first.tokens[0], *said]], job.answer_tokens, name)
